"""--loss-type custom_loss: a function of the user's, from one micro-batch's logits to a loss.

Promises that the function sees whole responses in every layout, and that what it returns is counted as the built-in
losses are. Made by the trainer once, called by `forward` for each micro-batch.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from slimrl.algorithms.reduction import masked_mean_per_sample_sum, masked_sum
from slimrl.arguments import Arguments
from slimrl.hooks import CustomLoss, HookFailedError, named
from slimrl.megatron.model.micro_batch import MicroBatch
from slimrl.megatron.training.loss import named_sums
from slimrl.megatron.training.loss_metrics import PolicyLossSums

if TYPE_CHECKING:
    from slimrl.megatron.training.forward_step import LogProbConfig, TrainTensors
    from slimrl.megatron.training.train_inputs import RolloutData

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
        return self._settings.of_all_ranks(values, torch.zeros_like(values), self._micro_batch)[0]


class CheckedCustomLoss:
    """The function of one run, whose answers are checked."""

    def __init__(self, args: Arguments, settings: LogProbConfig) -> None:
        """Raises HookError where the path leads to nothing that keeps its contract."""
        self._args = args
        self._settings = settings
        self._name = f"{FLAG} {args.custom_loss_function_path}"
        self._function = named(FLAG, args.custom_loss_function_path, CustomLoss)

    def sums(self, logits: Tensor, micro_batch: MicroBatch, columns: TrainTensors, data: RolloutData) -> PolicyLossSums:
        """The loss of one micro-batch; raises HookFailedError where the function fails or returns something else."""
        mask = columns.loss_mask.index_select(0, micro_batch.response_index)
        per_token = self._args.calculate_per_token_loss

        def sum_of_sample_mean(values: Tensor) -> Tensor:
            if per_token:
                return masked_sum(values, mask)
            return masked_mean_per_sample_sum(values, mask, micro_batch.response_lengths)

        batch = LossBatch(data, micro_batch, self._settings)
        loss, metrics = self._checked(self._function(self._args, batch, logits, sum_of_sample_mean))
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
                own=metrics,
            )

    def _checked(self, answer: Any) -> tuple[Tensor, dict[str, Tensor]]:
        if not isinstance(answer, tuple) or len(answer) != 2 or not isinstance(answer[1], dict):
            raise HookFailedError(
                f"{self._name} returned a value of type {type(answer).__name__}: return (loss, dict of metrics)"
            )
        loss, metrics = answer
        if not isinstance(loss, Tensor) or loss.numel() != 1 or not loss.requires_grad:
            raise HookFailedError(
                f"{self._name} returned a loss that is no scalar tensor with a gradient: make it from logits, summed by"
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
        return loss.sum(), values  # never a view, whose memory the pipeline's schedule would refuse to free


def added_metrics(all_sums: list[PolicyLossSums]) -> dict[str, float]:
    """The own metrics of a rank's micro-batches, added up. Raises HookFailedError where their names differ."""
    names = {frozenset(sums.own) for sums in all_sums}
    if len(names) > 1:
        odd = sorted(frozenset.union(*names) - frozenset.intersection(*names))
        raise HookFailedError(f"metrics {', '.join(odd)} of a function of yours are there for some micro-batches only")
    return {name: math.fsum(float(sums.own[name]) for sums in all_sums) for name in sorted(next(iter(names), ()))}
