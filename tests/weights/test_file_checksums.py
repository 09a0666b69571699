"""A checkpoint with changed bytes is rejected by file and offset; one without checksums is read."""

from __future__ import annotations

import json
import os
import random
import runpy
from pathlib import Path

import pytest
import torch
import xxhash

from slimrl.weights.checkpoint_checksums import (
    BLOCK,
    CHECKSUMS_NAME,
    BlockHasher,
    CheckedFolder,
    DamagedFileError,
    checksums_text,
)
from slimrl.weights.convert.torch_dist_reader import TorchDistCheckpoint
from slimrl.weights.convert.torch_dist_writer import Blueprint, Piece, Weight, write_torch_dist

ROOT = Path(__file__).resolve().parents[2]
ROWS, COLUMNS = 600, 1024  # of float32: more than two blocks


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """Two tensors of several blocks, in separate files, with checksums."""
    folder = tmp_path / "release"
    folder.mkdir()
    weights = [
        Weight(name, (Piece(name, (0, 0), (ROWS, COLUMNS), (ROWS, COLUMNS), torch.float32),), lambda read: [read])
        for name in ("decoder.a", "decoder.b")
    ]
    blueprint = Blueprint(tuple(weights), {"decoder.x._extra_state": b"small"})
    checksums = write_torch_dist(folder, blueprint, values, max_file_bytes=1)  # one file each, in any thread order
    assert sorted(checksums) == sorted(path.name for path in folder.glob("*.distcp"))
    (folder / CHECKSUMS_NAME).write_text(checksums_text(folder, checksums))
    return folder


def values(weight: Weight) -> torch.Tensor:
    return torch.arange(ROWS * COLUMNS, dtype=torch.float32).reshape(ROWS, COLUMNS) + len(weight.name)


def flip(path: Path, places: list[int]) -> None:
    content = bytearray(path.read_bytes())
    for place in places:
        content[place] ^= 0x10
    path.write_bytes(content)


def largest(folder: Path) -> Path:
    return max(folder.glob("*.distcp"), key=lambda path: path.stat().st_size)


def test_checksums_are_xxh3_of_each_mebibyte():
    assert xxhash.xxh3_64_hexdigest(b"") == "2d06800538d394c2"  # of the algorithm's published test vectors
    content = random.Random(0).randbytes(2 * 2**20 + 5)
    hasher = BlockHasher()
    hasher.update(content)
    blocks = (content[: 2**20], content[2**20 : 2**21], content[2**21 :])
    assert hasher.finish().blocks == "".join(map(xxhash.xxh3_64_hexdigest, blocks))
    assert BlockHasher().finish().blocks == ""


@pytest.mark.parametrize("pieces", [1, 7, 4096, BLOCK - 1, BLOCK, 3 * BLOCK])
def test_checksums_do_not_depend_on_write_sizes(pieces: int):
    content = random.Random(0).randbytes(2 * BLOCK + 5) if pieces > 7 else random.Random(0).randbytes(3000)
    whole, cut = BlockHasher(), BlockHasher()
    whole.update(content)
    for begin in range(0, len(content), pieces):
        cut.update(content[begin : begin + pieces])
    assert cut.finish() == whole.finish() and whole.finish().bytes == len(content)


def test_converter_checksums_match_a_reread_of_the_files(checkpoint: Path):
    assert json.loads((checkpoint / CHECKSUMS_NAME).read_text()) == json.loads(checksums_text(checkpoint, {}))
    checked = CheckedFolder.open(checkpoint)
    assert checked.check() == sum(p.stat().st_size for p in checkpoint.iterdir() if p.name != CHECKSUMS_NAME)


def test_whole_files_are_read_unchanged(checkpoint: Path):
    opened = TorchDistCheckpoint(checkpoint)
    for name in ("decoder.a", "decoder.b"):
        wanted = values(Weight(name, (), lambda read: [read]))
        assert torch.equal(opened.read(opened.find(name)), wanted)
        assert torch.equal(opened.read(opened.find(name), slice(299, 301)), wanted[299:301])


def test_flipped_bytes_are_reported_by_file_and_offset_when_read_and_not_before(checkpoint: Path):
    file = largest(checkpoint)
    flip(file, random.Random(1).sample(range(BLOCK, 2 * BLOCK), 4000))
    opened = TorchDistCheckpoint(checkpoint)
    damage = rf"{file.name} is damaged, bytes {BLOCK} to {2 * BLOCK - 1} are not those that were written.*--ckpt-step"
    untouched = refused = 0
    for name in ("decoder.a", "decoder.b"):
        stored = opened.find(name)
        wanted = values(Weight(name, (), lambda read: [read]))
        if opened._locate(stored.key, opened._chunks(stored)[0]).path != file:
            assert torch.equal(opened.read(stored), wanted)
            continue
        assert torch.equal(opened.read(stored, slice(0, 10)), wanted[:10])
        untouched += 1
        with pytest.raises(DamagedFileError, match=damage):
            opened.read(stored)
        with pytest.raises(DamagedFileError, match=damage):  # also when a part of a block is requested
            opened.read(stored, slice(300, 301))
        refused += 1
    assert untouched and refused
    with pytest.raises(DamagedFileError, match=damage):
        CheckedFolder.open(checkpoint).check()


@pytest.mark.parametrize("name", [".metadata", "data", CHECKSUMS_NAME])
def test_one_flipped_byte_anywhere_is_found(checkpoint: Path, name: str):
    path = largest(checkpoint) if name == "data" else checkpoint / name
    for place in random.Random(2).sample(range(path.stat().st_size), 25):
        flip(path, [place])
        with pytest.raises(DamagedFileError, match="damaged|reads xxh3_64"):
            checked = CheckedFolder.open(checkpoint)
            checked.check()
        flip(path, [place])
    CheckedFolder.open(checkpoint).check()


def test_truncated_extended_or_missing_file_is_named(checkpoint: Path):
    file = largest(checkpoint)
    whole = file.read_bytes()
    for content, complaint in (
        (whole[:-1], f"{len(whole) - 1} bytes, and {len(whole)} were written"),
        (whole + b"x", f"{len(whole) + 1} bytes, and {len(whole)} were written"),
    ):
        file.write_bytes(content)
        with pytest.raises(DamagedFileError, match=f"{file.name} is damaged, it has {complaint}"):
            CheckedFolder.open(checkpoint).check()
    os.unlink(file)
    with pytest.raises(DamagedFileError, match=f"{file.name} is missing"):
        CheckedFolder.open(checkpoint).check()


def test_damaged_metadata_is_reported_before_it_is_opened(checkpoint: Path):
    flip(checkpoint / ".metadata", [40])
    with pytest.raises(DamagedFileError, match=r"\.metadata is damaged, bytes 0 to"):
        TorchDistCheckpoint(checkpoint)


def test_checkpoint_without_checksums_is_read_and_cannot_be_verified(checkpoint: Path):
    (checkpoint / CHECKSUMS_NAME).unlink()
    opened = TorchDistCheckpoint(checkpoint)
    assert opened.checked is None
    assert opened.read(opened.find("decoder.a")).shape == (ROWS, COLUMNS)


@pytest.mark.parametrize("state", ["whole", "damaged", "without checksums"])
def test_tool_reports_whether_the_bytes_are_intact(checkpoint: Path, state: str, capsys: pytest.CaptureFixture[str]):
    if state == "damaged":
        flip(largest(checkpoint), [3 * BLOCK // 2])
    if state == "without checksums":
        (checkpoint / CHECKSUMS_NAME).unlink()
    main = runpy.run_path(str(ROOT / "tools" / "check_checkpoint.py"))["main"]
    code = main(["--input-dir", str(checkpoint)])
    out, err = capsys.readouterr()
    expected = {
        "whole": (0, "WHOLE: the bytes of "),
        "damaged": (2, f"bytes {BLOCK} to"),
        "without checksums": (2, "has no checksums"),
    }
    assert code == expected[state][0] and expected[state][1] in out + err
