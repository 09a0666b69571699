"""--loss-type custom_loss: a custom function from one micro-batch's logits to a loss.

The function gets whole responses in every parallel layout, and its result is normalised like the built-in losses.
The trainer creates it once; `forward_step` calls it for each micro-batch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slimrl.algorithms.losses import masked_mean_per_sample_sum, masked_sum
from slimrl.arguments.flags.algorithm import AlgorithmArguments
from slimrl.hooks import CustomLoss, HookFailedError, named
from slimrl.hooks.contracts import RunArguments
from slimrl.megatron.model.micro_batch import MicroBatch
from slimrl.megatron.training.loss.loss_sums import LossSums, named_sums

if TYPE_CHECKING:
    from slimrl.megatron.training.advantages import RolloutData
    from slimrl.megatron.training.forward_step import LogProbConfig, TrainTensors

FLAG = "--custom-loss-function-path"


class LossBatch(dict[str, Any]):
    """See `slimrl.hooks.LossBatch`."""

    def __init__(self, data: RolloutData, micro_batch: MicroBatch, settings: LogProbConfig) -> None:
        rows, count = micro_batch.rows, len(data["response_lengths"])
        super().__init__(
            {
                name: [values[row] for row in rows]
                for name, values in data.items()
                if isinstance(values, list) and len(values) == count
            }
        )
        self._micro_batch = micro_batch
        self._settings = settings
        mask = torch.cat([*self["loss_masks"], torch.zeros(0, device=micro_batch.tokens.device)])
        shown = torch.zeros(micro_batch.tokens.shape, device=mask.device)
        shown[0, micro_batch.logit_rows] = mask[micro_batch.own]
        self["unconcat_tokens"] = self["tokens"]
        self["tokens"] = micro_batch.tokens
        self["full_loss_masks"] = shown
        self["packed_seq_params"] = micro_batch.sequences

    def scores(self, logits: Tensor) -> tuple[Tensor, Tensor]:
        return self._settings(logits, self._micro_batch)

    def rows(self, logits: Tensor) -> Tensor:
        return logits[0].index_select(0, self._micro_batch.logit_rows)

    def whole(self, values: Tensor) -> Tensor:
        return self._settings.of_all_ranks(self._micro_batch, values)[0]


class CheckedCustomLoss:
    """The custom loss of one run; validates the function's results."""

    def __init__(self, algorithm: AlgorithmArguments, settings: LogProbConfig, hook_args: RunArguments) -> None:
        """`hook_args` is passed to the function.

        Raises HookError if its path does not name a function with the required signature.
        """
        path = algorithm.custom_loss_function_path
        if path is None:
            raise ValueError(f"--loss-type custom_loss needs {FLAG}")
        self._hook_args = hook_args
        self._settings = settings
        self._per_token = algorithm.calculate_per_token_loss
        self._name = f"{FLAG} {path}"
        self._function = named(FLAG, path, CustomLoss)

    def sums(self, logits: Tensor, micro_batch: MicroBatch, columns: TrainTensors, data: RolloutData) -> LossSums:
        """The loss of one micro-batch; raises HookFailedError if the function fails or returns something else."""
        mask = columns.loss_mask.index_select(0, micro_batch.response_index)
        per_token = self._per_token

        def sum_of_sample_mean(values: Tensor) -> Tensor:
            if per_token:
                return masked_sum(values, mask)
            return masked_mean_per_sample_sum(values, mask, micro_batch.response_lengths)

        batch = LossBatch(data, micro_batch, self._settings)
        loss, metrics = self._checked(self._function(self._hook_args, batch, logits, sum_of_sample_mean))
        trained_tokens = (mask != 0).sum()
        samples = torch.full_like(trained_tokens, micro_batch.response_lengths.numel())
        with torch.no_grad():
            gaps = (columns.train_log_probs - columns.rollout_log_probs).index_select(0, micro_batch.response_index)
            return named_sums(
                loss,
                trained_tokens if per_token else samples,
                trained_tokens,
                {"loss": loss.detach().double().reshape(())},
                mismatch=gaps.abs().masked_fill(mask == 0, 0.0),
                custom=metrics,
            )

    def _checked(self, answer: Any) -> tuple[Tensor, dict[str, Tensor]]:
        if not isinstance(answer, tuple) or len(answer) != 2 or not isinstance(answer[1], dict):
            raise HookFailedError(
                f"{self._name} returned a value of type {type(answer).__name__}: return (loss, dict of metrics)"
            )
        loss, metrics = answer
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise HookFailedError(
                f"{self._name} returned a loss that is not a scalar tensor with a gradient: use logits, summed by"
                " sum_of_sample_mean"
            )
        values = {}
        for name, value in metrics.items():
            if isinstance(value, Tensor) and value.numel() != 1:
                raise HookFailedError(
                    f"{self._name} returned a metric {name} of shape {list(value.shape)}: return numbers, summed by"
                    " sum_of_sample_mean"
                )
            values[name] = torch.as_tensor(value).detach().double().reshape(())
        return loss.sum(), values  # not a view, because the pipeline schedule cannot free a view's memory


def added_metrics(all_sums: list[LossSums]) -> dict[str, float]:
    """The custom metrics summed over a rank's micro-batches. Raises HookFailedError if their names differ."""
    names = {frozenset(sums.custom) for sums in all_sums}
    if len(names) > 1:
        odd = sorted(frozenset.union(*names) - frozenset.intersection(*names))
        raise HookFailedError(f"custom metrics {', '.join(odd)} were returned for some micro-batches only")
    return {name: math.fsum(float(sums.custom[name]) for sums in all_sums) for name in sorted(next(iter(names), ()))}
