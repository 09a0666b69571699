"""Hugging Face checkpoint folders: the config and the tensors, memory-mapped.

Reading never copies a file into memory, nor keeps much of it mapped; writing is the business of
`slimrl.weights.hf_shards`. Called by the loader and the converters.
"""

from __future__ import annotations

import contextlib
import json
import threading
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from slimrl.arguments.hf_files import check_inside
from slimrl.weights.fp8_blocks import SCALE_SUFFIX, block_size, dequantised
from slimrl.weights.hf_shards import DTYPES, INDEX_NAME, SINGLE_NAME

_REMAP_BYTES = 16 * 1024**2  # after so many bytes a file is mapped anew, which lets go of the pages read so far


def read_hf_config(hf_dir: Path) -> dict[str, Any]:
    """The parsed config.json. Raises FileNotFoundError or ValueError naming the file."""
    path = Path(hf_dir) / "config.json"
    if not path.is_file():
        raise FileNotFoundError(f"{path} does not exist: give the folder of a Hugging Face model")
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON ({error}): download the file again") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} is not a JSON object: download the file again")
    return config


class HfCheckpoint:
    """The safetensors of one folder, opened lazily and memory-mapped; a context manager.

    Tensors handed out are views of the mapped files: do not write to them. Weights stored as blocks of fp8 are handed
    out as the bfloat16 tensors that they stand for; their scales have no name here. Threads may share a checkpoint.
    """

    def __init__(self, hf_dir: Path) -> None:
        """Raises FileNotFoundError for a folder without weights, ValueError for damaged or otherwise quantised ones."""
        self.folder = Path(hf_dir)
        has_config = (self.folder / "config.json").is_file()
        self._block = block_size(read_hf_config(self.folder)) if has_config else None
        self._handles: dict[Path, tuple[Any, contextlib.ExitStack]] = {}
        self._read_bytes: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._files = self._find_files()

    def __enter__(self) -> HfCheckpoint:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for path in list(self._handles):
            self._let_go(path)

    @property
    def names(self) -> list[str]:
        """The name of every stored tensor."""
        return [name for name in self._files if not self._is_scale(name)]

    def tensor(self, name: str) -> Tensor:
        """The full tensor, on the CPU. Raises ValueError where there is no such tensor, or only a quantised one."""
        self.dtype(name)
        tensor = self._stored(name)
        if self._block is None or name + SCALE_SUFFIX not in self._files:
            return tensor
        return dequantised(tensor, self._stored(name + SCALE_SUFFIX), self._block)

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape, from the file's header."""
        with self._lock:
            return tuple(self._handle(name).get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """The tensor's dtype, from the file's header. Raises ValueError for a quantised tensor without scales."""
        with self._lock:
            stored = self._handle(name).get_slice(name).get_dtype()
        if stored == "F8_E4M3" and self._block is not None and name + SCALE_SUFFIX in self._files:
            return torch.bfloat16
        if stored not in DTYPES:
            raise ValueError(
                f"{self._files[name]}: {name} is stored as {stored}, and only {', '.join(DTYPES)} can be trained:"
                " use an unquantised checkpoint"
            )
        return DTYPES[stored]

    def _is_scale(self, name: str) -> bool:
        return self._block is not None and name.endswith(SCALE_SUFFIX)

    def _stored(self, name: str) -> Tensor:
        with self._lock:
            tensor = self._handle(name).get_tensor(name)
            path = self._files[name]
            self._read_bytes[path] += tensor.nbytes
            if self._read_bytes[path] > _REMAP_BYTES:
                self._let_go(path)  # the tensor keeps its own mapping
        return tensor

    def _handle(self, name: str) -> Any:
        if name not in self._files:
            raise ValueError(f"{self.folder}: the checkpoint has no tensor {name}: it is incomplete")
        path = self._files[name]
        if path not in self._handles:
            opened = contextlib.ExitStack()
            self._handles[path] = (opened.enter_context(_opened(path)), opened)
            self._read_bytes[path] = 0
        return self._handles[path][0]

    def _let_go(self, path: Path) -> None:
        _, opened = self._handles.pop(path)
        opened.close()

    def _find_files(self) -> dict[str, Path]:
        index = self.folder / INDEX_NAME
        if index.is_file():
            files = {name: self.folder / file for name, file in _weight_map(index).items()}
            for path in sorted(set(files.values())):
                if not path.is_file():
                    raise FileNotFoundError(f"{path} is named in {index} but does not exist: download it again")
            return files
        single = self.folder / SINGLE_NAME
        if not single.is_file():
            raise FileNotFoundError(
                f"{self.folder} has neither {SINGLE_NAME} nor {INDEX_NAME}: give a folder with safetensors weights"
            )
        with _opened(single) as handle:
            return dict.fromkeys(handle.keys(), single)


def _opened(path: Path) -> Any:
    """The file, memory-mapped. Raises ValueError for one that is cut off or something else."""
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or no safetensors file ({error}): copy or download it again") from error


def _weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor. Raises ValueError for an index that is cut off, something else, or leaves its folder."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8")).get("weight_map")
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError) as error:
        raise ValueError(f"{index} is damaged ({error}): copy or download it again") from error
    if not isinstance(weight_map, dict):
        raise ValueError(f"{index} has no weight_map: copy or download it again")
    check_inside(index, weight_map)
    return weight_map
