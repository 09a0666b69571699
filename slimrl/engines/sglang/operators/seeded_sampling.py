"""Seeded sampling whose random numbers belong to tokens, so that a response does not depend on the batch.

With --enable-deterministic-inference SGLang adds noise to the log-probabilities, hashed from the request's seed, the
position and a column, and takes the largest sum (Gumbel-max). Columns are token ids, but for every request of a batch
the places of tokens in order of probability as soon as one request of the batch has a top-k, a top-p or temperature 0.
A training sample would then depend on whether an evaluation happens to be in its batch. Here columns are always token
ids. `install` is called by `cpu_patches` on a CPU, and by `entry` in each process that SGLang starts on a GPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_MASK_32 = 0xFFFFFFFF
_REPLACED = "top_k_top_p_min_p_sampling_from_probs_torch"


def install(sampler: Any) -> None:
    """Replaces the function in SGLang's module `sampler`."""
    setattr(sampler, _REPLACED, by_token(getattr(sampler, _REPLACED), sampler.sampling_from_probs_torch))


def by_token(own: Callable[..., Any], sample: Callable[..., Tensor]) -> Callable[..., Any]:
    """SGLang's sampling of restricted requests, which `sample` does if there are seeds; else `own`.

    `sample(probabilities, seeds, positions)` is SGLang's for requests that restrict nothing.
    """

    def restricted(
        probs: Tensor,
        top_ks: Tensor,
        top_ps: Tensor,
        min_ps: Tensor,
        need_min_p_sampling: bool,
        sampling_seed: Tensor | None,
        positions: Tensor,
        *,
        return_filtered_probs: bool = False,
    ) -> Any:
        if sampling_seed is None or return_filtered_probs:
            rest = (need_min_p_sampling, sampling_seed, positions)
            return own(probs, top_ks, top_ps, min_ps, *rest, return_filtered_probs=return_filtered_probs)
        chosen = kept(probs, top_ks, top_ps, min_ps if need_min_p_sampling else None)
        return sample(chosen, sampling_seed, positions)

    return restricted


def kept(probs: Tensor, top_ks: Tensor, top_ps: Tensor, min_ps: Tensor | None = None) -> Tensor:
    """`probs` [requests, vocabulary] with 0 for all but the `top_ks` most likely tokens, and for those after `top_ps`.

    As SGLang: a token is kept if those before it, in order of probability, have `top_ps` or less together, and with
    `min_ps` if it has that part of the largest probability. With seeds SGLang itself stops at a min-p, because it
    numbers tokens by probability. A row that restricts nothing is returned bit for bit.
    """
    ordered, tokens = probs.sort(dim=-1, descending=True, stable=True)
    before = ordered.cumsum(-1, dtype=torch.float64).sub_(ordered)
    places = torch.arange(probs.shape[-1], device=probs.device)
    limit = top_ps.view(-1, 1)
    # the sums may be rounded to more than 1, which is the limit of those that restrict nothing
    dropped = (places >= top_ks.view(-1, 1)) | ((before > limit) & (limit < 1))
    if min_ps is not None:
        dropped |= ordered < ordered[:, :1] * min_ps.view(-1, 1)
    return torch.empty_like(probs).scatter_(-1, tokens, ordered.masked_fill_(dropped, 0.0))


def murmur_hash32(seed: Tensor, positions: Tensor, columns: Tensor) -> Tensor:
    """MurmurHash3 (32 bit) of (seed, position, column), as the function of SGLang, which is a Triton kernel.

    `seed` [rows] uint64 or int64, `positions` [rows], `columns` [columns]; returns [rows, columns] int64 in [0, 2^32).
    """
    seed = seed.view(torch.int64)[:, None]
    positions, columns = positions.to(torch.int64)[:, None], columns[None]
    result = torch.zeros_like(seed)
    for word in (seed & _MASK_32, seed >> 32 & _MASK_32, positions, columns):
        word = word * 0xCC9E2D51 & _MASK_32
        word = (word << 15 | word >> 17) & _MASK_32
        result = result ^ (word * 0x1B873593 & _MASK_32)
        result = (result << 13 | result >> 19) & _MASK_32
        result = result * 5 + 0xE6546B64 & _MASK_32
    result = result ^ 16  # length of the input in bytes
    result = (result ^ result >> 16) * 0x85EBCA6B & _MASK_32
    result = (result ^ result >> 13) * 0xC2B2AE35 & _MASK_32
    return result ^ result >> 16
