"""The loss of a run's optimizer steps, by --loss-type: what is read from the model, and the sums of a micro-batch.

And the same loss of held-out pairs or conversations, without gradient.

A custom loss (--loss-type custom_loss) gets whole responses in every parallel layout, and its result is normalised like
the built-in losses.

The loss of a reward model is here whole, as sums that do not depend on the split into micro-batches. The reward of a
sample is the value head's output at its last token, where Hugging Face's classifiers and SGLang read theirs. All
responses of a comparison are in one micro-batch (`schedule_batch`), the preferred one first. The formulas are in
`slimrl.algorithms.preference_losses`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slimrl.algorithms.losses import masked_mean_per_sample_sum, masked_sum
from slimrl.algorithms.preference_losses import REWARD_MODEL_LOSSES, RewardModelLoss
from slimrl.arguments import Arguments
from slimrl.arguments.flags.algorithm import AlgorithmArguments
from slimrl.data.train_batch import RolloutBatch
from slimrl.hooks import CustomLoss, HookFailedError, named
from slimrl.hooks.contracts import RunArguments
from slimrl.megatron.data_parallel import Stage
from slimrl.megatron.model.micro_batch import MicroBatch
from slimrl.megatron.parallel import ParallelState
from slimrl.megatron.training.advantages import RolloutData
from slimrl.megatron.training.forward_step import (
    LogProbConfig,
    TokenScores,
    TrainTensors,
    gather_context_parallel,
    policy_sums,
    score_tokens,
)
from slimrl.megatron.training.log_prob_passes import LogProbPasses, RolloutLogProbs
from slimrl.megatron.training.loss.loss_sums import CUSTOM_LOSS, LossSums, named_sums, reduce_step
from slimrl.megatron.training.loss.policy_loss import PolicyLossConfig, PolicyLossInputs, policy_loss_sums
from slimrl.megatron.training.loss.preference_loss import MismatchedStep, Mismatching, PairLoss, token_labels


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


SumsOf = Callable[[Tensor, MicroBatch], LossSums]


@dataclasses.dataclass(frozen=True)
class PairTraining:
    """The preference loss of a run, and its evaluation."""

    loss: PairLoss
    passes: LogProbPasses
    settings: PolicyLossConfig
    pack: Callable[[RolloutBatch, list[int]], MicroBatch]
    mismatching: Mismatching | None

    @classmethod
    def from_args(
        cls,
        args: Arguments,
        passes: LogProbPasses,
        settings: PolicyLossConfig,
        pack: Callable[[RolloutBatch, list[int]], MicroBatch],
    ) -> PairTraining | None:
        """None with another --loss-type. `pack` packs rows of a batch into a micro-batch."""
        loss = PairLoss.from_args(args, passes.settings)
        if loss is None:
            return None
        return cls(loss, passes, settings, pack, Mismatching.from_args(args, passes.parallel, pack))

    def mismatched(self, batch: RolloutBatch) -> list[MismatchedStep]:
        """The mismatched samples of each optimizer step, none for a loss without a KL estimate. Collective.

        Raises ValueError for a label of a loss of single responses that is neither 0 nor 1.
        """
        labels = set(batch.raw_rewards.tolist())
        if not self.loss.row.compares and labels - {0.0, 1.0}:
            raise ValueError(
                f"--preference-loss {self.loss.row.name} needs reward 1 of a desirable response and 0 of an undesirable"
                f" one, and a sample has {min(labels - {0.0, 1.0})}: return these from the rollout function"
            )
        return [] if self.mismatching is None else self.mismatching.steps(batch)

    def sums_of(
        self,
        batch: RolloutBatch,
        columns: TrainTensors,
        scores: RolloutLogProbs,
        number: int,
        advance: Callable[[], None],
    ) -> SumsOf:
        """`forward_backward`'s `sums_of` for the optimizer step `number`, before which it estimates the KL."""
        kl = self._no_kl
        if self.mismatching is not None:
            kl = self.passes.kl(*scores.mismatched[number], advance, within="actor_train")
        return partial(self.loss.sums, columns=columns, labels=token_labels(batch, kl.device), kl=kl)

    @property
    def _no_kl(self) -> Tensor:
        return torch.zeros((), dtype=torch.float64, device=self.passes.parallel.device)

    def evaluate(self, batch: RolloutBatch) -> dict[str, float]:
        """The metrics of a preference loss (`reduce_step`) over the pairs of all data-parallel ranks.

        `batch` is this rank's part, with pairs in order and a schedule; nothing is trained. Collective over all ranks.
        """
        micro_batches = [self.pack(batch, rows) for step in batch.micro_batches for rows in step]
        mask = batch.loss_mask.to(self.passes.parallel.device)
        stored = self.passes.stored(batch, [micro_batches])
        policy, reference = self.passes.score(micro_batches, mask.numel(), stored)
        kl = self._no_kl
        for step in self.mismatched(batch):  # one: the whole set
            own, other = self.passes.score(step.micro_batches, step.response_tokens)
            assert other is not None  # KTO has a reference
            kl = step.kl(own, other, self.passes.parallel.dp_group)
        lengths = batch.response_lengths.tolist()
        sums = self.loss.sums_of_scores(policy, reference, mask, lengths, token_labels(batch, kl.device), kl)
        return reduce_step([sums], self.settings, self.passes.parallel)


@dataclasses.dataclass(frozen=True)
class SupervisedEvaluation:
    """The loss of supervised training on held-out conversations, without gradient."""

    passes: LogProbPasses
    settings: PolicyLossConfig
    pack: Callable[[RolloutBatch, list[int]], MicroBatch]

    def evaluate(self, batch: RolloutBatch) -> dict[str, float]:
        """Loss and perplexity (`reduce_step`) over the samples of all data-parallel ranks.

        `batch` is this rank's part with a schedule; nothing is trained. Collective over all ranks.
        """
        device = self.passes.parallel.device
        micro_batches = [self.pack(batch, rows) for step in batch.micro_batches for rows in step]
        log_probs, _ = self.passes.score(micro_batches, batch.loss_mask.numel())
        none = torch.zeros_like(log_probs)
        mask, lengths = batch.loss_mask.to(device), batch.response_lengths.to(device)
        inputs = PolicyLossInputs(log_probs, none, none, none, none, None, none, mask, response_lengths=lengths)
        return reduce_step([policy_loss_sums(inputs, self.settings)], self.settings, self.passes.parallel)


@dataclasses.dataclass(frozen=True)
class StepLoss:
    """At most one of `custom`, `pairs` and `reward_model` is set; without any it is the policy's or SFT's loss."""

    settings: PolicyLossConfig
    passes: LogProbPasses
    custom: CheckedCustomLoss | None
    pairs: PairTraining | None
    reward_model: RewardModelTraining | None
    supervised: SupervisedEvaluation | None

    @classmethod
    def from_args(
        cls,
        args: Arguments,
        settings: PolicyLossConfig,
        passes: LogProbPasses,
        stages: list[Stage],
        pack: Callable[[RolloutBatch, list[int]], MicroBatch],
        hook_args: RunArguments,
    ) -> StepLoss:
        """The loss of a run; `pack` packs rows of a batch into a micro-batch."""
        return cls(
            settings,
            passes,
            CheckedCustomLoss(args, passes.settings, hook_args) if settings.is_custom_loss else None,
            PairTraining.from_args(args, passes, settings, pack),
            RewardModelTraining.from_args(args, settings, passes.parallel, stages, pack),
            SupervisedEvaluation(passes, settings, pack) if settings.supervised else None,
        )

    @property
    def scores(self) -> TokenScores:
        """What is read from the last stage's output."""
        return self._log_probs if self.reward_model is None else self.reward_model.scores

    @property
    def _log_probs(self) -> LogProbConfig:
        """Of an optimizer step: with the divergence from the teacher, if that is the loss."""
        return dataclasses.replace(self.passes.settings, distils=self.passes.teacher.states)

    @property
    def held_out(self) -> PairTraining | RewardModelTraining | SupervisedEvaluation | None:
        """Evaluates held-out data with the loss of training; None with a policy loss or a custom one."""
        return self.pairs or self.reward_model or self.supervised

    def mismatched(self, batch: RolloutBatch) -> list[MismatchedStep]:
        """The mismatched samples of each optimizer step; none without KTO. Collective."""
        return [] if self.pairs is None else self.pairs.mismatched(batch)

    def sums_of(
        self,
        batch: RolloutBatch,
        columns: TrainTensors,
        data: RolloutData | None,
        scores: RolloutLogProbs,
        number: int,
        advance: Callable[[], None],
    ) -> SumsOf:
        """`forward_backward`'s `sums_of` for the micro-batches of `batch` in its optimizer step `number`.

        Collective: a loss may need a pass of its own, which calls `advance` at the start of each micro-batch.
        """
        if self.custom is not None:
            assert data is not None  # made by `build_train_inputs` for a custom loss
            return partial(self.custom.sums, columns=columns, data=data)
        if self.pairs is not None:
            return self.pairs.sums_of(batch, columns, scores, number, advance)
        if self.reward_model is not None:
            return partial(self.reward_model.sums, batch=batch)
        on_policy = None if scores.first_step is None else scores.note
        return policy_sums(columns, self._log_probs, self.settings, on_policy)


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
            raise ValueError(f"--loss-type custom_loss needs {CUSTOM_LOSS}")
        self._hook_args = hook_args
        self._settings = settings
        self._per_token = algorithm.calculate_per_token_loss
        self._name = f"{CUSTOM_LOSS} {path}"
        self._function = named(CUSTOM_LOSS, path, CustomLoss)

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
