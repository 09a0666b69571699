"""Reductions of per-token values: masked sum over tokens, and sum over samples of the masked mean.

Both return sums, never means. The caller divides by a count that is global over micro-batches and ranks, so that the
result does not depend on how the batch was split.
"""

from __future__ import annotations

import torch
from torch import Tensor


def masked_sum(values: Tensor, mask: Tensor) -> Tensor:
    """Sum of `values` [tokens] weighted by `mask` [tokens]; masked values are ignored, even NaN."""
    return (values.masked_fill(mask == 0, 0.0) * mask).sum()


def sample_mean_weights(mask: Tensor, lengths: Tensor) -> Tensor:
    """Weights [tokens] such that `(weights * values).sum()` is the sum over samples of the masked mean.

    `mask` [tokens] holds samples end to end; `lengths` [n] (integers) is the number of tokens of each.
    A fully masked sample gets weight 0 everywhere. Raises ValueError if lengths in host memory do not add up to the
    size of the mask. Lengths on a device are not checked, because reading them would synchronize host and device.
    """
    if lengths.device.type == "cpu" and int(lengths.sum()) != mask.numel():
        raise ValueError(f"the lengths add up to {int(lengths.sum())} tokens and the mask has {mask.numel()}")
    lengths = lengths.to(mask.device)
    rows = torch.arange(lengths.numel(), device=mask.device)
    sample_of_token = torch.repeat_interleave(rows, lengths, output_size=mask.numel())
    # Sums of 0/1 are exact in float32, so index_add's order of addition does not matter.
    counts = mask.new_zeros(lengths.numel()).index_add_(0, sample_of_token, mask)
    counts = torch.where(counts > 0, counts, 1.0)
    return mask / counts[sample_of_token]


def sums_per_sample(values: Tensor, lengths: Tensor) -> Tensor:
    """The sum of each sample's `values` [tokens], which holds samples of these `lengths` end to end; [n]."""
    lengths = lengths.to(values.device)
    rows = torch.arange(lengths.numel(), device=values.device)
    sample_of_token = torch.repeat_interleave(rows, lengths, output_size=values.numel())
    return values.new_zeros(lengths.numel()).index_add(0, sample_of_token, values)


def masked_mean_per_sample_sum(values: Tensor, mask: Tensor, lengths: Tensor) -> Tensor:
    """Sum over samples of the mean of their unmasked `values`; a fully masked sample contributes 0.

    `values` and `mask` [tokens] hold samples end to end; `lengths` [n]. Returns a scalar, differentiable in `values`.
    """
    return masked_sum(values, sample_mean_weights(mask, lengths))
