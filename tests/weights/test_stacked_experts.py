"""Experts that files stack are read one by one, and written as they were."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slimrl.models.families import family_for
from slimrl.models.model_spec import ModelSpec
from slimrl.weights.convert.megatron_to_hf import HfExport, HfPlan
from slimrl.weights.hf_checkpoint import HfCheckpoint, plan_files, read_hf_config, writer_of
from slimrl.weights.hf_checkpoint_writer import TensorSpec
from tests.megatron import vision
from tests.weights.test_hf_export import reused

HIDDEN, WIDTH, NUMBER = 64, 48, 4
LAYER = "model.language_model.layers.1.mlp.experts."
RANKS = 2


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return vision.save_qwen3_vl_moe(tmp_path_factory.mktemp("stacked") / "hf", seed=1)


def stored(folder: Path) -> dict[str, Tensor]:
    return {name: tensor for path in folder.glob("*.safetensors") for name, tensor in load_file(path).items()}


def test_experts_have_the_names_and_shapes_of_single_ones(origin: Path):
    files = stored(origin)
    gates, downs = files[LAYER + "gate_up_proj"], files[LAYER + "down_proj"]
    assert gates.shape == (NUMBER, HIDDEN, 2 * WIDTH) and downs.shape == (NUMBER, WIDTH, HIDDEN)
    with HfCheckpoint(origin) as checkpoint:
        assert checkpoint.stacks_experts
        assert len(checkpoint.names) == len(files) + 4 * (3 * NUMBER - 2)  # of four layers
        for expert in range(NUMBER):
            found = {part: f"{LAYER}{expert}.{part}_proj.weight" for part in ("gate", "up", "down")}
            assert torch.equal(checkpoint.tensor(found["gate"]), gates[expert, :, :WIDTH].T)
            assert torch.equal(checkpoint.tensor(found["up"]), gates[expert, :, WIDTH:].T)
            assert torch.equal(checkpoint.tensor(found["down"]), downs[expert].T)
            assert [checkpoint.shape(name) for name in found.values()] == [(WIDTH, HIDDEN)] * 2 + [(HIDDEN, WIDTH)]


@pytest.mark.parametrize("copy", [False, True])
def test_two_ranks_export_the_published_tensors(copy: bool, origin: Path, tmp_path: Path):
    config = read_hf_config(origin)
    family, spec = family_for(config), ModelSpec.from_hf_config(config)
    plans = [
        HfPlan(origin, spec, family, rank=rank, world_size=RANKS, max_shard_bytes=100_000) for rank in range(RANKS)
    ]
    with HfCheckpoint(origin) as checkpoint:
        trained = {name: checkpoint.tensor(name) + 1.0 for name in checkpoint.names}
    assert plans[0].own_names | plans[1].own_names == set(trained)
    assert not plans[0].own_names & plans[1].own_names
    both = [HfExport(plan, tmp_path / "export", lambda: reused(trained)) for plan in plans]
    both[0].begin()
    for export in both:
        export.collect(copy=copy)
    for export in both:
        export.write()
    both[0].commit()
    before, after = stored(origin), stored(tmp_path / "export")
    assert before.keys() == after.keys()
    assert all(torch.equal(after[name], tensor + 1.0) for name, tensor in before.items())


def test_expert_without_its_other_half_is_an_error(tmp_path: Path):
    names = [f"{LAYER}{expert}.{part}_proj.weight" for expert in range(2) for part in ("gate", "up")]
    shards = plan_files([TensorSpec(name, torch.float32, (3, 5)) for name in names], 10**6, stacks=True)
    assert [(spec.name, spec.shape) for shard in shards for spec in shard.specs] == [
        (LAYER + "gate_up_proj", (2, 5, 6))
    ]
    with (
        pytest.raises(ValueError, match="lack tensors that were not written"),
        writer_of(tmp_path, shards, stacks=True) as writer,
    ):
        for name in names[:-1]:
            assert name in writer
            writer.write(name, torch.zeros(3, 5))


def test_transposed_experts_are_refused_by_name(origin: Path, tmp_path: Path):
    (tmp_path / "config.json").write_text((origin / "config.json").read_text())
    whole = {name: t.transpose(1, 2).contiguous() if t.dim() == 3 else t for name, t in stored(origin).items()}
    save_file(whole, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(ValueError, match=r"down_proj has shape \[4, 64, 48\].*transformers saved them the other way"):
        HfCheckpoint(tmp_path)
