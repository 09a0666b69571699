"""KTO's reference point: the KL to the reference model, estimated on responses to other prompts than their own.

In an optimizer step, with its samples in the order of their index, the prompt of each group is followed by the response
of the group before it (the first by the last), as TRL's KTOTrainer does within a batch. The estimate is the mean over
all samples of the step, on all data-parallel ranks. So neither the layout nor the split into micro-batches changes it.
The formula is `slimrl.algorithms.preference.mismatched_kl`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from slimrl.algorithms.preference import mismatched_kl
from slimrl.algorithms.preference_losses import PREFERENCE_LOSSES
from slimrl.arguments import Arguments
from slimrl.data.train_batch import RolloutBatch, schedule_batch
from slimrl.megatron.model.micro_batch import MicroBatch
from slimrl.megatron.parallel import ParallelState


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
