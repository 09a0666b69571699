"""Lays the samples of one micro-batch end to end for the model.

Promises that every response token's prediction can be found again: the row of logits that predicts it, its id,
and its place in the batch's response columns. Called by the trainer once per rollout and micro-batch.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from torch import Tensor

from slimrl.data.batch import RolloutBatch


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """One packed forward pass; sequences stand end to end, the last may be padding that nothing reads."""

    tokens: Tensor  # int64 [1, padded tokens]
    sequences: PackedSeqParams  # where each sequence starts, on the model's device
    logit_rows: Tensor  # int64 [response tokens]: the row of logits that predicts each response token
    targets: Tensor  # int64 [response tokens]: the ids of the response tokens
    response_index: Tensor  # int64 [response tokens]: their places in the rank's response columns
    response_lengths: Tensor  # int64 [samples]


def pack_micro_batch(
    batch: RolloutBatch, rows: Sequence[int], *, length_multiple: int, device: torch.device
) -> MicroBatch:
    """Pack `rows` of `batch`; the total length is padded to a multiple of `length_multiple` tokens.

    The prediction of the token at position t is row t - 1, so a sample of prompt length p and total length n
    uses the rows p - 1 to n - 2 of its own sequence.
    """
    index = torch.as_tensor(rows, dtype=torch.int64)
    totals, responses = batch.total_lengths[index], batch.response_lengths[index]
    tokens = batch.select(index).tokens
    ends = totals.cumsum(0)
    positions = _ranges(ends - responses, responses)
    padding = -tokens.numel() % length_multiple
    lengths = torch.cat([totals, totals.new_full((1,), padding)]) if padding else totals
    boundaries = torch.cat([lengths.new_zeros(1), lengths.cumsum(0)]).to(torch.int32)
    longest = int(lengths.max())
    boundaries = boundaries.to(device)
    return MicroBatch(
        tokens=F.pad(tokens, (0, padding)).unsqueeze(0).to(device),
        sequences=PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=boundaries,
            cu_seqlens_kv=boundaries,
            max_seqlen_q=longest,
            max_seqlen_kv=longest,
        ),
        logit_rows=(positions - 1).to(device),
        targets=tokens[positions].to(device),
        response_index=_ranges(batch.response_offsets[index], responses).to(device),
        response_lengths=responses.to(device),
    )


def _ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """`starts[i], starts[i] + 1, ...` (`lengths[i]` numbers) for every i, end to end."""
    shift = starts - (lengths.cumsum(0) - lengths)
    return torch.repeat_interleave(shift, lengths) + torch.arange(int(lengths.sum()))
