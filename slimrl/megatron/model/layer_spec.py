"""Layer specs: which modules a transformer block is built from.

With --transformer-impl transformer_engine these are Transformer Engine's layers, otherwise megatron-core's local layers
with this package's packed attention and norms that support sequence parallelism. --moe-layer-freq decides which layers
are dense and which have experts. Used by `model_builder`.
"""

from __future__ import annotations

from megatron.core.models.gpt.gpt_layer_specs import (
    get_gpt_layer_local_spec,
    get_gpt_layer_with_transformer_engine_spec,
)
from megatron.core.transformer import ModuleSpec, TransformerConfig
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules, get_num_layers_to_build
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from slimrl.megatron.model.attention import PackedCoreAttention, attention_spec, with_latent_epsilon
from slimrl.megatron.model.layers import PostNorms, RMSNorm, Router, with_post_norms, with_token_frequencies
from slimrl.models.model_spec import expand_layer_pattern


def block_spec(
    config: TransformerConfig, virtual_stage: int | None = None, post_norms: PostNorms | None = None
) -> TransformerBlockSubmodules:
    """The spec of this rank's transformer block, or of one of its virtual pipeline stages.

    Raises ValueError for a normalisation other than RMSNorm without Transformer Engine, and for experts in a layout
    that no parameter mapping describes.
    """
    if config.moe_grouped_gemm and config.moe_use_legacy_grouped_gemm:
        raise ValueError(
            "--moe-use-legacy-grouped-gemm joins all experts of a GPU in one matrix, which weight conversion does not"
            " support: leave it out, --moe-grouped-gemm alone uses Transformer Engine's kernels"
        )
    fused = config.transformer_impl == "transformer_engine"
    if not fused and config.normalization != "RMSNorm":
        raise ValueError(
            f"--normalization {config.normalization} needs --transformer-impl transformer_engine: install it on a"
            " machine with a GPU or train a model with --normalization RMSNorm"
        )
    norm = _engine_norm() if fused else RMSNorm
    make = _engine_layer_spec if fused else _local_layer_spec
    kinds = {}
    for moe in set(moe_layers(config)):
        layer = with_token_frequencies(make(config, moe=moe), config)
        kinds[moe] = with_post_norms(layer, post_norms or PostNorms(), norm)
        if moe:
            kinds[moe].submodules.mlp.submodules.router = Router
    first = get_transformer_layer_offset(config, virtual_stage)
    local = moe_layers(config)[first : first + get_num_layers_to_build(config, virtual_stage)]
    # For a bare layer spec megatron-core adds its own final norm, which does not support sequence parallelism.
    return TransformerBlockSubmodules(layer_specs=[kinds[moe] for moe in local], layer_norm=norm)


def block_of(
    config: TransformerConfig, found: ModuleSpec | TransformerBlockSubmodules, virtual_stage: int | None
) -> TransformerBlockSubmodules:
    """The block that --spec describes, either as a block or as one layer spec used for every layer."""
    if isinstance(found, TransformerBlockSubmodules):
        return found
    if isinstance(found.submodules, TransformerBlockSubmodules):
        return found.submodules
    norm = _engine_norm() if config.transformer_impl == "transformer_engine" else RMSNorm
    return TransformerBlockSubmodules(
        layer_specs=[found] * get_num_layers_to_build(config, virtual_stage), layer_norm=norm
    )


def moe_layers(config: TransformerConfig) -> tuple[bool, ...]:
    """Whether each layer of the whole model has experts.

    Raises ValueError if config.moe_layer_freq is a list whose length is not config.num_layers.
    """
    if config.num_moe_experts is None:
        return (False,) * config.num_layers
    return expand_layer_pattern(config.moe_layer_freq, config.num_layers)


def _engine_norm() -> type:
    # imported here because it needs Transformer Engine, which may be absent
    from megatron.core.extensions.transformer_engine import TENorm

    return TENorm


def _engine_layer_spec(config: TransformerConfig, *, moe: bool) -> ModuleSpec:
    layer = get_gpt_layer_with_transformer_engine_spec(
        num_experts=config.num_moe_experts if moe else None,
        moe_grouped_gemm=config.moe_grouped_gemm and moe,
        qk_layernorm=config.qk_layernorm,
        multi_latent_attention=config.multi_latent_attention,
        use_te_activation_func=config.use_te_activation_func,
    )
    return with_latent_epsilon(layer) if config.multi_latent_attention and config.qk_layernorm else layer


def _local_layer_spec(config: TransformerConfig, *, moe: bool) -> ModuleSpec:
    layer = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts if moe else None,
        # the grouped kernels need a GPU; the checkpoint format is the same with either
        moe_grouped_gemm=False,
        qk_layernorm=config.qk_layernorm,
        normalization=config.normalization,
    )
    submodules = layer.submodules
    submodules.input_layernorm = RMSNorm
    submodules.pre_mlp_layernorm = RMSNorm
    if config.multi_latent_attention:
        submodules.self_attention = attention_spec(config)
    else:
        attention = submodules.self_attention.submodules
        attention.core_attention = PackedCoreAttention
        if config.qk_layernorm:
            attention.q_layernorm = RMSNorm
            attention.k_layernorm = RMSNorm
    submodules.sharded_state_dict_keys_map = _stored_names(config, moe=moe)
    return layer


def _stored_names(config: TransformerConfig, *, moe: bool) -> dict[str, str]:
    """Checkpoint names of the norms: those of Transformer Engine's layers, so that both can load the checkpoint.

    Transformer Engine fuses a norm with the linear layer after it, if there is exactly one.
    """
    names = {}
    if config.multi_latent_attention:
        for latent in ("q", "kv"):
            names[f"self_attention.{latent}_layernorm."] = f"self_attention.linear_{latent}_up_proj.layer_norm_"
    else:
        names["input_layernorm."] = "self_attention.linear_qkv.layer_norm_"
    if not moe:  # in a layer with experts the norm feeds the router and every expert
        names["pre_mlp_layernorm."] = "mlp.linear_fc1.layer_norm_"
    return names
