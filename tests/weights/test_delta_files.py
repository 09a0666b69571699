"""Files of changed weights, and the checkpoint that an engine's host keeps current from them."""

from __future__ import annotations

import importlib.util
import json
import shutil
import signal
import subprocess
import sys
import zlib
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import xxhash
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from slimrl.weights.delta_files import CHECKSUMS, DeltaFileError, VersionIndex
from slimrl.weights.hf_checkpoint_writer import INDEX_NAME
from slimrl.weights.local_checkpoint import (
    UNFINISHED,
    LocalCheckpoint,
    answer_path,
    read_answer,
    write_answer,
)
from slimrl.weights.update.buckets import ReusedBuffer, iter_buckets
from slimrl.weights.update.transport_changed_files import ChangedFiles, ChangedFilesTransport
from tests.megatron.tiny import save_qwen3

Weights = dict[str, torch.Tensor]
ENCODINGS = ("xor", "overwrite")
BUCKET_BYTES = 64 * 1024


class Publisher:
    """The trainer's end, with folders that stay."""

    def __init__(self, folder: Path, origin: Path, encoding: str = "xor", checksum: str = "xxh3-128") -> None:
        changes = ChangedFiles(folder / "unused", origin, encoding, checksum)
        self.transport = ChangedFilesTransport([], folder, torch.device("cpu"), changes)

    def publish(self, weights: Weights, version: str) -> Path:
        self.transport.begin(version)
        buffer = ReusedBuffer(torch.device("cpu"))
        for bucket in iter_buckets(weights.items(), BUCKET_BYTES, buffer):
            self.transport.start(bucket)
        return self.transport.folder

    def acknowledged(self) -> None:
        self.transport._written = []  # as `remove` does
        self.transport.release()


@pytest.fixture(scope="module")
def origin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_qwen3(tmp_path_factory.mktemp("model") / "base", seed=0)


@pytest.fixture(scope="module")
def weights(origin: Path) -> Weights:
    """bf16, with a scalar-like and an empty change among them."""
    return {name: tensor.bfloat16() for name, tensor in load_file(origin / "model.safetensors").items()}


def changed(weights: Weights, part: float, seed: int) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    found = {}
    for name, tensor in weights.items():
        chosen = torch.rand(tensor.shape, generator=generator) < part
        found[name] = torch.where(chosen, tensor + 0.25, tensor)
    return found


def contents(checkpoint: Path) -> Weights:
    """What safetensors itself reads."""
    return {name: one for path in checkpoint.glob("*.safetensors") for name, one in load_file(path).items()}


def same_bits(one: Weights, other: Weights) -> bool:
    return one.keys() == other.keys() and all(
        torch.equal(one[name].view(torch.int16), other[name].view(torch.int16)) for name in one
    )


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("checksum", ["xxh3-128", "adler32", "blake3"])
def test_checkpoint_has_the_trainers_bits_at_every_version(origin, weights, tmp_path, encoding, checksum):
    if checksum == "blake3" and importlib.util.find_spec("blake3") is None:
        pytest.skip("blake3 is not installed")
    publisher, local = Publisher(tmp_path / "shared", origin, encoding, checksum), LocalCheckpoint(tmp_path / "local")
    now, sizes = weights, []
    for number, part in enumerate([0.0, 0.01, 0.0, 0.9, 0.05]):
        now = changed(now, part, number)
        now["model.norm.weight"] = now["model.norm.weight"] * -1  # zeros become -0
        published = publisher.publish(now, str(number))
        sizes.append(sum(path.stat().st_size for path in published.glob("*.safetensors")))
        found = local.pull(published)
        assert same_bits(contents(found), now)
        assert [path.name for path in (tmp_path / "local").glob("w*")] == [found.name]  # earlier ones are removed
        publisher.acknowledged()
    assert sizes[1] < 0.1 * sizes[0] and sizes[2] < 0.01 * sizes[0] and 0.9 < sizes[3] / sizes[0] < 1.1
    model = AutoModelForCausalLM.from_pretrained(found, dtype=torch.bfloat16)
    assert torch.equal(model.model.embed_tokens.weight, now["model.embed_tokens.weight"])


def test_index_states_versions_encoding_compression_and_checksums(origin, weights, tmp_path):
    publisher = Publisher(tmp_path / "shared", origin, checksum="adler32")
    publisher.publish(weights, "3")
    publisher.acknowledged()
    after = dict(weights)
    after["model.norm.weight"] = weights["model.norm.weight"] + 1
    published = publisher.publish(after, "4")
    index = json.loads((published / INDEX_NAME).read_text())
    assert published.name == "weight_v000004" and list(index["weight_map"]) == ["model.norm.weight"]
    found = index["metadata"]
    assert (found["version"], found["base_version"], found["delta_encoding"]) == ("4", "3", "xor")
    assert (found["compression_format"], found["checksum_format"]) == ("zstd", "adler32")
    digest = f"{zlib.adler32(after['model.norm.weight'].view(torch.uint8).numpy().tobytes()):08x}"
    assert found["tensors"]["model.norm.weight"]["checksum"] == digest


def test_checksums_are_those_of_their_libraries():
    data = torch.arange(250, dtype=torch.uint8).numpy()
    assert CHECKSUMS["xxh3-128"](data) == xxhash.xxh3_128(bytes(range(250))).hexdigest()
    assert CHECKSUMS["adler32"](data) == zlib.adler32(bytes(range(250))).to_bytes(4, "big").hex()


def test_host_that_missed_a_version_needs_a_full_one(origin, weights, tmp_path):
    publisher, local = Publisher(tmp_path / "shared", origin), LocalCheckpoint(tmp_path / "local")
    first = local.pull(publisher.publish(weights, "1"))
    publisher.acknowledged()
    publisher.publish(second := changed(weights, 0.1, 1), "2")
    publisher.acknowledged()
    third = publisher.publish(after := changed(second, 0.1, 2), "3")
    with pytest.raises(DeltaFileError, match=f"version '3' changes version '2' .*has {first.name}: it needs a full"):
        local.pull(third)
    assert same_bits(contents(first), weights)  # it keeps what it has
    with pytest.raises(DeltaFileError, match="has no complete checkpoint: it needs a full version"):
        LocalCheckpoint(tmp_path / "of a new host").pull(third)
    publisher.transport.reset()
    assert same_bits(contents(local.pull(publisher.publish(after, "3"))), after)


def test_version_of_another_run_with_the_same_number_is_no_base(origin, weights, tmp_path):
    local, runs = LocalCheckpoint(tmp_path / "local"), [Publisher(tmp_path / name, origin) for name in "ab"]
    for run in runs:
        run.publish(weights, "1")
    local.pull(runs[0].transport.folder)
    runs[1].acknowledged()
    with pytest.raises(DeltaFileError, match="it needs a full version"):
        local.pull(runs[1].publish(changed(weights, 0.1, 1), "2"))


def damage_index(published: Path) -> None:
    (published / INDEX_NAME).write_text("{")


def cut_file(published: Path) -> None:
    path = next(published.glob("*.safetensors"))
    path.write_bytes(path.read_bytes()[:-1])


def remove_file(published: Path) -> None:
    next(published.glob("*.safetensors")).unlink()


def flip_bit(published: Path) -> None:
    path = max(published.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(path.read_bytes())
    data[-100] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("encoding", ENCODINGS)
@pytest.mark.parametrize("damage", [damage_index, cut_file, remove_file, flip_bit])
@pytest.mark.parametrize("full", [True, False], ids=["full", "changes"])
def test_damaged_files_never_become_a_version(origin, weights, tmp_path, encoding, damage, full):
    publisher, local = Publisher(tmp_path / "shared", origin, encoding), LocalCheckpoint(tmp_path / "local")
    now = weights
    if not full:
        local.pull(publisher.publish(weights, "1"))
        publisher.acknowledged()
        now = changed(weights, 0.3, 1)
    published = publisher.publish(now, "2")
    damage(published)
    with pytest.raises(DeltaFileError):
        local.pull(published)
    left = [path for path in (tmp_path / "local").iterdir() if path.is_dir()] if (tmp_path / "local").exists() else []
    assert [path.name[:12] for path in left] in ([], ["weight_v0000"])
    assert all(same_bits(contents(path), weights) for path in left)  # the base, unchanged
    publisher.transport.reset()
    assert same_bits(contents(local.pull(publisher.publish(now, "2"))), now)


KILLED = """
import os, signal, sys
from pathlib import Path
from slimrl.weights import local_checkpoint
applied = []
def apply(row, payload, target):
    real(row, payload, target)
    applied.append(row)
    if len(applied) == 3:
        os.kill(os.getpid(), signal.SIGKILL)
real, local_checkpoint.apply = local_checkpoint.apply, apply
local_checkpoint.LocalCheckpoint(Path(sys.argv[1])).pull(Path(sys.argv[2]))
"""


def test_host_killed_in_the_middle_of_a_change_has_no_version(origin, weights, tmp_path):
    publisher, local = Publisher(tmp_path / "shared", origin), LocalCheckpoint(tmp_path / "local")
    local.pull(publisher.publish(weights, "1"))
    publisher.acknowledged()
    published = publisher.publish(now := changed(weights, 0.1, 1), "2")
    killed = subprocess.run([sys.executable, "-c", KILLED, tmp_path / "local", published], timeout=60, check=False)
    assert killed.returncode == -signal.SIGKILL
    (left,) = (path for path in (tmp_path / "local").iterdir() if path.is_dir())
    assert left.name == UNFINISHED and not same_bits(contents(left), weights)
    for _ in range(2):  # a second change would give the old bytes of XOR again
        with pytest.raises(DeltaFileError, match="has no complete checkpoint"):
            local.pull(published)
    publisher.transport.reset()
    assert same_bits(contents(local.pull(publisher.publish(now, "2"))), now)
    assert not left.exists()


def test_checkpoint_of_before_a_crash_of_the_machine_is_no_version(origin, weights, tmp_path, monkeypatch):
    publisher, local = Publisher(tmp_path / "shared", origin), LocalCheckpoint(tmp_path / "local")
    local.pull(publisher.publish(weights, "1"))
    publisher.acknowledged()
    (tmp_path / "boot").write_text("another start")
    monkeypatch.setattr("slimrl.weights.local_checkpoint._BOOT", tmp_path / "boot")
    with pytest.raises(DeltaFileError, match="has no complete checkpoint"):
        local.pull(publisher.publish(changed(weights, 0.1, 1), "2"))


def pulled(argument: tuple[Path, Path]) -> Path:
    local, published = argument
    return LocalCheckpoint(local).pull(published)


def test_ranks_of_one_host_change_the_checkpoint_once(origin, weights, tmp_path):
    publisher = Publisher(tmp_path / "shared", origin)
    now = weights
    for number in range(3):
        now = changed(now, 0.1, number)
        calls: Sequence[tuple[Path, Path]] = [(tmp_path / "local", publisher.publish(now, str(number)))] * 4
        with ThreadPoolExecutor(4) as pool:
            (found,) = set(pool.map(pulled, calls))
        assert same_bits(contents(found), now)
        publisher.acknowledged()


def test_version_is_pulled_onto_a_disk_without_room_only_by_name(origin, weights, tmp_path, monkeypatch):
    published = Publisher(tmp_path / "shared", origin).publish(weights, "1")
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda _: usage._replace(free=9))
    with pytest.raises(ValueError, match=r"local needs 0\.00 GiB and its disk has 0\.00 GiB free"):
        LocalCheckpoint(tmp_path / "local").pull(published)


def test_answers_name_the_error_and_late_ones_the_folder(tmp_path):
    write_answer(tmp_path, "a", 0, None)
    write_answer(tmp_path, "a", 1, "host: no room")
    assert [read_answer(tmp_path, "a", rank, 1) for rank in (0, 1)] == [None, "host: no room"]
    with pytest.raises(TimeoutError, match="no answer of rank 2 within 0 s"):
        read_answer(tmp_path, "a", 2, 0)
    assert answer_path(tmp_path, "a", 0).parent.parent == tmp_path


def test_index_that_lists_a_tensor_without_a_file_is_refused(origin, weights, tmp_path):
    published = Publisher(tmp_path, origin).publish(weights, "1")
    index = json.loads((published / INDEX_NAME).read_text())
    del index["weight_map"]["model.norm.weight"]
    (published / INDEX_NAME).write_text(json.dumps(index))
    with pytest.raises(DeltaFileError, match="a file for every tensor"):
        VersionIndex.read(published)
