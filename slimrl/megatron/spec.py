"""Which modules a transformer block is built from.

Promises Transformer Engine's layers where they can run, and otherwise megatron-core's local layers with this
package's packed attention and sequence-parallel-capable norms. Called by `model.build_model`.
"""

from __future__ import annotations

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build

from slimrl.megatron.attention import PackedCoreAttention
from slimrl.megatron.norm import RMSNorm


def block_spec(config: TransformerConfig) -> ModuleSpec | TransformerBlockSubmodules:
    """The specification of this rank's transformer block.

    Raises ValueError for a normalisation other than RMSNorm where Transformer Engine is absent.
    """
    if config.transformer_impl == "transformer_engine":
        return get_gpt_layer_with_transformer_engine_spec(
            num_experts=config.num_moe_experts,
            moe_grouped_gemm=config.moe_grouped_gemm,
            qk_layernorm=config.qk_layernorm,
        )
    if config.normalization != "RMSNorm":
        raise ValueError(
            f"--normalization {config.normalization} needs --transformer-impl transformer_engine: install it on a"
            " machine with a GPU or train a model with --normalization RMSNorm"
        )
    # A bare layer spec would get megatron-core's own final norm, which refuses sequence parallelism.
    return TransformerBlockSubmodules(
        layer_specs=[_local_layer_spec(config)] * get_num_layers_to_build(config), layer_norm=RMSNorm
    )


def _local_layer_spec(config: TransformerConfig) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts,
        moe_grouped_gemm=config.moe_grouped_gemm,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )
    layer.submodules.input_layernorm = RMSNorm
    layer.submodules.pre_mlp_layernorm = RMSNorm
    attention = layer.submodules.self_attention.submodules
    attention.core_attention = PackedCoreAttention
    if config.qk_layernorm:
        attention.q_layernorm = RMSNorm
        attention.k_layernorm = RMSNorm
    return layer
