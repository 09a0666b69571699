"""Where the sequences of a packed micro-batch stand, known to the host as well as to the device.

Promises that no layer has to ask the device for a length: each such question would stop the host until the device has
done all its work, once in every layer. Made once per micro-batch, read by attention.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from slimrl.megatron.zigzag import held_rows, pack_order, ranges


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
        """The frequencies of this rank's tokens (see `TokenFrequencies.of`); gathered anew outside `for_one_pass`."""
        return (self.frequencies or TokenFrequencies()).of(self.positions, make)


def packed_sequences(lengths: Tensor, ranks: int, device: torch.device, *, rank: int) -> PackedSequences:
    """The boundaries of a pack, on `device`; `lengths` int64 [sequences], on the host, of the whole pack.

    `ranks` context-parallel ranks share the pack, this one is number `rank`; then each length is a multiple of twice
    as many.
    """
    boundaries = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(device, torch.int32)
    longest = int(lengths.max())
    positions = ranges(torch.zeros_like(lengths), lengths)[held_rows(lengths, rank, ranks)]
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
    return dataclasses.replace(sequences, cu_seqlens_q=None, cu_seqlens_kv=None)
