"""The ways that the buckets of one push take side by side: what each can do, and all of them together.

Promises that the failure of one way does not end the others. Used by `sync`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from slimrl.weights.buckets import Bucket, BufferSource
from slimrl.weights.servers import WeightSyncError


class Transport(Protocol):
    """One way to bring buckets to some of the servers."""

    buffer: BufferSource

    def start(self, bucket: Bucket) -> None:
        """Begins to send a bucket, which must stay as it is until `finish`; raises as that."""

    def finish(self) -> None:
        """Returns once every server has the bucket started last, if any is under way.

        Raises WeightSyncError naming each server that failed.
        """

    def release(self) -> None:
        """Gives up what was kept for later pipeline stages of the servers: every one has read it."""

    def reset(self) -> None:
        """Gives up what a failed push left, so that the next can begin; never raises for a server that is gone."""

    def close(self) -> None:
        """Gives up what stays open between pushes."""

    def leave(self) -> None:
        """Leaves process groups among trainers, after `close` on all of them."""


class Lanes:
    """The transports of one push, each until its first failure."""

    def __init__(self, transports: Sequence[Transport]) -> None:
        self._working = list(transports)
        self._errors: list[WeightSyncError] = []

    def run(self, step: Callable[[Transport], None]) -> None:
        """`step` on each transport that has not failed yet."""
        for transport in tuple(self._working):
            try:
                step(transport)
            except WeightSyncError as error:
                self._working.remove(transport)
                self._errors.append(error)

    def raise_first(self) -> None:
        """The first failure, if there was one."""
        if self._errors:
            raise self._errors[0]
