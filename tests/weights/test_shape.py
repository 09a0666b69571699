"""Model dimensions from flags and from config.json."""

import dataclasses

import pytest

from slimrl.arguments import Arguments
from slimrl.models.families import family_for
from slimrl.models.model_spec import ModelSpec

QWEN3_4B = {  # the relevant entries of the published config.json
    "model_type": "qwen3",
    "num_hidden_layers": 36,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "vocab_size": 151936,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "hidden_act": "silu",
    "attention_bias": False,
    "tie_word_embeddings": True,
}


def qwen3_4b_flags(**changes: object) -> Arguments:
    """The flags of the published recipe for the same model."""
    flags = {
        "num_layers": 36,
        "hidden_size": 2560,
        "ffn_hidden_size": 9728,
        "num_attention_heads": 32,
        "group_query_attention": True,
        "num_query_groups": 8,
        "kv_channels": 128,
        "vocab_size": 151936,
        "padded_vocab_size": 151936,
        "norm_epsilon": 1e-6,
        "rotary_base": 1000000,
        "qk_layernorm": True,
        "swiglu": True,
        "add_bias_linear": False,
        "normalization": "RMSNorm",
    }
    return Arguments(**{**flags, **changes})


def test_flags_and_config_of_the_same_model_give_the_same_shape():
    assert ModelSpec.from_args(qwen3_4b_flags()) == ModelSpec.from_hf_config(QWEN3_4B)


def test_parameter_count_follows_from_the_table():
    # the model card says 4.0B parameters, 3.6B without the embedding
    shape = ModelSpec.from_hf_config(QWEN3_4B)
    count = 0
    for row in family_for(QWEN3_4B).rows(shape):
        for part in row.hf:
            size = 1
            for dim in part.dims:
                size *= shape.dimension(dim)
            count += size
    assert count == 4_022_468_096


def test_head_width_and_groups_default_as_in_transformers():
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_attention_heads": 4,
        "vocab_size": 100,
    }
    shape = ModelSpec.from_hf_config(config)
    assert (shape.kv_channels, shape.num_query_groups, shape.tied) == (16, 4, False)
    assert ModelSpec.from_hf_config({**config, "model_type": "qwen3"}).kv_channels == 128
    with pytest.raises(ValueError, match="no vocab_size"):
        ModelSpec.from_hf_config({key: value for key, value in config.items() if key != "vocab_size"})


def test_unknown_family_is_rejected_with_the_known_ones():
    with pytest.raises(ValueError, match=r"'gpt2'.*supported are llama, qwen2, qwen2_5_vl, qwen2_moe, qwen3"):
        family_for({"model_type": "gpt2"})


def test_variant_outside_the_table_is_rejected():
    with pytest.raises(ValueError, match="mlp_bias = True"):
        family_for({"model_type": "llama", "mlp_bias": True})


def test_shape_is_immutable():
    with pytest.raises(dataclasses.FrozenInstanceError):
        ModelSpec.from_hf_config(QWEN3_4B).num_layers = 1
