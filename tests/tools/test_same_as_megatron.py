"""The converter to torch_dist writes the same entries as megatron-core for the loaded model."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from tests.families.toys import TOYS
from tests.megatron.launch import RankPool
from tests.tools.saving_jobs import Model, read_everything, save_both

pytestmark = [pytest.mark.slow, pytest.mark.filterwarnings("ignore:torch.distributed is disabled")]

# stacked layers, stacked layers of stacked experts, layers one by one; biases, latent attention, an untied head
NAMES = ("qwen3", "qwen2", "qwen3-moe", "deepseek-v3")


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Model]:
    root: Path = tmp_path_factory.mktemp("same")
    found = {}
    for name in NAMES:
        folder = TOYS[name].save(root / name / "hf", dtype="bf16", tokenizer=False)
        found[name] = Model((*TOYS[name].flags, "--bf16"), folder, root / name / "megatron", root / name / "converter")
    with RankPool(1) as pool:
        pool.run(save_both, list(found.values()), timeout_s=240)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_keys_shapes_dtypes_and_chunks_are_equal(models, name):
    mine, theirs = (
        FileSystemReader(folder / "release").read_metadata().state_dict_metadata
        for folder in (models[name].by_converter, models[name].by_megatron)
    )
    assert mine.keys() == theirs.keys()
    for key, entry in theirs.items():
        assert type(mine[key]) is type(entry)
        if isinstance(entry, TensorStorageMetadata):
            assert mine[key].size == entry.size and mine[key].properties.dtype is entry.properties.dtype
            assert {(c.offsets, c.sizes) for c in mine[key].chunks} == {(c.offsets, c.sizes) for c in entry.chunks}


@pytest.mark.parametrize("name", NAMES)
def test_every_value_is_equal(models, name):
    mine, theirs = (
        read_everything(folder / "release") for folder in (models[name].by_converter, models[name].by_megatron)
    )
    tensors = [key for key, value in theirs.items() if isinstance(value, torch.Tensor)]
    assert len(tensors) >= 9
    assert [key for key in tensors if not torch.equal(mine[key], theirs[key])] == []
    assert {key: mine[key] for key in mine if key not in tensors} == {
        key: theirs[key] for key in theirs if key not in tensors
    }


@pytest.mark.parametrize("name", NAMES)
def test_small_files_are_equal(models, name):
    folders = [folder / "release" for folder in (models[name].by_converter, models[name].by_megatron)]
    assert len({(folder / "metadata.json").read_text() for folder in folders}) == 1
    assert json.loads((folders[0] / "metadata.json").read_text())["sharded_backend"] == "torch_dist"
    common = [torch.load(folder / "common.pt", weights_only=True) for folder in folders]
    assert common[0] == common[1]
    trackers = {(folder.parent / "latest_checkpointed_iteration.txt").read_text() for folder in folders}
    assert trackers == {"release"}


def test_files_are_closed_at_the_requested_size(models):
    files = sorted((models["qwen3"].by_converter / "release").glob("*.distcp"))
    assert len(files) > 5
