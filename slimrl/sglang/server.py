"""One SGLang server as a child process: its command line, its ports, its environment.

On a machine with CUDA this is `python -m sglang.launch_server`, on any other `python -m slimrl.sglang.cpu`, which runs
the same server. A server over several nodes has one such process on each of them (`NodePart`); the first answers
requests. Called by the engine actors and by tests.
"""

from __future__ import annotations

import dataclasses
import os
import sys
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slimrl.processes import ManagedProcess, importable
from slimrl.sglang.calls import answers, call
from slimrl.sglang.flags import RESERVED, render_options, server_flags
from slimrl.sglang.ports import PortClaim, claim_port, claim_ports

# the rendezvous port, and behind it what data-parallel attention uses: 6 sockets, one per data-parallel rank, and the
# 13th for the handshake between nodes
NEIGHBOUR_PORTS = 14
GRACEFUL_STOP_S = 20.0
FREEZE_TIMEOUT_S = 60.0
SHARED_MEMORY_PREFIXES = ("sglang_", "sgl_", "multi_tokenizer_args_")


@dataclasses.dataclass(frozen=True)
class NodePart:
    """Which part of a server a process is: number `rank` of `count`, one per node, each with as many slots.

    `meeting` is the "host:port" on the first node where the ranks of all of them meet, as `claim` there returned it.
    """

    rank: int = 0
    count: int = 1
    meeting: str | None = None

    def __post_init__(self) -> None:
        if self.rank > 0 and self.meeting is None:
            raise ValueError(f"part {self.rank} of a server needs the address that part 0 chose")


class ServerProcess:
    """One server of `tensor_parallel_size` times `--sglang-pp-size` slots, or the part of it on this machine.

    `options` holds what the user typed after `--sglang-`, by the engine's own names; they win over slimrl's defaults.
    `port` None: a free one is chosen when the process starts. `memory_saver` makes release_memory possible (GPU).
    `cpu` None: this process finds out whether the machine has GPUs, by importing torch, which takes seconds.
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
        memory_saver: bool = False,
        part: NodePart = NodePart(),
        cpu: bool | None = None,
    ) -> None:
        self.host = host
        self._cpu = _has_no_gpu() if cpu is None else cpu
        self.log_path = Path(log_path)
        self.part = part
        self._wanted_port = port
        self._options = dict(options or {})
        self._managed: dict[str, Any] = {
            "model_path": str(model_path),
            "tp_size": tensor_parallel_size,
            "host": host,
            "base_gpu_id": base_gpu_id,
            "random_seed": random_seed,
            "skip_server_warmup": True,
            "enable_memory_saver": memory_saver,
        }
        self._claims: list[PortClaim] = []
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
        self._process = ManagedProcess(
            server_command(managed, self._options, cpu=self._cpu),
            name=f"SGLang server {self.url}" + (f" (node {self.part.rank})" if self.part.count > 1 else ""),
            log_path=self.log_path,
            environment=server_environment(ranks, managed["base_gpu_id"], cpu=self._cpu),
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
        call("POST", f"{self.url}/freeze_gc", timeout_s=FREEZE_TIMEOUT_S)

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
            self._process.stop((0.0 if self._cpu else GRACEFUL_STOP_S) if timeout_s is None else timeout_s)
        self._release_ports()

    def _release_ports(self) -> None:
        for claim in self._claims:
            claim.release()
        self._claims.clear()

    def _started(self) -> ManagedProcess:
        if self._process is None:
            raise RuntimeError("the SGLang server was not started")
        return self._process


def server_command(managed: Mapping[str, Any], options: Mapping[str, Any], *, cpu: bool) -> list[str]:
    """The command line. `managed` is slimrl's part, `options` the user's; raises ValueError where both set one name."""
    clash = sorted(options.keys() & RESERVED.keys())
    if clash:
        raise ValueError(f"--sglang-{clash[0].replace('_', '-')} is set by slimrl itself ({RESERVED[clash[0]]})")
    entry = "slimrl.sglang.cpu" if cpu else "sglang.launch_server"
    return [sys.executable, "-m", entry, *render_options({**options, **managed}, server_flags())]


def rendezvous(options: Mapping[str, Any], host: str, first_port: int, part: NodePart = NodePart()) -> dict[str, Any]:
    """Where the ranks meet: one port, and over several nodes or with data-parallel attention its neighbours too."""
    settings: dict[str, Any] = {"nccl_port": first_port}
    if part.count > 1 or options.get("enable_dp_attention"):
        settings["dist_init_addr"] = part.meeting or f"{host}:{first_port + 1}"
    if part.count > 1:
        settings |= {"nnodes": part.count, "node_rank": part.rank}
    return settings


def server_environment(ranks: int, base_gpu_id: int, *, cpu: bool) -> dict[str, str]:
    """Environment variables of the server, on top of this process's own; `ranks` are those of all its nodes."""
    inductor = Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}"
    environment = {
        **importable(),
        # /health answers at once instead of generating a token: the router asks every second, and a server that is
        # paused for a weight update is healthy
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        # the temporary folder is the server's own and goes with it; compiled kernels are worth keeping
        "TORCHINDUCTOR_CACHE_DIR": os.environ.get("TORCHINDUCTOR_CACHE_DIR", str(inductor)),
    }
    if cpu:
        environment["OMP_NUM_THREADS"] = "1"
        if ranks > 1:  # left to itself SGLang wants a NUMA node for each rank, counting those of other machines
            cores = sorted(os.sched_getaffinity(0))
            picked = [cores[(base_gpu_id + rank) % len(cores)] for rank in range(ranks)]
            environment["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(map(str, picked))
    return environment


def _has_no_gpu() -> bool:
    from slimrl.platform import is_cpu

    return is_cpu()
