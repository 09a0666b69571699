"""Checks of weight updates: a cheap one in every update, and a full one with --check-weight-update-equal.

The full check compares every tensor of every server bit for bit. It converts the trainer's tensors to the layout of the
engine's ranks (fused, sharded, padded), hashes them and compares with the hashes that each server computes over its own
memory; it does not use buckets or transports. Both sides hash raw bytes: host memory with XXH3 (128 bits; SGLang's own
SHA-256 would take seconds per gigabyte, so `engines.sglang.cpu_patches` replaces it), GPU memory with SGLang's tiled
32-bit mix. Layouts and formulas are reimplemented from SGLang 0.5.20.

The cheap check runs on every bucket: names, order, shapes and byte offsets must match the family's parameter mapping.
It takes microseconds per tensor and does not check values.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import xxhash
from torch import Tensor

from slimrl.engines.server_protocol import WeightControl
from slimrl.models.families import ModelMapping, ParamMapping
from slimrl.models.families.param_mapping import Layout
from slimrl.models.families.vision import DEEPER_HF_DECODER, DEEPER_HF_TOWER, HF_TOWER
from slimrl.models.model_spec import ModelSpec
from slimrl.processes.files import listed
from slimrl.weights.hf_checkpoint_writer import byte_array
from slimrl.weights.reshard import hf_shapes
from slimrl.weights.update.buckets import Bucket
from slimrl.weights.update.engine_fanout import WeightsDifferError, WeightSyncError, call_all

VOCAB_MULTIPLE = 64  # the engine pads its vocabulary to a multiple of this
HOST_FFN_MULTIPLE = 32  # on the CPU it also pads each rank's part of the FFN width of every MLP to a multiple of this
TOWER_FFN_MULTIPLE = 8  # and everywhere that of a vision tower
COMPUTED = ("rotary_emb.axis_map",)  # tensors that a server makes of config.json
FFN_WIDTHS = ("ffn", "moe_ffn", "shared_ffn")


@dataclasses.dataclass(frozen=True)
class EngineLayout:
    """How many ranks shard an engine's tensors, and whether they are in host memory."""

    size: int
    on_host: bool


@dataclasses.dataclass(frozen=True)
class EngineTensor:
    """A tensor of the engine: its name, how many rows of the mapping form it, whether they are stacked or concatenated.

    `dtype` None means that of the rows.
    """

    name: str
    rows: int = 1
    stacked: bool = False
    dtype: torch.dtype | None = None

    def join(self, shards: list[Tensor]) -> Tensor:
        """The tensor, from the shards of its rows."""
        return (torch.stack(shards) if self.stacked else torch.cat(shards)).to(self.dtype or shards[0].dtype)


def engine_name(name: str) -> str:
    """The name of a Hugging Face tensor in an engine, which has both parts of a vision-language model one level up."""
    return name.replace(DEEPER_HF_DECODER, "model.", 1).replace(DEEPER_HF_TOWER, HF_TOWER, 1)


def engine_tensor(row: ParamMapping, spec: ModelSpec, family: ModelMapping) -> EngineTensor:
    """The engine tensor that holds a row's tensors."""
    name = engine_name(row.hf[0].name)
    if name.startswith(HF_TOWER):
        fused = re.sub(r"\.mlp\.(gate|up)_proj\.", ".mlp.gate_up_proj.", name)
        return EngineTensor(fused.replace(".attn.qkv.", ".attn.qkv_proj."), rows=1 + (fused != name))
    if name.endswith(".mlp.gate.weight") and family.float32_router:
        return EngineTensor(name, dtype=torch.float32)
    if row.expert is not None:
        module, _, projection = name.partition(f".experts.{row.expert}.")
        matrix = "w2_weight" if projection.startswith("down_proj") else "w13_weight"
        return EngineTensor(f"{module}.experts.{matrix}", spec.num_experts, stacked=True)
    if spec.has("query_latent"):
        for part in (".q_a_proj.", ".kv_a_proj_with_mqa."):
            if part in name:
                return EngineTensor(name.replace(part, ".fused_qkv_a_proj_with_mqa."), rows=2)
    if row.layout is Layout.QKV:
        name = name.replace(".q_proj.", ".qkv_proj.")
    elif row.layout is Layout.GATE_UP:
        name = name.replace(".gate_proj.", ".gate_up_proj.")
    return EngineTensor(name)


def engine_shard(row: ParamMapping, parts: list[Tensor], spec: ModelSpec, layout: EngineLayout, rank: int) -> Tensor:
    """The row's tensor on engine rank `rank`: `engine_parts`, concatenated."""
    return torch.cat(engine_parts(row, parts, spec, layout, rank))


def engine_parts(
    row: ParamMapping, parts: Sequence[Tensor], spec: ModelSpec, layout: EngineLayout, rank: int
) -> list[Tensor]:
    """The parts of the row's tensor on engine rank `rank`, each zero-padded and sharded over the ranks.

    Key and value heads are replicated if there are fewer of them than ranks. The parts share memory with `parts` where
    nothing is padded.
    """
    described = [part.dims for part in row.hf]
    if (padded := padded_dim_of_tower(row)) is not None:
        length = parts[0].shape[padded]
        multiple = HOST_FFN_MULTIPLE * layout.size if layout.on_host else TOWER_FFN_MULTIPLE
        return [_padded(parts[0], padded, _rounded_up(_rounded_up(length, TOWER_FFN_MULTIPLE), multiple))]
    if row.layout is Layout.PACKED_GATE_UP:
        described, parts = [("ffn", *described[0][1:])] * 2, parts[0].chunk(2)
    shards = []
    for part, dims in zip(parts, described, strict=True):
        copies = max(1, layout.size // spec.num_query_groups) if dims[0] == "keys" else 1
        for dim, name in enumerate(dims):
            part = _padded(part, dim, _padded_length(name, part.shape[dim], row, spec, layout))
        if row.shard_dim is not None:
            length = part.shape[row.shard_dim] * copies // layout.size
            part = part.narrow(row.shard_dim, rank // copies * length, length)
        shards.append(part)
    return shards


def padded_dim_of_tower(row: ParamMapping) -> int | None:
    """The dimension of the FFN width of a tensor of a vision tower; None for all others."""
    name = engine_name(row.hf[0].name)
    if not name.startswith(HF_TOWER):
        return None
    if re.search(r"\.mlp\.(gate_proj|up_proj|linear_fc1)\.", name):
        return 0
    return 1 if name.endswith((".mlp.down_proj.weight", ".mlp.linear_fc2.weight")) else None


def _padded_length(dimension: str, length: int, row: ParamMapping, spec: ModelSpec, layout: EngineLayout) -> int:
    """The engine's padded size of a dimension of `length`."""
    if dimension == "vocab":
        padded = _rounded_up(length, VOCAB_MULTIPLE)
        return padded if padded % layout.size == 0 else _rounded_up(length, VOCAB_MULTIPLE * layout.size)
    if dimension not in FFN_WIDTHS or not layout.on_host:
        return length
    multiple = HOST_FFN_MULTIPLE * layout.size
    if spec.experts is not None and ".shared_experts." in row.hf[0].name:
        # the shared width is a multiple of the routed experts' width, which the engine pads before multiplying
        routed = spec.experts.ffn_hidden_size
        return spec.experts.shared_ffn_hidden_size // routed * _rounded_up(routed, multiple)
    return _rounded_up(length, multiple)


def _rounded_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _padded(tensor: Tensor, dim: int, padded: int) -> Tensor:
    missing = padded - tensor.shape[dim]
    if not missing:
        return tensor
    zeros = tensor.new_zeros([missing if index == dim else length for index, length in enumerate(tensor.shape)])
    return torch.cat([tensor, zeros], dim)


_TILE_WORDS = 8192
_TILES_AT_ONCE = 512  # bounds the memory of the 64-bit intermediates to a few hundred megabytes
_MASK32 = 0xFFFFFFFF
_MASK64 = 0xFFFFFFFFFFFFFFFF
_SEED = 0x243F6A88


class HostHasher:
    """XXH3 (128 bits) of the bytes of tensors one after another, as if they were concatenated."""

    def __init__(self) -> None:
        self._state = xxhash.xxh3_128()

    def update(self, tensor: Tensor) -> None:
        """Adds the tensor's elements in row-major order; a contiguous tensor is not copied, and can be offloaded."""
        self._state.update(byte_array(tensor.detach().cpu().contiguous()).data)

    def hexdigest(self) -> str:
        """32 hex digits."""
        return self._state.hexdigest()


def host_checksum(tensor: Tensor) -> str:
    """XXH3 (128 bits) of the tensor's bytes, in hex."""
    hasher = HostHasher()
    hasher.update(tensor)
    return hasher.hexdigest()


def device_checksum(tensor: Tensor) -> str:
    """The GPU checksum in hex, computed on the tensor's own device.

    With the bytes as 32-bit words v_i, per tile of 8192 words and for each of two lanes:
    h = fmix(sum_i fmix(v_i ^ (i * P + s) ^ rotl(i, r)) ^ n_bytes); the tiles' 64-bit values (lane 1 in the upper
    half) are summed, and splitmix64's mix finishes the sum.
    """
    words = _words(tensor)
    count = words.numel()
    if count == 0:
        return f"{0:016x}"
    total = 0
    step = _TILES_AT_ONCE * _TILE_WORDS
    for start in range(0, count, step):
        part = words[start : start + step].to(torch.int64) & _MASK32
        place = torch.arange(start, start + part.numel(), device=part.device) & _MASK32
        upper = _lane(part, place, count, multiplier=0x27D4EB2D, seed=_SEED, rotation=15)
        lower = _lane(part, place, count, multiplier=0x165667B1, seed=(_SEED * 0x9E3779B1) ^ 0xDEADBEEF, rotation=13)
        total += sum((high << 32) | low for high, low in zip(upper.tolist(), lower.tolist(), strict=True))
    return f"{_splitmix(total & _MASK64):016x}"


def _words(tensor: Tensor) -> Tensor:
    """The bytes as int32, padded with zero bytes to whole words."""
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    missing = -raw.numel() % 4
    return (torch.nn.functional.pad(raw, (0, missing)) if missing else raw).view(torch.int32)


def _lane(part: Tensor, place: Tensor, count: int, *, multiplier: int, seed: int, rotation: int) -> Tensor:
    """One 32-bit value per tile of `part`."""
    turned = ((place << rotation) | (place >> (32 - rotation))) & _MASK32
    mixed = _fmix(part ^ ((place * multiplier + (seed & _MASK32)) & _MASK32) ^ turned)
    missing = -mixed.numel() % _TILE_WORDS
    tiles = torch.nn.functional.pad(mixed, (0, missing)).view(-1, _TILE_WORDS)
    return _fmix((tiles.sum(dim=1) & _MASK32) ^ (count * 4 & _MASK32))


def _fmix(x: Tensor) -> Tensor:
    """MurmurHash3's 32-bit finaliser on 64-bit integers that hold 32-bit values."""
    x = ((x ^ (x >> 16)) * 0x85EBCA6B) & _MASK32
    x = ((x ^ (x >> 13)) * 0xC2B2AE35) & _MASK32
    return x ^ (x >> 16)


def _splitmix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK64
    return x ^ (x >> 31)


Checksums = dict[str, str]


class _EngineHasher:
    """The checksum of one engine tensor on one rank, from the parts of its rows in order."""

    def __init__(self, target: EngineTensor, *, on_host: bool) -> None:
        self._target = target
        self._host = HostHasher() if on_host else None
        self._shards: list[Tensor] = []  # of a device, whose checksum is of the whole tensor
        self._rows = 0

    def add_row(self, parts: list[Tensor]) -> str | None:
        """Adds the parts of the next row; returns the checksum after the last row, else None."""
        self._rows += 1
        if self._host is None:
            self._shards.append(torch.cat(parts))
            return device_checksum(self._target.join(self._shards)) if self._complete else None
        for part in parts:  # stacked or concatenated: the bytes follow one another
            self._host.update(part.to(self._target.dtype or part.dtype))
        return self._host.hexdigest() if self._complete else None

    @property
    def _complete(self) -> bool:
        return self._rows == self._target.rows


def expected_checksums(
    named_tensors: Iterable[tuple[str, Tensor]],
    spec: ModelSpec,
    family: ModelMapping,
    engine_sizes: Iterable[int],
    *,
    on_host: bool,
) -> dict[int, list[Checksums]]:
    """For each tensor-parallel size, the checksums by engine tensor name on each of its ranks.

    `named_tensors` are all HF tensors in the order of the mapping; those of a row must be valid until the next row is
    requested. The iterator is consumed.
    """
    expected: dict[int, list[Checksums]] = {size: [{} for _ in range(size)] for size in set(engine_sizes)}
    # of engine tensors that several rows form, by (name, size, rank)
    hashers: dict[tuple[str, int, int], _EngineHasher] = {}
    tensors = iter(named_tensors)
    for row in family.rows(spec):
        parts = [next(tensors)[1] for _ in row.hf]
        target = engine_tensor(row, spec, family)
        for size, ranks in expected.items():
            layout = EngineLayout(size, on_host)
            for rank, checksums in enumerate(ranks):
                key = (target.name, size, rank)
                hasher = hashers.setdefault(key, _EngineHasher(target, on_host=on_host))
                checksum = hasher.add_row(engine_parts(row, parts, spec, layout, rank))
                if checksum is not None:
                    checksums[target.name] = checksum
                    del hashers[key]
    if (extra := next(tensors, None)) is not None:
        raise ValueError(
            f"{extra[0]} is not in the parameter mapping of {family.model_type}: the exporter and the mapping differ"
        )
    return expected


def check_servers(
    servers: Sequence[WeightControl], sizes: Sequence[int], expected: Callable[[], dict[int, list[Checksums]]]
) -> None:
    """Compares the weights of every server with the trainer's; `sizes` are the servers' tensor-parallel sizes.

    The servers hash their memory while `expected` hashes the trainer's. Raises WeightSyncError naming every server that
    fails, WeightsDifferError naming every server that differs.
    """
    with ThreadPoolExecutor(max_workers=1) as background:
        reported = background.submit(call_all, servers, lambda server: server.weights_checksum(), "computing checksums")
        wanted = expected()
    wrong = []
    for server, size, report in zip(servers, sizes, reported.result(), strict=True):
        try:
            check_server(server.url, report, wanted[size])
        except WeightSyncError as error:
            wrong.append(str(error))
    if wrong:
        raise WeightsDifferError("; ".join(wrong))


def check_server(url: str, reported: list[dict[str, Any]], expected: list[Checksums]) -> None:
    """Raises WeightSyncError naming the server and the tensors that differ, are unknown or were not reported."""
    if len(reported) != len(expected):
        raise WeightSyncError(
            f"{url} reports checksums of {len(reported)} ranks instead of {len(expected)}:"
            " --check-weight-update-equal needs engines with tensor parallelism only"
        )
    for report in reported:
        rank = report["parallelism_info"]["tp_rank"]
        actual = {name: value for name, value in report["checksums"].items() if not name.endswith(COMPUTED)}
        wanted = expected[rank]
        if actual.keys() != wanted.keys():
            only_engine, only_trainer = actual.keys() - wanted.keys(), wanted.keys() - actual.keys()
            raise WeightSyncError(
                f"{url} rank {rank} and the trainer have different tensors: only on the server"
                f" {listed(only_engine) or 'none'}, only on the trainer {listed(only_trainer) or 'none'}"
            )
        if different := [name for name, value in wanted.items() if actual[name] != value]:
            raise WeightSyncError(
                f"{url} rank {rank}: {len(different)} of {len(wanted)} tensors differ from the trainer's after the"
                f" update: {listed(different)}; if all differ, compare --sglang-dtype with --bf16"
            )


class Manifest:
    """The expected tensors of one weight update, checked off bucket by bucket."""

    def __init__(self, family: ModelMapping, spec: ModelSpec) -> None:
        self._model_type = family.model_type
        self._expected = iter(
            (part.name, dims)
            for row in family.rows(spec)
            for part, dims in zip(row.hf, hf_shapes(row, spec), strict=True)
        )

    def check_off(self, bucket: Bucket) -> None:
        """Raises ValueError at the first tensor that is not the next one of the mapping, or not at its byte offset."""
        offset = 0
        for entry in bucket.entries:
            name, dims = next(self._expected, ("nothing", ()))
            num_bytes = 0 if entry.shared is not None else math.prod(dims) * entry.dtype.itemsize
            if (entry.name, entry.shape) != (name, dims) or (entry.start, entry.end) != (offset, offset + num_bytes):
                raise ValueError(
                    f"a bucket has {entry.name} {list(entry.shape)} in bytes {entry.start} to {entry.end}, but the"
                    f" mapping of {self._model_type} has {name} {list(dims)} in {offset} to {offset + num_bytes}:"
                    " the exporter and the mapping differ"
                )
            offset = entry.end
        if offset != bucket.flat.numel():
            raise ValueError(f"a bucket of {bucket.flat.numel()} bytes has {offset} bytes of tensors: wrongly packed")

    def close(self) -> None:
        """Raises ValueError if a tensor is missing."""
        missing = next(self._expected, None)
        if missing is not None:
            raise ValueError(f"{missing[0]} of the mapping of {self._model_type} was not sent: the exporter omitted it")
