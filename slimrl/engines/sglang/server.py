"""One SGLang server as a child process: command line, ports and environment.

The process is `python -m slimrl.engines.sglang.entry server` on a machine with CUDA, and
`python -m slimrl.engines.sglang.cpu_patches` on any other; both run `sglang.launch_server`. A server over several nodes
has one such process on each of them (`NodePart`); the first answers requests.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slimrl.engines.http import KEY_OPTION, call, is_reachable, key_environment
from slimrl.engines.server_protocol import WHOLE_SERVER, NodePart, ServerLaunch
from slimrl.engines.sglang.launch import default_options, server_environment, without_expandable_segments
from slimrl.engines.sglang.server_args import RESERVED, render_options, server_flags
from slimrl.processes import ManagedProcess, importable
from slimrl.processes.folders import kernel_cache
from slimrl.processes.ports import PortReservation, claim_port, claim_ports

# the rendezvous port, followed by those of data-parallel attention: 6 sockets, one per data-parallel rank, and the 13th
# for the handshake between nodes
NEIGHBOUR_PORTS = 14
GRACEFUL_STOP_S = 20.0
FREEZE_TIMEOUT_S = 60.0
SHARED_MEMORY_PREFIXES = ("sglang_", "sgl_", "multi_tokenizer_args_", "psm_")  # the last is Python's own

logger = logging.getLogger(__name__)


class ServerProcess:
    """Implements `engines.server_protocol.ServerProcess`.

    It uses `tensor_parallel_size` times `--sglang-pp-size` GPUs, or is the part of such a server on this machine.
    `options` are the user's --sglang-* options by the engine's names; they win over slimrl's defaults. Clients call it
    at `host`, where it listens unless `options` have a "host"; calls without `key` are rejected. `port` None: a free
    port, chosen when the process starts. `launch` has the properties of the machine and the run; None: a standalone
    server on the GPUs that are visible to torch (which takes seconds to import).
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
        part: NodePart = WHOLE_SERVER,
        launch: ServerLaunch | None = None,
        key: str | None = None,
    ) -> None:
        self.host = host
        self.key = key
        self._launch = ServerLaunch(cuda=_has_gpu()) if launch is None else launch
        self.log_path = Path(log_path)
        self.part = part
        self._wanted_port = port
        self._options = {name: value for name, value in (options or {}).items() if name not in ("host", KEY_OPTION)}
        self._managed: dict[str, Any] = {
            "model_path": str(model_path),
            "tp_size": tensor_parallel_size,
            "host": (options or {}).get("host", host),
            "base_gpu_id": base_gpu_id,
            "random_seed": random_seed,
            "skip_server_warmup": True,
            "enable_memory_saver": self._launch.memory_saver,
        }
        self._reservations: list[PortReservation] = []
        self._process: ManagedProcess | None = None

    @property
    def port(self) -> int:
        """The HTTP port. Raises RuntimeError before `start` if none was given."""
        if self._wanted_port is None and not self._reservations:
            raise RuntimeError("the server has no port yet: start it first")
        return self._wanted_port or self._reservations[0].first

    @property
    def url(self) -> str:
        """e.g. http://127.0.0.1:21000"""
        return f"http://{self.host}:{self.port}"

    @property
    def started(self) -> bool:
        """Whether its process was started; stays true after its end."""
        return self._process is not None

    @property
    def pid(self) -> int:
        """Process id of the subreaper, the root of the server's process tree."""
        return self._started().pid

    def claim(self) -> str:
        """Reserves the ports until `stop`; returns the rendezvous "host:port" of the ranks of all nodes.

        Needed before `start` only on the first of several nodes. Raises OSError if the requested port is taken.
        """
        self._release_ports()
        wanted = self._wanted_port
        self._reservations.append(claim_port(wanted, self.host) if wanted else claim_ports(1, self.host))
        self._reservations.append(claim_ports(1 + NEIGHBOUR_PORTS + self._options.get("dp_size", 1), self.host))
        return self.part.rendezvous or f"{self.host}:{self._reservations[1].first + 1}"

    def start(self) -> None:
        """Starts the process without waiting for it. Raises OSError if the requested port is taken."""
        if not self._reservations:
            self.claim()
        rendezvous_options = rendezvous(self._options, self.host, self._reservations[1].first, self.part)
        managed = self._managed | {"port": self.port} | rendezvous_options
        ranks = managed["tp_size"] * self._options.get("pp_size", 1)
        launch = self._launch
        if launch.cuda and launch.memory_saver and (changed := without_expandable_segments(os.environ)):
            logger.warning("%s: removed expandable_segments, the memory saver does not support it", ", ".join(changed))
        self._process = ManagedProcess(
            server_command(managed, self._options, launch),
            name=f"SGLang server {self.url}" + (f" (node {self.part.rank})" if self.part.count > 1 else ""),
            log_path=self.log_path,
            environment=importable()
            | kernel_cache(os.environ)
            | key_environment(self.key)
            | server_environment(launch, self._options, os.environ, ranks=ranks, base_gpu_id=managed["base_gpu_id"]),
            shared_memory_prefixes=SHARED_MEMORY_PREFIXES,
        )
        self._process.start()

    def wait_ready(self, timeout_s: float) -> None:
        """Waits until the server responds; call it on the first of several nodes, which responds when all are ready.

        Raises ProcessStartError (exit code, last log lines) if it dies, or on timeout.
        """
        self._started().wait_until(lambda: is_reachable(f"{self.url}/health"), timeout_s)
        # The objects that exist now live as long as the server. Without the freeze every flush of the cache, two per
        # weight update, would scan all of them: 0.3 s on the CPU, where a flush runs the garbage collector.
        call("POST", f"{self.url}/freeze_gc", timeout_s=FREEZE_TIMEOUT_S, key=self.key)

    def poll(self) -> int | None:
        """None while the server runs (or was not started), then its exit code."""
        return self._process.poll() if self._process is not None else None

    def last_log_lines(self, count: int = 20) -> str:
        """The last `count` lines of the server's log."""
        return self._started().last_log_lines(count)

    def stop(self, timeout_s: float | None = None) -> None:
        """Ends the server's process tree and frees its ports.

        `timeout_s` is the time for a graceful exit; default: 0 on the CPU, where SGLang's graceful exit takes seconds
        and releases nothing more than a kill.
        """
        if self._process is not None:
            self._process.stop((GRACEFUL_STOP_S if self._launch.cuda else 0.0) if timeout_s is None else timeout_s)
        self._release_ports()

    def _release_ports(self) -> None:
        for reservation in self._reservations:
            reservation.release()
        self._reservations.clear()

    def _started(self) -> ManagedProcess:
        if self._process is None:
            raise RuntimeError("the SGLang server was not started")
        return self._process


def server_command(managed: Mapping[str, Any], options: Mapping[str, Any], launch: ServerLaunch) -> list[str]:
    """The command line of slimrl's `managed` options and the user's; raises ValueError for reserved options."""
    clash = sorted(options.keys() & RESERVED.keys())
    if clash:
        raise ValueError(f"--sglang-{clash[0].replace('_', '-')} is set by slimrl itself ({RESERVED[clash[0]]})")
    entry = ("slimrl.engines.sglang.entry", "server") if launch.cuda else ("slimrl.engines.sglang.cpu_patches",)
    flags = server_flags()
    defaults = default_options(launch, options, {flag.dest for flag in flags.values()})
    return [sys.executable, "-m", *entry, *render_options({**defaults, **options, **managed}, flags)]


def rendezvous(options: Mapping[str, Any], host: str, first_port: int, part: NodePart = WHOLE_SERVER) -> dict[str, Any]:
    """The rendezvous options: one port, and consecutive ones on several nodes or with data-parallel attention."""
    settings: dict[str, Any] = {"nccl_port": first_port}
    if part.count > 1 or options.get("enable_dp_attention"):
        settings["dist_init_addr"] = part.rendezvous or f"{host}:{first_port + 1}"
    if part.count > 1:
        settings |= {"nnodes": part.count, "node_rank": part.rank}
    return settings


def _has_gpu() -> bool:
    from slimrl.platform import is_cpu

    return not is_cpu()
