"""What families share of config.json: the rows that map it to flags, and the entries of toy models.

`COMMON` has the rows of every family; `table` builds a family's table from them. `EXPERTS` with `SOFTMAX` or `SIGMOID`
routing, `LATENT` attention and the tuples of unsupported settings are for those that have such layers.

`ToyConfig` is a toy-sized model in transformers' names. Its rotary positions, routing and scaling have published
values; sizes are small, and every count is divisible by 2. `slimrl.tiny.models` adds the sizes that all toys share and
builds them. Imports neither torch nor transformers: the flag parser reads these tables.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

from slimrl.models import config_rows
from slimrl.models.config_rows import (
    Config,
    FamilyTable,
    LayerPattern,
    Row,
    Switch,
    Unsupported,
    always,
    computed,
    first,
    not_there,
    switched,
    value,
    wrong,
)
from slimrl.models.families.vision import mrope_section


def head_width(default: int | None = None) -> Row:
    """Head width of config.json; without an entry, `default` or hidden size / heads."""

    def read(config: Config) -> int | None:
        hidden, heads = config.get("hidden_size"), config.get("num_attention_heads")
        return first(config, "head_dim", default=default or (hidden // heads if hidden and heads else None))

    return computed("kv_channels", "head_dim", read)


def qkv_bias(default: bool) -> Switch:
    """Bias on queries, keys and values, from attention_bias."""

    def is_on(config: Config) -> bool:
        return bool(first(config, "attention_bias", default=default))

    return Switch(
        "add_qkv_bias",
        "--add-qkv-bias",
        is_on,
        lambda config: f"model_type {config['model_type']!r}, attention_bias {str(is_on(config)).lower()}",
    )


# Rows of every family; a family's own rows override those of the same flag.
COMMON: tuple[Row, ...] = (
    value("num_layers", "num_hidden_layers"),
    value("hidden_size", "hidden_size"),
    value("ffn_hidden_size", "intermediate_size"),
    value("num_attention_heads", "num_attention_heads"),
    value("num_query_groups", "num_key_value_heads", "num_attention_heads"),
    head_width(),
    value("vocab_size", "vocab_size"),
    value("norm_epsilon", "rms_norm_eps"),
    config_rows.base(),
    config_rows.percent(1.0),
    config_rows.llama3_factor(),
    not_there("num_experts", "a model without experts"),
    not_there("mrope_section", "rotary positions of text alone"),
    Switch(
        "swiglu",
        "--swiglu",
        lambda config: first(config, "hidden_act", default="silu") == "silu",
        lambda config: f"hidden_act {first(config, 'hidden_act', default='silu')!r}",
    ),
    switched(
        "untie_embeddings_and_output_weights",
        "--untie-embeddings-and-output-weights",
        "tie_word_embeddings",
        default=False,
        reverse=True,
    ),
    always("qk_layernorm", "--qk-layernorm", False),
    qkv_bias(False),
    Switch("add_bias_linear", "--disable-bias-linear", lambda _: True, lambda _: "no bias in its linear layers"),
    always("rotary_interleaved", "--rotary-interleaved", False),
    config_rows.llama3_scaling(),
    always("post_self_attn_layernorm", "--post-self-attn-layernorm", False),
    always("post_mlp_layernorm", "--post-mlp-layernorm", False),
    always("multi_latent_attention", "--multi-latent-attention", False),
)
# rotary positions of time, height and width; text has the same number for all three
MULTIMODAL_POSITIONS = (
    computed("position_embedding_type", "rope mrope_section, value", lambda _: "mrope"),
    computed("mrope_section", "rope mrope_section", mrope_section, absent="no mrope_section"),
)
PLAIN_ATTENTION = (
    config_rows.only("default", "llama3"),
    wrong("use_sliding_window", False),
)
NO_BIASES = (wrong("mlp_bias", False), wrong("attention_bias", False))


def table(*rows: Row, unserved: tuple[Unsupported, ...] = PLAIN_ATTENTION) -> FamilyTable:
    """`COMMON`, overridden by the family's own rows for the same flag."""
    return FamilyTable({row.field: row for row in (*COMMON, *rows)}, unserved)


def _sparse_layers(config: Config) -> list[int] | None:
    """Qwen's rule: every decoder_sparse_step-th layer (counted from 1) except those of mlp_only_layers."""
    layers = config.get("num_hidden_layers")
    step, dense = config.get("decoder_sparse_step") or 1, config.get("mlp_only_layers") or []
    return None if layers is None else [int((n + 1) % step == 0 and n not in dense) for n in range(layers)]


def layers_after(default: int) -> LayerPattern:
    """The first layers are dense: first_k_dense_replace gives their number, or a list names the type of each layer."""

    def read(config: Config) -> list[int] | None:
        if kinds := config.get("mlp_layer_types"):
            return [int(kind == "sparse") for kind in kinds]
        layers, dense = config.get("num_hidden_layers"), first(config, "first_k_dense_replace", default=default)
        return None if layers is None else [int(n >= dense) for n in range(layers)]

    return LayerPattern("moe_layer_freq", ("first_k_dense_replace",), read)


def _shared_width(config: Config) -> int | None:
    """All shared experts form one block of their total width."""
    count, width = first(config, "n_shared_experts", default=0), config.get("moe_intermediate_size")
    return count * width if count and width else None


EXPERTS: tuple[Row, ...] = (
    value("num_experts", "num_experts", "n_routed_experts", "num_local_experts", absent="a model without experts"),
    value("moe_router_topk", "num_experts_per_tok"),
    value("moe_ffn_hidden_size", "moe_intermediate_size", absent="no width of experts"),
    not_there("moe_shared_expert_intermediate_size", "a model without shared experts"),
    always("moe_shared_expert_gate", "--moe-shared-expert-gate", False),
)
# The weights of the chosen experts are either normalised to sum to 1 (a softmax over them), or a softmax over all.
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
    # one latent vector serves all heads, so query groups and the plain head width do not apply
    computed("num_query_groups", "num_key_value_heads", lambda _: None),
    computed("kv_channels", "head_dim", lambda _: None),
    config_rows.yarn_type(),
    config_rows.scaling_factor(),
    config_rows.yarn("mscale", "mscale", 1.0),
    config_rows.yarn("mscale_all_dim", "mscale_all_dim", 0.0),
    config_rows.yarn("beta_fast", "beta_fast", 32.0),
    config_rows.yarn("beta_slow", "beta_slow", 1.0),
    config_rows.yarn("original_max_position_embeddings", "original_max_position_embeddings"),
)  # fmt: skip


def _groups_by_two(config: Config) -> str | None:
    """transformers scores a group by its two best experts, Megatron by as many as a token takes from each group."""
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
    Unsupported(_groups_by_two),
    Unsupported(_one_expert),
)
LATENT_ATTENTION = (
    config_rows.only("default", "yarn"),
    config_rows.yarn_with_own_factor(),
    wrong("attention_bias", False),
    wrong("rope_interleave", True),
)


def latent_table(dense_layers: int) -> FamilyTable:
    """The table of a family with DeepSeek-V3's layers; its config class's default number of dense layers is given."""
    rows = (*EXPERTS, *SIGMOID, *LATENT, layers_after(dense_layers))
    return table(*rows, unserved=(*LATENT_ATTENTION, *SIGMOID_ROUTING))


@dataclasses.dataclass(frozen=True)
class ToyConfig:
    """transformers' class, and the arguments of its config class in addition to those of every toy.

    `published` are entries of config.json that transformers' own class does not write; `config_code` is the file that
    published folders of the family include for a config class outside transformers (file, class, base class).
    """

    architecture: str
    config: Mapping[str, Any]
    published: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    config_code: tuple[str, str, str] | None = None


TOY_GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
TOY_EXPERTS = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
# a vision tower with the published patches, windows and merging
TOY_TOWER = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "in_chans": 3,
    "out_hidden_size": 64,
    "patch_size": 14,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "window_size": 112,
    "fullatt_block_indexes": [1],
    "initializer_range": 0.1,
}
# the same with features for the first layer of the decoder
TOY_LEVELS = {
    "depth": 2,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_heads": 2,
    "in_channels": 3,
    "out_hidden_size": 64,
    "patch_size": 16,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0],
    "initializer_range": 0.1,
}
TOY_LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
TOY_ROUTED = {
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_group": 1,
    "topk_group": 1,
}
ONE_DENSE_LAYER = {"first_k_dense_replace": 1, "num_nextn_predict_layers": 0}
TOY_SIGMOID = {**ONE_DENSE_LAYER, "moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}


def rope(theta: float, **more: Any) -> dict[str, Any]:
    """Rotary positions of this base, as transformers' config classes take them."""
    return {"rope_parameters": {"rope_theta": theta, **more}}


def yarn(theta: float, factor: float, beta_fast: float) -> dict[str, Any]:
    """Rotary positions scaled by YaRN to `factor` x 4096 tokens."""
    scaling = {"factor": factor, "beta_fast": beta_fast, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    positions = {"max_position_embeddings": int(4096 * factor)}
    return rope(theta, rope_type="yarn", original_max_position_embeddings=4096, **scaling) | positions
