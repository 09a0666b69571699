"""Reads a `.wandb` file: the log format of LevelDB (blocks of 32 KiB) with W&B's own protobuf records in it."""

from __future__ import annotations

import json
import struct
from collections.abc import Iterator
from pathlib import Path

BLOCK, HEADER = 32768, 7
FULL, FIRST, MIDDLE, LAST = 1, 2, 3, 4


def records(path: Path) -> Iterator[object]:
    from wandb.proto import wandb_internal_pb2

    data, offset, begun = path.read_bytes(), HEADER, b""
    assert data[:4] == b":W&B"
    while offset + HEADER <= len(data):
        if BLOCK - offset % BLOCK < HEADER:  # no space for another header: the rest of the block is padding
            offset += BLOCK - offset % BLOCK
            continue
        _, length, kind = struct.unpack_from("<IHB", data, offset)
        offset += HEADER
        part, offset = data[offset : offset + length], offset + length
        begun = part if kind in (FULL, FIRST) else begun + part
        if kind in (FULL, LAST):
            yield wandb_internal_pb2.Record.FromString(begun)


def rows(path: Path) -> list[dict[str, float]]:
    """The logged rows, one dict per call, without W&B's own entries."""
    found = []
    for record in records(path):
        if record.WhichOneof("record_type") == "history":
            items = {item.key or item.nested_key[0]: json.loads(item.value_json) for item in record.history.item}
            found.append({name: value for name, value in items.items() if not name.startswith("_")})
    return found


def run_of(path: Path) -> object:
    """The record of the run itself: its id, project, group and config."""
    return next(record.run for record in records(path) if record.WhichOneof("record_type") == "run")


def axes_of(path: Path) -> dict[str, str]:
    """Name pattern -> horizontal axis, as defined for the charts."""
    metrics = [record.metric for record in records(path) if record.WhichOneof("record_type") == "metric"]
    return {metric.glob_name: metric.step_metric for metric in metrics if metric.glob_name}
