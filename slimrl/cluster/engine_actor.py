"""The Ray actor around one SGLang server process: it starts it on its slots, watches it and ends it.

A server over several nodes has one such actor on each; `Engine` makes them and speaks for all of them.
"""

from __future__ import annotations

import contextlib
import dataclasses
import time
from pathlib import Path
from typing import Any

import ray

from slimrl.cluster import process_log, working_folder
from slimrl.cluster.reach import Reach, called_at, node_address
from slimrl.cluster.same_machine import NodeMark, marked, seen_of
from slimrl.platform.machine import network_of
from slimrl.processes import stacks
from slimrl.processes.memory import resident_gib
from slimrl.sglang.launch import ServerLaunch
from slimrl.sglang.server import NodePart, ServerProcess

POLL_INTERVAL_S = 0.25


@dataclasses.dataclass(frozen=True)
class ServerSettings:
    """What the processes of one server have in common on all its nodes.

    `life` counts how often the server was replaced: every life has log files of its own.
    """

    index: int
    model_path: str
    tensor_parallel_size: int
    random_seed: int
    options: dict[str, Any]
    memory_saver: bool  # whether its memory can be released
    cuda: bool  # whether it runs on GPUs
    shares_gpus: bool = False  # with training ranks
    nccl_cumem: str | None = None  # NCCL_CUMEM_ENABLE, as of the training ranks that send weights to it
    life: int = 0
    role: str = ""  # what it is, where it is not an engine of the policy
    reach: Reach = Reach()
    key: str | None = dataclasses.field(default=None, repr=False)

    @property
    def name(self) -> str:
        """ "0" in its first life, "0.1" in its second; behind its role."""
        return f"{self.role}{self.index}.{self.life}" if self.life else f"{self.role}{self.index}"


@dataclasses.dataclass(frozen=True)
class ServerEnd:
    """How a process of a server ended; as text with the last lines of its log."""

    what: str
    log_path: Path | None = None
    last_lines: str = ""

    def __str__(self) -> str:
        return self.what if self.log_path is None else f"{self.what}; last lines of {self.log_path}:\n{self.last_lines}"


@ray.remote(concurrency_groups={"watch": 1, "stop": 1, "memory": 1})
class EngineActor:
    """One process of a server, on one node."""

    def __init__(self, settings: ServerSettings, actor_log: Path, log_level: str, folder: Path) -> None:
        working_folder.enter(folder)
        process_log.redirect_to(actor_log, log_level)
        self._settings = settings
        self._server: ServerProcess | None = None
        self._stopping = False
        self._marks = contextlib.ExitStack()

    def claim(self, part: NodePart, gpu_ids: list[int | str], log_path: Path) -> str:
        """Chooses the ports; returns the address at which the processes of all nodes meet."""
        settings = self._settings
        # The server owns whole GPUs, the actor only a share of the first: it is shown all of its own.
        launch = ServerLaunch(
            settings.cuda,
            settings.memory_saver,
            settings.shares_gpus,
            settings.nccl_cumem,
            tuple(gpu_ids),
            network_of(settings.reach.here()),
        )
        server = ServerProcess(
            settings.model_path,
            host=called_at(settings.options.get("host"), settings.reach.here()),
            tensor_parallel_size=settings.tensor_parallel_size,
            random_seed=settings.random_seed,
            options=settings.options,
            launch=launch,
            log_path=log_path,
            part=part,
            key=settings.key,
        )
        meeting = server.claim()
        self._server = server
        return meeting

    def mark(self) -> NodeMark:
        """Marks this node for the processes of the other nodes, until `start`."""
        return self._marks.enter_context(marked(node_address()))

    def seen_of(self, marks: list[NodeMark]) -> set[str]:
        """Which of the marks are on this node too."""
        return seen_of(marks)

    def start(self) -> str:
        """Starts the process and returns at once; its URL, which only the first node's answers requests at."""
        self._marks.close()
        self._server.start()
        return self._server.url

    def wait_ready(self, timeout_s: float) -> None:
        """Waits until the server answers. Raises ProcessStartError with its last log lines if it dies."""
        self._server.wait_ready(timeout_s)

    @ray.method(concurrency_group="watch")
    def watch(self) -> ServerEnd:
        """Pending while the process lives; then its exit code and last log lines."""
        while (server := self._server) is None or (code := server.poll()) is None:
            time.sleep(POLL_INTERVAL_S)
        part = server.part
        name = f"SGLang server {self._settings.name}" + (
            f", node {part.rank} of {part.count}" if part.count > 1 else ""
        )
        if self._stopping:
            return ServerEnd(f"{name} was stopped")
        what = f"{name} ({server.url}) died with exit code {code}"
        return ServerEnd(what, server.log_path, server.last_log_lines(20))

    @ray.method(concurrency_group="memory")
    def stopped(self) -> list[str]:
        """Processes of the server that the kernel has stopped (SIGSTOP, a debugger), as "name (pid)"."""
        return [] if self._server is None or not self._server.started else stacks.stopped_below(self._server.pid)

    @ray.method(concurrency_group="memory")
    def last_log_lines(self) -> tuple[Path, str]:
        """The server's log, and the end of it."""
        return self._server.log_path, self._server.last_log_lines(20)

    @ray.method(concurrency_group="memory")
    def memory(self) -> dict[str, float]:
        """Resident memory in GiB by name: of the server's processes on this node, and of this actor."""
        server, index = self._server, f"{self._settings.role}{self._settings.index}"
        if server is None or not server.started:
            return {}
        name = f"server{index}" + (f"_node{server.part.rank}" if server.part.rank else "")
        own = resident_gib(with_children=False)
        return {f"{name}_rss_gib": resident_gib(server.pid), f"{name}_actor_rss_gib": own}

    @ray.method(concurrency_group="stop")
    def stop(self, timeout_s: float | None = None) -> None:
        """Ends the process and everything it started; `timeout_s` as in `ServerProcess.stop`."""
        self._stopping = True
        self._marks.close()
        if self._server is not None:
            self._server.stop(timeout_s)
