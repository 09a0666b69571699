"""Waiting for work while watching everybody: the first death ends the wait with one message that names it."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import ray
from ray import ObjectRef
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError

from slimrl.cluster.out_of_memory import brief
from slimrl.cluster.watchdog import Awaited, Patience, Wait

PROGRESS_INTERVAL_S = 0.5


class ProcessDiedError(RuntimeError):
    """A train worker, a server, the router or the rollout manager ended before its time."""


class Attendant(Protocol):
    """Something that may have to be done while the driver waits."""

    def news(self) -> ObjectRef:
        """Ready when there is something to do; the same until `act`."""

    def act(self) -> None:
        """Does it; may wait for calls of its own."""


class Supervisor:
    """Owns the watches: object refs that stay pending while a process lives.

    A watch becomes ready (with a message) or fails (with Ray's actor error) when its process dies.
    """

    def __init__(self, patience: Patience, silent_nodes: Callable[[], str] = str) -> None:
        """`silent_nodes` tells which nodes do not answer on the network, in words."""
        self._patience = patience
        self._silent_nodes = silent_nodes
        self._watches: dict[ObjectRef, Callable[[Exception | None], str]] = {}
        self._attendant: Attendant | None = None
        self._bystanders: Callable[[], str] = lambda: ""

    def watch(self, ref: ObjectRef, describe: Callable[[Exception | None], str]) -> None:
        """Watches `ref`; `describe(error)` makes the message from Ray's error where the ref holds no text."""
        self._watches[ref] = describe

    def attend(self, attendant: Attendant) -> None:
        """From now on every wait heeds its news."""
        self._attendant = attendant

    def ask_too(self, bystanders: Callable[[], str]) -> None:
        """Every report of a long wait ends with what this says of those that are not waited for themselves, or ""."""
        self._bystanders = bystanders

    def forget(self) -> None:
        """Drops every watch: from here on processes end because they are told to."""
        self._watches.clear()
        self._attendant = None
        self._bystanders = lambda: ""

    def get(self, refs: Sequence[ObjectRef], awaited: Awaited, progress: Callable[[], None] | None = None) -> list[Any]:
        """`ray.get`, ended early by the first failure among `refs` or the watched processes; `awaited` says what for.

        Raises ProcessDiedError for a death, the task's own exception for a failed call, and WaitedTooLongError.
        """
        with contextlib.ExitStack() as stack:
            stack.callback(_read_by_nobody, refs)
            self._wait(refs, awaited, progress)
            stack.pop_all()
        return ray.get(list(refs))

    def _wait(self, refs: Sequence[ObjectRef], awaited: Awaited, progress: Callable[[], None] | None) -> None:
        pending = list(dict.fromkeys(refs))
        wait = Wait(self._patience, self._with_silent_nodes(awaited), self._bystanders)
        while pending:
            times = [wait.remaining(), PROGRESS_INTERVAL_S if progress else None]
            timeout = min((time_s for time_s in times if time_s is not None), default=None)
            attendant = self._attendant
            news = [attendant.news()] if attendant is not None else []
            ready, _ = ray.wait([*self._watches, *news, *pending], num_returns=1, timeout=timeout)
            if progress:
                progress()
            if ready == news and attendant is not None:
                self._act(attendant)
                continue
            if not ready:
                wait.look([place for place, ref in enumerate(refs) if ref in pending])
            for ref in ready:
                if ref in self._watches:
                    raise ProcessDiedError(self._message(ref))
                pending.remove(ref)
                self._raise_failure(ref)

    def _with_silent_nodes(self, awaited: Awaited) -> Awaited:
        """A wait whose report begins with the nodes that keep everybody else waiting."""

        def describe(places: Sequence[int]) -> str:
            return "; ".join(filter(None, [self._silent_nodes(), awaited.describe(places)]))

        return Awaited(awaited.what, describe)

    def _act(self, attendant: Attendant) -> None:
        """Nobody attends to the waits in which it acts itself."""
        self._attendant = None
        try:
            with self._deaths_named():
                attendant.act()
        finally:
            self._attendant = attendant

    def _message(self, ref: ObjectRef) -> str:
        describe = self._watches[ref]
        try:
            return str(ray.get(ref))
        except (RayActorError, OutOfMemoryError) as error:
            return describe(brief(error))

    def _raise_failure(self, ref: ObjectRef) -> None:
        with self._deaths_named():
            ray.get(ref)

    @contextlib.contextmanager
    def _deaths_named(self) -> Iterator[None]:
        try:
            yield
        except (RayActorError, OutOfMemoryError) as error:
            raise ProcessDiedError(self._who_died(error)) from error
        except RayTaskError as error:
            self._raise_death_behind(error)
            raise error.cause from None

    def _who_died(self, error: RayActorError | OutOfMemoryError) -> str:
        """The dead actor's own watch fails in the same moment: its description names the process."""
        ready, _ = ray.wait(list(self._watches), num_returns=1, timeout=5.0) if self._watches else ([], [])
        return self._message(ready[0]) if ready else str(brief(error))

    def _raise_death_behind(self, error: RayTaskError) -> None:
        """A peer's failed collective or request is often only the echo of a death: name the death itself."""
        ready, _ = ray.wait(list(self._watches), num_returns=1, timeout=3.0) if self._watches else ([], [])
        if ready:
            raise ProcessDiedError(self._message(ready[0])) from error


def _read_by_nobody(refs: Sequence[ObjectRef]) -> None:
    """Takes the results of a call that failed whenever they come: Ray writes failures that nobody fetches to stderr."""
    for ref in refs:
        ref.future()
