"""Packs the samples of a micro-batch into one sequence and cuts it over context-parallel ranks.

The trainer packs each micro-batch once per rollout. For every response token a `MicroBatch` holds the rank and the row
of logits that predicts it, its id, and its index in the batch's response columns.

Context parallelism cuts every sequence into 2 x ranks equal pieces. Rank r holds pieces r and 2 x ranks - 1 - r, which
balances causal attention. Packing and attention take the cut from here.

`PackedSequences` has the sequence lengths on the host too. A layer that asked the device for a length would wait, in
every layer, until the device has finished all its work.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from slimrl.data.train_batch import RolloutBatch, sequence_multiple


def local_rows(lengths: Tensor, rank: int, ranks: int) -> Tensor:
    """Rows of the whole pack that `rank` holds, in its own order; int64 [sum(lengths) / ranks].

    `lengths` int64 [sequences], each a multiple of 2 x `ranks` (of 1 where there is one rank).
    """
    if ranks == 1:
        return torch.arange(int(lengths.sum()), device=lengths.device)
    starts, piece = lengths.cumsum(0) - lengths, lengths // (2 * ranks)
    numbers = lengths.new_tensor([rank, 2 * ranks - 1 - rank])
    return ranges((starts[:, None] + piece[:, None] * numbers).flatten(), piece.repeat_interleave(2))


def pack_order(lengths: Tensor, ranks: int) -> Tensor:
    """Where each row of the whole pack stands after all ranks' rows were laid end to end; int64 [sum(lengths)]."""
    gathered = torch.cat([local_rows(lengths, rank, ranks) for rank in range(ranks)])
    order = torch.empty_like(gathered)
    order[gathered] = torch.arange(gathered.numel(), device=gathered.device)
    return order


def ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """`starts[i], starts[i] + 1, ...` (`lengths[i]` numbers) for every i, end to end."""
    shift = starts - (lengths.cumsum(0) - lengths)
    return torch.repeat_interleave(shift, lengths) + torch.arange(int(lengths.sum()), device=lengths.device)


class TokenFrequencies:
    """The rotary frequencies of one forward pass, gathered by the first layer that asks and read by all others.

    All layers of a model have the same. The recomputation of a layer finds them here too.
    """

    def __init__(self) -> None:
        self._gathered: tuple[Tensor, float] | None = None

    def of(self, positions: Tensor, make: Callable[[], tuple[Tensor, float]]) -> tuple[Tensor, float]:
        """Rows [tokens, 1, 1, width] at `positions` of what `make` gives, and the scale that it gives beside them."""
        if self._gathered is None:
            by_position, scale = make()
            self._gathered = by_position.index_select(0, positions), scale
        return self._gathered


@dataclasses.dataclass
class PackedSequences(PackedSeqParams):
    """megatron-core's boundaries, and what layers without Transformer Engine need beside them."""

    lengths: tuple[int, ...] = ()  # of every sequence of the whole pack
    order: Tensor | None = None  # `pack_order` on the model's device; None where one rank holds the whole pack
    positions: Tensor | None = None  # int64 [tokens of this rank]: the place of each in its sequence
    frequencies: TokenFrequencies | None = None  # of the forward pass that this object was made for

    def token_frequencies(self, make: Callable[[], tuple[Tensor, float]]) -> tuple[Tensor, float]:
        """The frequencies of this rank's tokens (see `TokenFrequencies.of`); gathered again outside `for_one_pass`."""
        assert self.positions is not None  # as `packed_sequences` makes them
        return (self.frequencies or TokenFrequencies()).of(self.positions, make)


def packed_sequences(lengths: Tensor, ranks: int, device: torch.device, *, rank: int) -> PackedSequences:
    """The boundaries of a pack, on `device`; `lengths` int64 [sequences], on the host, of the whole pack.

    `ranks` context-parallel ranks share the pack, this one is number `rank`; then each length is a multiple of twice
    as many.
    """
    boundaries = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(device, torch.int32)
    longest = int(lengths.max())
    positions = ranges(torch.zeros_like(lengths), lengths)[local_rows(lengths, rank, ranks)]
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        lengths=tuple(lengths.tolist()),
        order=None if ranks == 1 else pack_order(lengths, ranks).to(device),
        positions=positions.to(device),
    )


def with_lengths(sequences: PackedSeqParams, ranks: int, rank: int) -> PackedSequences:
    """The same sequences as `packed_sequences` gives them; asks the device where a caller made them otherwise."""
    if isinstance(sequences, PackedSequences):
        return sequences
    return packed_sequences(sequences.cu_seqlens_q.diff().long().cpu(), ranks, sequences.cu_seqlens_q.device, rank=rank)


def for_one_pass(sequences: PackedSeqParams | None) -> PackedSeqParams | None:
    """The same sequences for one forward pass and its backward pass, whose layers share rotary frequencies.

    These are let go of with the pass: a rollout's micro-batches are all kept to its end.
    """
    if not isinstance(sequences, PackedSequences):
        return sequences
    return dataclasses.replace(sequences, frequencies=TokenFrequencies())


def without_boundaries(sequences: PackedSequences) -> PackedSequences:
    """The same sequences for code that looks rotary frequencies up by boundaries where it finds any."""
    # fields of megatron-core's PackedSeqParams, which is not read here
    return dataclasses.replace(sequences, cu_seqlens_q=None, cu_seqlens_kv=None)  # type: ignore[call-arg]


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """One packed forward pass; sequences stand end to end, the last may be padding that nothing reads.

    With context parallelism `tokens` are this rank's share, and so are `padding`, `logit_rows`, `targets` and `own`;
    the rest is the same on every rank.
    """

    tokens: Tensor  # int64 [1, padded tokens / context-parallel ranks]
    padding: Tensor  # bool like tokens: which of them are padding
    sequences: PackedSequences  # where each sequence starts in the whole pack
    logit_rows: Tensor  # int64 [own response tokens]: the row of logits that predicts each
    targets: Tensor  # int64 [own response tokens]: their ids
    own: Tensor  # int64 [own response tokens]: which of the micro-batch's response tokens they are
    response_index: Tensor  # int64 [response tokens]: their places in the rank's response columns
    response_lengths: Tensor  # int64 [samples]
    rows: tuple[int, ...]  # the samples' places in the rank's batch
    lengths: tuple[tuple[int, int], ...]  # of each sample and of its response, known to the host


def pack_micro_batch(
    batch: RolloutBatch,
    rows: Sequence[int],
    *,
    length_multiple: int,
    device: torch.device,
    context_rank: int = 0,
    context_size: int = 1,
) -> MicroBatch:
    """Pack `rows` of `batch`; each rank's share is padded to a multiple of `length_multiple` tokens.

    The prediction of the token at position t is row t - 1, so a sample of prompt length p and total length n
    uses the rows p - 1 to n - 2 of its own sequence.
    """
    index = torch.as_tensor(rows, dtype=torch.int64)
    totals, responses = batch.total_lengths[index], batch.response_lengths[index]
    multiple = sequence_multiple(context_size)
    lengths = _rounded_up(totals, multiple)
    starts = lengths.cumsum(0) - lengths
    padding = int(-lengths.sum() % (context_size * math.lcm(length_multiple, multiple // context_size)))
    if padding:
        lengths = torch.cat([lengths, lengths.new_full((1,), padding)])

    tokens = torch.zeros(int(lengths.sum()), dtype=torch.int64)
    real = ranges(starts, totals)
    tokens[real] = batch.select(index).tokens
    padded = torch.ones_like(tokens, dtype=torch.bool)
    padded[real] = False
    positions = ranges(starts + totals - responses, responses)
    held = local_rows(lengths, context_rank, context_size)
    place = torch.full_like(tokens, -1)
    place[held] = torch.arange(held.numel())
    logit_rows = place[positions - 1]
    own = (logit_rows >= 0).nonzero().squeeze(1)

    return MicroBatch(
        tokens=tokens[held].unsqueeze(0).to(device),
        padding=padded[held].unsqueeze(0).to(device),
        sequences=packed_sequences(lengths, context_size, device, rank=context_rank),
        logit_rows=logit_rows[own].to(device),
        targets=tokens[positions[own]].to(device),
        own=own.to(device),
        response_index=ranges(batch.response_offsets[index], responses).to(device),
        response_lengths=responses.to(device),
        rows=tuple(rows),
        lengths=tuple(zip(totals.tolist(), responses.tolist(), strict=True)),
    )


def _rounded_up(lengths: Tensor, multiple: int) -> Tensor:
    return -(-lengths // multiple) * multiple
