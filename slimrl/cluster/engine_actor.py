"""The Ray actor around one SGLang server process: it starts it on its slots, watches it and ends it."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import ray

from slimrl import platform
from slimrl.cluster import process_log, working_folder
from slimrl.sglang.server import ServerProcess

POLL_INTERVAL_S = 0.25


@ray.remote(concurrency_groups={"watch": 1})
class EngineActor:
    """One engine: one server of `tensor_parallel_size` slots on one node."""

    def __init__(self, index: int, actor_log: Path, log_level: str, folder: Path) -> None:
        working_folder.enter(folder)
        process_log.redirect_to(actor_log, log_level)
        self._index = index
        self._server: ServerProcess | None = None
        self._stopping = False

    def start(
        self,
        model_path: str,
        *,
        tensor_parallel_size: int,
        gpu_ids: list[int],
        random_seed: int,
        options: dict[str, Any],
        log_path: Path,
        ready_timeout_s: float,
    ) -> str:
        """Starts the server and waits until it answers; returns its URL. Raises with its last log lines if it dies."""
        if not platform.is_cpu():
            # The server owns whole GPUs, the actor only a share of the first: it is shown all of its own.
            os.environ["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, gpu_ids))
        self._server = ServerProcess(
            model_path,
            host=ray.util.get_node_ip_address(),
            tensor_parallel_size=tensor_parallel_size,
            random_seed=random_seed,
            options=options,
            log_path=log_path,
        )
        self._server.start()
        self._server.wait_ready(ready_timeout_s)
        return self._server.url

    @ray.method(concurrency_group="watch")
    def watch(self) -> str:
        """Pending while the server lives; then a message with its exit code and last log lines."""
        while (server := self._server) is None or (code := server.poll()) is None:
            time.sleep(POLL_INTERVAL_S)
        if self._stopping:
            return f"SGLang server {self._index} was stopped"
        return (
            f"SGLang server {self._index} ({server.url}) died with exit code {code}; last lines of"
            f" {server.log_path}:\n{server.last_log_lines(20)}"
        )

    def stop(self) -> None:
        """Ends the server and everything it started."""
        self._stopping = True
        if self._server is not None:
            self._server.stop()
