"""Attention of the layer specs without Transformer Engine: packed causal attention and multi-head latent attention.

The packed attention is megatron-core's `core_attention`, in layout "thd" (packed) or, without context parallelism,
"sbhd" (padded). A token attends only to its own sequence, however the pack is cut over context-parallel ranks.

Latent attention is megatron-core's (DeepSeek-V2, arXiv:2405.04434, section 2.1). Its weights are those of Transformer
Engine's layers: the two down-projections are replicated over tensor-parallel ranks, and their gradients are right under
tensor and sequence parallelism. `with_latent_epsilon` sets the epsilon of the latents' norms, in Transformer Engine's
layers too.
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
import math
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

from slimrl.megatron.model.layers import RMSNorm
from slimrl.megatron.model.micro_batch import PackedSequences, with_lengths
from slimrl.megatron.model.rotary import PackedLatentSelfAttention

# Where keys outnumber the queries, a mask is needed: [this many queries, keys] at a time.
MASKED_ROWS = 512


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
        if attn_mask_type not in (AttnMaskType.causal, AttnMaskType.padding_causal):
            raise ValueError(
                f"layer {layer_number}: packed attention is causal only, the layer asks for {attn_mask_type}"
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
        parallelism the tokens are this rank's (see `zigzag`) and the boundaries those of the whole pack.
        Padded: query [length, batch, heads, d], key and value alike, result [length, batch, heads * d]; right
        padding needs no mask, since a causal row never sees what stands behind it.
        """
        if packed_seq_params is None:
            heads = self._attend(*(x.permute(1, 2, 0, 3) for x in (query, key, value)))
            return heads.permute(2, 0, 1, 3).flatten(2)
        if self.context_group is None:
            sequences = with_lengths(packed_seq_params, 1, 0)
            pieces = zip(*(x.split(sequences.lengths) for x in (query, key, value)), strict=True)
            attended = [self._attend_one(*piece) for piece in pieces]
        else:
            sequences = with_lengths(packed_seq_params, self.context_group.size(), self.context_group.rank())
            attended = self._attend_across_ranks(query, key, value, sequences)
        return torch.cat(attended).flatten(1)

    def _attend_across_ranks(
        self, query: Tensor, key: Tensor, value: Tensor, sequences: PackedSequences
    ) -> list[Tensor]:
        """Each rank's queries against the keys of all ranks; every sequence has two pieces of queries here."""
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
                seen = slice(start, start + (number + 1) * piece)
                attended += self._attend_last(query[first : first + piece], keys[seen], values[seen])
            start += length
        return attended

    def _attend_last(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """The last queries of a sequence, all keys: in blocks, computed again on the way back instead of kept.

        So that memory grows with the length of a sequence and not with its square: a kept mask is as large as both.
        """
        before = key.shape[0] - query.shape[0]
        if query.shape[0] <= MASKED_ROWS or before == 0:
            return [self._attend_one(query, key, value)]
        blocks = []
        for start in range(0, query.shape[0], MASKED_ROWS):
            rows = query[start : start + MASKED_ROWS]
            seen = before + start + rows.shape[0]
            blocks.append(checkpoint(self._attend_one, rows, key[:seen], value[:seen], use_reentrant=False))
        return blocks

    def _attend_one(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """One sequence, [length, heads, d] each; where there are more keys than queries, these are its last ones."""
        heads = self._attend(*(x.transpose(0, 1).unsqueeze(0) for x in (query, key, value)))
        return heads.squeeze(0).transpose(0, 1)

    def _attend(self, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        """[batch, heads, length, d] each; values may have another width, as those of latent attention."""
        queries, keys, wanted = query.shape[2], key.shape[2], value.shape[3]
        # Zeros change nothing, and for equal widths torch need not write out [queries, keys] scores.
        width = max(query.shape[3], wanted)
        query, key, value = (
            x if x.shape[3] == width else F.pad(x, (0, width - x.shape[3]))  # by 0 it would copy
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
        return attended[..., :wanted]


class _GatheredRows(torch.autograd.Function):
    """Rows of all ranks of `group` end to end; the gradients of a rank's rows are added up over the ranks."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        gathered = rows.new_empty(group.size() * rows.shape[0], *rows.shape[1:])
        dist.all_gather_into_tensor(gathered, rows.contiguous(), group=group)
        return gathered

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        own = gradient.new_empty(gradient.shape[0] // ctx.group.size(), *gradient.shape[1:])
        dist.reduce_scatter_tensor(own, gradient.contiguous(), group=ctx.group)
        return own, None


# The models' own code leaves the norms of the latents at this, whatever rms_norm_eps says for the others.
LATENT_NORM_EPSILON = 1e-6


def attention_spec(config: MLATransformerConfig) -> ModuleSpec:
    """The self-attention of one layer, packed or padded, for any tensor-parallel size.

    Raises ValueError without --qk-layernorm: every published model normalises its latents.
    """
    if not config.qk_layernorm:
        raise ValueError("--multi-latent-attention needs --qk-layernorm here: add it (the latents are normalised)")
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
    """Transformer Engine's `layer` with the models' own epsilon in the norms of the latents.

    There each norm is one module with the projection up behind it, which reads its epsilon from the configuration.
    """
    attention = layer.submodules.self_attention
    projections = dataclasses.replace(
        attention.submodules, linear_q_up_proj=FusedLatentUpProjection, linear_kv_up_proj=FusedLatentUpProjection
    )
    attention = dataclasses.replace(attention, submodules=projections)
    return dataclasses.replace(layer, submodules=dataclasses.replace(layer.submodules, self_attention=attention))


class FusedLatentUpProjection:
    """Makes Transformer Engine's layer of a norm and a column-parallel projection, as `TENorm` makes its norms."""

    def __new__(cls, *args: Any, config: MLATransformerConfig, **settings: Any) -> Any:
        # the class exists only where Transformer Engine is installed
        engine = importlib.import_module("megatron.core.extensions.transformer_engine")
        of_latents = copy.copy(config)
        of_latents.layernorm_epsilon = LATENT_NORM_EPSILON
        layer = engine.TELayerNormColumnParallelLinear(*args, config=of_latents, **settings)
        layer.config = config
        return layer


class LatentNorm(RMSNorm):
    """The norm of a compressed query or key-value vector; its epsilon is not the flag's."""

    def __init__(self, config: MLATransformerConfig, hidden_size: int, **_: Any):
        super().__init__(config, hidden_size, eps=LATENT_NORM_EPSILON)


class PackedLatentAttention(PackedLatentSelfAttention):
    """megatron-core's latent attention with down-projections that are whole on every tensor-parallel rank.

    Its own divide them by rows where Transformer Engine is absent, and then each rank keeps only its own heads' part
    of the rotary key's gradient: wrong for every tensor-parallel size above 1, without an error.
    """

    def __init__(self, config: MLATransformerConfig, *args: Any, **kwargs: Any):
        super().__init__(config, *args, **kwargs)
        if config.q_lora_rank is not None:
            self.linear_q_down_proj = WholeLinear(config, config.q_lora_rank)
        self.linear_kv_down_proj = WholeLinear(config, config.kv_lora_rank + config.qk_pos_emb_head_dim)

    def forward(self, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor | None]:
        """As megatron-core's. Raises ValueError in training under tensor without sequence parallelism."""
        config = self.config
        if self.training and config.tensor_model_parallel_size > 1 and not config.sequence_parallel:
            # Nobody would add up the gradients of the rotary key, and megatron-core would add up those of the query
            # norm although they are complete.
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
        # Drawn from the default generator, which all tensor-parallel ranks have at the same place.
        config.init_method(weight)
        self.weight = torch.nn.Parameter(weight)
        # Each rank sees its own part of the tokens: the gradients of the copies must be added up.
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """`x` [tokens, batch, hidden_size] to [tokens, batch, output_size], and no bias, as parallel layers return."""
        return F.linear(x, self.weight), None
