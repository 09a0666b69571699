"""Cut a rollout into optimizer steps, data-parallel ranks and micro-batches.

Promises: deterministic; every sample exactly once; steps of `global_batch_size` samples in their order;
the same number of micro-batches on every rank; none empty; none above the cap except a longer sample alone.
A row is the k-th micro-batch of every rank: ranks that exchange data in every layer work on it together.
Called by the rollout manager.
"""

from __future__ import annotations

from collections.abc import Sequence

from slimrl.data import bins
from slimrl.data.batch import RolloutBatch

# A token's attention costs as much as the rest of the layer at 6 to 12 times the hidden size; 4-8 B models.
DEFAULT_BREAK_EVEN_TOKENS = 32_768


def sequence_multiple(context_parallel_size: int) -> int:
    """Every sample is padded to a multiple of this many tokens: context parallelism cuts it into equal pieces."""
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
) -> list[RolloutBatch]:
    """One batch per data-parallel rank, its rows and its schedule; see the module's promises.

    With `max_tokens_per_micro_batch` (prompt + response tokens) micro-batches hold as many samples as fit, and
    there are as few as can be found; with None they hold `micro_batch_size` samples. The ranks of a context-parallel
    group share a micro-batch, so that it holds `context_parallel_size` times as many tokens. A rank's micro-batches
    of a step come in whole groups of `micro_batch_group`, as virtual pipeline stages take them. `balance` evens out
    over the ranks, in all and in each row, the cost `length + length**2 / break_even_tokens` (linear layers +
    attention); without it the micro-batches stand in the order of their first samples. `samples_per_step` and
    `tokens_per_step` count the samples and the trained tokens of all ranks.

    Raises ValueError where the samples do not divide into steps, ranks or micro-batches.
    """
    if len(batch) == 0 or len(batch) % global_batch_size:
        raise ValueError(
            f"the rollout has {len(batch)} samples, which --global-batch-size {global_batch_size} does not divide:"
            " every sample must belong to an optimizer step"
        )
    lengths = batch.total_lengths.tolist()
    costs = [length + length * length / break_even_tokens for length in lengths]
    multiple = sequence_multiple(context_parallel_size)
    padded = [-(-length // multiple) * multiple for length in lengths]
    if max_tokens_per_micro_batch is None:
        _check_static(global_batch_size, data_parallel_size, micro_batch_size, micro_batch_group)
    else:
        cap = max_tokens_per_micro_batch * context_parallel_size

    steps = []  # [step][rank][micro-batch] -> rows of the whole batch
    for start in range(0, len(batch), global_batch_size):
        rows = range(start, start + global_batch_size)
        if max_tokens_per_micro_batch is None:
            ranks = _fixed_size(rows, costs, micro_batch_size, data_parallel_size, balance)
        else:
            ranks = _under_cap(rows, padded, costs, cap, data_parallel_size, micro_batch_group, balance)
        steps.append(ranks)

    trained = _trained_tokens(batch)
    starts = range(0, len(batch), global_batch_size)
    tokens_per_step = [sum(trained[start : start + global_batch_size]) for start in starts]
    per_rank = []
    for rank in range(data_parallel_size):
        per_rank.append(_rank_batch(batch, [step[rank] for step in steps]))
        per_rank[-1].samples_per_step = [global_batch_size] * len(steps)
        per_rank[-1].tokens_per_step = list(tokens_per_step)
    return per_rank


def _check_static(global_batch_size: int, data_parallel_size: int, micro_batch_size: int, group: int) -> None:
    if global_batch_size % (data_parallel_size * micro_batch_size * group):
        groups = "" if group == 1 else f" x {group} micro-batches that virtual pipeline stages take in a row"
        raise ValueError(
            f"--global-batch-size {global_batch_size} is not divisible by {data_parallel_size} data-parallel ranks x"
            f" --micro-batch-size {micro_batch_size}{groups}: change one of them, or use --use-dynamic-batch-size"
        )


def _fixed_size(rows: range, costs: Sequence[float], size: int, ranks: int, balance: bool) -> list[bins.Bins]:
    """Micro-batches of `size` rows; balanced, they hold rows of similar cost, so that dealing evens out the ranks."""
    if not balance:
        return _in_order([list(rows[start : start + size]) for start in range(0, len(rows), size)], ranks)
    order = sorted(rows, key=lambda row: (-costs[row], row))
    return bins.deal([sorted(order[start : start + size]) for start in range(0, len(order), size)], costs, ranks)


def _under_cap(
    rows: range, lengths: Sequence[int], costs: Sequence[float], cap: int, ranks: int, group: int, balance: bool
) -> list[bins.Bins]:
    """As few micro-batches under the cap as can be found; rows ascending in each.

    Unbalanced they are dealt out in turn, in the order of their first rows: a run of them for each rank would give the
    last one all of the longest samples, which stand alone.
    """
    packed = bins.pack([lengths[row] for row in rows], [costs[row] for row in rows], cap, ranks, group)
    dealt = [[sorted(rows[position] for position in group) for group in rank] for rank in packed]
    if balance:
        return dealt
    in_order = sorted(group for rank in dealt for group in rank)
    return [in_order[rank::ranks] for rank in range(ranks)]


def _in_order(groups: bins.Bins, ranks: int) -> list[bins.Bins]:
    """The micro-batches sorted by first row, an equal run of them to each rank."""
    groups = sorted(groups)
    share = len(groups) // ranks
    return [groups[rank * share : (rank + 1) * share] for rank in range(ranks)]


def _trained_tokens(batch: RolloutBatch) -> list[int]:
    """Number of unmasked response tokens of each sample."""
    return [int(part.count_nonzero()) for part in batch.loss_mask.split(batch.response_lengths.tolist())]


def _rank_batch(batch: RolloutBatch, micro_batches: list[bins.Bins]) -> RolloutBatch:
    """The rows of one rank in ascending order, with `micro_batches` [step][micro-batch] renumbered to them."""
    rows = sorted(row for step in micro_batches for group in step for row in group)
    local = {row: position for position, row in enumerate(rows)}
    result = batch.select(rows)
    result.micro_batches = [[[local[row] for row in group] for group in step] for step in micro_batches]
    return result
