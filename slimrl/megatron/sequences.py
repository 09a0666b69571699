"""Where the sequences of a packed micro-batch stand, known to the host as well as to the device.

Promises that no layer has to ask the device for a length: each such question would stop the host until the device has
done all its work, once in every layer. Made once per micro-batch, read by attention.
"""

from __future__ import annotations

import dataclasses

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from slimrl.megatron.zigzag import pack_order


@dataclasses.dataclass
class PackedSequences(PackedSeqParams):
    """megatron-core's boundaries, and what attention without Transformer Engine needs beside them."""

    lengths: tuple[int, ...] = ()  # of every sequence of the whole pack
    order: Tensor | None = None  # `pack_order` on the model's device; None where one rank holds the whole pack


def packed_sequences(lengths: Tensor, ranks: int, device: torch.device) -> PackedSequences:
    """The boundaries of a pack, on `device`; `lengths` int64 [sequences], on the host, of the whole pack.

    `ranks` context-parallel ranks share the pack; then each length is a multiple of twice as many.
    """
    boundaries = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(device, torch.int32)
    longest = int(lengths.max())
    return PackedSequences(
        qkv_format="thd",
        cu_seqlens_q=boundaries,
        cu_seqlens_kv=boundaries,
        max_seqlen_q=longest,
        max_seqlen_kv=longest,
        lengths=tuple(lengths.tolist()),
        order=None if ranks == 1 else pack_order(lengths, ranks).to(device),
    )


def with_lengths(sequences: PackedSeqParams, ranks: int) -> PackedSequences:
    """The same sequences as `packed_sequences` gives them; asks the device where a caller made them otherwise."""
    if isinstance(sequences, PackedSequences):
        return sequences
    return packed_sequences(sequences.cu_seqlens_q.diff().long().cpu(), ranks, sequences.cu_seqlens_q.device)
