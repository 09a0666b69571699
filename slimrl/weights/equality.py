"""The proof behind --check-weight-update-equal: every tensor in every server equals the trainer's, bit for bit.

The trainer lays its tensors out as the engine's ranks hold them, hashes them and compares with the hashes
that each server computes over its own memory; buckets and transports take no part in it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import Tensor

from slimrl.weights.checksums import device_checksum, host_checksum
from slimrl.weights.engine_layout import EngineLayout, engine_shard, engine_tensor
from slimrl.weights.families import Family
from slimrl.weights.names import listed
from slimrl.weights.servers import WeightSyncError
from slimrl.weights.shape import ModelShape

Checksums = dict[str, str]


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
    # what is there of tensors that several rows make up, by (name, size, rank)
    waiting: dict[tuple[str, int, int], list[Tensor]] = {}
    tensors = iter(named_tensors)
    for row in family.rows(shape):
        parts = [next(tensors)[1].clone() for _ in row.hf]
        target = engine_tensor(row, shape, family.model_type)
        for size, ranks in expected.items():
            layout = EngineLayout(size, on_host)
            for rank, checksums in enumerate(ranks):
                shards = waiting.setdefault((target.name, size, rank), [])
                shards.append(engine_shard(row, parts, shape, layout, rank))
                if len(shards) == target.rows:
                    checksums[target.name] = checksum(target.join(waiting.pop((target.name, size, rank))))
    if (extra := next(tensors, None)) is not None:
        raise ValueError(f"{extra[0]} is not in the table of {family.model_type}: the exporter and the table differ")
    return expected


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
