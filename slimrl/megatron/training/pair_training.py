"""Training on pairs: the loss of the optimizer steps, and the same loss of held-out pairs, without gradient."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

from slimrl.arguments.flags.algorithm import AlgorithmArguments
from slimrl.data.train_batch import RolloutBatch
from slimrl.megatron.model.micro_batch import MicroBatch
from slimrl.megatron.training.log_prob_passes import LogProbPasses
from slimrl.megatron.training.loss.policy_loss import PolicyLossConfig
from slimrl.megatron.training.loss.preference_loss import PairLoss, preference_loss_sums
from slimrl.megatron.training.reporting.train_metrics import reduce_step


@dataclasses.dataclass(frozen=True)
class PairTraining:
    """The preference loss of a run, and its evaluation."""

    loss: PairLoss
    passes: LogProbPasses
    settings: PolicyLossConfig
    pack: Callable[[RolloutBatch, list[int]], MicroBatch]

    @classmethod
    def from_args(
        cls,
        algorithm: AlgorithmArguments,
        passes: LogProbPasses,
        settings: PolicyLossConfig,
        pack: Callable[[RolloutBatch, list[int]], MicroBatch],
    ) -> PairTraining | None:
        """None with another --loss-type. `pack` packs rows of a batch into a micro-batch."""
        loss = PairLoss.from_args(algorithm, passes.settings)
        return None if loss is None else cls(loss, passes, settings, pack)

    def evaluate(self, batch: RolloutBatch) -> dict[str, float]:
        """The metrics of a preference loss (`reduce_step`) over the pairs of all data-parallel ranks.

        `batch` is this rank's part, with pairs in order and a schedule; nothing is trained. Collective over all ranks.
        """
        micro_batches = [self.pack(batch, rows) for step in batch.micro_batches for rows in step]
        mask = batch.loss_mask.to(self.passes.parallel.device)
        policy, reference = self.passes.score(micro_batches, mask.numel())
        sums = preference_loss_sums(policy, reference, mask, batch.response_lengths.tolist(), self.loss.settings)
        return reduce_step([sums], self.settings, self.passes.parallel)
