"""Hugging Face checkpoints: config.json, memory-mapped tensors, block-wise fp8 weights, stacked experts, model ids.

Reading never copies a whole file into memory and keeps only a small part of it mapped.

DeepSeek-V3 and Kimi-K2 are published in fp8: `x.weight_scale_inv` has one scale per block of `x.weight`, and a block's
values times its scale are the weights (arXiv:2412.19437, section 3.3.2). They are dequantised when read.

Published files of Qwen3-VL-MoE have all experts of a layer in one tensor per projection: `...mlp.experts.gate_up_proj`
[experts, hidden, 2 x width], of which the first half of the columns is the gate, and `...mlp.experts.down_proj`
[experts, width, hidden]: the transposes of what a linear layer multiplies by. They are read and written expert by
expert. Everything else knows each expert by the names of other families, such as `...mlp.experts.3.gate_proj.weight`
[width, hidden]; engines load these names too.

Tools accept a model id (`org/name`) instead of a folder; it is downloaded to the hub's cache.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import re
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from slimrl.models.families import stacks_experts
from slimrl.models.families.vision import decoder_config
from slimrl.models.hf_folder import check_inside
from slimrl.weights.hf_checkpoint_writer import (
    DTYPES,
    INDEX_NAME,
    SINGLE_NAME,
    Shard,
    ShardWriter,
    TensorSpec,
    plan_shards,
)

_STACK = re.compile(r"(.*\.mlp\.experts\.)(gate_up_proj|down_proj)")
_EXPERT = re.compile(r"(.*\.mlp\.experts\.)(\d+)\.(gate|up|down)_proj\.weight")
_PARTS = {"gate_up_proj": ("gate", "up"), "down_proj": ("down",)}  # in the order of their columns


@dataclasses.dataclass(frozen=True)
class StackedExpert:
    """One projection of one expert: columns `begin` to `begin + shape[0]` of row `number` of the tensor `stack`."""

    stack: str
    number: int
    begin: int
    shape: tuple[int, int]

    def of(self, stack: Tensor) -> Tensor:
        """Its weight [outputs, inputs], a view of the stack."""
        return stack[self.number].narrow(1, self.begin, self.shape[0]).T


def experts_of(name: str, shape: Callable[[], tuple[int, ...]], hidden_size: int) -> dict[str, StackedExpert]:
    """The single experts of the stored tensor `name`, by their names; none if it is no stack.

    Raises ValueError if its `shape` is not that of a published stack; transformers 5 also reads and saves transposes,
    which engines do not load.
    """
    match = _STACK.fullmatch(name)
    if match is None:
        return {}
    prefix, projection = match.groups()
    parts, size = _PARTS[projection], shape()
    if len(size) != 3 or size[2] % len(parts) or size[1 if len(parts) > 1 else 2] != hidden_size:
        raise ValueError(
            f"{name} has shape {list(size)}, and published files have [experts, inputs, outputs], of which"
            f" {'inputs' if len(parts) > 1 else 'outputs'} is {hidden_size}: engines load no other, so"
            " exchange the last two dimensions if transformers saved them the other way round"
        )
    count, inputs, columns = size
    outputs = columns // len(parts)
    return {
        f"{prefix}{number}.{part}_proj.weight": StackedExpert(name, number, place * outputs, (outputs, inputs))
        for number in range(count)
        for place, part in enumerate(parts)
    }


def plan_files(specs: Iterable[TensorSpec], max_shard_bytes: int, *, stacks: bool) -> list[Shard]:
    """The files for `specs`, which name each expert; `stacks`: with the experts of a layer in one tensor."""
    return plan_shards(_stacked(specs) if stacks else specs, max_shard_bytes)


def _stacked(specs: Iterable[TensorSpec]) -> list[TensorSpec]:
    """Each stack comes at the place of its first part."""
    parts: dict[str, list[TensorSpec]] = {}
    for spec in specs:
        parts.setdefault(_stack_of(spec.name) or spec.name, []).append(spec)
    return [_stack(name, own) if _stack_of(own[0].name) else own[0] for name, own in parts.items()]


def _stack_of(name: str) -> str | None:
    match = _EXPERT.fullmatch(name)
    return None if match is None else match[1] + ("down_proj" if match[3] == "down" else "gate_up_proj")


def _stack(name: str, parts: Sequence[TensorSpec]) -> TensorSpec:
    outputs, inputs = parts[0].shape
    columns = outputs * len(_PARTS[name.rpartition(".")[2]])
    return TensorSpec(name, parts[0].dtype, (sum(map(_elements, parts)) // (inputs * columns), inputs, columns))


def _elements(spec: TensorSpec) -> int:
    return math.prod(spec.shape)


class StackingWriter(ShardWriter):
    """Writes the files of `shards`, which stack experts, and takes single ones."""

    def __init__(self, folder: Path, shards: Sequence[Shard]) -> None:
        super().__init__(folder, shards)
        self._begun: dict[tuple[str, int], tuple[Tensor, int]] = {}  # an expert's row, and the parts that it lacks
        self._begun_lock = threading.Lock()

    def __contains__(self, name: str) -> bool:
        return super().__contains__(_stack_of(name) or name)

    def write(self, name: str, tensor: Tensor, *, first_row: int = 0) -> int:
        """As `ShardWriter.write`; a gate is copied, and written with its expert's other half."""
        match, stack = _EXPERT.fullmatch(name), _stack_of(name)
        if match is None or stack is None:
            return super().write(name, tensor, first_row=first_row)
        number, parts = int(match[2]), _PARTS[stack.rpartition(".")[2]]
        outputs, inputs = tensor.shape
        begin = parts.index(match[3]) * outputs
        with self._begun_lock:
            begun = self._begun.pop((stack, number), None)
            row, lacks = begun or (tensor.new_empty(inputs, len(parts) * outputs), len(parts))
            row[:, begin : begin + outputs] = tensor.T
            if lacks > 1:
                self._begun[stack, number] = row, lacks - 1
                return 0
        return super().write(stack, row[None], first_row=number)


def writer_of(folder: Path, shards: Sequence[Shard], *, stacks: bool) -> ShardWriter:
    """The writer of files that stack experts, or of files that do not."""
    return StackingWriter(folder, shards) if stacks else ShardWriter(folder, shards)


SCALE_SUFFIX = "_scale_inv"
DEFAULT_BLOCK = (128, 128)


def block_size(hf_config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Rows and columns of a block from config.json's quantization_config; None for an unquantised model.

    Raises ValueError for any other quantisation.
    """
    quantisation = hf_config.get("quantization_config")
    if quantisation is None:
        return None
    method, scheme = quantisation.get("quant_method"), quantisation.get("fmt", "e4m3")
    rows, columns = quantisation.get("weight_block_size") or DEFAULT_BLOCK
    if method != "fp8" or scheme != "e4m3":
        raise ValueError(
            f"config.json has quantization_config with quant_method {method!r} (format {scheme!r}), but only"
            " block-wise fp8 (e4m3) is supported: use the bf16 checkpoint of the model"
        )
    return rows, columns


def dequantised(
    weight: Tensor, scale: Tensor, block: tuple[int, int] = DEFAULT_BLOCK, dtype: torch.dtype = torch.bfloat16
) -> Tensor:
    """`weight` [rows, columns] float8_e4m3fn with each block multiplied by its `scale`, float32; result in `dtype`.

    `scale` is [ceil(rows / block rows), ceil(columns / block columns)]: blocks at the end may be cut off. The
    product is rounded once, from float32. Raises ValueError if the two shapes do not match.
    """
    wanted = tuple(-(-length // step) for length, step in zip(weight.shape, block, strict=True))
    if tuple(scale.shape) != wanted:
        raise ValueError(
            f"scales of shape {list(scale.shape)} do not fit a weight of shape {list(weight.shape)} in blocks of"
            f" {block[0]} x {block[1]} (they must be {list(wanted)}): check weight_block_size in config.json"
        )
    rows, columns = weight.shape
    factors = scale.float().repeat_interleave(block[0], 0)[:rows].repeat_interleave(block[1], 1)[:, :columns]
    return (weight.float() * factors).to(dtype)


_REMAP_BYTES = 16 * 1024**2  # a file is mapped again after this many bytes, which frees the pages read so far


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

    Returned tensors are views of the mapped files: do not write to them. Block-wise fp8 weights are returned
    dequantised to bfloat16, and their scales are not listed. Stacked experts have the names of single ones. Threads may
    share a checkpoint.
    """

    def __init__(self, hf_dir: Path) -> None:
        """Raises FileNotFoundError for a folder without weights, ValueError for damaged or otherwise quantised ones."""
        self.folder = Path(hf_dir)
        config = read_hf_config(self.folder) if (self.folder / "config.json").is_file() else {}
        self._block = block_size(config)
        self._handles: dict[Path, tuple[Any, contextlib.ExitStack]] = {}
        self._read_bytes: dict[Path, int] = {}
        self._lock = threading.Lock()
        self._files = self._find_files()
        self._experts: dict[str, StackedExpert] = {}
        if stacks_experts(config):
            self._experts = self._find_experts(decoder_config(config).get("hidden_size", 0))

    def __enter__(self) -> HfCheckpoint:
        return self

    def __exit__(self, *exc_info: object) -> None:
        for path in list(self._handles):
            self._let_go(path)

    @property
    def names(self) -> list[str]:
        """The name of every stored tensor, of stacked experts those of each."""
        stacks = {expert.stack for expert in self._experts.values()}
        return [*(name for name in self._files if not self._is_scale(name) and name not in stacks), *self._experts]

    @property
    def stacks_experts(self) -> bool:
        """Whether the files stack the experts of a layer."""
        return bool(self._experts)

    def tensor(self, name: str) -> Tensor:
        """The full tensor, on the CPU. Raises ValueError if it does not exist or its quantisation is unsupported."""
        self.dtype(name)
        tensor = self._stored(name)
        if self._block is None or name + SCALE_SUFFIX not in self._files:
            return tensor
        return dequantised(tensor, self._stored(name + SCALE_SUFFIX), self._block)

    def shape(self, name: str) -> tuple[int, ...]:
        """The tensor's shape, from the file's header."""
        if (expert := self._experts.get(name)) is not None:
            return expert.shape
        with self._lock:
            return tuple(self._handle(name).get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """The tensor's dtype, from the file's header. Raises ValueError for a quantised tensor without scales."""
        name = self._experts[name].stack if name in self._experts else name
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
        expert = self._experts.get(name)
        name = name if expert is None else expert.stack
        with self._lock:
            tensor: Tensor = self._handle(name).get_tensor(name)
            tensor = tensor if expert is None else expert.of(tensor)
            path = self._files[name]
            self._read_bytes[path] += tensor.nbytes
            if self._read_bytes[path] > _REMAP_BYTES:
                self._let_go(path)  # the tensor keeps its own mapping
        return tensor

    def _handle(self, name: str) -> Any:
        if name not in self._files:
            raise ValueError(f"{self.folder}: the checkpoint is incomplete, it has no tensor {name}")
        path = self._files[name]
        if path not in self._handles:
            opened = contextlib.ExitStack()
            self._handles[path] = (opened.enter_context(_opened(path)), opened)
            self._read_bytes[path] = 0
        return self._handles[path][0]

    def _let_go(self, path: Path) -> None:
        _, opened = self._handles.pop(path)
        opened.close()

    def _find_experts(self, hidden_size: int) -> dict[str, StackedExpert]:
        """The experts of every stack, by the names that single ones have."""
        found: dict[str, StackedExpert] = {}
        for name in self._files:
            found |= experts_of(name, functools.partial(self.shape, name), hidden_size)
        return found

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
    """The file, memory-mapped. Raises ValueError if it is truncated or not a safetensors file."""
    try:
        return safe_open(path, framework="pt")
    except SafetensorError as error:
        raise ValueError(f"{path} is damaged or not a safetensors file ({error}): copy or download it again") from error


def _weight_map(index: Path) -> dict[str, str]:
    """The file of each tensor. Raises ValueError for an index that is truncated, invalid, or leaves its folder."""
    try:
        weight_map = json.loads(index.read_text(encoding="utf-8")).get("weight_map")
    except (json.JSONDecodeError, UnicodeDecodeError, AttributeError) as error:
        raise ValueError(f"{index} is damaged ({error}): copy or download it again") from error
    if not isinstance(weight_map, dict):
        raise ValueError(f"{index} has no weight_map: copy or download it again")
    check_inside(index, weight_map)
    return weight_map


_MODEL_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*")
# safetensors weights, and the files of a tokenizer and a config
_WANTED = ["*.safetensors", "*.json", "*.txt", "*.model", "*.jinja", "*.tiktoken", "*.py", "*.md", "LICENSE*"]


def local_hf_folder(flag: str, value: str | Path) -> Path:
    """`value` if it exists, else the folder into which the model with that id was downloaded.

    Respects HF_HOME, HF_ENDPOINT, HF_TOKEN and HF_HUB_OFFLINE. Raises FileNotFoundError naming `flag` if there is
    neither a folder nor a model that can be downloaded.
    """
    folder = Path(value)
    if folder.exists():
        return folder
    if not _MODEL_ID.fullmatch(str(value)):
        raise FileNotFoundError(
            f"{flag} {value} does not exist: give the folder of a Hugging Face model, or a model id like Qwen/Qwen3-4B"
        )
    # imported here because it is slow and most runs give a folder
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled

    try:
        return Path(snapshot_download(str(value), allow_patterns=_WANTED))
    except (HfHubHTTPError, LocalEntryNotFoundError, OfflineModeIsEnabled) as error:
        reason = str(error).strip().splitlines()[0]
        raise FileNotFoundError(
            f"{flag} {value} is not a folder, and the model with that id could not be downloaded ({reason}): check the"
            " spelling and the network, or give a folder"
        ) from error
