"""Exports next to checkpoints: ranks share the files, and a folder appears complete or not at all."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from slimrl.models.families import family_for
from slimrl.models.model_spec import ModelSpec
from slimrl.weights.convert.megatron_to_hf import HfExport, HfPlan
from slimrl.weights.hf_checkpoint import HfCheckpoint
from tests.megatron import tiny

RANKS = 2


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tiny.save_qwen3(tmp_path_factory.mktemp("origin") / "hf", seed=1)
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture
def trained(origin: Path) -> dict[str, Tensor]:
    """Weights other than the original's, in double precision, which no original has."""
    with HfCheckpoint(origin) as checkpoint:
        return {name: checkpoint.tensor(name).double() + 1.0 for name in checkpoint.names}


def plans(origin: Path, max_shard_bytes: int = 60_000) -> list[HfPlan]:
    shape = ModelSpec.from_args(tiny.tiny_args())
    family = family_for({"model_type": "qwen3"})
    return [
        HfPlan(origin, shape, family, rank=rank, world_size=RANKS, max_shard_bytes=max_shard_bytes)
        for rank in range(RANKS)
    ]


def reused(tensors: dict[str, Tensor]) -> Iterator[tuple[str, Tensor]]:
    """Each tensor is overwritten when the next is requested."""
    for name, tensor in tensors.items():
        lent = tensor.clone()
        yield name, lent
        lent.fill_(float("nan"))


def exports(origin: Path, folder: Path, tensors: dict[str, Tensor]) -> list[HfExport]:
    return [HfExport(plan, folder, lambda: reused(tensors)) for plan in plans(origin)]


@pytest.mark.parametrize("copy", [False, True])
def test_two_ranks_write_one_model_that_transformers_loads(
    copy: bool, origin: Path, trained: dict[str, Tensor], tmp_path: Path
):
    folder = tmp_path / "export"
    both = exports(origin, folder, trained)
    both[0].begin()
    for export in both:
        export.collect(copy=copy)
    for export in both:
        export.write()
    assert not folder.exists()
    both[0].commit()
    files = {path.name for path in folder.iterdir()}
    shards = {shard.file for shard in plans(origin)[0].shards}
    assert len(shards) > 3
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == shards
    assert files - shards == {path.name for path in origin.iterdir()} - {"model.safetensors"} | {
        "model.safetensors.index.json"
    }
    loaded = AutoModelForCausalLM.from_pretrained(folder).state_dict()
    for name, tensor in trained.items():
        assert torch.equal(loaded[name], tensor.float()), name


def test_each_tensor_is_written_by_one_rank(origin: Path):
    one, other = (plan.own_names for plan in plans(origin))
    assert one and other and not one & other
    with HfCheckpoint(origin) as checkpoint:
        assert one | other == set(checkpoint.names)


def test_rank_that_cannot_write_still_gathers_to_the_end(origin: Path, trained: dict[str, Tensor], tmp_path: Path):
    seen: list[str] = []

    def counted() -> Iterator[tuple[str, Tensor]]:
        for name, tensor in trained.items():
            seen.append(name)
            yield name, tensor

    export = HfExport(plans(origin)[0], tmp_path / "export", counted)
    export.begin()
    for shard in export._plan.own_shards:
        (tmp_path / ".export.partial" / shard.file).mkdir()  # blocks the path
    with pytest.raises(OSError, match="exists|directory"):
        export.collect(copy=False)
    assert seen == list(trained)
    export.discard()
    assert list(tmp_path.iterdir()) == []


def test_export_that_lacks_a_tensor_never_reaches_its_final_path(
    origin: Path, trained: dict[str, Tensor], tmp_path: Path
):
    del trained["model.norm.weight"]
    both = exports(origin, tmp_path / "export", trained)
    both[0].begin()
    failed = 0
    for export in both:
        export.collect(copy=True)
        try:
            export.write()
        except ValueError as error:
            assert "lack tensors that were not written" in str(error)
            failed += 1
    assert failed == 1
    assert not (tmp_path / "export").exists()


def test_only_an_export_of_the_same_rollout_is_replaced(origin: Path, trained: dict[str, Tensor], tmp_path: Path):
    folder = tmp_path / "export"
    for _ in range(2):
        both = exports(origin, folder, trained)
        both[0].begin()
        for export in both:
            export.collect(copy=True)
            export.write()
        both[0].commit()
    (folder / "thesis.tex").touch()
    with pytest.raises(ValueError, match="is not replaced, because it also has thesis.tex"):
        exports(origin, folder, trained)


def test_origin_of_another_model_is_rejected(origin: Path):
    shape = ModelSpec.from_args(tiny.tiny_args(num_layers=3))
    with pytest.raises(ValueError, match="lacks model.layers.2"):
        HfPlan(origin, shape, family_for({"model_type": "qwen3"}))
