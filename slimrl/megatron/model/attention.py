"""Attention of the layer specs without Transformer Engine: packed causal attention and multi-head latent attention.

The packed attention replaces megatron-core's `core_attention`, in layout "thd" (packed) or, without context
parallelism, "sbhd" (padded). A token attends only to its own sequence, however the pack is split over context-parallel
ranks.

Latent attention (MLA) is megatron-core's (DeepSeek-V2, arXiv:2405.04434, section 2.1), with the weight layout of
Transformer Engine's layers: the two down-projections are replicated over tensor-parallel ranks, and their gradients are
correct under tensor and sequence parallelism. `with_latent_epsilon` sets the epsilon of the latents' norms in
Transformer Engine's layers.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.process_groups_config import ProcessGroupCollection
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import MLATransformerConfig, ModuleSpec, TransformerConfig
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from torch import Tensor
from torch.utils.checkpoint import checkpoint

from slimrl.algorithms.batch_invariant import operators
from slimrl.megatron.model.layers import PackedLatentSelfAttention, RMSNorm
from slimrl.megatron.model.micro_batch import PackedSequences, with_lengths

# Queries per block if there are more keys than queries: that case needs an explicit mask [queries, keys].
MASKED_ROWS = 512
# Sequences of one length up to this one are attended to in one call, which copies their queries, keys and values: short
# ones take less time than a call does.
BATCHED_LENGTH = 256


class PackedCoreAttention(torch.nn.Module):
    """softmax(q k^T * scale) v per sequence with torch's scaled dot-product attention; supports grouped queries."""

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
        if attn_mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal):
            raise ValueError(
                f"layer {layer_number}: packed attention is causal only, the layer spec has {attn_mask_type}"
            )
        self.config = config
        self.context_group = None if pg_collection is None or config.context_parallel_size == 1 else pg_collection.cp
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

        Packed: query [tokens, heads, d], key and value [tokens, groups, d], result [tokens, heads * d]; with context
        parallelism the tokens are this rank's (see `local_rows`) and the boundaries those of the whole pack.
        Padded: query [length, batch, heads, d], key and value alike, result [length, batch, heads * d]; right
        padding needs no mask, because a causal query never attends to later positions.
        """
        if packed_seq_params is None:
            heads = self._attend(*(x.permute(1, 2, 0, 3) for x in (query, key, value)))
            return heads.permute(2, 0, 1, 3).flatten(2)
        if self.context_group is None:
            sequences = with_lengths(packed_seq_params, 1, 0)
            if self.config.batch_invariant_mode:
                return operators.attend_packed(query, key, value, sequences.lengths, self.scale).flatten(1)
            attended = self._attend_each(query, key, value, sequences.lengths)
        else:
            sequences = with_lengths(packed_seq_params, self.context_group.size(), self.context_group.rank())
            attended = self._attend_across_ranks(query, key, value, sequences)
        return torch.cat(attended).flatten(1)

    def _attend_each(self, query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int]) -> list[Tensor]:
        """Attention within each of the sequences of `lengths`; the same bits however many of them have one length."""
        pieces = [x.split(lengths) for x in (query, key, value)]
        by_length: dict[int, list[int]] = defaultdict(list)
        for number, length in enumerate(lengths):
            by_length[length].append(number)
        attended: list[Tensor] = [query] * len(lengths)
        for length, numbers in by_length.items():
            if len(numbers) == 1 or length > BATCHED_LENGTH:
                for number in numbers:
                    attended[number] = self._attend_one(*(x[number] for x in pieces))
                continue
            batch = (torch.stack([x[number] for number in numbers]).transpose(1, 2) for x in pieces)
            for number, heads in zip(numbers, self._attend(*batch).transpose(1, 2).unbind(), strict=True):
                attended[number] = heads
        return attended

    def _attend_across_ranks(
        self, query: Tensor, key: Tensor, value: Tensor, sequences: PackedSequences
    ) -> list[Tensor]:
        """This rank's queries, two pieces of each sequence, against the keys of all ranks."""
        assert self.context_group is not None
        rank, ranks = self.context_group.rank(), self.context_group.size()
        channels = [key.shape[-1], value.shape[-1]]
        rows = _GatheredRows.apply(torch.cat([key, value], dim=-1), self.context_group)
        keys, values = rows.index_select(0, sequences.order).split(channels, dim=-1)
        attended, start = [], 0
        for length in sequences.lengths:
            piece = length // (2 * ranks)
            for half, number in enumerate((rank, 2 * ranks - 1 - rank)):
                first = start // ranks + half * piece
                visible = slice(start, start + (number + 1) * piece)
                attended += self._attend_last(query[first : first + piece], keys[visible], values[visible])
            start += length
        return attended

    def _attend_last(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Attention of a sequence's last queries to all its keys, in blocks that backward recomputes.

        Memory then grows with the length of a sequence, not with its square: a saved mask is [queries, keys].
        """
        before = key.shape[0] - query.shape[0]
        if query.shape[0] <= MASKED_ROWS or before == 0:
            return [self._attend_one(query, key, value)]
        blocks = []
        for start in range(0, query.shape[0], MASKED_ROWS):
            rows = query[start : start + MASKED_ROWS]
            visible = before + start + rows.shape[0]
            blocks.append(checkpoint(self._attend_one, rows, key[:visible], value[:visible], use_reentrant=False))
        return blocks

    def _attend_one(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One sequence, [length, heads, d] each; if there are more keys than queries, the queries are its last ones."""
        heads = self._attend(*(x.transpose(0, 1).unsqueeze(0) for x in (query, key, value)))
        return heads.squeeze(0).transpose(0, 1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[batch, heads, length, d] each; values may have a different width, as in latent attention."""
        queries, keys, value_width = query.shape[2], key.shape[2], value.shape[3]
        # Zero padding does not change the result, and for equal widths torch does not store [queries, keys] scores.
        width = max(query.shape[3], value_width)
        query, key, value = (
            x if x.shape[3] == width else F.pad(x, (0, width - x.shape[3]))  # F.pad copies even if there is no padding
            for x in (query, key, value)
        )
        mask = None
        if queries != keys:
            mask = torch.ones(queries, keys, dtype=torch.bool, device=query.device).tril(keys - queries)
        attended = F.scaled_dot_product_attention(
            query,
            key,
            value,
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            dropout_p=self.dropout if self.training else 0.0,
            enable_gqa=query.shape[1] != key.shape[1],
        )
        return attended[..., :value_width]


class _GatheredRows(torch.autograd.Function):
    """All-gather of rows over `group`, concatenated in rank order; backward reduce-scatters the gradients."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = rows.new_empty(group.size() * rows.shape[0], *rows.shape[1:])
        dist.all_gather_into_tensor(gathered, rows.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        local = gradient.new_empty(gradient.shape[0] // ctx.group.size(), *gradient.shape[1:])
        dist.reduce_scatter_tensor(local, gradient.contiguous(), group=ctx.group)
        return local, None


# The models' reference code uses this default for the norms of the latents; rms_norm_eps applies to the others only.
LATENT_NORM_EPSILON = 1e-6


def attention_spec(config: MLATransformerConfig) -> ModuleSpec:
    """Spec of one layer's latent self-attention, packed or padded, for any tensor-parallel size.

    Raises ValueError without --qk-layernorm: every published model normalises its latents.
    """
    if not config.qk_layernorm:
        raise ValueError("--multi-latent-attention needs --qk-layernorm, which normalises the latents: add it")
    return ModuleSpec(
        module=PackedLatentAttention,
        params={"attn_mask_type": AttnMaskType.causal},
        submodules=MLASelfAttentionSubmodules(
            linear_q_proj=ColumnParallelLinear,
            linear_q_down_proj=Linear,
            linear_q_up_proj=ColumnParallelLinear,
            linear_kv_down_proj=Linear,
            linear_kv_up_proj=ColumnParallelLinear,
            core_attention=PackedCoreAttention,
            linear_proj=RowParallelLinear,
            q_layernorm=LatentNorm,
            kv_layernorm=LatentNorm,
        ),
    )


def with_latent_epsilon(layer: ModuleSpec) -> ModuleSpec:
    """Transformer Engine's `layer` with `LATENT_NORM_EPSILON` in the norms of the latents.

    Transformer Engine fuses each norm with the up-projection after it and reads the epsilon from the configuration.
    """
    attention = layer.submodules.self_attention
    projections = dataclasses.replace(
        attention.submodules, linear_q_up_proj=FusedLatentUpProjection, linear_kv_up_proj=FusedLatentUpProjection
    )
    attention = dataclasses.replace(attention, submodules=projections)
    return dataclasses.replace(layer, submodules=dataclasses.replace(layer.submodules, self_attention=attention))


class FusedLatentUpProjection:
    """Factory of Transformer Engine's fused norm and column-parallel projection, like `TENorm` for norms."""

    def __new__(cls, *args: Any, config: MLATransformerConfig, **settings: Any) -> Any:
        # the class exists only if Transformer Engine is installed
        engine = importlib.import_module("megatron.core.extensions.transformer_engine")
        latent_config = copy.copy(config)
        latent_config.layernorm_epsilon = LATENT_NORM_EPSILON
        layer = engine.TELayerNormColumnParallelLinear(*args, config=latent_config, **settings)
        layer.config = config
        return layer


class LatentNorm(RMSNorm):
    """The norm of a compressed query or key-value vector; its epsilon is fixed, not set by a flag."""

    def __init__(self, config: MLATransformerConfig, hidden_size: int, **_: Any):
        super().__init__(config, hidden_size, eps=LATENT_NORM_EPSILON)


class PackedLatentAttention(PackedLatentSelfAttention):
    """megatron-core's latent attention with down-projections that are replicated on every tensor-parallel rank.

    Without Transformer Engine megatron-core splits them by rows. Each rank then keeps only its own heads' part of the
    rotary key's gradient: silently wrong for every tensor-parallel size above 1.
    """

    def __init__(
        self,
        config: MLATransformerConfig,
        *args: Any,
        down_projections: Mapping[str, Callable[[MLATransformerConfig, int], torch.nn.Module]] = MappingProxyType({}),
        **kwargs: Any,
    ):
        """`down_projections` make those with LoRA adapters, by attribute; the others are `WholeLinear`."""
        super().__init__(config, *args, **kwargs)
        make = {"linear_q_down_proj": WholeLinear, "linear_kv_down_proj": WholeLinear, **down_projections}
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = make["linear_q_down_proj"](config, config.q_lora_rank)
        latent = config.kv_lora_rank + config.qk_pos_emb_head_dim
        self.linear_kv_down_proj = make["linear_kv_down_proj"](config, latent)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """As megatron-core's. Raises ValueError in training under tensor without sequence parallelism."""
        config = self.config
        if self.training and config.tensor_model_parallel_size > 1 and not config.sequence_parallel:
            # Without it the gradients of the rotary key are not all-reduced, and megatron-core all-reduces those of the
            # query norm although they are complete.
            raise ValueError(
                f"--tensor-model-parallel-size {config.tensor_model_parallel_size} with --multi-latent-attention needs"
                " --sequence-parallel in training: add it"
            )
        return super().forward(*args, **kwargs)


class WholeLinear(torch.nn.Module):
    """y = x W^T with a weight [output_size, hidden_size] that tensor parallelism does not divide."""

    def __init__(self, config: MLATransformerConfig, output_size: int):
        super().__init__()
        weight = torch.empty(output_size, config.hidden_size, dtype=config.params_dtype)
        # Initialised from the default generator, whose state is the same on all tensor-parallel ranks.
        config.init_method(weight)
        self.weight = torch.nn.Parameter(weight)
        # Each rank processes its part of the tokens, so the gradients of the copies must be all-reduced.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """`x` [tokens, batch, hidden_size] to ([tokens, batch, output_size], no bias), like the parallel layers."""
        return F.linear(x, self.weight), None
