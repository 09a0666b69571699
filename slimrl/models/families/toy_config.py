"""`ToyConfig`: a toy-sized model of a family in transformers' names, and the settings that families share.

Settings such as rotary positions, routing and scaling have published values; sizes are small, and every count is
divisible by 2. `slimrl.tiny.models` adds the sizes that all toys share and builds them. Imports neither torch nor
transformers.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True)
class ToyConfig:
    """transformers' class, and the arguments of its config class in addition to those of every toy.

    `published` are entries of config.json that transformers' own class does not write; `config_code` is the file that
    published folders of the family include for a config class outside transformers (file, class, base class).
    """

    architecture: str
    config: Mapping[str, Any]
    published: Mapping[str, Any] = field(default_factory=dict)
    config_code: tuple[str, str, str] | None = None


GROUPED = {"num_key_value_heads": 2, "head_dim": 16}
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
LATENT = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 48,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
}
ROUTED = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_group": 1, "topk_group": 1}
ONE_DENSE_LAYER = {"first_k_dense_replace": 1, "num_nextn_predict_layers": 0}
SIGMOID = {**ONE_DENSE_LAYER, "moe_layer_freq": 1, "scoring_func": "sigmoid", "topk_method": "noaux_tc"}


def rope(theta: float, **more: Any) -> dict[str, Any]:
    """Rotary positions of this base, as transformers' config classes take them."""
    return {"rope_parameters": {"rope_theta": theta, **more}}


def yarn(theta: float, factor: float, beta_fast: float) -> dict[str, Any]:
    """Rotary positions scaled by YaRN to `factor` x 4096 tokens."""
    scaling = {"factor": factor, "beta_fast": beta_fast, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0}
    positions = {"max_position_embeddings": int(4096 * factor)}
    return rope(theta, rope_type="yarn", original_max_position_embeddings=4096, **scaling) | positions
