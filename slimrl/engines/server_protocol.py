"""The interfaces of inference servers and of the router in front of them: protocols and plain values.

`ServerProcess` and `Router` start processes; `ServerControl` calls one server; `ExternalServer` and
`ExternalRouter` were not started by the run. Every implementation raises the errors of `engines.protocol`, which also
has the interface for generation. `engines.backend` has the table of engines.

`EngineMemory` releases the memory of all servers while training has the GPUs. The servers do not check the order of the
calls: they crash or generate garbage. So invalid calls raise here. Without a GPU the servers keep their memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Literal, Protocol

from slimrl.engines.protocol import EngineError, EngineUnavailableError
from slimrl.engines.shared_adapters import AdapterControl
from slimrl.platform.launch_env import Network

# what a weight update does with running requests: returns them as aborted, or continues them with the new weights
RunningRequests = Literal["abort", "retract"]

CALL_TIMEOUT_S = 600.0  # of a call to a server, which may transfer a whole model

# the releasable parts of a server's memory
WEIGHTS = "weights"
KV_CACHE = "kv_cache"
CUDA_GRAPHS = "cuda_graph"
EVERYTHING = (WEIGHTS, KV_CACHE, CUDA_GRAPHS)


@dataclasses.dataclass(frozen=True)
class ServerLaunch:
    """The properties of the machine and the run that determine how a server is started.

    `memory_saver`: its memory is released while training runs. `shares_gpus`: training ranks use the same GPUs. `nccl`:
    NCCL's variables that it has in common with the ranks that broadcast weights to it. `gpus`: the GPUs of its node
    that it uses; None: all GPUs that are visible to this process. `network`: how other nodes reach its node.
    `batch_invariant`: it computes with the operators of --true-on-policy-mode. `worker_type`: its part of a
    request.
    """

    cuda: bool
    memory_saver: bool = False
    shares_gpus: bool = False
    nccl: Mapping[str, str] = dataclasses.field(default_factory=dict)
    gpus: tuple[int | str, ...] | None = None
    network: Network = Network()
    batch_invariant: bool = False
    worker_type: str = "regular"  # or "prefill", "decode"


@dataclasses.dataclass(frozen=True)
class NodePart:
    """A server's process on one node: number `rank` of `count`, one per node, all with the same number of GPUs.

    `rendezvous` is the "host:port" on the first node, as `claim` returned it there.
    """

    rank: int = 0
    count: int = 1
    rendezvous: str | None = None

    def __post_init__(self) -> None:
        if self.rank > 0 and self.rendezvous is None:
            raise ValueError(f"part {self.rank} of a server needs the rendezvous address of part 0")


WHOLE_SERVER = NodePart()


@dataclasses.dataclass(frozen=True)
class ServerLoad:
    """Request counts, written by the scheduler `seconds` ago; `prefilled`: ever. None without an answer."""

    url: str
    running: int | None = None
    waiting: int | None = None
    seconds: float | None = None
    prefilled: bool | None = None


class ServerProcess(Protocol):
    """One server as a child process, or the part of it on this machine."""

    @property
    def part(self) -> NodePart:
        """The part of the server that this process is."""

    @property
    def log_path(self) -> Path:
        """The file of its output."""

    @property
    def url(self) -> str:
        """e.g. http://127.0.0.1:21000. Raises RuntimeError before its port is chosen."""

    @property
    def started(self) -> bool:
        """Whether its process was started; stays true after its end."""

    @property
    def pid(self) -> int:
        """The id of the root of its process tree."""

    def claim(self) -> str:
        """Reserves the ports until `stop`; returns the rendezvous "host:port" of the ranks of all nodes."""

    def start(self) -> None:
        """Starts the process without waiting for it. Raises OSError if a requested port is taken."""

    def wait_ready(self, timeout_s: float) -> None:
        """Waits until the server responds. Raises ProcessStartError (exit code, last log lines)."""

    def poll(self) -> int | None:
        """None while it runs (or was not started), then its exit code."""

    def last_log_lines(self, count: int = 20) -> str:
        """The last `count` lines of its log."""

    def stop(self, timeout_s: float | None = None) -> None:
        """Ends its process tree; `timeout_s` is the time for a graceful exit."""


class Router(Protocol):
    """The router in front of the servers: started by the run (`Router`) or external (`ExternalRouter`).

    Changes of its list of servers have taken effect when the methods return.
    """

    label: str  # in messages: "the SGLang router"
    is_external: bool

    @property
    def log_path(self) -> Path | None:
        """The file of its output; None for an external router."""

    @property
    def pid(self) -> int | None:
        """The id of the root of its process tree; None for an external router."""

    @property
    def port(self) -> int:
        """The HTTP port."""

    @property
    def url(self) -> str:
        """e.g. http://127.0.0.1:21000"""

    def open(self) -> None:
        """Starts it, or checks that an external one is usable. Raises OSError or EngineError."""

    def responds(self, timeout_s: float) -> bool:
        """Whether it responds, with or without servers; never raises."""

    def wait_alive(self, timeout_s: float) -> None:
        """Waits until it responds. Raises ProcessStartError or EngineUnavailableError on timeout."""

    def wait_ready(self, n_workers: int, timeout_s: float) -> None:
        """Waits until `n_workers` servers are in use; raises as `wait_alive` does."""

    def server_urls(self) -> list[str]:
        """The URLs of its registered servers."""

    def add_worker(self, url: str) -> None:
        """Registers a server; `wait_ready` waits until it is in use."""

    def add_workers(self, urls: Sequence[str]) -> None:
        """`add_worker` for many servers."""

    def remove_worker(self, url: str) -> None:
        """Unregisters a server; its requests in flight end normally."""

    def restart(self, log_path: Path) -> None:
        """Restarts it after its end, at the same address and without servers; does nothing for an external router."""

    def poll(self) -> int | None:
        """None while it runs, then its exit code; always None for an external router."""

    def last_log_lines(self, count: int = 20) -> str:
        """The last `count` lines of its log; for an external router a sentence."""

    def stop(self, timeout_s: float = 0.0) -> None:
        """Ends it; removes the run's servers from an external router instead."""


class ExternalRouter(Router, Protocol):
    """An external router (--sglang-router-ip): never started or ended here."""

    added: set[str]  # the servers that this run registered


class ExternalServer(Protocol):
    """An external server (--rollout-external-engine-addrs) that passed the checks."""

    @property
    def tensor_parallel_size(self) -> int:
        """GPUs that hold one copy of the model."""

    def was_replaced(self) -> bool:
        """Whether another server responds at its address now; False if none responds."""


class WeightControl(AdapterControl, Protocol):
    """The calls of a weight update to one server; each blocks. `url` is its address, for messages."""

    def begin_weight_update(self, running: RunningRequests) -> None:
        """Ends ("abort") or holds ("retract") running requests, holds new ones, and empties the KV cache."""

    def commit_weight_update(self, version: str, running: RunningRequests) -> None:
        """Sets the version of the loaded weights; requests stay held."""

    def continue_(self) -> None:
        """Resumes held requests."""

    def flush_pipeline(self) -> None:
        """Waits until every process of the server has completed all earlier calls; the server must not be paused."""

    def weight_version(self) -> str:
        """The version of the weights that the server reports."""

    def update_weights_from_tensor(
        self, serialized: list[str], *, load_format: str | None, weight_version: str | None, flush_cache: bool
    ) -> None:
        """Loads tensors from shared memory; one base64 payload per tensor-parallel rank.

        See `weights.update.transport_tensor.serialize`.
        """

    def init_weights_update_group(
        self,
        *,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: Literal["nccl", "gloo"],
    ) -> None:
        """Joins a process group as ranks `rank_offset`, `rank_offset` + 1, ..."""

    def destroy_weights_update_group(self, group_name: str, *, timeout_s: float | None = None) -> None:
        """Leaves the process group; raises after `timeout_s`."""

    def update_weights_from_distributed(
        self,
        names: list[str],
        dtypes: list[str],
        shapes: list[list[int]],
        *,
        group_name: str,
        load_format: str | None,
        weight_version: str | None,
        flush_cache: bool,
    ) -> None:
        """Receives tensors that rank 0 of the group broadcasts concurrently."""

    def update_weights_from_disk(self, model_path: str, *, weight_version: str | None, flush_cache: bool) -> None:
        """Loads the safetensors of a folder that the server can read."""

    def update_weights_from_changes(self, serialized: list[str]) -> None:
        """Changes elements of the weights, from shared memory or a broadcast; one base64 payload per rank."""

    def pull_weights(self, serialized: list[str]) -> None:
        """Loads a folder, each rank answering in it; a payload per rank (`weights.update.transport_disk`)."""

    def update_weights_from_shards(self, serialized: list[str], timeout_s: float | None = None) -> None:
        """One step of a point-to-point update; a payload per rank (`point_to_point.engine_side.serialize_call`)."""

    def weights_checksum(self) -> list[dict[str, Any]]:
        """Per engine rank: {"checksums": {name: hex digest}, "parallelism_info": {"tp_rank": ..., ...}}."""


class MemoryControl(Protocol):
    """The calls that release and resume a server's memory; `engines.engine_memory` orders them."""

    @property
    def url(self) -> str:
        """The server's address."""

    def flush_cache(self) -> None:
        """Empties the KV cache. Raises EngineRequestError if a running request does not end in time."""

    def release_memory(self, tags: Sequence[str] | None) -> None:
        """Releases the device memory of `tags`; None means all."""

    def resume_memory(self, tags: Sequence[str] | None) -> None:
        """Reallocates the memory of `tags`; its contents are lost."""


class ServerControl(WeightControl, MemoryControl, Protocol):
    """All blocking calls to one server, each with the timeout that the control was created with."""

    def abort_all(self) -> None:
        """Returns every running and queued request with its tokens so far."""

    def load(self) -> ServerLoad:
        """Its request counts, with None fields if it does not respond; never raises."""

    def responds(self) -> bool:
        """Whether its HTTP server responds, whatever its scheduler does; never raises."""

    def scheduler_responds(self) -> bool:
        """Whether its scheduler responds; never raises."""


class EngineMemoryError(EngineError):
    """A call needs memory that the servers have released, or the reverse."""


class ReleasableMemory(Protocol):
    """The memory of all servers, for code that shares GPUs with them; implemented by `EngineMemory`."""

    def release(self) -> None:
        """Releases all memory of every server; none may have requests left."""

    def resume(self, tags: Sequence[str]) -> None:
        """Reallocates the memory of `tags` on every server; its contents are lost."""


class EngineMemory:
    """Starts with all memory resident.

    Assign `servers` when they change. `when_lost(server, error)` is called, from any thread, for a server that is gone
    or hangs; the others continue without it. If it is None, such an error is raised.
    """

    def __init__(
        self, servers: Sequence[MemoryControl], when_lost: Callable[[MemoryControl, EngineError], None] | None = None
    ) -> None:
        self.servers = list(servers)
        self.when_lost = when_lost
        self.released: tuple[str, ...] = ()  # tags

    def release(self) -> None:
        """Releases all memory of every server; none may have requests left.

        Raises EngineError if some memory is released already, or a server has requests that do not end.
        """
        if self.released:
            raise EngineMemoryError(
                f"the engines cannot release their memory: {_listed(self.released)} is released already"
            )
        # releasing the memory of a busy server crashes it; flush_cache raises for a busy server
        self._on_all(lambda server: server.flush_cache())
        self._on_all(lambda server: server.release_memory(EVERYTHING))
        self.released = EVERYTHING

    def resume(self, tags: Sequence[str] = EVERYTHING) -> None:
        """Reallocates the memory of `tags` on every server; its contents are lost. Raises EngineError if resident."""
        if present := [tag for tag in tags if tag not in self.released]:
            raise EngineMemoryError(f"the engines cannot resume {_listed(present)}: that memory is not released")
        self._on_all(lambda server: server.resume_memory(tags))
        self.released = tuple(tag for tag in self.released if tag not in tags)

    def adopt(self, server: MemoryControl) -> None:
        """Releases the same memory on a newly started server as on the others. Raises EngineError."""
        if self.released:
            server.flush_cache()
            server.release_memory(self.released)

    def require(self, action: str, tags: Sequence[str] = EVERYTHING) -> None:
        """Raises EngineError unless the servers have the memory of `tags`."""
        if absent := [tag for tag in tags if tag in self.released]:
            raise EngineMemoryError(
                f"{action} needs the engines' {_listed(absent)}, which is released while training runs"
            )

    def _on_all(self, call: Callable[[MemoryControl], None]) -> None:
        if not self.servers:
            return
        with ThreadPoolExecutor(max_workers=len(self.servers)) as pool:
            futures = [(server, pool.submit(call, server)) for server in self.servers]
        for server, future in futures:
            try:
                future.result()
            except EngineUnavailableError as error:
                if self.when_lost is None:
                    raise
                self.servers = [other for other in self.servers if other is not server]
                self.when_lost(server, error)


def _listed(tags: Sequence[str]) -> str:
    return " and ".join(", ".join(tags).replace("_", " ").rsplit(", ", 1))
