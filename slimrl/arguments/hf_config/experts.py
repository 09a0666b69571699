"""Rows and tables of the families with experts, behind ordinary or latent attention."""

from __future__ import annotations

from slimrl.arguments.hf_config import decoder, rope
from slimrl.arguments.hf_config.row import (
    Config,
    FamilyTable,
    LayerPattern,
    Row,
    Switch,
    Unserved,
    always,
    computed,
    first,
    not_there,
    switched,
    value,
    wrong,
)


def _sparse_layers(config: Config) -> list[int] | None:
    """Qwen's rule: every decoder_sparse_step-th layer (counted from 1), less those of mlp_only_layers."""
    layers = config.get("num_hidden_layers")
    step, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or []
    return None if layers is None else [int((n + 1) % step == 0 and n not in dense) for n in range(layers)]


def _layers_after(default: int) -> LayerPattern:
    """The first layers have no experts; how many, first_k_dense_replace says, or a word for each layer which."""

    def read(config: Config) -> list[int] | None:
        if kinds := config.get("mlp_layer_types"):
            return [int(kind == "sparse") for kind in kinds]
        layers, dense = config.get("num_hidden_layers"), first(config, "first_k_dense_replace", default=default)
        return None if layers is None else [int(n >= dense) for n in range(layers)]

    return LayerPattern("moe_layer_freq", ("first_k_dense_replace",), read)


def _shared_width(config: Config) -> int | None:
    """All shared experts are one block, as wide as they are together."""
    count, width = first(config, "n_shared_experts", default=0), config.get("moe_intermediate_size")
    return count * width if count and width else None


EXPERTS: tuple[Row, ...] = (
    value("num_experts", "num_experts", "n_routed_experts", "num_local_experts", absent="a model without experts"),
    value("moe_router_topk", "num_experts_per_tok"),
    value("moe_ffn_hidden_size", "moe_intermediate_size", absent="no width of experts"),
    not_there("moe_shared_expert_intermediate_size", "a model without shared experts"),
    always("moe_shared_expert_gate", "--moe-shared-expert-gate", False),
)
# The weights of the chosen experts either add up to 1 (the same as a softmax over them), or are their share of all.
SOFTMAX: tuple[Row, ...] = (
    LayerPattern("moe_layer_freq", ("decoder_sparse_step and mlp_only_layers",), _sparse_layers),
    computed("moe_router_score_function", "softmax scores, value", lambda _: "softmax"),
    switched("moe_router_pre_softmax", "--moe-router-pre-softmax", "norm_topk_prob", default=False, reverse=True),
    always("moe_router_enable_expert_bias", "--moe-router-enable-expert-bias", False),
    computed("moe_router_topk_scaling_factor", "no routed_scaling_factor, value", lambda _: 1.0, unset=1.0),
    computed("moe_router_num_groups", "no n_group, value", lambda _: 1, unset=1),
    computed("moe_router_group_topk", "no topk_group, value", lambda _: 1, unset=1),
)
SIGMOID: tuple[Row, ...] = (
    computed(
        "moe_shared_expert_intermediate_size",
        "n_shared_experts x moe_intermediate_size",
        _shared_width,
        absent="a model without shared experts",
    ),
    computed("moe_router_score_function", "scoring_func", lambda _: "sigmoid"),
    Switch(
        "moe_router_enable_expert_bias",
        "--moe-router-enable-expert-bias",
        lambda _: True,
        lambda _: "topk_method 'noaux_tc'",
    ),
    computed(
        "moe_router_topk_scaling_factor",
        "routed_scaling_factor",
        lambda config: first(config, "routed_scaling_factor", default=1.0),
        unset=1.0,
    ),
    computed("moe_router_num_groups", "n_group", lambda config: first(config, "n_group", default=1), unset=1),
    computed("moe_router_group_topk", "topk_group", lambda config: first(config, "topk_group", default=1), unset=1),
)
LATENT: tuple[Row, ...] = (
    always("multi_latent_attention", "--multi-latent-attention", True),
    value("q_lora_rank", "q_lora_rank", absent="queries without a latent vector"),
    value("kv_lora_rank", "kv_lora_rank"),
    value("qk_head_dim", "qk_nope_head_dim"),
    value("qk_pos_emb_head_dim", "qk_rope_head_dim"),
    value("v_head_dim", "v_head_dim"),
    always("qk_layernorm", "--qk-layernorm", True),
    # one latent vector serves all heads: neither groups nor the width of a plain head mean anything
    computed("num_query_groups", "num_key_value_heads", lambda _: None),
    computed("kv_channels", "head_dim", lambda _: None),
    rope.yarn_type(),
    rope.scaling_factor(),
    rope.yarn("mscale", "mscale", 1.0),
    rope.yarn("mscale_all_dim", "mscale_all_dim", 0.0),
    rope.yarn("beta_fast", "beta_fast", 32.0),
    rope.yarn("beta_slow", "beta_slow", 1.0),
    rope.yarn("original_max_position_embeddings", "original_max_position_embeddings"),
)  # fmt: skip


def _groups_by_two(config: Config) -> str | None:
    """transformers ranks a group by its two best experts, Megatron by as many as a token takes from each group."""
    groups, chosen = first(config, "n_group", default=1), first(config, "topk_group", default=1)
    taken = config.get("num_experts_per_tok") or 0
    if groups == 1 or taken == 2 * chosen:
        return None
    return f"num_experts_per_tok {taken} of topk_group {chosen} groups, where only two per group are ranked alike,"


def _one_expert(config: Config) -> str | None:
    """With one expert per token transformers' weight is 1, Megatron's its score."""
    return "num_experts_per_tok 1 with sigmoid scores" if config.get("num_experts_per_tok") == 1 else None


SIGMOID_ROUTING = (
    wrong("scoring_func", "sigmoid"),
    wrong("topk_method", "noaux_tc"),
    wrong("norm_topk_prob", True),
    wrong("moe_layer_freq", 1),
    Unserved(_groups_by_two),
    Unserved(_one_expert),
)
LATENT_ATTENTION = (
    rope.only("default", "yarn"),
    rope.yarn_with_own_factor(),
    wrong("attention_bias", False),
    wrong("rope_interleave", True),
)


def _latent(model_type: str, dense_layers: int) -> FamilyTable:
    rows = (*EXPERTS, *SIGMOID, *LATENT, _layers_after(dense_layers))
    return decoder.table(model_type, *rows, unserved=(*LATENT_ATTENTION, *SIGMOID_ROUTING))


QWEN2_MOE = decoder.table(
    "qwen2_moe",
    *EXPERTS,
    *SOFTMAX,
    switched("add_qkv_bias", "--add-qkv-bias", "qkv_bias", default=True),
    value("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size", absent="no shared expert"),
    always("moe_shared_expert_gate", "--moe-shared-expert-gate", True),
)
QWEN3_MOE = decoder.table(
    "qwen3_moe",
    *EXPERTS,
    *SOFTMAX,
    always("qk_layernorm", "--qk-layernorm", True),
    unserved=(*decoder.PLAIN_ATTENTION, *decoder.NO_BIASES),
)
GLM4_MOE = decoder.table(
    "glm4_moe",
    *EXPERTS,
    *SIGMOID,
    _layers_after(1),
    rope.percent(0.5),
    switched("qk_layernorm", "--qk-layernorm", "use_qk_norm", default=False),
    unserved=(*decoder.PLAIN_ATTENTION, *SIGMOID_ROUTING),
)
DEEPSEEK_V3 = _latent("deepseek_v3", 3)
KIMI_K2 = _latent("kimi_k2", 3)
GLM4_MOE_LITE = _latent("glm4_moe_lite", 1)
