"""Modules that megatron-core lacks: a layer with post-norms, RMSNorm, a padding-aware MoE router, packed RoPE.

The layer also normalises the outputs of attention and MLP before they are added to the residual stream (GLM-4). Its
norms are named `post_self_attn_layernorm` and `post_mlp_layernorm`; the rest is megatron-core's layer.

RMSNorm is for specs without Transformer Engine. It marks its weight for the gradient reduction of sequence parallelism,
which torch's RMSNorm inside megatron-core does not.

The router excludes padding from the token counts that update the expert bias. Padding tokens all choose the same few
experts, so counting them would push real tokens away from those experts.

Rotary embeddings of packed sequences without Transformer Engine's fused kernel equal megatron-core's bit for bit.
megatron-core reads the sequence lengths from the device for the queries and keys of every layer; here the frequencies
of all tokens are gathered once per micro-batch, from positions computed on the host.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    YarnRotaryEmbedding,
    _yarn_get_concentration_factor_from_config,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import MLATransformerConfig, ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.router import TopKRouter
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from megatron.core.transformer.spec_utils import build_module
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor

from slimrl.algorithms.batch_invariant import operators
from slimrl.megatron.model.micro_batch import PackedSequences, without_boundaries

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
        self.batch_invariant = config.batch_invariant_mode
        self.weight = torch.nn.Parameter(torch.ones(self.shape, dtype=config.params_dtype))
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        """`x` [..., hidden_size] to the same shape and dtype."""
        if self.batch_invariant:
            return operators.rms_norm(x, self.weight, self.eps)
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


class _Rotation(NamedTuple):
    """Frequencies [tokens, 1, 1, width] of a pack's tokens, as the pair that megatron-core's attention expects."""

    query: Tensor
    key: Tensor


class PackedSelfAttention(SelfAttention):
    """megatron-core's self-attention; rotates packed queries and keys with one row of frequencies per token."""

    def forward(
        self,
        hidden_states: Tensor,
        attention_mask: Tensor | None,
        *,
        rotary_pos_emb: Tensor | tuple[Tensor, Tensor] | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **settings: Any,
    ) -> tuple[Tensor, Tensor | None]:
        """As megatron-core's; `rotary_pos_emb` [longest sequence, 1, 1, width] has one row per position.

        With multimodal positions it has one row per token.
        """
        if self.config.mrope_section is not None and isinstance(rotary_pos_emb, Tensor):
            rotary_pos_emb = _Rotation(rotary_pos_emb, rotary_pos_emb)
        elif _laid_out(packed_seq_params, self.config) and isinstance(rotary_pos_emb, Tensor):
            by_position = rotary_pos_emb
            assert packed_seq_params is not None  # `_laid_out`
            rows, _ = packed_seq_params.token_frequencies(lambda: (by_position, 1.0))
            rotary_pos_emb = _Rotation(rows, rows)
        return super().forward(
            hidden_states,
            attention_mask,
            rotary_pos_emb=rotary_pos_emb,
            packed_seq_params=packed_seq_params,
            **settings,
        )

    def _adjust_key_value_for_inference(
        self, inference_context: Any, query: Tensor, key: Tensor, value: Tensor, rotary_pos_emb: Any, *rest: Any
    ) -> tuple[Any, ...]:
        """Rotates here, the last hook before megatron-core would; queries and keys are [tokens, 1, heads, width]."""
        if not isinstance(rotary_pos_emb, _Rotation):
            return super()._adjust_key_value_for_inference(inference_context, query, key, value, rotary_pos_emb, *rest)
        rotate = _rotated if self.config.batch_invariant_mode else _apply_rotary_pos_emb_bshd
        query, key = (
            rotate(
                x,
                frequencies,
                rotary_interleaved=self.config.rotary_interleaved,
                multi_latent_attention=self.config.multi_latent_attention,
                mscale=_yarn_get_concentration_factor_from_config(self.config),
            )
            for x, frequencies in zip((query, key), rotary_pos_emb, strict=True)
        )
        return query, key, value, None, self.attn_mask_type, None


def _rotated(x: Tensor, angles: Tensor, **settings: Any) -> Tensor:
    """megatron-core's rotation of `x` by halves, with cosines and sines that depend on their angle alone."""
    assert settings == _PLAIN_ROTATION, settings  # a rule rejects other rotations
    return operators.rotate(x, *operators.cosines_and_sines(angles[..., : angles.shape[-1] // 2]))


_PLAIN_ROTATION = {"rotary_interleaved": False, "multi_latent_attention": False, "mscale": 1.0}


class PackedLatentSelfAttention(MLASelfAttention):
    """megatron-core's latent attention, with frequencies per token instead of a lookup by sequence boundaries."""

    def __init__(self, config: MLATransformerConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        if not config.apply_rope_fusion:
            self.rotary_pos_emb: Any = _FrequenciesOfTokens(self.rotary_pos_emb)

    def get_query_key_value_tensors(
        self,
        hidden_states: Tensor,
        key_value_states: Tensor | None = None,
        position_ids: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
        **settings: Any,
    ) -> tuple[Tensor, ...]:
        """As megatron-core's: query, key, value and the two compressed vectors."""
        if _laid_out(packed_seq_params, self.config):
            assert packed_seq_params is not None  # `_laid_out`
            packed_seq_params = without_boundaries(packed_seq_params)  # else each layer reads them from the device
        return super().get_query_key_value_tensors(
            hidden_states, key_value_states, position_ids, packed_seq_params, **settings
        )


class _FrequenciesOfTokens(torch.nn.Module):
    """A rotary embedding of latent attention; for a pack it returns [tokens, 1, width], one row per token."""

    def __init__(self, by_position: RotaryEmbedding | YarnRotaryEmbedding):
        super().__init__()
        self.by_position = by_position

    def get_rotary_seq_len(
        self,
        inference_context: Any,
        transformer: Any,
        transformer_input: Tensor,
        transformer_config: TransformerConfig,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> int | PackedSequences:
        """The argument of the following `forward` call: the pack itself if its layout is known."""
        if _laid_out(packed_seq_params, transformer_config):
            assert packed_seq_params is not None
            return packed_seq_params
        return self.by_position.get_rotary_seq_len(
            inference_context, transformer, transformer_input, transformer_config, packed_seq_params
        )

    def forward(self, length: int | PackedSequences, packed_seq: bool = False) -> Tensor | tuple[Tensor, float]:
        """Frequencies; with YaRN also the factor for cosine and sine."""
        if not isinstance(length, PackedSequences):
            return self.by_position(length, packed_seq=packed_seq)
        yarn = isinstance(self.by_position, YarnRotaryEmbedding)

        def make() -> tuple[Tensor, float]:
            frequencies = self.by_position(length.max_seqlen_q, packed_seq=True)
            return frequencies if yarn else (frequencies, 1.0)

        rows, scale = length.token_frequencies(make)
        rows = rows.squeeze(1)  # latent attention rotates packed queries [tokens, heads, width]
        return (rows, scale) if yarn else rows


def with_token_frequencies(layer: ModuleSpec, config: TransformerConfig) -> ModuleSpec:
    """`layer`, modified in place to rotate packs with this module's attention unless the fused kernel does."""
    attention = layer.submodules.self_attention
    packed = {SelfAttention: PackedSelfAttention, MLASelfAttention: PackedLatentSelfAttention}
    if not config.apply_rope_fusion:
        attention.module = packed.get(attention.module, attention.module)
    return layer


def drop_frequencies() -> None:
    """Free the frequencies by position that megatron-core caches on the device, up to 32 lengths per class.

    They are recomputed when needed.
    """
    for kind in (RotaryEmbedding, YarnRotaryEmbedding):
        kind.forward.cache_clear()


def _laid_out(sequences: PackedSeqParams | None, config: TransformerConfig) -> bool:
    """Whether the tokens' positions are known on the host and the fused kernel is not used."""
    return isinstance(sequences, PackedSequences) and not config.apply_rope_fusion
