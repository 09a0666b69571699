"""Evaluation of held-out pairs with the loss that they would be trained with: a pass of each model, no gradient."""

from __future__ import annotations

from collections.abc import Sequence

from slimrl.data.train_batch import RolloutBatch
from slimrl.megatron.model.micro_batch import MicroBatch
from slimrl.megatron.training.log_prob_passes import LogProbPasses
from slimrl.megatron.training.loss.policy_loss import PolicyLossConfig
from slimrl.megatron.training.loss.preference_loss import PairLoss, preference_loss_sums
from slimrl.megatron.training.reporting.train_metrics import reduce_step


def held_out_metrics(
    passes: LogProbPasses,
    loss: PairLoss | None,
    settings: PolicyLossConfig,
    batch: RolloutBatch,
    micro_batches: Sequence[MicroBatch],
) -> dict[str, float]:
    """The metrics of a preference loss (`reduce_step`) over all pairs of all data-parallel ranks.

    `batch` is this rank's part, pairs in order; `micro_batches` are its packed samples. Collective over all ranks.
    Raises ValueError if the run's loss is not one of pairs.
    """
    if loss is None:
        raise ValueError("pairs are evaluated with --loss-type preference_loss only")
    mask = batch.loss_mask.to(passes.parallel.device)
    policy, reference = passes.score(micro_batches, mask.numel())
    sums = preference_loss_sums(policy, reference, mask, batch.response_lengths.tolist(), loss.settings)
    return reduce_step([sums], settings, passes.parallel)
