"""Modules that megatron-core lacks: a transformer layer with post-norms, RMSNorm, and a padding-aware MoE router.

The layer also normalises the outputs of attention and MLP before they are added to the residual stream (GLM-4). Its
norms are named `post_self_attn_layernorm` and `post_mlp_layernorm`; the rest is megatron-core's layer.

RMSNorm is for specs without Transformer Engine. It marks its weight for the gradient reduction of sequence parallelism,
which torch's RMSNorm inside megatron-core does not.

The router excludes padding from the token counts that update the expert bias. Padding tokens all choose the same few
experts, so counting them would push real tokens away from those experts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.spec_utils import ModuleSpec, build_module
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

OutputWithBias = tuple[Tensor, Tensor | None]


@dataclasses.dataclass(frozen=True)
class PostNorms:
    """Which outputs are normalised."""

    self_attention: bool = False
    mlp: bool = False


@dataclasses.dataclass
class PostNormSubmodules(TransformerLayerSubmodules):
    """megatron-core's submodules of a layer, plus the two post-norms."""

    post_self_attn_layernorm: ModuleSpec | type = IdentityOp
    post_mlp_layernorm: ModuleSpec | type = IdentityOp


class PostNormTransformerLayer(TransformerLayer):
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(self, config: TransformerConfig, submodules: PostNormSubmodules, *args: Any, **kwargs: Any):
        super().__init__(config, submodules, *args, **kwargs)
        self.post_self_attn_layernorm = self._norm(submodules.post_self_attn_layernorm)
        self.post_mlp_layernorm = self._norm(submodules.post_mlp_layernorm)
        # megatron-core has no hook between a block and its bias-dropout-add, so the latter is wrapped
        self.self_attn_bda: Any = _normalising(self.post_self_attn_layernorm, self.self_attn_bda)
        self.mlp_bda: Any = _normalising(self.post_mlp_layernorm, self.mlp_bda)

    def _norm(self, spec: ModuleSpec | type) -> torch.nn.Module:
        return build_module(
            spec, config=self.config, hidden_size=self.config.hidden_size, eps=self.config.layernorm_epsilon
        )


def with_post_norms(layer: ModuleSpec, post_norms: PostNorms, norm: ModuleSpec | type) -> ModuleSpec:
    """`layer` with `norm` after the blocks that `post_norms` selects."""
    if post_norms == PostNorms():
        return layer
    submodules = PostNormSubmodules(
        **{field.name: getattr(layer.submodules, field.name) for field in dataclasses.fields(layer.submodules)},
        post_self_attn_layernorm=norm if post_norms.self_attention else IdentityOp,
        post_mlp_layernorm=norm if post_norms.mlp else IdentityOp,
    )
    return dataclasses.replace(layer, module=PostNormTransformerLayer, submodules=submodules)


def _normalising(norm: torch.nn.Module, add: Callable[..., Callable[..., Tensor]]) -> Callable[..., Any]:
    """Wraps `add`, megatron-core's factory of bias-dropout-add functions, to normalise the block's output first."""

    def factory(training: bool, fused: bool) -> Callable[[OutputWithBias, Tensor, float], Tensor]:
        def normalise_and_add(output_with_bias: OutputWithBias, residual: Tensor, dropout: float) -> Tensor:
            output, bias = output_with_bias
            normalised = norm(output if bias is None else output + bias)
            return add(training, fused)((normalised, None), residual, dropout)

        return normalise_and_add

    return factory


class RMSNorm(torch.nn.Module):
    """y = x / sqrt(mean(x^2) + eps) * weight over the last dimension (arXiv:1910.07467)."""

    def __init__(self, config: TransformerConfig, hidden_size: int, eps: float = 1e-6, **_: Any):
        super().__init__()
        self.shape = (hidden_size,)
        self.eps = eps
        self.weight = torch.nn.Parameter(torch.ones(self.shape, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """`x` [..., hidden_size] to the same shape and dtype."""
        return F.rms_norm(x, self.shape, self.weight, self.eps)


class Router(TopKRouter):
    """Chooses the experts of each token; `padding_mask` [tokens, 1] is true where a token is padding."""

    _padding: Tensor | None = None  # padding mask of the current micro-batch

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Probabilities and routing map, [tokens, experts] each; load-balancing losses include padding tokens."""
        self._padding = padding_mask
        return super().routing(logits)

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        if self._padding is not None:  # megatron-core 0.16.1 combines [tokens, experts] with [tokens], which fails
            routing_map = routing_map & ~self._padding.reshape(-1, 1)
        super()._apply_expert_bias(routing_map)
