"""The loss of a reward model for one micro-batch, as sums that do not depend on the split into micro-batches.

The reward of a sample is the value head's output at its last token, where Hugging Face's classifiers and SGLang read
theirs. All responses of a comparison are in one micro-batch (`schedule_batch`), the preferred one first. The formulas
are in `slimrl.algorithms.reward_model`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from slimrl.algorithms.reward_model import REWARD_MODEL_LOSSES, RewardModelLoss
from slimrl.arguments import Arguments
from slimrl.data.train_batch import RolloutBatch
from slimrl.megatron.data_parallel import Stage
from slimrl.megatron.model.micro_batch import MicroBatch
from slimrl.megatron.parallel import ParallelState
from slimrl.megatron.training.forward_step import gather_context_parallel, score_tokens
from slimrl.megatron.training.loss.loss_sums import LossSums, named_sums
from slimrl.megatron.training.loss.policy_loss import PolicyLossConfig
from slimrl.megatron.training.reporting.train_metrics import reduce_step


@dataclasses.dataclass(frozen=True)
class RewardScores:
    """The rewards of a micro-batch's samples: `TokenScores` of a `ValueModel`, one number per sample."""

    context_group: dist.ProcessGroup

    def wanted(self, micro_batch: MicroBatch) -> Tensor:
        """The position of each last token that this rank holds."""
        return micro_batch.last_rows

    def index(self, micro_batch: MicroBatch) -> Tensor:
        """The samples' places in the rank's batch."""
        return torch.tensor(micro_batch.rows, device=micro_batch.tokens.device)

    def __call__(self, output: Tensor, micro_batch: MicroBatch) -> tuple[Tensor, ...]:
        """Float32 [samples of the micro-batch]."""
        samples = len(micro_batch.rows)
        return gather_context_parallel(micro_batch.last_own, samples, self.context_group, output)


@dataclasses.dataclass(frozen=True)
class RewardModelTraining:
    """The loss of a reward model's run, and the same loss of held-out comparisons, without gradient."""

    row: RewardModelLoss
    responses: int  # of a comparison; 1 without one
    scores: RewardScores
    settings: PolicyLossConfig  # names of the metrics
    parallel: ParallelState
    stages: list[Stage]
    pack: Callable[[RolloutBatch, list[int]], MicroBatch]

    @classmethod
    def from_args(
        cls,
        args: Arguments,
        settings: PolicyLossConfig,
        parallel: ParallelState,
        stages: list[Stage],
        pack: Callable[[RolloutBatch, list[int]], MicroBatch],
    ) -> RewardModelTraining | None:
        """None with another --loss-type. `pack` packs rows of a batch into a micro-batch."""
        if not args.trains_reward_model:
            return None
        row = REWARD_MODEL_LOSSES[args.reward_model_loss]
        return cls(row, args.samples_together, RewardScores(parallel.cp_group), settings, parallel, stages, pack)

    def sums(self, output: Tensor, micro_batch: MicroBatch, batch: RolloutBatch) -> LossSums:
        """The sums of one micro-batch of `batch` from the last stage's output."""
        (rewards,) = self.scores(output, micro_batch)
        return self._sums(rewards, batch, torch.tensor(micro_batch.rows))

    def evaluate(self, batch: RolloutBatch) -> dict[str, float]:
        """The metrics of the loss (`reduce_step`) over the samples of all data-parallel ranks.

        `batch` is this rank's part, with comparisons in order and a schedule. Collective over all ranks.
        """
        micro_batches = [self.pack(batch, rows) for step in batch.micro_batches for rows in step]
        parts = (self.stages, micro_batches, self.scores, len(batch), self.parallel)
        (rewards,) = score_tokens(*parts, lambda: None)
        return reduce_step([self._sums(rewards, batch, torch.arange(len(batch)))], self.settings, self.parallel)

    def _sums(self, rewards: Tensor, batch: RolloutBatch, rows: Tensor) -> LossSums:
        """Each response of a comparison counts its loss, so the sum divided by the samples is the mean over these."""
        targets = batch.raw_rewards[rows].to(rewards.device)
        trained = batch.select(rows).loss_mask.count_nonzero().to(rewards.device)
        return reward_model_loss_sums(rewards, targets, trained, self.row, self.responses)


def reward_model_loss_sums(
    rewards: Tensor, targets: Tensor, trained_tokens: Tensor, row: RewardModelLoss, responses: int
) -> LossSums:
    """Sums over the samples of a micro-batch; `rewards` and `targets` [samples], comparisons of `responses` each."""
    groups = (-1, responses)
    found = row.formula(rewards.double().view(groups), targets.double().view(groups))
    loss = responses * found["loss"].sum().float()
    weighted = {name: responses * value.detach().sum() for name, value in found.items()}
    count = rewards.new_full((), rewards.numel(), dtype=torch.int64)
    return named_sums(loss, count, trained_tokens, weighted)
