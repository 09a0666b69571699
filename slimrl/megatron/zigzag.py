"""Which tokens of a packed micro-batch each context-parallel rank holds.

Every sequence is cut into 2 x ranks equal pieces; rank r holds the pieces r and 2 x ranks - 1 - r, so that under a
causal mask all ranks have the same amount to attend to. Called by the packing and by attention, which must agree.
"""

from __future__ import annotations

import torch
from torch import Tensor


def held_rows(lengths: Tensor, rank: int, ranks: int) -> Tensor:
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
    gathered = torch.cat([held_rows(lengths, rank, ranks) for rank in range(ranks)])
    order = torch.empty_like(gathered)
    order[gathered] = torch.arange(gathered.numel(), device=gathered.device)
    return order


def ranges(starts: Tensor, lengths: Tensor) -> Tensor:
    """`starts[i], starts[i] + 1, ...` (`lengths[i]` numbers) for every i, end to end."""
    shift = starts - (lengths.cumsum(0) - lengths)
    return torch.repeat_interleave(shift, lengths) + torch.arange(int(lengths.sum()), device=lengths.device)
