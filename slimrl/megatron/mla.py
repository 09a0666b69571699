"""Multi-head latent attention: the layers without Transformer Engine, and the epsilon of the latents' norms in both.

Promises the weights that Transformer Engine's layers have too (the two projections down to the latents are whole on
every tensor-parallel rank), with gradients that are right under tensor and sequence parallelism. `attention_spec` and
`with_latent_epsilon` are called by the layer specs; the attention is megatron-core's (arXiv:2405.04434, section 2.1).
"""

from __future__ import annotations

import copy
import dataclasses
import importlib
from typing import Any

import torch
import torch.nn.functional as F
from megatron.core.post_training.modelopt.layers import Linear
from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer import MLATransformerConfig, ModuleSpec
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.multi_latent_attention import MLASelfAttentionSubmodules
from torch import Tensor

from slimrl.megatron.attention import PackedCoreAttention
from slimrl.megatron.norm import RMSNorm
from slimrl.megatron.rotary import PackedLatentSelfAttention

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

    def __new__(cls, *args: Any, config: MLATransformerConfig, **settings: Any) -> torch.nn.Module:
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
        self.weight.sequence_parallel = config.sequence_parallel

    def forward(self, x: Tensor) -> tuple[Tensor, None]:
        """`x` [tokens, batch, hidden_size] to [tokens, batch, output_size], and no bias, as parallel layers return."""
        return F.linear(x, self.weight), None
