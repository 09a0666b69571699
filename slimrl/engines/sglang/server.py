"""One SGLang server as a child process: its command line, its ports and its environment.

The process is `python -m slimrl.engines.sglang.entry server` on a machine with CUDA, and
`python -m slimrl.engines.sglang.cpu_patches` on any other; both run `sglang.launch_server`. A server over several nodes
has one such process on each of them (`NodePart`); the first answers requests.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slimrl.engines import auth
from slimrl.engines.http import answers, call
from slimrl.engines.sglang.launch import ServerLaunch, default_options, server_environment, without_expandable_segments
from slimrl.engines.sglang.server_args import RESERVED, render_options, server_flags
from slimrl.processes import ManagedProcess, importable
from slimrl.processes.folders import kernel_cache
from slimrl.processes.ports import PortReservation, claim_port, claim_ports

# the rendezvous port, and behind it what data-parallel attention uses: 6 sockets, one per data-parallel rank, and the
# 13th for the handshake between nodes
NEIGHBOUR_PORTS = 14
GRACEFUL_STOP_S = 20.0
FREEZE_TIMEOUT_S = 60.0
SHARED_MEMORY_PREFIXES = ("sglang_", "sgl_", "multi_tokenizer_args_", "psm_")  # the last is Python's own

logger = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True)
class NodePart:
    """Which part of a server a process is: number `rank` of `count`, one per node, each with as many GPUs.

    `meeting` is the "host:port" on the first node where the ranks of all of them meet, as `claim` there returned it.
    """

    rank: int = 0
    count: int = 1
    meeting: str | None = None

    def __post_init__(self) -> None:
        if self.rank > 0 and self.meeting is None:
            raise ValueError(f"part {self.rank} of a server needs the address that part 0 chose")


class ServerProcess:
    """One server of `tensor_parallel_size` times `--sglang-pp-size` GPUs, or the part of it on this machine.

    `options` holds what the user typed after `--sglang-`, by the engine's own names; they win over slimrl's defaults.
    It is called at `host`, where it listens unless `options` have a "host"; who shows no `key` is refused. `port` None:
    a free one is chosen when the process starts. `launch` says what the machine and the run decide; None:
    a server of its own, on the GPUs that torch sees (importing it takes seconds).
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        log_path: Path,
        host: str = "127.0.0.1",
        port: int | None = None,
        tensor_parallel_size: int = 1,
        options: Mapping[str, Any] | None = None,
        base_gpu_id: int = 0,
        random_seed: int = 0,
        part: NodePart = NodePart(),
        launch: ServerLaunch | None = None,
        key: str | None = None,
    ) -> None:
        self.host = host
        self.key = key
        self._launch = ServerLaunch(cuda=_has_gpu()) if launch is None else launch
        self.log_path = Path(log_path)
        self.part = part
        self._wanted_port = port
        self._options = {name: value for name, value in (options or {}).items() if name not in ("host", auth.OPTION)}
        self._managed: dict[str, Any] = {
            "model_path": str(model_path),
            "tp_size": tensor_parallel_size,
            "host": (options or {}).get("host", host),
            "base_gpu_id": base_gpu_id,
            "random_seed": random_seed,
            "skip_server_warmup": True,
            "enable_memory_saver": self._launch.memory_saver,
        }
        self._claims: list[PortReservation] = []
        self._process: ManagedProcess | None = None

    @property
    def port(self) -> int:
        """The HTTP port. Raises RuntimeError before `start` where none was given."""
        if self._wanted_port is None and not self._claims:
            raise RuntimeError("the server has no port yet: start it first")
        return self._wanted_port or self._claims[0].first

    @property
    def url(self) -> str:
        """e.g. http://127.0.0.1:21000"""
        return f"http://{self.host}:{self.port}"

    @property
    def started(self) -> bool:
        """Whether there is, or was, a process."""
        return self._process is not None

    @property
    def pid(self) -> int:
        """Process id of the guardian above the server; everything of this server is below it."""
        return self._started().pid

    def claim(self) -> str:
        """Chooses the ports and holds them until `stop`; returns where the ranks of all nodes meet ("host:port").

        Needed before `start` only on the first of several nodes. Raises OSError where a wanted port is taken.
        """
        self._release_ports()
        wanted = self._wanted_port
        self._claims.append(claim_port(wanted, self.host) if wanted else claim_ports(1, self.host))
        self._claims.append(claim_ports(1 + NEIGHBOUR_PORTS + self._options.get("dp_size", 1), self.host))
        return self.part.meeting or f"{self.host}:{self._claims[1].first + 1}"

    def start(self) -> None:
        """Starts the process and returns at once. Raises OSError where a wanted port is taken."""
        if not self._claims:
            self.claim()
        meeting = rendezvous(self._options, self.host, self._claims[1].first, self.part)
        managed = self._managed | {"port": self.port} | meeting
        ranks = managed["tp_size"] * self._options.get("pp_size", 1)
        launch = self._launch
        if launch.cuda and launch.memory_saver and (changed := without_expandable_segments(os.environ)):
            logger.warning("%s: expandable_segments is left out, the memory saver refuses it", ", ".join(changed))
        self._process = ManagedProcess(
            server_command(managed, self._options, launch),
            name=f"SGLang server {self.url}" + (f" (node {self.part.rank})" if self.part.count > 1 else ""),
            log_path=self.log_path,
            environment=importable()
            | kernel_cache(os.environ)
            | auth.for_child(self.key)
            | server_environment(launch, self._options, os.environ, ranks=ranks, base_gpu_id=managed["base_gpu_id"]),
            shared_memory_prefixes=SHARED_MEMORY_PREFIXES,
        )
        self._process.start()

    def wait_ready(self, timeout_s: float) -> None:
        """Waits until the server answers; ask the first of several nodes, which answers when all are ready.

        Raises ProcessStartError (exit code, last log lines) if it dies or is late.
        """
        self._started().wait_until(lambda: answers(f"{self.url}/health"), timeout_s)
        # What exists now lives as long as the server. Otherwise every flush of the cache, two per weight update,
        # walks through all of it: 0.3 s on the CPU, where a flush collects garbage.
        call("POST", f"{self.url}/freeze_gc", timeout_s=FREEZE_TIMEOUT_S, key=self.key)

    def poll(self) -> int | None:
        """None while the server runs (or was not started), then its exit code."""
        return self._process.poll() if self._process is not None else None

    def last_log_lines(self, count: int = 20) -> str:
        """The end of the server's log."""
        return self._started().last_log_lines(count)

    def stop(self, timeout_s: float | None = None) -> None:
        """Ends the server and everything it started, and frees its ports.

        `timeout_s` is how long it may take to end by itself; default: 0 on the CPU, where SGLang's orderly end takes
        seconds and releases nothing that killing it would not.
        """
        if self._process is not None:
            self._process.stop((GRACEFUL_STOP_S if self._launch.cuda else 0.0) if timeout_s is None else timeout_s)
        self._release_ports()

    def _release_ports(self) -> None:
        for claim in self._claims:
            claim.release()
        self._claims.clear()

    def _started(self) -> ManagedProcess:
        if self._process is None:
            raise RuntimeError("the SGLang server was not started")
        return self._process


def server_command(managed: Mapping[str, Any], options: Mapping[str, Any], launch: ServerLaunch) -> list[str]:
    """The command line. `managed` is slimrl's part, `options` the user's; raises ValueError where both set one name."""
    clash = sorted(options.keys() & RESERVED.keys())
    if clash:
        raise ValueError(f"--sglang-{clash[0].replace('_', '-')} is set by slimrl itself ({RESERVED[clash[0]]})")
    entry = ("slimrl.engines.sglang.entry", "server") if launch.cuda else ("slimrl.engines.sglang.cpu_patches",)
    flags = server_flags()
    defaults = default_options(launch, options, {flag.dest for flag in flags.values()})
    return [sys.executable, "-m", *entry, *render_options({**defaults, **options, **managed}, flags)]


def rendezvous(options: Mapping[str, Any], host: str, first_port: int, part: NodePart = NodePart()) -> dict[str, Any]:
    """Where the ranks meet: one port, and over several nodes or with data-parallel attention its neighbours too."""
    settings: dict[str, Any] = {"nccl_port": first_port}
    if part.count > 1 or options.get("enable_dp_attention"):
        settings["dist_init_addr"] = part.meeting or f"{host}:{first_port + 1}"
    if part.count > 1:
        settings |= {"nnodes": part.count, "node_rank": part.rank}
    return settings


def _has_gpu() -> bool:
    from slimrl.platform import is_cpu

    return not is_cpu()
