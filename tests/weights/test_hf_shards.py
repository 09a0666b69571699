"""Safetensors files written in parts: the same bytes as from safetensors itself, in any order of writing."""

from __future__ import annotations

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from slimrl.weights.hf_checkpoint_writer import ShardWriter, TensorSpec, index_text, plan_shards


def specs_of(tensors: dict[str, torch.Tensor]) -> list[TensorSpec]:
    return [TensorSpec(name, tensor.dtype, tuple(tensor.shape)) for name, tensor in tensors.items()]


def some_tensors(dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    draw = torch.Generator().manual_seed(3)
    shapes = {"b": (6, 5), "a": (7,), "c": (4, 3, 2), "ä": (2, 2)}
    return {name: torch.randn(shape, generator=draw).to(dtype) for name, shape in shapes.items()}


def test_file_is_byte_for_byte_what_safetensors_writes(tmp_path):
    tensors = some_tensors()
    (shard,) = plan_shards(specs_of(tensors))
    with ShardWriter(tmp_path, [shard]) as writer:
        for name in reversed(tensors):
            assert writer.write(name, tensors[name]) == tensors[name].nbytes
    save_file(tensors, tmp_path / "theirs", metadata={"format": "pt"})
    assert (tmp_path / "model.safetensors").read_bytes() == (tmp_path / "theirs").read_bytes()
    assert shard.nbytes == (tmp_path / "theirs").stat().st_size


def test_rows_may_be_written_in_parts_and_out_of_order(tmp_path):
    tensors = some_tensors()
    with ShardWriter(tmp_path, plan_shards(specs_of(tensors))) as writer:
        writer.write("b", tensors["b"][4:], first_row=4)
        for name in ("a", "c", "ä"):
            writer.write(name, tensors[name])
        writer.write("b", tensors["b"][:4])
    assert torch.equal(load_file(tmp_path / "model.safetensors")["b"], tensors["b"])


def test_values_are_cast_to_the_planned_dtype_and_views_written_by_value(tmp_path):
    table = torch.randn(40, 30, generator=torch.Generator().manual_seed(1))
    specs = [TensorSpec("t", torch.bfloat16, (30, 40)), TensorSpec("n", torch.float32, (3,))]
    with ShardWriter(tmp_path, plan_shards(specs)) as writer:
        writer.write("t", table.T)
        writer.write("n", torch.arange(6.0)[::2])
    found = load_file(tmp_path / "model.safetensors")
    assert torch.equal(found["t"], table.T.bfloat16()) and found["n"].tolist() == [0, 2, 4]


def test_wide_elements_are_aligned_to_their_size(tmp_path):
    specs = [TensorSpec("a", torch.bfloat16, (3,)), TensorSpec("b", torch.float32, (5,))]
    (shard,) = plan_shards(specs)
    assert [spec.name for spec in shard.specs] == ["b", "a"]
    assert all(offset % spec.dtype.itemsize == 0 for spec, offset in zip(shard.specs, shard.offsets, strict=True))


def test_files_stay_below_the_limit_and_the_index_counts_every_byte_once(tmp_path):
    tensors = {f"t{n}": torch.full((10,), float(n)) for n in range(5)}
    shards = plan_shards(specs_of(tensors), max_shard_bytes=80)
    assert [[spec.name for spec in shard.specs] for shard in shards] == [["t0", "t1"], ["t2", "t3"], ["t4"]]
    index = json.loads(index_text(shards))
    assert index["metadata"]["total_size"] == 5 * 40
    assert index["weight_map"]["t3"] == "model-00002-of-00003.safetensors"
    with ShardWriter(tmp_path, shards[1:]) as writer:  # another process has the first file
        assert "t0" not in writer and "t2" in writer
        for name in ("t2", "t3", "t4"):
            writer.write(name, tensors[name])
    with safe_open(tmp_path / index["weight_map"]["t3"], framework="pt") as file:
        assert file.get_tensor("t3").tolist() == [3.0] * 10


def test_tensor_larger_than_the_limit_has_its_own_file():
    specs = [TensorSpec(name, torch.float32, (size,)) for name, size in (("a", 1), ("b", 100), ("c", 1))]
    assert [[spec.name for spec in shard.specs] for shard in plan_shards(specs, 40)] == [["a"], ["b"], ["c"]]


def test_missing_tensor_and_wrong_shape_are_rejected_by_name(tmp_path):
    tensors = some_tensors()
    shards = plan_shards(specs_of(tensors))
    with pytest.raises(ValueError, match=r"model\.safetensors lack tensors"), ShardWriter(tmp_path, shards) as writer:
        writer.write("a", tensors["a"])
    other = tmp_path / "other"
    other.mkdir()
    with (
        pytest.raises(ValueError, match=r"a has shape \[8\] and should be \[7\]"),
        ShardWriter(other, shards) as writer,
    ):
        writer.write("a", torch.ones(8))
