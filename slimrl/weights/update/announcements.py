"""The calls that announce a broadcast's buckets to many servers, divided over the trainer ranks.

Rank 0 packs and broadcasts the buckets, and every server must be told of each by an HTTP call. A call costs its rank a
part of a millisecond, which for one rank, thousands of servers and dozens of buckets are a minute. So from more than
ENGINES_OF_ONE_RANK servers on, other ranks announce to a share of them: rank 0 puts the layout of each bucket into the
store of the training ranks, where their threads wait for it. A server takes part in a broadcast once it has been told,
so rank 0 need not know who told it. A rank whose server rejects a bucket leaves the reason in the store, where rank 0
looks while it waits for a broadcast. Used by `WeightUpdater` and `DistributedTransport`.
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Protocol, cast

from torch.distributed import DistStoreError
from torch.distributed.distributed_c10d import _get_default_store

from slimrl.engines.server_protocol import WeightControl
from slimrl.platform.collective_errors import RANK_ZERO
from slimrl.weights.update.engine_fanout import ENGINES_OF_ONE_RANK, WeightSyncError, call_all, callers_of

WHAT = "updating weights from a broadcast"
LOOK_INTERVAL_S = 0.1  # between looks for the failure of another rank
FAILURE_GRACE_S = 5.0  # for the own calls to fail, too
CHANGES = "changes"
_END = b""  # in place of a layout: no more buckets
_PREFIX = "slimrl-announcements"


def divided_announcements(
    servers: Sequence[WeightControl], rank: int, ranks: int, timeout_s: float, of_one_rank: int = ENGINES_OF_ONE_RANK
) -> Announcements | None:
    """This rank's part, if the servers are so many that several ranks announce to them; collective."""
    callers = callers_of(len(servers), ranks, of_one_rank)
    return Announcements(default_store(), servers, rank, callers, timeout_s) if callers > 1 else None


def announce(server: WeightControl, call: dict[str, Any]) -> None:
    """Tells a server of a bucket: of weights, or of changes, whose payloads are in `call`."""
    if CHANGES in call:
        server.update_weights_from_changes(call[CHANGES])
    else:
        server.update_weights_from_distributed(**call)


def default_store() -> KeyStore:
    """That of all training ranks."""
    return cast("KeyStore", _get_default_store())


class KeyStore(Protocol):
    """What is used of a torch.distributed store; its types name neither `clone` nor values of bytes."""

    def clone(self) -> KeyStore:
        """Another client, whose waiting does not block this one."""

    def add(self, key: str, amount: int) -> int:
        """The sum of all amounts."""

    def set(self, key: str, value: bytes) -> None:
        """Stores the value."""

    def get(self, key: str) -> bytes:
        """The value, after waiting for it."""

    def check(self, keys: list[str]) -> bool:
        """Whether all keys have values."""

    def wait(self, keys: list[str], timeout: datetime.timedelta) -> None:
        """Raises DistStoreError if a key has no value in time."""

    def delete_key(self, key: str) -> bool:
        """Whether the key had a value."""


class Announcements:
    """One rank's part: rank 0 publishes, the other callers announce to their share. `round` is collective."""

    def __init__(
        self, store: KeyStore, servers: Sequence[WeightControl], rank: int, callers: int, timeout_s: float
    ) -> None:
        """`store` is that of all training ranks, on each of which this is constructed."""
        self.own = list(servers[rank::callers]) if rank < callers else []
        self._store, self._rank, self._timeout_s = store.clone(), rank, timeout_s
        # the same on all ranks; a later object must not find the keys of this one
        self._prefix = f"{_PREFIX}/{store.add(f'{_PREFIX}/objects of rank {rank}', 1)}"
        self._round = self._number = 0
        self._looked = 0.0
        self._pool: ThreadPoolExecutor | None = None

    @contextlib.contextmanager
    def round(self) -> Iterator[None]:
        """Around the sending of all buckets, on every rank.

        Raises WeightSyncError on a rank whose own servers failed, and on others if rank 0 failed meanwhile.
        """
        if self._rank == RANK_ZERO:
            self._forget()
        self._round, self._number = self._round + 1, 0
        announcing = self._start() if self._rank != RANK_ZERO and self.own else None
        try:
            yield
        except BaseException:
            self._fail(self._store, self._key("failed"), f"sending buckets failed on rank {self._rank}", final=False)
            raise
        finally:
            if self._rank == RANK_ZERO:
                self._store.set(self._key(self._number), _END)
        if announcing is not None:
            self._wait(announcing)

    def publish(self, call: dict[str, Any]) -> None:
        """On rank 0: the arguments with which the other ranks announce the next bucket."""
        self._store.set(self._key(self._number), json.dumps(call).encode())
        self._number += 1

    def check(self) -> None:
        """Raises WeightSyncError if another rank has failed; looks from time to time."""
        if time.monotonic() > self._looked + LOOK_INTERVAL_S:
            self._looked = time.monotonic()
            if self._store.check([self._key("failed")]):
                text, final = json.loads(self._store.get(self._key("failed")))
                raise WeightSyncError(text, final=final)

    def await_failure(self) -> None:
        """Raises WeightSyncError as soon as another rank reports a failure; returns if none does so in time."""
        until = time.monotonic() + FAILURE_GRACE_S
        while time.monotonic() < until:
            self.check()
            time.sleep(LOOK_INTERVAL_S)

    def _key(self, name: int | str, round_number: int | None = None) -> str:
        return f"{self._prefix}/{self._round if round_number is None else round_number}/{name}"

    @staticmethod
    def _fail(store: KeyStore, key: str, text: str, *, final: bool) -> None:
        if not store.check([key]):
            store.set(key, json.dumps([text, final]).encode())

    def _forget(self) -> None:
        """Deletes the keys of the last round, which every rank has left."""
        for name in (*range(self._number + 1), "failed") if self._round else ():
            self._store.delete_key(self._key(name))

    def _start(self) -> Future[None]:
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="weight-announcements")
        return self._pool.submit(self._announce, self._store.clone(), self._round)

    def _announce(self, store: KeyStore, round_number: int) -> None:
        """Waits for each layout and calls the own servers with it, until rank 0 has no more.

        After a failure elsewhere it may outlive its round, whose number it keeps.
        """
        try:
            for number in itertools.count():
                if (layout := self._layout(store, self._key(number, round_number))) == _END:
                    return
                self._tell(json.loads(layout))
        except WeightSyncError as error:
            self._fail(store, self._key("failed", round_number), str(error), final=error.final)
            raise

    def _tell(self, call: dict[str, Any]) -> None:
        call_all(self.own, lambda server: announce(server, call), WHAT)

    def _layout(self, store: KeyStore, key: str) -> bytes:
        try:
            store.wait([key], datetime.timedelta(seconds=self._timeout_s))
        except DistStoreError as error:
            text = f"rank 0 had no bucket for {self._timeout_s:g} s, for which rank {self._rank} waits: {error}"
            raise WeightSyncError(text, final=True) from error
        return store.get(key)

    def _wait(self, announcing: Future[None]) -> None:
        """Until all buckets are announced; after a failure elsewhere, calls in progress are left to their limit."""
        assert self._pool is not None
        while not announcing.done():
            try:
                self.check()
            except WeightSyncError:
                with contextlib.suppress(TimeoutError):
                    announcing.exception(FAILURE_GRACE_S)
                if not announcing.done():
                    self._pool.shutdown(wait=False)
                    raise
            time.sleep(0.001)
        self._pool.shutdown()
        announcing.result()
