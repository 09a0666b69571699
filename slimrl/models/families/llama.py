"""Tensors and config.json of dense Llama 2 and 3: no biases, no query or key norms."""

from __future__ import annotations

from slimrl.models.families import config_mapping, param_mapping
from slimrl.models.families.config_mapping import TOY_GROUPED, ToyConfig, rope
from slimrl.models.families.param_mapping import ModelMapping

LLAMA3_POSITIONS = {
    **rope(
        500000.0,
        rope_type="llama3",
        factor=8.0,
        low_freq_factor=1.0,
        high_freq_factor=4.0,
        original_max_position_embeddings=8192,
    ),
    "max_position_embeddings": 131072,
}

LLAMA = ModelMapping(
    model_type="llama",
    config=config_mapping.table(unserved=(*config_mapping.PLAIN_ATTENTION, *config_mapping.NO_BIASES)),
    embedding=param_mapping.EMBEDDING,
    layer=(
        param_mapping.ATTENTION_NORM,
        param_mapping.QKV,
        param_mapping.ATTENTION_OUTPUT,
        param_mapping.MLP_NORM,
        param_mapping.GATE_UP,
        param_mapping.DOWN,
    ),
    final_norm=param_mapping.FINAL_NORM,
    head=param_mapping.HEAD,
    fixed_config=(("attention_bias", False), ("mlp_bias", False)),
    toys={"llama": ToyConfig("LlamaForCausalLM", TOY_GROUPED | LLAMA3_POSITIONS | {"rms_norm_eps": 1e-5})},
)
