"""Lays the samples of one micro-batch end to end for the model, and cuts out what this rank holds of them.

Promises that every response token's prediction can be found again: the rank and row of logits that predicts it, its
id, and its place in the batch's response columns. Called by the trainer once per rollout and micro-batch.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from slimrl.data.batch import RolloutBatch
from slimrl.data.packing import sequence_multiple
from slimrl.megatron.sequences import PackedSequences, packed_sequences
from slimrl.megatron.zigzag import held_rows, ranges


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
    held = held_rows(lengths, context_rank, context_size)
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
