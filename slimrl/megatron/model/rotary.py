"""Rotary embeddings of packed sequences without Transformer Engine's fused kernel.

Promises megatron-core's own arithmetic, bit for bit, without its read of the sequence lengths from the device for
queries and keys of every layer: the frequencies of all tokens are gathered once per micro-batch, from positions that
the host laid out. Called by the layer specs; attention with the fused kernel stays as it is.
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
    """Frequencies [tokens, 1, 1, width] of a pack's tokens; a pair, as megatron-core's attention expects."""

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
        """The last place before megatron-core rotates; queries and keys are [tokens, 1, heads, width] here."""
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
    """megatron-core's latent attention, with frequencies per token and without boundaries to look them up by."""

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
            packed_seq_params = without_boundaries(packed_seq_params)  # with them each layer would ask the device
        return super().get_query_key_value_tensors(
            hidden_states, key_value_states, position_ids, packed_seq_params, **settings
        )


class _FrequenciesOfTokens(torch.nn.Module):
    """A rotary embedding of latent attention; of a pack it gives [tokens, 1, width], one row per token."""

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
        """What `forward` is called with next: the pack itself where its layout is known."""
        if _laid_out(packed_seq_params, transformer_config):
            assert packed_seq_params is not None
            return packed_seq_params
        return self.by_position.get_rotary_seq_len(
            inference_context, transformer, transformer_input, transformer_config, packed_seq_params
        )

    def forward(self, length: int | PackedSequences, packed_seq: bool = False) -> Tensor | tuple[Tensor, float]:
        """Frequencies; with YaRN also what cosine and sine are multiplied by."""
        if not isinstance(length, PackedSequences):
            return self.by_position(length, packed_seq=packed_seq)
        yarn = isinstance(self.by_position, YarnRotaryEmbedding)

        def make() -> tuple[Tensor, float]:
            made = self.by_position(length.max_seqlen_q, packed_seq=True)
            return made if yarn else (made, 1.0)

        rows, scale = length.token_frequencies(make)
        rows = rows.squeeze(1)  # latent attention has packed queries as [tokens, heads, width] when it rotates them
        return (rows, scale) if yarn else rows


def with_token_frequencies(layer: ModuleSpec, config: TransformerConfig) -> ModuleSpec:
    """`layer`, whose self-attention rotates packs as above unless the fused kernel does; the spec is changed."""
    attention = layer.submodules.self_attention
    own = {SelfAttention: PackedSelfAttention, MLASelfAttention: PackedLatentSelfAttention}
    if not config.apply_rope_fusion:
        attention.module = own.get(attention.module, attention.module)
    return layer


def drop_frequencies() -> None:
    """Let go of the frequencies by position that megatron-core keeps for the lengths it has seen.

    They are kept per class, up to 32 lengths each, on the device; they are made again where they are needed.
    """
    for kind in (RotaryEmbedding, YarnRotaryEmbedding):
        kind.forward.cache_clear()


def _laid_out(sequences: PackedSeqParams | None, config: TransformerConfig) -> bool:
    """Whether tokens' positions are known without the device, and the fused kernel does not look them up itself."""
    return isinstance(sequences, PackedSequences) and not config.apply_rope_fusion
