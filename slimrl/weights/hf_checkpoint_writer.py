"""Writes Hugging Face checkpoints: safetensors files, each tensor directly at its offset, and the other files.

The files are like those of safetensors' own `save_file`: 8 bytes of header length, the header as JSON, the tensors'
bytes. Headers are known before the first tensor, and no tensor is kept in memory. Tensors may come in any order, from
several threads or processes, and in several runs of rows.

The bytes of a tensor in host memory are taken without a copy and without a trace on it (`byte_array`):
`Tensor.numpy()` marks the tensor's storage as one that cannot be resized, and offloading resizes the storages of
weights and optimizer state.

The other files (tokenizer, chat template, generation config) are copied from the model's original folder. Used by the
converter and by the export of checkpoints.
"""

from __future__ import annotations

import dataclasses
import glob
import json
import math
import os
import shutil
import threading
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy
import torch
from torch import Tensor


class _Memory:
    """numpy's array interface to the memory of a tensor, which it keeps alive."""

    def __init__(self, tensor: Tensor) -> None:
        self._tensor = tensor
        self.__array_interface__: dict[str, Any] = {
            "data": (tensor.data_ptr(), False),
            "shape": (tensor.nbytes,),
            "typestr": "|u1",
            "version": 3,
        }


def byte_array(tensor: Tensor) -> numpy.ndarray[Any, numpy.dtype[numpy.uint8]]:
    """Its values as uint8 [bytes], writable, in the same memory.

    Raises ValueError for a tensor that is not contiguous or not in host memory.
    """
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise ValueError(
            f"a contiguous tensor in host memory is needed, not {tensor.device}, strides {tensor.stride()}"
        )
    if tensor.numel() == 0:  # its address may be 0
        return numpy.empty(0, dtype=numpy.uint8)
    return numpy.asarray(_Memory(tensor.detach()))


def with_own_storage(tensor: Tensor) -> Tensor:
    """The values of a CPU tensor in a storage that begins and ends with them; not copied if they are contiguous.

    torch.save writes the whole storage of a view.
    """
    tensor = tensor.contiguous()
    if tensor.untyped_storage().nbytes() == tensor.nbytes:
        return tensor
    return torch.from_numpy(byte_array(tensor)).view(tensor.dtype).view(tensor.shape)


INDEX_NAME = "model.safetensors.index.json"
SINGLE_NAME = "model.safetensors"
MAX_SHARD_BYTES = 5 * 1024**3

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
# bytes of one call to the kernel: from 128 KiB on, ext4 looks for large runs of free memory for its cache, which was
# measured to take five times as long as the copying
WRITE_BYTES = 64 * 1024
_CAST_BYTES = 16 * 1024**2  # a tensor of another dtype is cast in runs of about this many bytes


@dataclasses.dataclass(frozen=True)
class TensorSpec:
    """A tensor to be written."""

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The bytes of its values."""
        return math.prod(self.shape) * self.dtype.itemsize


@dataclasses.dataclass(frozen=True)
class Shard:
    """One file: its name, its header and the offset of each tensor."""

    file: str
    specs: tuple[TensorSpec, ...]
    header: bytes
    offsets: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """The length of the file."""
        return len(self.header) + sum(spec.nbytes for spec in self.specs)


def plan_shards(specs: Iterable[TensorSpec], max_shard_bytes: int = MAX_SHARD_BYTES) -> list[Shard]:
    """The files for `specs` in order; a file exceeds `max_shard_bytes` only with a single tensor."""
    groups: list[list[TensorSpec]] = [[]]
    filled = 0
    for spec in specs:
        if groups[-1] and filled + spec.nbytes > max_shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(spec)
        filled += spec.nbytes
    count = len(groups)
    names = [SINGLE_NAME] if count == 1 else [f"model-{n:05d}-of-{count:05d}.safetensors" for n in range(1, count + 1)]
    return [shard_of(name, group) for name, group in zip(names, groups, strict=True)]


def index_text(shards: Sequence[Shard]) -> str:
    """The content of the index file: the bytes of all tensors, and the file of each tensor."""
    specs = [spec for shard in shards for spec in shard.specs]
    weight_map = {spec.name: shard.file for shard in shards for spec in shard.specs}
    index = {
        "metadata": {"total_size": sum(spec.nbytes for spec in specs)},
        "weight_map": dict(sorted(weight_map.items())),
    }
    return json.dumps(index, indent=2) + "\n"


def shard_of(file: str, specs: Iterable[TensorSpec]) -> Shard:
    """The file that holds `specs`."""
    # wide dtypes first, so that every tensor is aligned to its element size
    ordered = sorted(specs, key=lambda spec: (-spec.dtype.itemsize, spec.name))
    entries: dict[str, object] = {"__metadata__": {"format": "pt"}}
    begins, end = [], 0
    for spec in ordered:
        begins.append(end)
        end += spec.nbytes
        entries[spec.name] = {
            "dtype": _DTYPE_NAMES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [begins[-1], end],
        }
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    header = len(text).to_bytes(8, "little") + text
    return Shard(file, tuple(ordered), header, tuple(len(header) + begin for begin in begins))


class ShardWriter:
    """The files of `shards` in `folder`, created at the first write and closed when full; thread-safe."""

    def __init__(self, folder: Path, shards: Sequence[Shard]) -> None:
        self._folder = Path(folder)
        self._places = {
            spec.name: (shard, spec, offset)
            for shard in shards
            for spec, offset in zip(shard.specs, shard.offsets, strict=True)
        }
        self._missing = {shard.file: sum(spec.nbytes for spec in shard.specs) for shard in shards}
        self._files: dict[str, int] = {}
        self._lock = threading.Lock()
        # the kernel lets one thread at a time write to a file while others spin; a lock lets them sleep
        self._file_locks = {shard.file: threading.Lock() for shard in shards}

    def __enter__(self) -> ShardWriter:
        return self

    def __exit__(self, exc_type: type[BaseException] | None, *exc_info: object) -> None:
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()
        if exc_type is None and (lacking := [file for file, missing in self._missing.items() if missing]):
            raise ValueError(f"{self._folder}: {', '.join(lacking)} lack tensors that were not written")

    def __contains__(self, name: str) -> bool:
        return name in self._places

    def write(self, name: str, tensor: Tensor, *, first_row: int = 0) -> int:
        """Writes rows of a tensor, all by default, cast to its dtype; returns the bytes written.

        `tensor` is [rows, ...] of any floating dtype, on the CPU. Each row must be written exactly once.
        """
        shard, spec, offset = self._places[name]
        fits = tuple(tensor.shape[1:]) == spec.shape[1:] and first_row + len(tensor) <= spec.shape[0]
        if tensor.dim() != len(spec.shape) or not fits:
            raise ValueError(f"{name} has shape {list(tensor.shape)} and should be {list(spec.shape)}")
        position = offset + first_row * spec.nbytes // max(1, spec.shape[0])
        descriptor = self._open(shard)
        written = 0
        for run in _runs(tensor, spec.dtype):
            with self._file_locks[shard.file]:
                written += _write_all(descriptor, run, position + written)
        self._account(shard, written)
        return written

    def _open(self, shard: Shard) -> int:
        with self._lock:
            if shard.file not in self._files:
                flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL
                self._files[shard.file] = os.open(self._folder / shard.file, flags, 0o666)
                _write_all(self._files[shard.file], torch.frombuffer(bytearray(shard.header), dtype=torch.uint8), 0)
            return self._files[shard.file]

    def _account(self, shard: Shard, written: int) -> None:
        with self._lock:
            self._missing[shard.file] -= written
            descriptor = self._files.pop(shard.file) if self._missing[shard.file] == 0 else None
        if descriptor is not None:
            os.close(descriptor)


def _runs(tensor: Tensor, dtype: torch.dtype) -> Iterator[Tensor]:
    """`tensor` in `dtype`, contiguous, in runs of rows; a single run without a copy if it matches already."""
    if tensor.dtype == dtype and tensor.is_contiguous():
        yield tensor
        return
    row_bytes = max(1, tensor[0].numel() * dtype.itemsize) if len(tensor) else 1
    for rows in tensor.split(max(1, _CAST_BYTES // row_bytes)):
        yield rows.to(dtype).contiguous()


def _write_all(descriptor: int, tensor: Tensor, position: int) -> int:
    view = byte_array(tensor.contiguous()).data
    done = 0
    while done < len(view):
        done += os.pwrite(descriptor, view[done : done + WRITE_BYTES], position + done)
    return done


# files of the original folder that are not copied
_WEIGHT_SUFFIXES = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_OWN_FILES = ("config.json", SINGLE_NAME, "model-?????-of-?????.safetensors", INDEX_NAME)  # written, not copied


def companions(origin: Path) -> list[Path]:
    """Tokenizer, chat template, generation config and the like."""
    return sorted(
        path
        for path in origin.iterdir()
        if path.is_file() and path.name != "config.json" and not path.name.endswith(_WEIGHT_SUFFIXES)
    )


def replaceable(beside: Sequence[Path]) -> tuple[str, ...]:
    """Patterns of all files in a folder that was written with the copied files `beside`."""
    return (*_OWN_FILES, *(glob.escape(path.name) for path in beside))


def finish(folder: Path, shards: Sequence[Shard], beside: Sequence[Path], config: dict[str, Any]) -> None:
    """Writes everything besides the weights: tokenizer, index and, last, config.json, which loaders require."""
    for path in beside:
        shutil.copyfile(path, folder / path.name)
    if len(shards) > 1:
        (folder / INDEX_NAME).write_text(index_text(shards), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def classifier_config(config: dict[str, Any]) -> dict[str, Any]:
    """The config.json of a model as that of the classifier with one output, as reward models are published.

    Raises ValueError if the architecture has no name of the usual form.
    """
    names = config.get("architectures") or [""]
    found = [name.removesuffix("ForCausalLM").removesuffix("ForSequenceClassification") for name in names]
    if found == [""] or any(one == name for one, name in zip(found, names, strict=True)):
        raise ValueError(f"config.json of the origin has architectures {names}: a reward model needs ...ForCausalLM")
    labels = {"num_labels": 1, "id2label": {"0": "reward"}, "label2id": {"reward": 0}}
    return {**config, "architectures": [f"{one}ForSequenceClassification" for one in found], **labels}
