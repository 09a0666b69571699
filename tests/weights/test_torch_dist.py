"""Reading single tensors from torch_dist checkpoints, for any sharding and stacking."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slimrl.weights.convert.torch_dist_reader import TorchDistCheckpoint, resolve_checkpoint
from slimrl.weights.convert.torch_dist_writer import Blueprint, Piece, Weight, write_torch_dist


def block(key: str, values: Tensor, offsets: tuple[int, ...], full: tuple[int, ...]) -> tuple[Weight, Tensor]:
    """A weight of one block of `key`, and its values."""
    piece = Piece(key, offsets, tuple(values.shape), full, values.dtype)
    return Weight(f"{key}@{offsets}", (piece,), lambda read: [read]), values


def save(folder, *blocks: tuple[Weight, Tensor], **options) -> TorchDistCheckpoint:
    folder.mkdir()
    values = {weight.name: tensor for weight, tensor in blocks}
    blueprint = Blueprint(tuple(weight for weight, _ in blocks), {"decoder.x._extra_state": b"small"})
    write_torch_dist(folder, blueprint, lambda weight: values[weight.name], **options)
    return TorchDistCheckpoint(folder)


def numbered(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
    return torch.arange(torch.Size(shape).numel(), dtype=dtype).reshape(shape)


def test_tensor_sharded_by_rows_and_columns_is_reassembled(tmp_path):
    full = numbered(8, 6)
    checkpoint = save(
        tmp_path / "c",
        *(block("decoder.w", full[r : r + 4, c : c + 3].contiguous(), (r, c), (8, 6)) for r in (0, 4) for c in (0, 3)),
    )
    stored = checkpoint.find("decoder.w")
    assert stored.shape == (8, 6) and stored.place == ()
    assert torch.equal(checkpoint.read(stored), full)
    assert torch.equal(checkpoint.read(stored, slice(3, 7)), full[3:7])
    assert torch.equal(checkpoint.read(stored, slice(6, 100)), full[6:])


def test_layers_and_experts_are_found_by_number_for_any_stacking(tmp_path):
    stacked = numbered(2, 3, 4, 5, dtype=torch.bfloat16)
    alone = numbered(3, 4)
    name = "decoder.layers.mlp.experts.experts.linear_fc1.weight"
    checkpoint = save(
        tmp_path / "c",
        # the gate and the up half of one expert are two blocks
        *(
            block(
                name,
                stacked[layer, expert, half : half + 2][None, None].contiguous(),
                (layer, expert, half, 0),
                (2, 3, 4, 5),
            )
            for layer in range(2)
            for expert in range(3)
            for half in (0, 2)
        ),
        block("decoder.layers.7.mlp.experts.experts.linear_fc2.weight", alone, (0, 0), (3, 4)),
        block("decoder.layers.mlp.linear_fc2.weight", alone[:2], (0, 0), (2, 4)),
    )
    for spelling in ("local_experts.2.linear_fc1.weight", "linear_fc1.weight2"):
        stored = checkpoint.find(f"decoder.layers.1.mlp.experts.{spelling}")
        assert (stored.key, stored.place, stored.shape) == (name, (1, 2), (4, 5))
        assert torch.equal(checkpoint.read(stored), stacked[1, 2])
        assert torch.equal(checkpoint.read(stored, slice(1, 3)), stacked[1, 2, 1:3])
    own = checkpoint.find("decoder.layers.7.mlp.experts.local_experts.1.linear_fc2.weight")
    assert own.place == (1,) and torch.equal(checkpoint.read(own), alone[1])
    assert torch.equal(checkpoint.read(checkpoint.find("decoder.layers.1.mlp.linear_fc2.weight")), alone[1])
    for absent in ("2.mlp.linear_fc2.weight", "1.mlp.experts.local_experts.3.linear_fc1.weight"):
        assert checkpoint.find(f"decoder.layers.{absent}") is None
    assert checkpoint.sizes[name] == 2 * 3 * 4 * 5


def test_views_of_a_larger_tensor_are_stored_alone(tmp_path):
    table = numbered(1000, 100)
    checkpoint = save(tmp_path / "c", block("decoder.w", table[10:12], (0, 0), (2, 100)))
    assert torch.equal(checkpoint.read(checkpoint.find("decoder.w")), table[10:12])
    assert sum(path.stat().st_size for path in (tmp_path / "c").iterdir()) < 10000


def test_weight_in_row_ranges_is_the_same_tensor(tmp_path):
    table = numbered(10, 4)
    piece = Piece("embedding.w", (0, 0), (10, 4), (10, 4), torch.float32)
    runs = tuple(Weight("embedding.w", (piece,), lambda read: [read]).in_rows(3 * 16))
    assert [weight.rows for weight in runs] == [(0, 3), (3, 6), (6, 9), (9, 10)]
    (tmp_path / "c").mkdir()
    write_torch_dist(tmp_path / "c", Blueprint(runs, {}), lambda weight: table[slice(*weight.rows)])
    checkpoint = TorchDistCheckpoint(tmp_path / "c")
    assert torch.equal(checkpoint.read(checkpoint.find("embedding.w")), table)


def test_source_error_ends_the_writing_with_that_error(tmp_path):
    (tmp_path / "c").mkdir()
    weight, _ = block("decoder.w", torch.ones(2), (0,), (2,))

    def broken(weight: Weight) -> Tensor:
        raise FileNotFoundError("the disk went away")

    with pytest.raises(FileNotFoundError, match="the disk went away"):
        write_torch_dist(tmp_path / "c", Blueprint((weight,), {}), broken)
    assert not (tmp_path / "c" / ".metadata").exists()


def test_values_of_another_shape_are_rejected_by_key(tmp_path):
    weight, _ = block("decoder.w", torch.ones(2), (0,), (2,))
    with pytest.raises(ValueError, match=r"decoder\.w has shape \[3\] of torch\.float32 and not \[2\]"):
        save(tmp_path / "c", (weight, torch.ones(3)))


def test_damaged_file_is_named(tmp_path):
    checkpoint = save(tmp_path / "c", block("decoder.w", numbered(64, 64), (0, 0), (64, 64)))
    for path in (tmp_path / "c").glob("*.distcp"):
        path.write_bytes(path.read_bytes()[:2000])
    with pytest.raises(ValueError, match=r"distcp.*the checkpoint is damaged"):
        checkpoint.read(checkpoint.find("decoder.w"))


def test_newest_checkpoint_is_the_one_named_by_the_tracker(tmp_path):
    for name in ("release", "iter_0000012"):
        (tmp_path / name).mkdir()
    assert resolve_checkpoint(tmp_path / "release") == tmp_path / "release"
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("12")
    assert resolve_checkpoint(tmp_path) == tmp_path / "iter_0000012"
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("release\n")
    assert resolve_checkpoint(tmp_path) == tmp_path / "release"
    (tmp_path / "latest_checkpointed_iteration.txt").write_text("13")
    with pytest.raises(FileNotFoundError, match="names iter_0000013, which does not exist"):
        resolve_checkpoint(tmp_path)
    for torn in (b"", b"\xff"):
        (tmp_path / "latest_checkpointed_iteration.txt").write_bytes(torn)
        with pytest.raises(FileNotFoundError, match=r"iteration\.txt names .*, which does not exist"):
            resolve_checkpoint(tmp_path)


def test_missing_file_and_damaged_metadata_are_named(tmp_path):
    checkpoint = save(tmp_path / "c", block("decoder.w", numbered(4, 4), (0, 0), (4, 4)))
    for path in (tmp_path / "c").glob("*.distcp"):
        path.unlink()
    with pytest.raises(ValueError, match=r"\.distcp, which holds decoder\.w, does not exist"):
        checkpoint.read(checkpoint.find("decoder.w"))
    whole = (tmp_path / "c" / ".metadata").read_bytes()
    for part in (b"", whole[:100]):
        (tmp_path / "c" / ".metadata").write_bytes(part)
        with pytest.raises(ValueError, match=r"\.metadata is damaged"):
            TorchDistCheckpoint(tmp_path / "c")
