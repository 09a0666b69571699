"""Splits a rollout into optimizer steps, data-parallel ranks and micro-batches (`schedule_batch`).

Invariants: deterministic; every sample exactly once; steps of `global_batch_size` samples in order; the same number of
micro-batches on every rank; none empty; none above the cap, except a single sample (or pair) that is longer.
A row of the schedule is the k-th micro-batch of every rank: ranks that exchange data in every layer process it
together.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import numpy as np

from slimrl.data import bin_packing
from slimrl.data.train_batch import RolloutBatch

# Sequence length at which attention costs as much as the rest of the layer: 6 to 12 times the hidden size; 4-8B models.
DEFAULT_BREAK_EVEN_TOKENS = 32_768


def sequence_multiple(context_parallel_size: int) -> int:
    """Every sample is padded to a multiple of this many tokens: context parallelism splits it into equal chunks."""
    return 2 * context_parallel_size if context_parallel_size > 1 else 1


def schedule_batch(
    batch: RolloutBatch,
    *,
    data_parallel_size: int,
    context_parallel_size: int = 1,
    micro_batch_group: int = 1,
    global_batch_size: int,
    micro_batch_size: int,
    max_tokens_per_micro_batch: int | None,
    balance: bool,
    break_even_tokens: int = DEFAULT_BREAK_EVEN_TOKENS,
    patch_cost: float = 0.0,
    samples_together: int = 1,
) -> list[RolloutBatch]:
    """One batch per data-parallel rank with its rows and schedule; see the module's invariants.

    With `max_tokens_per_micro_batch` (prompt + response tokens) the micro-batches are filled up to that cap, and their
    number is as small as the search finds; with None they have `micro_batch_size` samples. The ranks of a
    context-parallel group share a micro-batch, so that its cap is `context_parallel_size` times as large. A rank has a
    multiple of `micro_batch_group` micro-batches per step, as virtual pipeline stages require. `balance` evens out the
    cost `length + length**2 / break_even_tokens` (linear layers + attention) over the ranks, in total and in each row,
    with `patch_cost` for every patch of the sample's images and videos (a vision tower, in tokens of the decoder);
    without it the micro-batches are in the order of their first samples. `samples_per_step` and `tokens_per_step` count
    the samples and the trained tokens of all ranks. A group is `samples_together` consecutive samples (2: the pairs of
    a preference loss) and stays together, in order, in one micro-batch.

    Raises ValueError if the samples do not divide into steps, ranks, micro-batches or groups.
    """
    if len(batch) == 0 or len(batch) % global_batch_size:
        raise ValueError(
            f"the rollout has {len(batch)} samples, which is not a multiple of --global-batch-size"
            f" {global_batch_size}: every sample must belong to an optimizer step"
        )
    lengths, size = batch.total_lengths.tolist(), samples_together
    _check_groups(batch, size, global_batch_size)
    patches = [0] * len(lengths) if batch.images is None else batch.images.patches_of_samples()
    of_samples = zip(lengths, patches, strict=True)
    costs = _sums([own + own * own / break_even_tokens + patch_cost * seen for own, seen in of_samples], size)
    multiple = sequence_multiple(context_parallel_size)
    padded = _sums([-(-length // multiple) * multiple for length in lengths], size)
    if max_tokens_per_micro_batch is None:
        if micro_batch_size % size:
            raise ValueError(f"--micro-batch-size {micro_batch_size} divides pairs: give an even number of samples")
        _check_static(global_batch_size, data_parallel_size, micro_batch_size, micro_batch_group)
    else:
        cap = max_tokens_per_micro_batch * context_parallel_size

    steps = []  # [step][rank][micro-batch] -> rows of the whole batch
    for start in range(0, len(batch) // size, global_batch_size // size):
        groups = range(start, start + global_batch_size // size)
        if max_tokens_per_micro_batch is None:
            ranks = bin_packing.fixed_size(groups, costs, micro_batch_size // size, data_parallel_size, balance)
        else:
            ranks = bin_packing.under_cap(groups, padded, costs, cap, data_parallel_size, micro_batch_group, balance)
        steps.append([[_samples_of(groups, size) for groups in rank] for rank in ranks])

    trained = _trained_tokens(batch)
    starts = range(0, len(batch), global_batch_size)
    tokens_per_step = [sum(trained[start : start + global_batch_size]) for start in starts]
    per_rank = []
    for rank in range(data_parallel_size):
        per_rank.append(_rank_batch(batch, [step[rank] for step in steps]))
        per_rank[-1].samples_per_step = [global_batch_size] * len(steps)
        per_rank[-1].tokens_per_step = list(tokens_per_step)
    return per_rank


def _check_groups(batch: RolloutBatch, size: int, global_batch_size: int) -> None:
    """Raise ValueError if the samples of a group of `size` > 1 are not next to each other in one optimizer step."""
    if size == 1:
        return
    if global_batch_size % size:
        raise ValueError(f"--global-batch-size {global_batch_size} divides pairs: give an even number of samples")
    ids = batch.group_ids.tolist()
    groups = [ids[start : start + size] for start in range(0, len(ids), size)]
    if any(len(set(group)) > 1 for group in groups) or len({group[0] for group in groups}) < len(groups):
        raise ValueError(
            f"the rollout's samples are not {len(groups)} groups of {size}: return each pair as one group, the"
            " preferred response first"
        )


def _sums(values: Sequence[Any], size: int) -> list[Any]:
    """The sums of `size` consecutive values each."""
    return [sum(values[start : start + size]) for start in range(0, len(values), size)]


def _samples_of(groups: Sequence[int], size: int) -> list[int]:
    return [group * size + position for group in groups for position in range(size)]


def _check_static(global_batch_size: int, data_parallel_size: int, micro_batch_size: int, group: int) -> None:
    if global_batch_size % (data_parallel_size * micro_batch_size * group):
        groups = "" if group == 1 else f" x {group} micro-batches per group of virtual pipeline stages"
        raise ValueError(
            f"--global-batch-size {global_batch_size} is not divisible by {data_parallel_size} data-parallel ranks x"
            f" --micro-batch-size {micro_batch_size}{groups}: change one of them, or use --use-dynamic-batch-size"
        )


def _trained_tokens(batch: RolloutBatch) -> list[int]:
    """Number of unmasked response tokens of each sample."""
    mask, offsets = batch.loss_mask.numpy(), batch.response_offsets.tolist()
    return [int(np.count_nonzero(mask[start:end])) for start, end in itertools.pairwise(offsets)]


def _rank_batch(batch: RolloutBatch, micro_batches: list[bin_packing.Bins]) -> RolloutBatch:
    """The rows of one rank in ascending order, with `micro_batches` [step][micro-batch] renumbered to them."""
    rows = sorted(row for step in micro_batches for group in step for row in group)
    local = {row: position for position, row in enumerate(rows)}
    result = batch.select(rows)
    result.micro_batches = [[[local[row] for row in group] for group in step] for step in micro_batches]
    return result
