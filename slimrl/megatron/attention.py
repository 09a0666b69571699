"""Causal attention over packed sequences, for the layer spec without Transformer Engine.

Promises that a token sees only its own sequence, whatever stands beside it in the pack. Called by
megatron-core's SelfAttention as its `core_attention`; layouts "thd" (packed) and "sbhd" (padded).
"""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.transformer import TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from torch import Tensor


class PackedCoreAttention(torch.nn.Module):
    """softmax(q k^T * scale) v per sequence by torch's scaled dot-product attention, with grouped queries."""

    def __init__(
        self,
        config: TransformerConfig,
        layer_number: int,
        attn_mask_type: AttnMaskType,
        attention_type: str,
        attention_dropout: float | None = None,
        softmax_scale: float | None = None,
        cp_comm_type: str | None = None,
        pg_collection: ProcessGroupCollection | None = None,
        **_: Any,
    ):
        super().__init__()
        if config.context_parallel_size > 1:
            raise ValueError(
                f"--context-parallel-size {config.context_parallel_size} needs --transformer-impl"
                " transformer_engine: install it on a machine with a GPU or set --context-parallel-size 1"
            )
        if attn_mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal):
            raise ValueError(
                f"layer {layer_number}: packed attention is causal only, the layer asks for {attn_mask_type}"
            )
        self.config = config
        self.scale = 1.0 / math.sqrt(config.kv_channels) if softmax_scale is None else softmax_scale
        self.dropout = config.attention_dropout if attention_dropout is None else attention_dropout

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Tensor | None,
        attn_mask_type: AttnMaskType | None = None,
        attention_bias: Tensor | None = None,
        packed_seq_params: PackedSeqParams | None = None,
    ) -> Tensor:
        """Attend within each sequence.

        Packed: query [tokens, heads, d], key and value [tokens, groups, d], result [tokens, heads * d].
        Padded: query [length, batch, heads, d], key and value alike, result [length, batch, heads * d]; right
        padding needs no mask, since a causal row never sees what stands behind it.
        """
        if packed_seq_params is None:
            heads = self._attend(*(x.permute(1, 2, 0, 3) for x in (query, key, value)))
            return heads.permute(2, 0, 1, 3).flatten(2)
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        pieces = zip(*(x.split(lengths) for x in (query, key, value)), strict=True)
        attended = [self._attend_one(*piece) for piece in pieces]
        return torch.cat(attended).flatten(1)

    def _attend_one(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One sequence, [length, heads, d] each."""
        heads = self._attend(*(x.transpose(0, 1).unsqueeze(0) for x in (query, key, value)))
        return heads.squeeze(0).transpose(0, 1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[batch, heads, length, d] each."""
        return F.scaled_dot_product_attention(
            query,
            key,
            value,
            is_causal=True,
            scale=self.scale,
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=query.shape[1] != key.shape[1],
        )
