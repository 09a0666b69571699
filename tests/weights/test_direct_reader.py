"""Parts of stored tensors, read straight from the files of a checkpoint."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest
import torch
from torch import Tensor

from slimrl.weights import checkpoint_checksums
from slimrl.weights.checkpoint_checksums import CHECKSUMS_NAME, CheckedFolder, DamagedFileError, checksums_text
from slimrl.weights.direct_reader import OpenedFile, StoredValues, locate, read_part

SHAPES = ((7,), (300, 1000), (3, 5, 400), (), (1, 1200, 700))
DTYPES = (torch.float32, torch.bfloat16, torch.int64)


@pytest.fixture
def stored(tmp_path: Path) -> tuple[Path, list[tuple[Tensor, int, int]]]:
    """A file with archives of torch.save one after another: their values, offsets and lengths."""
    generator = torch.Generator().manual_seed(5)
    content, entries = io.BytesIO(), []
    for shape in SHAPES:
        for dtype in DTYPES:
            tensor = torch.randint(-100, 100, shape, generator=generator).to(dtype)
            begin = content.tell()
            torch.save(tensor, content)
            entries.append((tensor, begin, content.tell() - begin))
    path = tmp_path / "__0_0.distcp"
    path.write_bytes(content.getvalue())
    (tmp_path / CHECKSUMS_NAME).write_text(checksums_text(tmp_path, {}))
    return path, entries


def part_of(tensor: Tensor, generator: torch.Generator) -> tuple[list[int], list[int]]:
    """Random offsets and sizes inside the tensor."""
    low = [int(torch.randint(0, size, (), generator=generator)) for size in tensor.shape]
    pairs = zip(low, tensor.shape, strict=True)
    return low, [int(torch.randint(1, size - first + 1, (), generator=generator)) for first, size in pairs]


@pytest.mark.parametrize("verified", [True, False])
def test_any_part_is_read_into_any_target(verified: bool, stored: tuple[Path, list[tuple[Tensor, int, int]]]):
    path, entries = stored
    generator = torch.Generator().manual_seed(6)
    checked = CheckedFolder.open(path.parent) if verified else None
    with OpenedFile(path, checked) as file:
        for tensor, begin, length in entries:
            values = locate(file, begin, length, "weight")
            assert (values.shape, values.dtype) == (tensor.shape, tensor.dtype)
            for _ in range(6):
                low, sizes = part_of(tensor, generator)
                expected = tensor[tuple(slice(a, a + n) for a, n in zip(low, sizes, strict=True))]
                wide = torch.zeros([*sizes, 2], dtype=tensor.dtype)
                for target in (torch.empty_like(expected), wide[..., 0], torch.empty(sizes, dtype=torch.float64)):
                    read_part(file, values, low, target, "weight")
                    assert torch.equal(target, expected.to(target.dtype))
                assert not wide[..., 1].any()


def test_every_block_is_read_once(stored: tuple[Path, list[tuple[Tensor, int, int]]], monkeypatch: pytest.MonkeyPatch):
    path, entries = stored
    read: list[int] = []

    def counted(descriptor: int, buffers: list[memoryview], offset: int) -> int:
        count = preadv(descriptor, buffers, offset)
        read.append(count)
        return count

    preadv = os.preadv
    monkeypatch.setattr(checkpoint_checksums.os, "preadv", counted)
    with OpenedFile(path, CheckedFolder.open(path.parent)) as file:
        for tensor, begin, length in entries:
            target = torch.empty_like(tensor)
            read_part(file, locate(file, begin, length, "weight"), [0] * tensor.ndim, target, "weight")
            assert torch.equal(target, tensor)
    assert sum(read) == path.stat().st_size


def test_changed_byte_is_found_and_short_file_is_named(stored: tuple[Path, list[tuple[Tensor, int, int]]]):
    path, entries = stored
    tensor, begin, length = entries[-1]
    content = bytearray(path.read_bytes())
    content[begin + length // 2] ^= 1
    path.write_bytes(content)
    with OpenedFile(path, CheckedFolder.open(path.parent)) as file:
        values = locate(file, begin, length, "weight")
        with pytest.raises(DamagedFileError, match=f"{path.name} is damaged, bytes"):
            read_part(file, values, [0] * tensor.ndim, torch.empty_like(tensor), "weight")
    path.write_bytes(content[: begin + length // 2])
    with OpenedFile(path, None) as file:
        with pytest.raises(ValueError, match="ends inside weight: the checkpoint is damaged"):
            read_part(file, values, [0] * tensor.ndim, torch.empty_like(tensor), "weight")
        with pytest.raises(ValueError, match="weight cannot be read"):
            locate(file, begin, length, "weight")


def test_metadata_that_does_not_fit_the_tensor_is_rejected(tmp_path: Path):
    path = tmp_path / "__0_0.distcp"
    torch.save(torch.arange(12.0).view(3, 4).T, path)
    with OpenedFile(path, None) as file:
        with pytest.raises(ValueError, match="weight is not a contiguous tensor"):
            locate(file, 0, path.stat().st_size, "weight")
        values = StoredValues(0, torch.Size([3, 4]), torch.float32)
        with pytest.raises(ValueError, match=r"weight is stored with shape \[3, 4\]"):
            read_part(file, values, [2, 0], torch.empty(2, 4), "weight")
