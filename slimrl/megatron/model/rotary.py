"""Rotary embeddings of packed sequences without Transformer Engine's fused kernel.

The result equals megatron-core's bit for bit. megatron-core reads the sequence lengths from the device for the queries
and keys of every layer; this module gathers the frequencies of all tokens once per micro-batch, from positions computed
on the host. Used by the layer specs; attention with the fused kernel is unchanged.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from megatron.core.models.common.embeddings.rope_utils import _apply_rotary_pos_emb_bshd
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
    YarnRotaryEmbedding,
    _yarn_get_concentration_factor_from_config,
)
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import MLATransformerConfig, ModuleSpec, TransformerConfig
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention
from torch import Tensor

from slimrl.megatron.model.micro_batch import PackedSequences, without_boundaries


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
        """As megatron-core's; `rotary_pos_emb` [longest sequence, 1, 1, width] has one row per position."""
        if _laid_out(packed_seq_params, self.config) and isinstance(rotary_pos_emb, Tensor):
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
        query, key = (
            _apply_rotary_pos_emb_bshd(
                x,
                frequencies,
                rotary_interleaved=self.config.rotary_interleaved,
                multi_latent_attention=self.config.multi_latent_attention,
                mscale=_yarn_get_concentration_factor_from_config(self.config),
            )
            for x, frequencies in zip((query, key), rotary_pos_emb, strict=True)
        )
        return query, key, value, None, self.attn_mask_type, None


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
