"""Every family converts from Hugging Face files to torch_dist and back, bit for bit, with the users' tools."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slimrl.weights.convert.torch_dist_reader import TorchDistCheckpoint
from slimrl.weights.hf_checkpoint import dequantised
from tests.families import conversion_jobs, latent_jobs
from tests.families.conftest import Pools
from tests.families.conversion_jobs import RoundTrip
from tests.families.toys import TOYS

pytestmark = pytest.mark.slow

FP8 = "deepseek-v3 in fp8"
PREDICTING = "deepseek-v3 with a predicting layer"
RESHARDED = ("deepseek-v3", "moonlight", "qwen3-moe")
LAYOUT = (
    *("--tensor-model-parallel-size", "2", "--sequence-parallel"),
    *("--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "1"),
)


def tensors_of(folder: Path) -> dict[str, Tensor]:
    """Every tensor of the folder's index; more than one file."""
    files = set(json.loads((folder / "model.safetensors.index.json").read_text())["weight_map"].values())
    assert len(files) > 1 and files == {path.name for path in folder.glob("*.safetensors")}
    return {name: tensor for file in files for name, tensor in load_file(folder / file).items()}


def rewrite(folder: Path, config: dict[str, object], tensors: dict[str, Tensor]) -> None:
    """Adds entries to config.json, and replaces `tensors` by name."""
    path, index_path = folder / "config.json", folder / "model.safetensors.index.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | config))
    index = json.loads(index_path.read_text())
    for file in set(index["weight_map"].values()):
        kept = {name: tensor for name, tensor in load_file(folder / file).items() if name not in tensors}
        save_file(kept, folder / file, metadata={"format": "pt"})
    save_file(tensors, folder / "changed.safetensors", metadata={"format": "pt"})
    index["weight_map"] |= dict.fromkeys(tensors, "changed.safetensors")
    index_path.write_text(json.dumps(index))


def add_predicting_layer(folder: Path) -> None:
    """The layer after the last one, as published: a decoder layer's tensors and its additional ones."""
    stored = tensors_of(folder)
    last, extra = "model.layers.2.", "model.layers.3."
    tensors = {extra + name.removeprefix(last): t.clone() for name, t in stored.items() if name.startswith(last)}
    tensors |= {f"{extra}{name}.weight": torch.rand(64).bfloat16() for name in ("enorm", "hnorm", "shared_head.norm")}
    tensors[extra + "eh_proj.weight"] = torch.randn(64, 128).bfloat16()
    rewrite(folder, {"num_nextn_predict_layers": 1}, tensors)


def quantise(folder: Path) -> None:
    """The attention matrices as 8-bit floats with one scale per block of 32 x 16."""
    tensors: dict[str, Tensor] = {}
    for name, weight in tensors_of(folder).items():
        if "_proj" in name and "self_attn" in name:
            rows, columns = -(-weight.shape[0] // 32), -(-weight.shape[1] // 16)
            tensors[name] = (64 * weight.float()).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = (1 + torch.rand(rows, columns)) / 64
    published = {"quant_method": "fp8", "fmt": "e4m3", "weight_block_size": [32, 16], "activation_scheme": "dynamic"}
    rewrite(folder, {"quantization_config": published}, tensors)


@pytest.fixture(scope="module")
def round_trips(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> dict[str, RoundTrip]:
    """All models, round-tripped by one process."""
    root, made = tmp_path_factory.mktemp("journeys"), {}
    for name in (*TOYS, FP8, PREDICTING):
        toy = TOYS[name.split(" ")[0]]
        # resharded models are compared with single-precision logits
        hf = toy.save(root / name / "hf", dtype="fp32" if name in RESHARDED else "bf16", tokenizer=False)
        made[name] = RoundTrip(toy.flags, hf, root / name / "torch_dist", root / name / "back")
    quantise(made[FP8].hf)
    add_predicting_layer(made[PREDICTING].hf)
    pools[1].run(conversion_jobs.round_trip, list(made.values()), timeout_s=300)
    return made


@pytest.mark.parametrize("name", [*TOYS, PREDICTING])
def test_every_tensor_round_trips_bit_for_bit_in_its_dtype(round_trips, name):
    before, after = tensors_of(round_trips[name].hf), tensors_of(round_trips[name].back)
    assert before.keys() == after.keys()
    different = [key for key, t in before.items() if after[key].dtype != t.dtype or not torch.equal(after[key], t)]
    assert different == []
    configs = [
        json.loads((folder / "config.json").read_text()) for folder in (round_trips[name].hf, round_trips[name].back)
    ]
    assert configs[0] == configs[1]


def test_norms_are_stored_under_the_names_of_fused_layers(round_trips):
    keys = TorchDistCheckpoint(round_trips["deepseek-v3"].torch_dist / "release").sizes
    attention = "decoder.layers.1.self_attention."
    assert {f"{attention}linear_{latent}_up_proj.layer_norm_weight" for latent in ("q", "kv")} < keys.keys()
    assert not any("q_layernorm" in key or "kv_layernorm" in key for key in keys)


def test_fp8_weights_are_restored_as_their_bf16_values(round_trips):
    before, after = tensors_of(round_trips[FP8].hf), tensors_of(round_trips[FP8].back)
    scales = {name for name in before if name.endswith("_scale_inv")}
    assert len(scales) == 3 * 5 and after.keys() == before.keys() - scales
    for name, tensor in after.items():
        if f"{name}_scale_inv" in scales:
            assert torch.equal(tensor, dequantised(before[name], before[f"{name}_scale_inv"], (32, 16)))
        else:
            assert torch.equal(tensor, before[name])
    assert "quantization_config" not in json.loads((round_trips[FP8].back / "config.json").read_text())


def test_converted_checkpoint_gives_equal_results_over_tensor_and_expert_ranks(pools, round_trips):
    for name in RESHARDED:
        toy, trip = TOYS[name], round_trips[name]
        found = pools[2].run(conversion_jobs.logits_from_torch_dist, (*toy.flags, *LAYOUT), trip.torch_dist)
        ids = latent_jobs.tokens(toy.decoder["vocab_size"]).split(latent_jobs.SEQUENCES)
        wanted = torch.cat([toy.reference_logits(trip.hf, sequence[None])[0] for sequence in ids])
        for logits in found:
            assert float((logits - wanted).abs().max() / wanted.abs().max()) < 1e-5
