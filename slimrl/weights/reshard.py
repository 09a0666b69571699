"""Resharding of one row of a mapping: Hugging Face tensors to one tensor-parallel shard, and all shards back.

Pure functions that only move elements, so they are exact. Loader, exporter and converters share them.

Also here: the check of a checkpoint's names and shapes against a family's mapping before any tensor is moved, with an
error that names missing or unexpected tensors; and a Megatron model's tensors by their global names, for any pipeline
stage and experts of this process. That works on any module built like GPTModel; megatron-core is not imported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from slimrl.models.adapters import is_adapter
from slimrl.models.families import ModelMapping
from slimrl.models.families.param_mapping import NON_PARAMETER_SUFFIXES, Layout, ParamMapping
from slimrl.models.model_spec import ModelSpec
from slimrl.processes.files import listed

Empty = Callable[[tuple[int, ...]], Tensor]


def hf_shapes(row: ParamMapping, spec: ModelSpec) -> tuple[tuple[int, ...], ...]:
    """The full shape of each Hugging Face tensor of the row."""
    return tuple(tuple(spec.dimension(dim) for dim in part.dims) for part in row.hf)


def megatron_shape(row: ParamMapping, spec: ModelSpec) -> tuple[int, ...]:
    """The shape of the row's Megatron tensor without tensor parallelism."""
    parts = hf_shapes(row, spec)
    rows = spec.padded_vocab_size if row.padded_vocab else sum(part[0] for part in parts)
    return (rows, *parts[0][1:])


def local_shape(row: ParamMapping, spec: ModelSpec, *, size: int) -> tuple[int, ...]:
    """The shape of one shard out of `size`."""
    full = list(megatron_shape(row, spec))
    if row.shard_dim is not None:
        full[row.shard_dim] //= size
    return tuple(full)


def check_tensor_parallel(spec: ModelSpec, size: int, expert_size: int = 1) -> None:
    """Raises ValueError if `size` (for experts `expert_size`) does not divide the dimensions that it shards."""
    experts = spec.experts
    _check_divides(
        "--tensor-model-parallel-size",
        size,
        ("--num-attention-heads", spec.num_attention_heads),
        ("--num-query-groups", spec.num_query_groups),
        ("--ffn-hidden-size", spec.ffn_hidden_size),
        ("--moe-shared-expert-intermediate-size", experts.shared_ffn_hidden_size if experts else 0),
        ("the padded vocabulary size", spec.padded_vocab_size),
    )
    width = experts.ffn_hidden_size if experts else 0
    _check_divides("--expert-tensor-parallel-size", expert_size, ("--moe-ffn-hidden-size", width))


def _check_divides(size_flag: str, size: int, *divided: tuple[str, int]) -> None:
    for flag, value in divided:
        if value % size:
            raise ValueError(f"{size_flag} {size} does not divide {flag} ({value}): choose a size that divides it")


def to_shard(row: ParamMapping, parts: list[Tensor], spec: ModelSpec, *, rank: int, size: int) -> Tensor:
    """The Megatron tensor of tensor-parallel `rank` out of `size`, from the row's full HF tensors.

    For the row of an expert these are the expert-tensor-parallel rank and size. Only this rank's slices of
    `parts` are read, so memory-mapped parts stay mostly on disk.
    """
    if row.layout is Layout.QKV:
        return _merge_qkv(parts, spec, rank=rank, size=size)
    if row.layout is Layout.GATE_UP:
        return torch.cat([_slice(part, 0, rank, size) for part in parts])
    (full,) = parts
    if row.layout is Layout.PACKED_GATE_UP:
        return torch.cat([_slice(half, 0, rank, size) for half in full.chunk(2)])
    if row.padded_vocab:
        return _vocab_shard(full, spec.padded_vocab_size, rank=rank, size=size)
    return full if row.shard_dim is None else _slice(full, row.shard_dim, rank, size)


def from_shards(row: ParamMapping, shards: list[Tensor], spec: ModelSpec, empty: Empty | None = None) -> list[Tensor]:
    """The row's full HF tensors (vocabulary padding removed) from the shards of all ranks, in rank order.

    The result may share memory with `shards`; otherwise `empty(shape)` allocates it (default: new memory).
    """
    empty = empty or shards[0].new_empty
    if row.layout is Layout.QKV:
        return _split_qkv(shards, spec, empty)
    if row.layout is Layout.GATE_UP:
        return [_join(list(halves), 0, empty) for halves in _halves(shards)]
    if row.layout is Layout.PACKED_GATE_UP:
        return [_join([half for halves in _halves(shards) for half in halves], 0, empty) if shards[1:] else shards[0]]
    full = shards[0] if row.shard_dim is None else _join(shards, row.shard_dim, empty)
    return [full[: spec.vocab_size] if row.padded_vocab else full]


def _halves(shards: list[Tensor]) -> Iterable[tuple[Tensor, ...]]:
    """The first halves of all shards, and the second."""
    return zip(*[shard.chunk(2) for shard in shards], strict=True)


def _slice(full: Tensor, dim: int, rank: int, size: int) -> Tensor:
    length = full.shape[dim] // size
    return full.narrow(dim, rank * length, length)


def _join(shards: list[Tensor], dim: int, empty: Empty) -> Tensor:
    if len(shards) == 1:
        return shards[0]
    joined = list(shards[0].shape)
    joined[dim] = sum(shard.shape[dim] for shard in shards)
    return torch.cat(shards, dim, out=empty(tuple(joined)))


def _vocab_shard(full: Tensor, padded_rows: int, *, rank: int, size: int) -> Tensor:
    """Rows [rank * n, (rank + 1) * n) of the table after padding it with zero rows to `padded_rows`."""
    rows = padded_rows // size
    own = full[rank * rows : (rank + 1) * rows]
    return torch.cat([own, own.new_zeros(rows - own.shape[0], *own.shape[1:])]) if own.shape[0] < rows else own


def _merge_qkv(parts: list[Tensor], spec: ModelSpec, *, rank: int, size: int) -> Tensor:
    """[groups / size * (heads_per_group + 2) * channels, ...]: per group its queries, its key, its value."""
    rest = parts[0].shape[1:]
    grouped = [_slice(part.view(spec.num_query_groups, -1, *rest), 0, rank, size) for part in parts]
    return torch.cat(grouped, dim=1).reshape(-1, *rest)


def _split_qkv(shards: list[Tensor], spec: ModelSpec, empty: Empty) -> list[Tensor]:
    """The inverse of `_merge_qkv` for all shards."""
    rest = shards[0].shape[1:]
    groups = spec.num_query_groups // len(shards)
    lengths = [spec.heads_per_group * spec.kv_channels, spec.kv_channels, spec.kv_channels]
    parts = [empty((spec.num_query_groups * length, *rest)) for length in lengths]
    for rank, shard in enumerate(shards):
        grouped = shard.view(groups, -1, *rest).split(lengths, dim=1)
        for part, own in zip(parts, grouped, strict=True):
            _slice(part, 0, rank, len(shards)).view(own.shape).copy_(own)
    return parts


def redundant_head(names: Iterable[str], family: ModelMapping, spec: ModelSpec) -> str | None:
    """The name of a stored output head that duplicates the tied embedding, or None."""
    head = family.head.hf[0].name
    return head if spec.tied and head in set(names) else None


def check_hf_names(
    names: Iterable[str], family: ModelMapping, spec: ModelSpec, where: str, carried: tuple[str, ...] = ()
) -> None:
    """Raises ValueError naming the tensors of `where` that are missing or unexpected.

    Ignores buffers that are computed from the config, a redundant head of a tied model, and names with a prefix in
    `carried` (`ModelMapping.carried_prefixes`).
    """
    stored = {name for name in names if not name.endswith(NON_PARAMETER_SUFFIXES) and not name.startswith(carried)}
    expected = set(family.hf_names(spec))
    stored.discard(redundant_head(stored, family, spec) or "")
    if missing := expected - stored:
        raise ValueError(
            f"{where} lacks {listed(missing)}, which a {family.model_type} model of {spec.num_layers} layers has:"
            " the checkpoint is incomplete or --num-layers is wrong"
        )
    if left_over := stored - expected:
        raise ValueError(
            f"{where} has {listed(left_over)}, which a {family.model_type} model of {spec.num_layers} layers does not"
            " have: check --num-layers, --untie-embeddings-and-output-weights and the model_type in config.json"
        )


def check_hf_shapes(shapes: dict[str, tuple[int, ...]], family: ModelMapping, spec: ModelSpec, where: str) -> None:
    """Raises ValueError naming the first tensor whose shape does not match the sizes."""
    for row in family.rows(spec):
        for part, wanted in zip(row.hf, hf_shapes(row, spec), strict=True):
            if shapes[part.name] != wanted:
                raise ValueError(
                    f"{where}: {part.name} has shape {list(shapes[part.name])} but the model flags require"
                    f" {list(wanted)} ({' x '.join(part.dims)}): make the flags match config.json"
                )


_LAYERS = "decoder.layers."
# an expert's number within its process: in a list of modules, or at the end of a grouped weight's name
_EXPERT = re.compile(r"(.*\.experts\.(?:local_experts\.|linear_fc[12]\.weight))(\d+)(.*)")
_TRAINED_BUFFER = "router.expert_bias"  # updated without gradients, but part of the checkpoint


def global_tensors(model: nn.Module | Sequence[nn.Module], *, adapters: bool = False) -> dict[str, Tensor]:
    """Name to parameter (or the router's bias, a buffer), of one model or of all chunks of an interleaved stage.

    Layers and experts have global numbers, counted from 0. With `adapters` only the tensors of adapters, else all
    others.
    """
    tensors: dict[str, Tensor] = {}
    for chunk in (model,) if isinstance(model, nn.Module) else model:
        biases = ((name, buffer) for name, buffer in chunk.named_buffers() if name.endswith(_TRAINED_BUFFER))
        for name, tensor in (*chunk.named_parameters(), *biases):
            if is_adapter(name) == adapters:
                tensors[global_name(chunk, name)] = tensor
    return tensors


def find(row: ParamMapping, tensors: Collection[str]) -> str | None:
    """The row's name in `tensors`, or None if `tensors` has none of its names."""
    return next((name for name in row.megatron if name in tensors), None)


def global_name(model: nn.Module, name: str) -> str:
    """The name of a tensor of one chunk, `name` there, with global numbers of layer and expert."""
    if not name.startswith(_LAYERS):
        return name
    local, _, rest = name.removeprefix(_LAYERS).partition(".")
    if match := _EXPERT.fullmatch(rest):
        before, expert, after = match.groups()
        moe_layer: Any = model.get_submodule(f"{_LAYERS}{local}.{rest.partition('.experts.')[0]}")
        rest = f"{before}{moe_layer.local_expert_indices[int(expert)]}{after}"
    layer: Any = model.get_submodule(_LAYERS + local)
    return f"{_LAYERS}{layer.layer_number - 1}.{rest}"
