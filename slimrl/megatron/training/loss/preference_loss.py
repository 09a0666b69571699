"""The preference loss of one micro-batch, as sums that do not depend on the split into micro-batches.

The samples of a pair are in one micro-batch (`schedule_batch`), the preferred response first, so the loss of a pair
and its gradient are exact in every layout. The formulas are in `slimrl.algorithms.preference`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
from torch import Tensor

from slimrl.algorithms.preference import PreferenceConfig, ResponseScores, pair_losses
from slimrl.algorithms.preference_losses import PAIR, PREFERENCE_LOSSES
from slimrl.arguments.flags.algorithm import AlgorithmArguments
from slimrl.megatron.model.micro_batch import MicroBatch
from slimrl.megatron.training.forward_step import LogProbConfig, TrainTensors
from slimrl.megatron.training.loss.loss_sums import LossSums
from slimrl.megatron.training.loss.policy_loss import named_sums


@dataclasses.dataclass(frozen=True)
class PairLoss:
    """The preference loss of a run."""

    settings: PreferenceConfig
    scores: LogProbConfig

    @classmethod
    def from_args(cls, algorithm: AlgorithmArguments, scores: LogProbConfig) -> PairLoss | None:
        """None with another --loss-type."""
        if not algorithm.trains_on_pairs:
            return None
        row = PREFERENCE_LOSSES[algorithm.preference_loss]
        settings = PreferenceConfig(
            name=row.name,
            beta=row.beta if algorithm.preference_beta is None else algorithm.preference_beta,
            label_smoothing=algorithm.preference_label_smoothing,
            gamma=algorithm.simpo_gamma,
            nll_coef=algorithm.preference_nll_coef,
            reference_free=algorithm.preference_reference_free,
        )
        return cls(settings, scores)

    def sums(self, output: Tensor, micro_batch: MicroBatch, columns: TrainTensors) -> LossSums:
        """The sums of one micro-batch from the last stage's output."""
        log_probs, _ = self.scores(output, micro_batch)
        index, reference = micro_batch.response_index, columns.ref_log_probs
        return preference_loss_sums(
            log_probs,
            None if reference is None else reference.index_select(0, index),
            columns.loss_mask.index_select(0, index),
            [response for _, response in micro_batch.lengths],
            self.settings,
        )


def preference_loss_sums(
    log_probs: Tensor,
    ref_log_probs: Tensor | None,
    loss_mask: Tensor,
    response_lengths: Sequence[int],
    settings: PreferenceConfig,
) -> LossSums:
    """Sums over the samples of a micro-batch; each of the two samples of a pair counts the loss of the pair.

    So the sum divided by the samples is the mean over pairs. Tensors are float32 [response tokens] with samples end to
    end, `response_lengths` [samples] on the host. A pair with a response that has no trained token adds 0.
    """
    trained = loss_mask != 0
    tokens = _per_sample(trained.double(), response_lengths)
    scores = _per_sample(log_probs.double().masked_fill(~trained, 0.0), response_lengths)
    reference = None
    if ref_log_probs is not None:
        reference = _per_sample(ref_log_probs.double().masked_fill(~trained, 0.0), response_lengths)
    chosen, rejected = (
        ResponseScores(
            log_probs=scores[place::PAIR],
            tokens=tokens[place::PAIR].clamp(min=1),
            ref_log_probs=None if reference is None else reference[place::PAIR],
        )
        for place in range(PAIR)
    )
    usable = (tokens[0::PAIR] > 0) & (tokens[1::PAIR] > 0)
    found = pair_losses(chosen, rejected, settings)
    loss = PAIR * torch.where(usable, found.loss, 0.0).sum().float()
    with torch.no_grad():
        values = {
            "loss": found.loss,
            "pair_accuracy": (found.margin > 0).double(),
            "reward_margin": found.margin,
            "chosen_reward": found.chosen_reward,
            "rejected_reward": found.rejected_reward,
            "chosen_log_probs": chosen.log_probs,
            "rejected_log_probs": rejected.log_probs,
        }
        weighted = {name: PAIR * torch.where(usable, value.detach(), 0.0).sum() for name, value in values.items()}
        samples = trained.new_full((), len(response_lengths), dtype=torch.int64)
        return named_sums(loss, samples, trained.sum(), weighted)


def _per_sample(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """Float64 [samples]; each sum has a fixed order, so that it is the same in every micro-batch."""
    return torch.stack([part.sum() for part in values.split(list(lengths))])
