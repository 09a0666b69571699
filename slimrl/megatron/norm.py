"""Root-mean-square norm for the layer spec without Transformer Engine.

Promises to mark its weight for the gradient reduction that sequence parallelism needs, which torch's own
RMSNorm inside megatron-core does not. Used for every norm of a layer, the query / key norms and the final norm.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from torch import Tensor


class RMSNorm(torch.nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv:1910.07467)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any):
        super().__init__()
        self.shape = (hidden_size,)
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(self.shape, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> Tensor:
        """`x` [..., hidden_size] to the same shape and dtype."""
        return F.rms_norm(x, self.shape, self.weight, self.eps)
