"""The preference loss of one micro-batch, as sums that do not depend on the split into micro-batches.

The samples of a comparison are in one micro-batch (`schedule_batch`), the preferred response first, so its loss and its
gradient are exact in every layout. The formulas are in `slimrl.algorithms.preference_losses`.

A loss of single responses needs no other sample, but KTO's needs a reference point of the whole step: the KL to the
reference model, estimated on responses to other prompts than their own. With the samples of a step in the order of
their index, the prompt of each group is followed by the response of the group before it (the first by the last), as
TRL's KTOTrainer does within a batch. The estimate is the mean over all samples of the step, on all data-parallel ranks,
so neither the layout nor the split into micro-batches changes it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slimrl.algorithms.preference_losses import (
    PAIR,
    PREFERENCE_LOSSES,
    PreferenceConfig,
    PreferenceLoss,
    ResponseScores,
    label_losses,
    mismatched_kl,
    pair_losses,
)
from slimrl.arguments import Arguments
from slimrl.data.batch_schedule import schedule_batch
from slimrl.data.train_batch import RolloutBatch
from slimrl.megatron.model.micro_batch import MicroBatch
from slimrl.megatron.parallel import ParallelState
from slimrl.megatron.training.forward_step import LogProbConfig, TrainTensors
from slimrl.megatron.training.loss.loss_sums import LossSums
from slimrl.megatron.training.loss.policy_loss import named_sums


@dataclasses.dataclass(frozen=True)
class PairLoss:
    """The preference loss of a run; `responses` is the number of those in a comparison, 1 without one."""

    settings: PreferenceConfig
    scores: LogProbConfig
    responses: int

    @classmethod
    def from_args(cls, algorithm: Arguments, scores: LogProbConfig) -> PairLoss | None:
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
            desirable_weight=algorithm.desirable_weight,
            undesirable_weight=algorithm.undesirable_weight,
        )
        return cls(settings, scores, algorithm.samples_together)

    @property
    def row(self) -> PreferenceLoss:
        """Its row of the table."""
        return PREFERENCE_LOSSES[self.settings.name]

    def sums(
        self, output: Tensor, micro_batch: MicroBatch, columns: TrainTensors, labels: Tensor, kl: Tensor
    ) -> LossSums:
        """The sums of one micro-batch from the last stage's output.

        `labels` are the `token_labels` of the rank, `kl` is the reference point of a loss of single responses.
        """
        log_probs, _ = self.scores(output, micro_batch)
        index, reference = micro_batch.response_index, columns.ref_log_probs
        return self.sums_of_scores(
            log_probs,
            None if reference is None else reference.index_select(0, index),
            columns.loss_mask.index_select(0, index),
            [response for _, response in micro_batch.lengths],
            labels.index_select(0, index),
            kl,
        )

    def sums_of_scores(
        self,
        log_probs: Tensor,
        ref_log_probs: Tensor | None,
        loss_mask: Tensor,
        response_lengths: Sequence[int],
        labels: Tensor,
        kl: Tensor,
    ) -> LossSums:
        """The sums over samples end to end: `preference_loss_sums`, or `label_loss_sums` by `token_labels`."""
        scores = (log_probs, ref_log_probs, loss_mask, response_lengths)
        if self.row.compares:
            return preference_loss_sums(*scores, self.settings, self.responses)
        desirable = torch.stack([part[:1].any() for part in labels.split(list(response_lengths))])
        return label_loss_sums(*scores, desirable, kl, self.settings)


def token_labels(batch: RolloutBatch, device: torch.device) -> Tensor:
    """Whether the sample of each response token is desirable (reward 1): bool [response tokens], on `device`.

    On the device the label of a micro-batch's samples is then found without a copy from the host.
    """
    return torch.repeat_interleave(batch.raw_rewards > 0, batch.response_lengths).to(device)


def preference_loss_sums(
    log_probs: Tensor,
    ref_log_probs: Tensor | None,
    loss_mask: Tensor,
    response_lengths: Sequence[int],
    settings: PreferenceConfig,
    responses: int = PAIR,
) -> LossSums:
    """Sums over the samples of a micro-batch; each sample of a comparison counts its loss.

    So the sum divided by the samples is the mean over comparisons. With more than two `responses` the loss of a
    comparison is the mean over its pairs, the first response with each other one. Tensors are float32 [response tokens]
    with samples end to end, `response_lengths` [samples] on the host. A pair with a response that has no trained token
    adds 0.
    """
    trained, tokens, scores = _scores(log_probs, ref_log_probs, loss_mask, response_lengths)
    pairs = responses - 1
    chosen = _selected(scores, lambda values: values.view(-1, responses)[:, :1].expand(-1, pairs).flatten())
    rejected = _selected(scores, lambda values: values.view(-1, responses)[:, 1:].flatten())
    by_group = tokens.view(-1, responses) > 0
    usable = (by_group[:, :1] & by_group[:, 1:]).flatten()
    found = pair_losses(chosen, rejected, settings)
    weight = responses / pairs
    loss = (weight * torch.where(usable, found.loss, 0.0).sum()).float()
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
        weighted = {name: weight * torch.where(usable, value.detach(), 0.0).sum() for name, value in values.items()}
        samples = trained.new_full((), len(response_lengths), dtype=torch.int64)
        return named_sums(loss, samples, trained.sum(), weighted)


def label_loss_sums(
    log_probs: Tensor,
    ref_log_probs: Tensor | None,
    loss_mask: Tensor,
    response_lengths: Sequence[int],
    desirable: Tensor,
    kl: Tensor,
    settings: PreferenceConfig,
) -> LossSums:
    """Sums over the samples of a micro-batch, of a loss of single responses.

    Tensors as in `preference_loss_sums`; `desirable` is bool [samples], `kl` a float64 scalar. A sample without a
    trained token adds 0. The metrics chosen_... are sums over desirable samples, rejected_... over the others.
    """
    trained, tokens, scores = _scores(log_probs, ref_log_probs, loss_mask, response_lengths)
    losses, reward = label_losses(scores, desirable, kl, settings)
    usable = tokens > 0
    loss = torch.where(usable, losses, 0.0).sum().float()
    with torch.no_grad():
        good, bad = (usable & desirable).double(), (usable & ~desirable).double()
        distance = reward - settings.beta * kl
        weighted = {
            "loss": torch.where(usable, losses.detach(), 0.0).sum(),
            "label_accuracy": (good * (distance > 0) + bad * (distance < 0)).sum(),
            "desirable_share": desirable.double().sum(),
        }
        for name, values in (("reward", reward), ("log_probs", scores.log_probs.detach())):
            weighted |= {f"chosen_{name}": (good * values).sum(), f"rejected_{name}": (bad * values).sum()}
        if PREFERENCE_LOSSES[settings.name].has_kl:
            weighted["kto_kl"] = kl * len(response_lengths)
        samples = trained.new_full((), len(response_lengths), dtype=torch.int64)
        return named_sums(loss, samples, trained.sum(), weighted)


def _scores(
    log_probs: Tensor, ref_log_probs: Tensor | None, loss_mask: Tensor, lengths: Sequence[int]
) -> tuple[Tensor, Tensor, ResponseScores]:
    """Which tokens are trained, their number in each sample, and the scores of the samples; float64 [samples] each."""
    trained = loss_mask != 0
    tokens = _per_sample(trained.double(), lengths)
    policy = _per_sample(log_probs.double().masked_fill(~trained, 0.0), lengths)
    reference = None
    if ref_log_probs is not None:
        reference = _per_sample(ref_log_probs.double().masked_fill(~trained, 0.0), lengths)
    return trained, tokens, ResponseScores(policy, tokens.clamp(min=1), reference)


def _selected(scores: ResponseScores, select: Callable[[Tensor], Tensor]) -> ResponseScores:
    reference = None if scores.ref_log_probs is None else select(scores.ref_log_probs)
    return ResponseScores(select(scores.log_probs), select(scores.tokens), reference)


def _per_sample(values: Tensor, lengths: Sequence[int]) -> Tensor:
    """Float64 [samples]; each sum has a fixed order, so that it is the same in every micro-batch."""
    return torch.stack([part.sum() for part in values.split(list(lengths))])


@dataclasses.dataclass(frozen=True)
class MismatchedStep:
    """This rank's part of the mismatched samples of one optimizer step, packed into micro-batches."""

    micro_batches: list[MicroBatch]
    loss_mask: Tensor  # float32 [response tokens], on the trainer's device
    response_lengths: list[int]

    @property
    def response_tokens(self) -> int:
        """Response tokens of all micro-batches."""
        return self.loss_mask.numel()

    def kl(self, log_probs: Tensor, ref_log_probs: Tensor, group: dist.ProcessGroup) -> Tensor:
        """The estimate, a float64 scalar, from float32 [response tokens] each; `group` are the data-parallel ranks.

        A sample without a trained token does not count. Collective over `group`.
        """
        trained = self.loss_mask != 0
        gaps = (log_probs.double() - ref_log_probs.double()).masked_fill(~trained, 0.0)
        parts = trained.split(self.response_lengths)
        totals = torch.stack([gaps.sum(), torch.stack([part.any() for part in parts]).sum().double()])
        dist.all_reduce(totals, group=group)
        return mismatched_kl(*totals)


@dataclasses.dataclass(frozen=True)
class Mismatching:
    """Makes the mismatched samples of a run."""

    group_size: int  # samples of a group: 1, or those of a pair
    parallel: ParallelState
    micro_batch_size: int
    max_tokens: int | None  # of a micro-batch, of each context-parallel rank; None: as the longest samples need
    micro_batch_group: int
    pack: Callable[[RolloutBatch, list[int]], MicroBatch]

    @classmethod
    def from_args(
        cls, args: Arguments, parallel: ParallelState, pack: Callable[[RolloutBatch, list[int]], MicroBatch]
    ) -> Mismatching | None:
        """None for a loss without the estimate. `pack` packs rows of a batch into a micro-batch."""
        if not args.trains_on_pairs or not PREFERENCE_LOSSES[args.preference_loss].has_kl:
            return None
        return cls(
            args.n_samples_per_prompt,
            parallel,
            args.micro_batch_size,
            args.max_tokens_per_gpu if args.use_dynamic_batch_size else None,
            args.microbatch_group_size_per_vp_stage or 1,
            pack,
        )

    def steps(self, batch: RolloutBatch) -> list[MismatchedStep]:
        """The mismatched samples of each optimizer step of `batch`, this rank's part of a rollout with its schedule.

        Collective over data-parallel ranks. Raises ValueError for a step of one group, which has no other response.
        """
        own = [batch.select([row for rows in step for row in rows]) for step in batch.micro_batches]
        of_ranks: list[Any] = [own] * self.parallel.dp_size
        if self.parallel.dp_size > 1:
            dist.all_gather_object(of_ranks, own, group=self.parallel.dp_group)
        return [self._step(mismatched(parts, self.group_size)) for parts in zip(*of_ranks, strict=True)]

    def _step(self, samples: RolloutBatch) -> MismatchedStep:
        ranks = self.parallel
        longest = -(-int(samples.total_lengths.max()) * self.micro_batch_size // ranks.cp_size)
        share = schedule_batch(
            samples,
            data_parallel_size=ranks.dp_size,
            context_parallel_size=ranks.cp_size,
            micro_batch_group=self.micro_batch_group,
            global_batch_size=len(samples),
            micro_batch_size=self.micro_batch_size,
            max_tokens_per_micro_batch=longest if self.max_tokens is None else self.max_tokens,
            balance=True,
        )[ranks.dp_rank]
        packed = [self.pack(share, rows) for rows in share.micro_batches[0]]
        return MismatchedStep(packed, share.loss_mask.to(ranks.device), share.response_lengths.tolist())


def mismatched(parts: Sequence[RolloutBatch], group_size: int) -> RolloutBatch:
    """The samples of all `parts` in the order of their index, each with the response of the group before its own.

    A group is `group_size` consecutive samples. Prompt, response and loss mask are combined; the other response columns
    are those of the response. Raises ValueError if there is one group, or two samples have the same index.
    """
    columns: dict[str, Any] = {
        field.name: torch.cat([getattr(part, field.name) for part in parts])
        for field in dataclasses.fields(RolloutBatch)
        if isinstance(getattr(parts[0], field.name), Tensor)
    }
    order = columns["sample_ids"].argsort(stable=True)
    whole = RolloutBatch(**columns).select(order)
    samples = len(whole)
    if samples <= group_size:
        raise ValueError(
            f"the KL estimate of KTO needs a response to another prompt, and there are {samples} samples in groups of"
            f" {group_size}: give at least {2 * group_size}"
        )
    if whole.sample_ids.unique().numel() < samples:
        raise ValueError("two samples of an optimizer step have the same index: give each one its own")
    others = whole.select((torch.arange(samples) - group_size) % samples)
    prompts = _parts(whole, prompt=True)
    responses = _parts(others, prompt=False)
    return dataclasses.replace(
        others,
        tokens=torch.cat([piece for both in zip(prompts, responses, strict=True) for piece in both]),
        total_lengths=whole.total_lengths - whole.response_lengths + others.response_lengths,
        group_ids=whole.group_ids,
        sample_ids=whole.sample_ids,
    )


def _parts(batch: RolloutBatch, *, prompt: bool) -> list[Tensor]:
    """The prompt or the response of each sample."""
    samples = zip(batch.tokens.split(batch.total_lengths.tolist()), batch.response_lengths.tolist(), strict=True)
    return [tokens[: len(tokens) - length] if prompt else tokens[len(tokens) - length :] for tokens, length in samples]
