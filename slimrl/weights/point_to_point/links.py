"""Moves messages between trainer ranks and engine ranks: the transports of a point-to-point weight update.

A `Link` is one process's end. It numbers the members of both sides: the trainer's ranks, then those of the engines. In
a round a member sends at most one message to each peer and receives at most one from each. Messages are packed in, and
read from, buffers of the link: two of each peer, for odd and even rounds. The round after the next uses the same
buffers.

`ProcessGroupLink` sends by torch's process groups: NCCL, or gloo between processes without a GPU. A process group
cannot be told to stop waiting for a peer, so a sender first waits until all receivers are ready (`Readiness`), and
every member that fails closes its end, which fails the calls of its peers.

`MooncakeLink` sends by Mooncake's transfer engine: RDMA, or TCP where a machine has no RDMA device. The engine writes
into the memory of another process, which does not take part. So each member has a word of memory for every peer: a
receiver grants rounds in the sender's, when an inbox is free; a sender counts rounds in the receiver's, after their
messages. A negative word says that the peer has failed. The messages are in host memory. No process group is made, so a
lost member does not disturb the others.
"""

from __future__ import annotations

import contextlib
import datetime
import importlib
import json
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import Store

from slimrl.platform.launch_env import NCCL_GRACE

Sizes = Mapping[int, int]  # bytes by peer
JOIN_TIMEOUT_S = 60.0  # every member has answered the trainer before
SHORTEST_POLL_S, LONGEST_POLL_S = 0.001, 0.05


class LinkError(RuntimeError):
    """A message cannot be sent or received; `peer` is the member at the other end, if it is known."""

    def __init__(self, text: str, peer: int | None = None) -> None:
        super().__init__(text)
        self.peer = peer


class Link(Protocol):
    """One member's end."""

    def outbox(self, peer: int, round_number: int) -> Tensor:
        """The buffer, uint8, of the message to `peer`; the round before the last must have ended."""

    def inbox(self, peer: int, round_number: int) -> Tensor:
        """The buffer of the message from `peer`."""

    def start(self, round_number: int, sends: Sizes, receives: Sizes) -> None:
        """Starts to send the messages in the outboxes, and to receive into the inboxes."""

    def wait(self, round_number: int) -> None:
        """Waits until all messages of the round have been sent and received. Raises LinkError."""

    def close(self, *, failed: bool) -> None:
        """Closes the end; if it `failed`, the peers' calls in progress fail, too."""


class Buffers:
    """The buffers of a link: two for each peer of each direction."""

    def __init__(self, sends: Sizes, receives: Sizes, device: torch.device, *, pinned: bool = False) -> None:
        def pair(size: int) -> tuple[Tensor, Tensor]:
            first, second = (torch.empty(size, dtype=torch.uint8, device=device, pin_memory=pinned) for _ in range(2))
            return first, second

        self.out = {peer: pair(size) for peer, size in sends.items()}
        self.into = {peer: pair(size) for peer, size in receives.items()}


class ProcessGroupLink:
    """Joins a process group of all members, which must do so at the same time."""

    def __init__(
        self,
        store: Store,
        member: int,
        members: int,
        buffers: Buffers,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        """`store` is one of this group alone. Raises LinkError if a member does not join."""
        self._device, self._buffers = device, buffers
        self._timeout = datetime.timedelta(seconds=timeout_s)
        self._works: dict[int, list[tuple[int | None, dist.Work]]] = {}
        try:
            self._group = self._join(store, member, members)
        except (RuntimeError, ValueError) as error:
            raise LinkError(f"joining the process group failed: {error}") from error

    def _join(self, store: Store, member: int, members: int) -> Any:
        """A `Backend`, most of whose methods torch does not declare; a `ProcessGroup` would need a default one."""
        store.set_timeout(datetime.timedelta(seconds=min(JOIN_TIMEOUT_S, self._timeout.total_seconds())))
        if self._device.type != "cuda":
            return dist.ProcessGroupGloo(store, member, members, self._timeout)
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = self._timeout + NCCL_GRACE
        group: Any = dist.ProcessGroupNCCL(store, member, members, options)
        with torch.cuda.device(self._device):
            # Makes the communicator, of which a trainer rank without messages is a member, too. A broadcast: for an
            # allreduce, deterministic trainers and deterministic servers choose different algorithms, and would hang.
            group.broadcast([torch.zeros(1, device=self._device)]).wait()
            torch.cuda.current_stream(self._device).synchronize()
        return group

    def outbox(self, peer: int, round_number: int) -> Tensor:
        """See `Link.outbox`."""
        return self._buffers.out[peer][round_number % 2]

    def inbox(self, peer: int, round_number: int) -> Tensor:
        """See `Link.inbox`."""
        return self._buffers.into[peer][round_number % 2]

    def start(self, round_number: int, sends: Sizes, receives: Sizes) -> None:
        """See `Link.start`."""
        calls = [(peer, self.outbox(peer, round_number)[:size], True) for peer, size in sends.items()]
        calls += [(peer, self.inbox(peer, round_number)[:size], False) for peer, size in receives.items()]
        together = self._device.type == "cuda"  # NCCL runs calls in order, and in another order on each rank
        self._works[round_number] = self._together(calls) if together else self._each(round_number, calls)

    def _each(self, tag: int, calls: Sequence[tuple[int, Tensor, bool]]) -> list[tuple[int | None, dist.Work]]:
        works: list[tuple[int | None, dist.Work]] = []
        for peer, part, sends in calls:
            try:
                call = self._group.send if sends else self._group.recv
                works.append((peer, call([part], peer, tag)))
            except RuntimeError as error:
                works.clear()
                raise LinkError(str(error), peer) from error
        return works

    def _together(self, calls: Sequence[tuple[int, Tensor, bool]]) -> list[tuple[int | None, dist.Work]]:
        if not calls:
            return []
        self._group._start_coalescing()
        self._each(0, calls)
        return [(None, self._group._end_coalescing())]

    def wait(self, round_number: int) -> None:
        """See `Link.wait`."""
        works = self._works.pop(round_number, [])
        while works:
            peer, failure = self._end(works)
            if failure is not None:
                works.clear()
                raise LinkError(failure, peer)
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()

    def _end(self, works: list[tuple[int | None, dist.Work]]) -> tuple[int | None, str | None]:
        """Waits for the last of the works: its peer, and how it failed. No traceback then keeps the group alive."""
        peer, work = works.pop()
        try:
            work.wait(self._timeout)
        except RuntimeError as error:
            return peer, str(error)
        return peer, None

    def close(self, *, failed: bool) -> None:
        """See `Link.close`."""
        if self._device.type == "cuda":
            self._group.abort()  # also after success: the peers need not leave at the same time
        # gloo has no abort: its connections are closed when nothing refers to the group and its works
        self._works.clear()
        del self._group


def ready_key(name: str, update: int, member: int) -> str:
    """The key that a receiver sets when it begins to receive an update."""
    return f"ready/{name}/{update}/{member}"


def failure_key(name: str) -> str:
    """The key that an engine rank sets when it has failed, and trainer rank 0 when it gives up an update."""
    return f"failed/{name}"


class Readiness:
    """Waits until receivers receive: `peers` of the link `name`.

    `failure` has the reason why they will not, if this rank knows one.
    """

    def __init__(
        self, store: Store, name: str, peers: Sequence[int], failure: Callable[[], str | None], timeout_s: float
    ) -> None:
        self._store, self._name, self._peers = store, name, peers
        self._failure, self._timeout_s = failure, timeout_s

    def wait(self, update: int) -> None:
        """Raises LinkError if they will not receive update number `update`, or do not in time."""
        deadline, pause = time.monotonic() + self._timeout_s, SHORTEST_POLL_S
        keys = [ready_key(self._name, update, peer) for peer in self._peers]
        try:
            while keys and not self._store.check(keys):
                reason = self._failure() or self._given_up()
                if reason is not None:
                    raise LinkError(reason)
                if time.monotonic() > deadline:
                    raise LinkError(f"a server does not receive after {self._timeout_s:g} s")
                time.sleep(pause)
                pause = min(2 * pause, LONGEST_POLL_S)
        except dist.DistError as error:
            raise LinkError(f"trainer rank 0 is gone: {error}") from error

    def _given_up(self) -> str | None:
        return "another rank has failed" if self._store.check([failure_key(self._name)]) else None


POLL_INTERVAL_S = 0.0002
PROBE_INTERVAL_S = 1.0  # of a peer that is waited for
MODULE = "mooncake.engine"  # of an optional package
WORD_BYTES = 8
FAILED = -1
RDMA_DEVICES = Path("/sys/class/infiniband")


def protocol_here(devices: Path = RDMA_DEVICES) -> str:
    """What Mooncake uses on this machine: rdma, or tcp if there is no RDMA device."""
    return "rdma" if devices.is_dir() and any(devices.iterdir()) else "tcp"


class MooncakeLink:
    """Implements `Link`; `buffers` are in host memory."""

    def __init__(
        self,
        store: Store,
        member: int,
        host: str,
        buffers: Buffers,
        timeout_s: float,
        protocol: str | None = None,
    ) -> None:
        """`host` is the address at which the peers reach this process; `store` is one of this link alone.

        Raises LinkError if Mooncake is not installed, or a peer does not join.
        """
        self._buffers, self._timeout_s = buffers, timeout_s
        self._peers = [*buffers.out, *buffers.into]
        self._words = torch.zeros(2 * max(len(self._peers), 1), dtype=torch.int64)  # the second half: to be sent
        self._sent = dict.fromkeys(buffers.out, 0)
        self._granted = dict.fromkeys(buffers.into, 0)
        self._sending: dict[int, list[tuple[int, Future[None]]]] = {}
        self._awaited: dict[int, list[tuple[int, int]]] = {}  # by round: peer, its count then
        # one thread for each peer, because a count says that all messages before have arrived
        self._threads = {peer: ThreadPoolExecutor(1, thread_name_prefix="weight-messages") for peer in buffers.out}
        self._engine, session = self._open(host, protocol or protocol_here())
        for memory in self._memory():
            if code := self._engine.register_memory(memory.data_ptr(), memory.nbytes):
                raise LinkError(f"Mooncake does not register {memory.nbytes} bytes of host memory (code {code})")
        own = {
            "session": session,
            "words": {peer: self._words[number].data_ptr() for number, peer in enumerate(self._peers)},
            "inboxes": {peer: [one.data_ptr() for one in pair] for peer, pair in buffers.into.items()},
        }
        store.set_timeout(datetime.timedelta(seconds=min(JOIN_TIMEOUT_S, timeout_s)))
        try:
            store.set(str(member), json.dumps(own))
            described = {peer: json.loads(store.get(str(peer))) for peer in self._peers}
        except RuntimeError as error:
            raise LinkError(f"a peer did not join by Mooncake: {error}") from error
        self._session = {peer: one["session"] for peer, one in described.items()}
        self._word_of = {peer: one["words"][str(member)] for peer, one in described.items()}
        self._inboxes = {peer: one["inboxes"].get(str(member)) for peer, one in described.items()}

    @staticmethod
    def _open(host: str, protocol: str) -> tuple[Any, str]:
        try:
            engine = importlib.import_module(MODULE).TransferEngine()
        except ImportError as error:
            raise LinkError(
                f"Mooncake cannot be imported ({error}): install mooncake-transfer-engine (docs/weight-updates.md), or"
                " leave --update-weight-transport mooncake out"
            ) from error
        if code := engine.initialize(host, "P2PHANDSHAKE", protocol, ""):
            raise LinkError(f"Mooncake does not start at {host} with {protocol} (code {code})")
        return engine, f"{host}:{engine.get_rpc_port()}"

    def _memory(self) -> list[Tensor]:
        pairs = [*self._buffers.out.values(), *self._buffers.into.values()]
        return [self._words, *(one for pair in pairs for one in pair)]

    def outbox(self, peer: int, round_number: int) -> Tensor:
        """See `Link.outbox`."""
        return self._buffers.out[peer][round_number % 2]

    def inbox(self, peer: int, round_number: int) -> Tensor:
        """See `Link.inbox`."""
        return self._buffers.into[peer][round_number % 2]

    def start(self, round_number: int, sends: Sizes, receives: Sizes) -> None:
        """See `Link.start`."""
        for peer in receives:
            self._granted[peer] += 1
            self._write_word(peer, self._granted[peer])
        self._awaited[round_number] = [(peer, self._granted[peer]) for peer in receives]
        self._sending[round_number] = []
        for peer, size in sends.items():
            self._sent[peer] += 1
            call = self._threads[peer].submit(self._send, peer, round_number, size, self._sent[peer])
            self._sending[round_number].append((peer, call))

    def _send(self, peer: int, round_number: int, size: int, count: int) -> None:
        self._await_word(peer, count)
        inbox = self._inboxes[peer][round_number % 2]
        self._write(peer, self.outbox(peer, round_number).data_ptr(), inbox, size)
        self._write_word(peer, count)

    def wait(self, round_number: int) -> None:
        """See `Link.wait`."""
        for _, call in self._sending.pop(round_number, []):
            call.result()
        for peer, count in self._awaited.pop(round_number, []):
            self._await_word(peer, count)

    def _await_word(self, peer: int, count: int) -> None:
        number = self._peers.index(peer)
        self._until(lambda: self._value(number, peer) >= count, peer)

    def _value(self, number: int, peer: int) -> int:
        value = int(self._words[number])
        if value < 0:
            raise LinkError("the peer has failed", peer)
        return value

    def _until(self, done: Callable[[], bool], peer: int) -> None:
        started = probed = time.monotonic()
        while not done():
            now = time.monotonic()
            if now > started + self._timeout_s:
                raise LinkError(f"no message in {self._timeout_s:g} s", peer)
            if now > probed + PROBE_INTERVAL_S:
                probed = now
                self._write_word(peer)  # fails once the peer is gone
            time.sleep(POLL_INTERVAL_S)

    def _write_word(self, peer: int, value: int | None = None) -> None:
        """Writes the word for the peer; None: its last value again."""
        own = len(self._words) // 2 + self._peers.index(peer)
        if value is not None:
            self._words[own] = value
        self._write(peer, self._words[own].data_ptr(), self._word_of[peer], WORD_BYTES)

    def _write(self, peer: int, source: int, target: int, size: int) -> None:
        if code := self._engine.transfer_sync_write(self._session[peer], source, target, size):
            raise LinkError(f"Mooncake does not reach {self._session[peer]} (code {code})", peer)

    def close(self, *, failed: bool) -> None:
        """See `Link.close`."""
        if failed:
            self._words[: len(self._peers)] = FAILED  # ends the own threads
        for thread in self._threads.values():
            thread.shutdown()
        for peer in self._peers if failed else ():
            with contextlib.suppress(LinkError):
                self._write_word(peer, FAILED)
        for memory in self._memory():
            self._engine.unregister_memory(memory.data_ptr())
        del self._engine
