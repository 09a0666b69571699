"""Weight transport to servers on other GPUs: trainer rank 0 broadcasts buckets to every engine rank.

The trainer is rank 0 of the group, followed by the servers' ranks. If a server rejects a bucket, the transport raises
an error that names the server, within the time limit.

`listening_store` is a torch TCPStore that listens on one address only, whereas torch's own listens on all addresses. It
is for process groups whose processes share no folder.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import itertools
import json
import socket
import time
import uuid
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed import TCPStore
from torch.distributed.distributed_c10d import (
    GroupName,
    Store,
    _abort_process_group,
    _new_process_group_helper,
    _world,
)

from slimrl.engines.server_protocol import WeightControl
from slimrl.platform.launch_env import NCCL_GRACE
from slimrl.weights.delta_files import REFUSED
from slimrl.weights.update.announcements import CHANGES, FAILURE_GRACE_S, WHAT, Announcements, announce
from slimrl.weights.update.buckets import Bucket, DoubleBuffer, ReusedBuffer
from slimrl.weights.update.engine_fanout import WeightSyncError, call_all, collect_results
from slimrl.weights.update.transport_tensor import serialize_call

BACKLOG = 2048


def listening_store(
    host: str, timeout: datetime.timedelta, *, world_size: int | None = None, port: int = 0
) -> TCPStore:
    """A TCPStore server and its first client on `host` and a free port (or `port`); does not wait for more clients."""
    family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    with socket.socket(family, kind, protocol) as listener:
        listener.bind(address)
        listener.listen(BACKLOG)
        return TCPStore(
            host,
            listener.getsockname()[1],
            world_size,
            is_master=True,
            timeout=timeout,
            wait_for_workers=False,
            multi_tenant=False,
            master_listen_fd=listener.detach(),
        )


LOAD_FORMAT = "flattened_bucket"
POLL_INTERVAL_S = 0.0005
LEAVE_TIMEOUT_S = 10.0  # a server that still waits for a broadcast cannot leave the group


@dataclasses.dataclass(frozen=True)
class _Flight:
    """A bucket in flight: the trainer's broadcast, and each server's response."""

    work: Future[dist.Work]
    answers: list[Future[None]]


class DistributedTransport:
    """The sender, on trainer rank 0. The first `start` opens the process group, which is used until `close`."""

    def __init__(
        self,
        servers: list[WeightControl],
        engine_sizes: list[int],
        device: torch.device,
        timeout_s: float,
        announcements: Announcements | None = None,
    ) -> None:
        """`engine_sizes` are the tensor-parallel sizes of the servers, in their order.

        With `announcements` other ranks tell a part of the servers of each bucket.
        """
        self.buffer = DoubleBuffer(ReusedBuffer(device), ReusedBuffer(device))
        self.changes_buffer = ReusedBuffer(device)
        self._servers = servers
        self._announcements = announcements
        self._told = servers if announcements is None else announcements.own  # by this rank
        self._engine_sizes = engine_sizes
        self._backend = "nccl" if device.type == "cuda" else "gloo"
        self._timeout_s = timeout_s
        self._group: dist.ProcessGroup | None = None
        self._group_name = ""
        self._flight: _Flight | None = None
        self._pool = self._new_pool()

    def _new_pool(self) -> ThreadPoolExecutor:
        """One thread for each server's response, one for the broadcast, and one for leaving the group."""
        return ThreadPoolExecutor(max_workers=len(self._servers) + 2, thread_name_prefix="weight-broadcast")

    def start(self, bucket: Bucket) -> None:
        """Starts the broadcast. Raises WeightSyncError naming a server that does not join the group."""
        if self._group is None:
            # a new name each time: a server may still have the group of a failed weight update
            self._group_name = f"slimrl-{uuid.uuid4().hex[:12]}"
            self._group = self._connect()
        call = self._call(bucket)
        if self._announcements is not None:
            self._announcements.publish(call)
        answers = [self._pool.submit(announce, server, call) for server in self._told]
        # In a thread: the first broadcast creates NCCL's communicator, which waits for every server without a time
        # limit, and a server that rejects the bucket never joins.
        self._flight = _Flight(self._pool.submit(self._broadcast, self._group, bucket.flat), answers)

    def opens(self, tensor: torch.Tensor) -> bool:
        """See `Transport.opens`."""
        return False

    def finish(self) -> None:
        """Waits until every server has loaded the last started bucket.

        Raises WeightSyncError naming the server that rejected it, or the time limit.
        """
        if self._flight is None:
            return
        self._wait(self._flight)
        collect_results(self._told, self._flight.answers, WHAT)
        self._flight = None

    def check_changes(self) -> None:
        """Raises WeightSyncError naming a server that could not apply changes, whose last bucket has been sent."""
        store = None if self._group is None else _world.pg_map[self._group][1]
        if store is not None and store.check([REFUSED]):
            rank, error = json.loads(store.get(REFUSED))
            last = itertools.accumulate(self._engine_sizes)
            url = next(server.url for server, end in zip(self._servers, last, strict=True) if rank <= end)
            raise WeightSyncError(f"applying changes of weights failed on {url}: {error}")

    def release(self) -> None:
        """Keeps no memory for later stages, because servers with pipeline stages do not use this transport."""
        self.buffer.rewind()

    def reset(self) -> None:
        """Leaves the group, aborting pending broadcasts; the next `start` opens a new one."""
        failed, self._flight = self._flight is not None, None
        if self._group is None:
            return
        group, self._group = self._group, None
        if failed and self._backend == "nccl":
            # aborts the pending broadcast, which would otherwise block the device and this process forever
            _abort_process_group(group)
            # a broadcast that still waits for its communicator keeps its thread, so the pool is replaced
            self._pool.shutdown(wait=False)
            self._pool = self._new_pool()
        leaving = self._pool.submit(
            call_all,
            self._servers,
            lambda server: server.destroy_weights_update_group(self._group_name, timeout_s=LEAVE_TIMEOUT_S),
            "leaving the weight update group",
        )
        if self._backend == "nccl" and not failed:
            dist.destroy_process_group(
                group
            )  # together with the servers: each end of a communicator waits for the others
        with contextlib.suppress(WeightSyncError):
            leaving.result()
        if self._backend != "nccl":
            # after the servers: gloo has no abort, and pending operations here end when the servers leave
            dist.destroy_process_group(group)

    def close(self) -> None:
        """Leaves the group; ignores servers that are already dead."""
        self.reset()
        self._pool.shutdown(wait=False)  # a call to a hung server ends with its own time limit

    def leave(self) -> None:
        """Does nothing: `close` left the group with the servers."""

    @staticmethod
    def _broadcast(group: dist.ProcessGroup, flat: torch.Tensor) -> dist.Work:
        options = dist.BroadcastOptions()
        options.rootRank = 0
        if flat.device.type != "cuda":
            return group.broadcast([flat], options)
        with torch.cuda.device(flat.device):  # the current device is per thread
            return group.broadcast([flat], options)

    def _call(self, bucket: Bucket) -> dict[str, Any]:
        """What makes a server take part in the broadcast (`announce`)."""
        if bucket.changes:
            parts = {entry.name: entry.end - entry.start for entry in bucket.entries}
            payload = serialize_call({"group": self._group_name, "parts": parts})
            return {CHANGES: [payload] * max(self._engine_sizes)}
        return {
            "names": [entry.name for entry in bucket.entries],
            "dtypes": [str(entry.dtype).removeprefix("torch.") for entry in bucket.entries],
            "shapes": [list(entry.shape) for entry in bucket.entries],
            "group_name": self._group_name,
            "load_format": LOAD_FORMAT,
            "weight_version": None,
            "flush_cache": False,
        }

    def _wait(self, flight: _Flight) -> None:
        """Waits for the broadcast; stops if a server fails meanwhile, because the broadcast would never complete."""
        deadline = time.monotonic() + self._timeout_s
        while not _completed(flight.work):
            if any(answer.done() and answer.exception() is not None for answer in flight.answers):
                self._raise_failed(flight)
            if self._announcements is not None:
                self._announcements.check()
            if time.monotonic() > deadline:
                waiting = [s.url for s, f in zip(self._told, flight.answers, strict=True) if not f.done()]
                raise WeightSyncError(
                    f"the broadcast of weights to {', '.join(waiting)} took more than {self._timeout_s:g} s:"
                    " look at the logs of those servers",
                    final=True,
                )
            time.sleep(POLL_INTERVAL_S)
        try:
            flight.work.result().wait()
        except RuntimeError as error:  # the connection to a server broke; the error does not name the server
            self._raise_failed(flight)
            if self._announcements is not None:
                self._announcements.await_failure()
            raise WeightSyncError(f"{WHAT} failed on the trainer: {error}") from error

    def _raise_failed(self, flight: _Flight) -> None:
        """Raises WeightSyncError naming the servers that have failed so far, if any."""
        wait(flight.answers, FAILURE_GRACE_S)  # other servers may be about to fail for the same reason
        done = [(s, f) for s, f in zip(self._told, flight.answers, strict=True) if f.done()]
        collect_results([s for s, _ in done], [f for _, f in done], WHAT)

    def _connect(self) -> dist.ProcessGroup:
        """Opens the store, makes every server join, and joins as rank 0."""
        world_size = 1 + sum(self._engine_sizes)
        address = own_address([server.url for server in self._servers])
        timeout = datetime.timedelta(seconds=self._timeout_s)
        store = listening_store(address, timeout, world_size=world_size)
        offsets = {server.url: 1 + sum(self._engine_sizes[:index]) for index, server in enumerate(self._servers)}
        joining = self._pool.submit(
            call_all,
            self._servers,
            lambda server: server.init_weights_update_group(
                master_address=address,
                master_port=store.port,
                rank_offset=offsets[server.url],
                world_size=world_size,
                group_name=self._group_name,
                backend=self._backend,
            ),
            "joining the weight update group",
        )
        try:
            limit = timeout + NCCL_GRACE if self._backend == "nccl" else timeout
            group = join_group(store, self._backend, self._group_name, rank=0, world_size=world_size, timeout=limit)
        except dist.DistError as error:
            joining.result()  # a server's error is more informative than the trainer's time-out
            raise WeightSyncError(f"joining the weight update group failed on the trainer: {error}") from error
        joining.result()
        return group


def _completed(work: Future[dist.Work]) -> bool:
    """Whether a broadcast has completed, or failed to start."""
    return work.done() and (work.exception() is not None or work.result().is_completed())


def join_group(
    store: Store, backend: str, name: str, *, rank: int, world_size: int, timeout: datetime.timedelta
) -> dist.ProcessGroup:
    """A process group besides the default one, with ranks that are not all in the default one.

    torch has no public function for it. Both ends use the same store keys, because both prefix them with the group's
    name and call the same torch function.
    """
    group: dist.ProcessGroup
    group, _ = _new_process_group_helper(
        world_size,
        rank,
        [],
        dist.Backend(backend),
        dist.PrefixStore(name, store),
        group_name=GroupName(name),
        timeout=timeout,
    )
    _world.pg_group_ranks[group] = {member: member for member in range(world_size)}
    return group


def own_address(urls: list[str]) -> str:
    """This machine's address for the servers: the source address of connections to them.

    The loopback address only if all servers are reached through it.
    """
    addresses: list[str] = []
    for url in urls:
        parts = urlsplit(url)
        family, kind, protocol, _, target = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # a datagram socket only selects its route; nothing is sent
            addresses.append(probe.getsockname()[0])
    return next((address for address in addresses if not address.startswith("127.") and address != "::1"), addresses[0])
