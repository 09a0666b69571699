"""Which layers have experts, and their checkpoint names, independent of the machine's kernels."""

from __future__ import annotations

from typing import Any

import pytest

from slimrl.arguments import Arguments
from tests.families.layouts import LAYOUTS, flags
from tests.families.toys import TOYS

pytestmark = pytest.mark.slow


def stored_keys(rank: int, world_size: int, init_method: str, models: dict[str, Arguments]) -> dict[str, set[str]]:
    """The checkpoint keys, by model."""
    from slimrl.megatron.checkpoint.state import model_blueprint

    return {
        name: {piece.key for weight in model_blueprint(args).weights for piece in weight.pieces}
        for name, args in models.items()
    }


def refusal(rank: int, world_size: int, init_method: str, args: Arguments, changes: dict[str, Any]) -> str:
    from slimrl.megatron import config
    from slimrl.megatron.model import model_builder

    shape = config.transformer_config(args)
    for name, value in changes.items():
        setattr(shape, name, value)
    try:
        model_builder.block_spec(shape)
    except ValueError as error:
        return str(error)
    return ""


@pytest.fixture(scope="module")
def keys(one_rank: Any) -> dict[str, set[str]]:
    return one_rank.run(stored_keys, _models())[0]


@pytest.fixture(scope="module")
def watched_keys(one_rank: Any) -> dict[str, set[str]]:
    """The keys with the layers of a custom function instead of slimrl's own."""
    models = _models()
    for args in models.values():
        args.spec = ["examples.model", "watched_layers"]
    return one_rank.run(stored_keys, models)[0]


def _models() -> dict[str, Arguments]:
    return {name: flags(TOYS[name], LAYOUTS[0]) for name in ("glm4", "glm4-moe", "deepseek-v3")}


def test_norms_are_stored_under_the_names_of_fused_layers(keys):
    dense, experts = "decoder.layers.0.", "decoder.layers.1."
    ordinary, latent = keys["glm4-moe"], keys["deepseek-v3"]
    for layer in (dense, experts):
        assert f"{layer}self_attention.linear_qkv.layer_norm_weight" in ordinary
        assert f"{layer}input_layernorm.weight" in latent  # two projections follow it
        assert f"{layer}self_attention.linear_q_up_proj.layer_norm_weight" in latent
        assert f"{layer}self_attention.linear_kv_up_proj.layer_norm_weight" in latent
    for stored in (ordinary, latent):
        assert f"{dense}mlp.linear_fc1.layer_norm_weight" in stored
        assert f"{experts}pre_mlp_layernorm.weight" in stored
        assert not any("layer_norm" in key and "mlp" in key for key in stored if key.startswith(experts))


def test_layers_follow_the_order_of_the_flags(keys):
    assert "decoder.layers.0.mlp.linear_fc1.weight" in keys["glm4-moe"]
    assert {key.split(".")[2] for key in keys["glm4-moe"] if "experts" in key} == {"1", "2"}
    assert {key for key in keys["glm4-moe"] if key.startswith("decoder.layers.2.mlp.")} == {
        "decoder.layers.2.mlp.router.weight",
        "decoder.layers.2.mlp.router.expert_bias",
        "decoder.layers.2.mlp.experts.experts.linear_fc1.weight",
        "decoder.layers.2.mlp.experts.experts.linear_fc2.weight",
        "decoder.layers.2.mlp.shared_experts.linear_fc1.weight",
        "decoder.layers.2.mlp.shared_experts.linear_fc2.weight",
    }


def test_custom_spec_starts_from_layers_with_the_same_norms(keys, watched_keys):
    assert watched_keys == keys


def test_post_norms_are_stored_under_their_own_names(keys):
    assert {key for key in keys["glm4"] if "post_" in key} == {
        "decoder.layers.post_self_attn_layernorm.weight",
        "decoder.layers.post_mlp_layernorm.weight",
    }


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        ({"moe_layer_freq": [0, 1]}, "--moe-layer-freq describes 2 layers and --num-layers is 3"),
        (
            {"moe_grouped_gemm": True, "moe_use_legacy_grouped_gemm": True},
            "--moe-use-legacy-grouped-gemm joins all experts of a GPU in one matrix",
        ),
        ({"normalization": "LayerNorm"}, "--normalization LayerNorm needs --transformer-impl transformer_engine"),
    ],
)
def test_unsupported_layers_are_rejected(one_rank, changes, sentence):
    assert sentence in one_rank.run(refusal, flags(TOYS["glm4-moe"], LAYOUTS[0]), changes)[0]
