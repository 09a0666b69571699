"""The proof behind --check-weight-update-equal: every tensor in every server equals the trainer's, bit for bit.

The trainer lays its tensors out as the engine's ranks hold them, hashes them and compares with the hashes
that each server computes over its own memory; buckets and transports take no part in it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from slimrl.weights.checksums import device_checksum, host_checksum
from slimrl.weights.families import Family, Row
from slimrl.weights.families.table import Layout
from slimrl.weights.names import listed
from slimrl.weights.servers import WeightSyncError
from slimrl.weights.shape import ModelShape

VOCAB_MULTIPLE = 64  # the engine pads its vocabulary to a multiple of this
HOST_FFN_MULTIPLE = 32  # on the CPU it pads each rank's part of the inner width of the MLP, too
Checksums = dict[str, str]


@dataclasses.dataclass(frozen=True)
class EngineLayout:
    """How many ranks divide an engine's tensors, and whether they lie in host memory."""

    size: int
    on_host: bool


def expected_checksums(
    named_tensors: Iterable[tuple[str, Tensor]],
    shape: ModelShape,
    family: Family,
    engine_sizes: Iterable[int],
    *,
    on_host: bool,
) -> dict[int, list[Checksums]]:
    """For each tensor-parallel size, the checksums by engine name on each of its ranks.

    `named_tensors` are all HF tensors in table order; it is consumed to the end.
    """
    checksum = host_checksum if on_host else device_checksum
    expected: dict[int, list[Checksums]] = {size: [{} for _ in range(size)] for size in set(engine_sizes)}
    tensors = iter(named_tensors)
    for row in family.rows(shape):
        parts = [next(tensors)[1].clone() for _ in row.hf]
        for size, ranks in expected.items():
            layout = EngineLayout(size, on_host)
            for rank, checksums in enumerate(ranks):
                checksums[engine_name(row)] = checksum(engine_shard(row, parts, shape, layout, rank))
    if (extra := next(tensors, None)) is not None:
        raise ValueError(f"{extra[0]} is not in the table of {family.model_type}: the exporter and the table differ")
    return expected


def engine_name(row: Row) -> str:
    """What the engine calls the tensor: the HF name, or that of the matrix which joins several."""
    name = row.hf[0].name
    if row.layout is Layout.QKV:
        return name.replace(".q_proj.", ".qkv_proj.")
    if row.layout is Layout.GATE_UP:
        return name.replace(".gate_proj.", ".gate_up_proj.")
    return name


def engine_shard(row: Row, parts: list[Tensor], shape: ModelShape, layout: EngineLayout, rank: int) -> Tensor:
    """The tensor on engine rank `rank`: the row's parts one after another, each padded and divided among the ranks.

    Padding is with zeros. Key and value heads are repeated where there are fewer than ranks.
    """
    shards = []
    for part, described in zip(parts, row.hf, strict=True):
        copies = max(1, layout.size // shape.num_query_groups) if described.dims[0] == "keys" else 1
        for dim, name in enumerate(described.dims):
            part = _padded(part, dim, _multiple(name, part.shape[dim], layout))
        if row.shard_dim is not None:
            length = part.shape[row.shard_dim] * copies // layout.size
            part = part.narrow(row.shard_dim, rank // copies * length, length)
        shards.append(part)
    return torch.cat(shards)


def check_server(url: str, reported: list[dict[str, Any]], expected: list[Checksums]) -> None:
    """Raises WeightSyncError naming the server and the tensors that differ, are unknown or were not reported."""
    if len(reported) != len(expected):
        raise WeightSyncError(
            f"{url} reports checksums of {len(reported)} ranks and {len(expected)} were expected:"
            " the check needs engines that are only tensor parallel"
        )
    for report in reported:
        rank = report["parallelism_info"]["tp_rank"]
        own, wanted = report["checksums"], expected[rank]
        if own.keys() != wanted.keys():
            only_there, only_here = own.keys() - wanted.keys(), wanted.keys() - own.keys()
            raise WeightSyncError(
                f"{url} rank {rank} and the trainer name different tensors: only there {listed(only_there) or 'none'},"
                f" only here {listed(only_here) or 'none'}"
            )
        if different := [name for name, value in wanted.items() if own[name] != value]:
            raise WeightSyncError(
                f"{url} rank {rank}: {len(different)} of {len(wanted)} tensors differ from the trainer's after the"
                f" update: {listed(different)}; if it is all of them, compare --sglang-dtype with --bf16"
            )


def _multiple(dimension: str, length: int, layout: EngineLayout) -> int:
    """What the engine pads `length` to a multiple of."""
    if dimension == "vocab":
        padded = -(-length // VOCAB_MULTIPLE) * VOCAB_MULTIPLE
        return VOCAB_MULTIPLE if padded % layout.size == 0 else VOCAB_MULTIPLE * layout.size
    if dimension == "ffn" and layout.on_host:
        return HOST_FFN_MULTIPLE * layout.size
    return 1


def _padded(tensor: Tensor, dim: int, multiple: int) -> Tensor:
    missing = -tensor.shape[dim] % multiple
    if not missing:
        return tensor
    zeros = tensor.new_zeros([missing if index == dim else length for index, length in enumerate(tensor.shape)])
    return torch.cat([tensor, zeros], dim)
