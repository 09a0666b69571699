"""Weights to servers on other slots: buckets broadcast from trainer rank 0 to every engine rank.

The group is joined by the trainer as rank 0 and by each server's ranks behind it. Promises an error within
the time limit, naming the server, where one refuses a bucket instead of receiving it.
"""

from __future__ import annotations

import contextlib
import datetime
import socket
import time
import uuid
from concurrent.futures import Future, ThreadPoolExecutor, wait
from urllib.parse import urlsplit

import torch
import torch.distributed as dist
from torch.distributed.distributed_c10d import _new_process_group_helper, _world

from slimrl.weights.buckets import Bucket, ReusedBuffer
from slimrl.weights.servers import ServerControl, WeightSyncError, on_all, results

LOAD_FORMAT = "flattened_bucket"
POLL_INTERVAL_S = 0.0005
FAILURE_GRACE_S = 5.0


class DistributedTransport:
    """The sending end, on trainer rank 0. The group is opened by the first `send` and used until `close`."""

    def __init__(
        self, servers: list[ServerControl], engine_sizes: list[int], device: torch.device, timeout_s: float
    ) -> None:
        """`engine_sizes` are the tensor-parallel sizes of the servers, in their order."""
        self.buffer = ReusedBuffer(device)
        self._servers = servers
        self._engine_sizes = engine_sizes
        self._backend = "nccl" if device.type == "cuda" else "gloo"
        self._timeout_s = timeout_s
        self._group_name = f"slimrl-{uuid.uuid4().hex[:12]}"
        self._group: dist.ProcessGroup | None = None
        self._pool = ThreadPoolExecutor(max_workers=len(servers), thread_name_prefix="weight-broadcast")

    def send(self, bucket: Bucket, version: str | None) -> None:
        """Returns once every server has loaded the bucket; `version` goes with the last one.

        Raises WeightSyncError naming the server that refused it, or the time limit.
        """
        if self._group is None:
            self._group = self._connect()
        futures = [self._pool.submit(self._receive, server, bucket, version) for server in self._servers]
        options = dist.BroadcastOptions()
        options.rootRank = 0
        work = self._group.broadcast([bucket.flat], options)
        self._wait(work, futures)
        results(self._servers, futures, "updating weights from a broadcast")

    def release(self) -> None:
        """Nothing is kept: servers with pipeline stages are not sent to in this way."""

    def close(self) -> None:
        """Leaves the group; servers that are gone already are passed over."""
        if self._group is not None:
            group, self._group = self._group, None
            with contextlib.suppress(WeightSyncError):
                on_all(
                    self._servers,
                    lambda server: server.destroy_weights_update_group(self._group_name),
                    "leaving the weight update group",
                )
            dist.destroy_process_group(group)
        self._pool.shutdown()

    def _receive(self, server: ServerControl, bucket: Bucket, version: str | None) -> None:
        server.update_weights_from_distributed(
            names=[entry.name for entry in bucket.entries],
            dtypes=[str(entry.dtype).removeprefix("torch.") for entry in bucket.entries],
            shapes=[list(entry.shape) for entry in bucket.entries],
            group_name=self._group_name,
            load_format=LOAD_FORMAT,
            weight_version=version,
            flush_cache=False,
        )

    def _wait(self, work: dist.Work, futures: list[Future[None]]) -> None:
        """Waits for the broadcast, unless a server fails meanwhile: it would never arrive."""
        deadline = time.monotonic() + self._timeout_s
        while not work.is_completed():
            if any(future.done() and future.exception() is not None for future in futures):
                wait(futures, FAILURE_GRACE_S)  # the others may be about to fail for the same reason
                failed = [(s, f) for s, f in zip(self._servers, futures, strict=True) if f.done()]
                results([s for s, _ in failed], [f for _, f in failed], "updating weights from a broadcast")
            if time.monotonic() > deadline:
                waiting = [s.url for s, f in zip(self._servers, futures, strict=True) if not f.done()]
                raise WeightSyncError(
                    f"the broadcast of weights to {', '.join(waiting)} took more than {self._timeout_s:g} s:"
                    " look into the logs of those servers"
                )
            time.sleep(POLL_INTERVAL_S)
        work.wait()

    def _connect(self) -> dist.ProcessGroup:
        """Opens the store, has every server join, and joins as rank 0."""
        world_size = 1 + sum(self._engine_sizes)
        address = own_address([server.url for server in self._servers])
        timeout = datetime.timedelta(seconds=self._timeout_s)
        store = dist.TCPStore(
            address, 0, world_size, is_master=True, timeout=timeout, wait_for_workers=False, multi_tenant=False
        )
        offsets = {server.url: 1 + sum(self._engine_sizes[:index]) for index, server in enumerate(self._servers)}
        joining = self._pool.submit(
            on_all,
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
            group = join_group(store, self._backend, self._group_name, rank=0, world_size=world_size, timeout=timeout)
        except dist.DistError as error:
            joining.result()  # a server's refusal says more than our own time-out
            raise WeightSyncError(f"joining the weight update group failed here: {error}") from error
        joining.result()
        return group


def join_group(
    store: dist.Store, backend: str, name: str, *, rank: int, world_size: int, timeout: datetime.timedelta
) -> dist.ProcessGroup:
    """A process group next to the default one, over ranks that are not all in the default one.

    torch has no public call for it. The far end reaches the same keys because both put the group's name
    before them and leave the rest to the same torch function.
    """
    group, _ = _new_process_group_helper(
        world_size,
        rank,
        [],
        dist.Backend(backend),
        dist.PrefixStore(name, store),
        group_name=name,
        timeout=timeout,
    )
    _world.pg_group_ranks[group] = {member: member for member in range(world_size)}
    return group


def own_address(urls: list[str]) -> str:
    """This machine's address as the servers see it: the one it would speak to them from.

    The loopback address only where all of them are reached by it.
    """
    addresses = []
    for url in urls:
        parts = urlsplit(url)
        family, kind, protocol, _, target = socket.getaddrinfo(parts.hostname, parts.port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.connect(target)  # a datagram socket only chooses its route; nothing is sent
            addresses.append(probe.getsockname()[0])
    return next((address for address in addresses if not address.startswith("127.") and address != "::1"), addresses[0])
