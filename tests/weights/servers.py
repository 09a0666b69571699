"""Fake inference servers in this process: they load weight updates through the real server's interface."""

from __future__ import annotations

import base64
import pickle
from typing import Any

import torch
from torch import Tensor

from slimrl.weights.hf_checkpoint import HfCheckpoint
from slimrl.weights.update.verify import host_checksum


class RecordingServer:
    """Records the tensors it receives and the calls in order.

    It rejects update number `fails_at` (counted from 0 in each attempt) in the first `failures` attempts, with `error`,
    and is unreachable from then on if `gone` is an error. `reports` makes it report another version.
    """

    def __init__(
        self,
        url: str,
        *,
        fails_at: int | None = None,
        failures: int = 1000,
        error: Exception | None = None,
        gone: Exception | None = None,
        reports: str | None = None,
    ) -> None:
        self.url = url
        self.calls: list[str] = []
        self.running: list[str] = []
        self.tensors: dict[str, Tensor] = {}
        self.version = "default"
        self._fails_at, self._failures = fails_at, failures
        self._error, self._gone = error or gone or RuntimeError("out of memory"), gone
        self._reports = reports

    def begin_weight_update(self, running: str) -> None:
        self.running.append(running)
        self.calls.append("begin")

    def commit_weight_update(self, version: str, running: str) -> None:
        self.running.append(running)
        self.calls.append(f"commit {version}")
        self.version = version

    def continue_(self) -> None:
        self.calls.append("continue")

    def flush_pipeline(self) -> None:
        self.calls.append("settle")

    def weight_version(self) -> str:
        if self._gone is not None and self.calls.count("refused"):
            raise self._gone
        return self._reports or self.version

    def update_weights_from_tensor(self, serialized, *, load_format, weight_version, flush_cache) -> None:
        assert load_format in ("flattened_bucket", None) and not flush_cache
        begun = len(self.calls) - self.calls[::-1].index("begin")
        if len(self.calls) - begun == self._fails_at and self.calls.count("begin") <= self._failures:
            self.calls.append("refused")
            raise self._error
        self.calls.append("update")
        for payload in serialized:
            decoded = pickle.loads(base64.b64decode(payload))
            if load_format is None:
                self.tensors |= {name: tensor.clone() for name, tensor in decoded}
                continue
            for entry in decoded["metadata"]:
                flat = decoded["flattened_tensor"][entry.start_idx : entry.end_idx]
                assert flat.numel() == entry.numel
                self.tensors[entry.name] = flat.view(entry.dtype).reshape(entry.shape).clone()

    def update_weights_from_disk(self, model_path, *, weight_version, flush_cache) -> None:
        assert not flush_cache
        with HfCheckpoint(model_path) as checkpoint:
            self.tensors = {name: checkpoint.tensor(name).clone() for name in checkpoint.names}

    def weights_checksum(self) -> list[dict[str, Any]]:
        checksums = {name: host_checksum(tensor) for name, tensor in self._as_engine().items()}
        return [{"checksums": checksums, "parallelism_info": {"tp_rank": 0}}]

    def _as_engine(self) -> dict[str, Tensor]:
        """The engine's own tensors for sizes that need no padding: joined q, k, v and gate, up."""
        joined: dict[str, list[Tensor]] = {}
        for name, tensor in self.tensors.items():
            for part, whole in (("q", "qkv"), ("k", "qkv"), ("v", "qkv"), ("gate", "gate_up"), ("up", "gate_up")):
                name = name.replace(f".{part}_proj.", f".{whole}_proj.")
            joined.setdefault(name, []).append(tensor)
        return {name: torch.cat(parts) for name, parts in joined.items()}
