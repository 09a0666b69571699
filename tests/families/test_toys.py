"""The toy checkpoints themselves, on which other tests rely."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from slimrl.models.families.vision import decoder_config
from tests.families.toys import TOYS, Toy

IDS = torch.tensor([[5, 17, 90, 3, 250, 5, 17]])


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        found |= load_file(path)
    return found


@pytest.fixture(params=TOYS)
def toy(request: pytest.FixtureRequest) -> Toy:
    return TOYS[request.param]


def test_files_contain_the_model_of_the_seed(toy, tmp_path):
    toy.save(tmp_path, shards=2, seed=3)
    assert len(list(tmp_path.glob("*.safetensors"))) >= 2
    with torch.no_grad():
        expected = toy.build(3)(IDS).logits
    assert torch.equal(toy.reference_logits(tmp_path, IDS), expected)
    assert expected.std() > 0.3  # tokens are far from equally likely
    assert not torch.equal(toy.build(4)(IDS).logits, expected)


def test_no_tensor_is_constant_and_experts_are_stored_separately(toy, tmp_path):
    tensors = tensors_of(toy.save(tmp_path))
    assert all(tensor.unique().numel() > tensor.numel() // 2 for tensor in tensors.values())
    experts = toy.config.get("num_experts") or toy.config.get("n_routed_experts") or 0
    last = toy.decoder["num_hidden_layers"] - 1
    projections = [name for name in tensors if name.startswith(f"model.layers.{last}.mlp.experts.")]
    assert len(projections) == 3 * experts


def test_bf16_files_are_the_rounded_fp32_ones_except_for_the_router_bias(toy, tmp_path):
    whole, rounded = tensors_of(toy.save(tmp_path / "a")), tensors_of(toy.save(tmp_path / "b", dtype="bf16"))
    assert whole.keys() == rounded.keys()
    for name, tensor in whole.items():
        kept = torch.float32 if name.endswith("e_score_correction_bias") else torch.bfloat16
        assert torch.equal(tensor.to(kept), rounded[name]), name


def test_config_json_has_the_published_keys_and_matches_the_flags(toy, tmp_path):
    entries = decoder_config(json.loads((toy.save(tmp_path) / "config.json").read_text()))
    assert entries["model_type"] == toy.model_type and "rope_parameters" not in entries
    given = dict(zip(toy.flags, toy.flags[1:], strict=False))
    for flag, key in (
        ("--num-layers", "num_hidden_layers"),
        ("--hidden-size", "hidden_size"),
        ("--ffn-hidden-size", "intermediate_size"),
        ("--rotary-base", "rope_theta"),
        ("--norm-epsilon", "rms_norm_eps"),
        ("--moe-router-topk", "num_experts_per_tok"),
        ("--moe-router-topk-scaling-factor", "routed_scaling_factor"),
        ("--kv-lora-rank", "kv_lora_rank"),
        ("--max-position-embeddings", "max_position_embeddings"),
    ):
        if flag in given:
            assert float(given[flag]) == entries[key], flag
    assert ("--untie-embeddings-and-output-weights" in toy.flags) is not entries["tie_word_embeddings"]


def test_mimo_has_the_published_tensors_of_one_mtp_layer(tmp_path):
    tensors = tensors_of(TOYS["mimo"].save(tmp_path))
    extra = {name.removeprefix("model.mtp_layers.0."): t for name, t in tensors.items() if "mtp_layers" in name}
    layer = {name.removeprefix("model.layers.0."): t for name, t in tensors.items() if "model.layers.0." in name}
    own = {"token_layernorm.weight", "hidden_layernorm.weight", "final_layernorm.weight", "input_proj.weight"}
    assert extra.keys() == layer.keys() | own
    assert extra["input_proj.weight"].shape == (64, 128)
