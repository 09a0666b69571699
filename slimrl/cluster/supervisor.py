"""A `ray.get` that watches every process of the run: the first death ends the wait with one message that names it.

`summarize_oom` shortens Ray's page of text about a process that it killed for lack of memory to one sentence. Lost
nodes (`nodes`) end a wait too.
"""

from __future__ import annotations

import contextlib
import re
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import ray
from ray import ObjectRef
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError

from slimrl.cluster.watchdog import Wait, WaitTarget, WatchdogConfig

_SIGNS = ("running low on memory", "due to memory pressure (OOM)")
_NODE = re.compile(r"Memory on the node \(IP: ([^,]+), ID: [^)]*\) was ([\d.]+) ?GB used / ([\d.]+) ?GB limit")
_PROCESS = re.compile(r"pid=(\d+), actual memory used=([\d.]+) ?GB")
_OOM_FIX = (
    "give the machine more memory, or start fewer or smaller processes on it (--dry-run shows what each GPU needs);"
    " Ray's limit is RAY_memory_usage_threshold"
)


class OutOfMemorySummary(RuntimeError):
    """Ray killed a process because its machine ran out of memory."""


def summarize_oom(error: Exception) -> Exception:
    """OutOfMemorySummary with one sentence if `error` is Ray's out-of-memory report, else `error`.

    Without the numbers if the report's format is unknown.
    """
    text = str(error)
    if not any(sign in text for sign in _SIGNS):
        return error
    node, process = _NODE.search(text), _PROCESS.search(text)
    victim = f"process {process[1]}, which had {float(process[2]):.1f} GB," if process else "it"
    usage = f": {float(node[2]):.1f} of the {float(node[3]):.1f} GB of machine {node[1]} were in use" if node else ""
    return OutOfMemorySummary(f"Ray killed {victim} for lack of memory{usage}; {_OOM_FIX}")


PROGRESS_INTERVAL_S = 0.5
NODE_INTERVAL_S = 1.0
NODE_DEATH_S = 3.0  # between Ray's reports of a dead actor and of its dead node


class ProcessDiedError(RuntimeError):
    """A train worker, a server, the router or the rollout manager ended unexpectedly."""


class TrainWorkerDiedError(ProcessDiedError):
    """A process of a training rank ended: `TrainRecovery` may replace it."""


class TrainNodeLostError(TrainWorkerDiedError):
    """It ended with its node, and a spare node may take the place of that."""


class EventHandler(Protocol):
    """Handles events that arrive while the driver waits."""

    def events(self) -> ObjectRef:
        """A reference that is ready when there are events; the same one until `handle_events`."""

    def handle_events(self) -> None:
        """Handles them; may wait for its own calls."""


class Nodes(Protocol):
    """The other nodes of a run, as text; "" for none."""

    def unreachable(self) -> str:
        """Nodes that do not respond on the network."""

    def lost(self) -> str:
        """Nodes that have not responded for so long that the run must end."""

    def dead(self) -> str:
        """Nodes whose Ray has ended."""

    def dead_are_replaceable(self) -> bool:
        """Whether spare nodes may replace the nodes whose Ray has ended."""


class Supervisor:
    """Owns the watches: object refs that stay pending while a process lives.

    A watch becomes ready (with a message) or fails (with Ray's actor error) when its process dies.
    """

    def __init__(self, config: WatchdogConfig, nodes: Nodes | None = None) -> None:
        """`nodes` are the other nodes of the run, None if there are none."""
        self._config = config
        self._nodes = nodes
        self._watches: dict[ObjectRef, tuple[Callable[[Exception | None], str], type[ProcessDiedError]]] = {}
        self._event_handler: EventHandler | None = None
        self._loss_handler: Callable[[TrainWorkerDiedError], None] | None = None
        self._report_suffix: Callable[[], str] = lambda: ""

    def watch(
        self,
        ref: ObjectRef,
        describe: Callable[[Exception | None], str],
        died: type[ProcessDiedError] = ProcessDiedError,
    ) -> None:
        """Watches `ref`; `describe(error)` makes the message from Ray's error if the ref fails.

        A death raises `died`, or ProcessDiedError if it is that of a node.
        """
        self._watches[ref] = describe, died

    def unwatch(self, refs: Sequence[ObjectRef]) -> None:
        """Drops these watches, of processes that are about to be replaced."""
        for ref in refs:
            self._watches.pop(ref, None)

    def set_event_handler(self, event_handler: EventHandler) -> None:
        """Makes every later wait handle its events."""
        self._event_handler = event_handler

    def set_loss_handler(self, loss_handler: Callable[[TrainWorkerDiedError], None]) -> None:
        """Makes every later wait call it for a lost training rank, and continue."""
        self._loss_handler = loss_handler

    @contextlib.contextmanager
    def raising_losses(self) -> Iterator[None]:
        """Waits in this block need the training ranks: a lost one ends them."""
        handler, self._loss_handler = self._loss_handler, None
        try:
            yield
        finally:
            self._loss_handler = handler

    def set_report_suffix(self, report_suffix: Callable[[], str]) -> None:
        """Appends the text of `report_suffix()`, if any, to every report of a long wait."""
        self._report_suffix = report_suffix

    def stop_watching(self) -> None:
        """Drops every watch: from here on processes end on request."""
        self._watches.clear()
        self._event_handler = self._loss_handler = None
        self._report_suffix = lambda: ""

    def get(
        self, refs: Sequence[ObjectRef], target: WaitTarget, progress: Callable[[], None] | None = None
    ) -> list[Any]:
        """`ray.get` that raises at the first failure among `refs` or the watched processes.

        `target` describes the wait in watchdog reports. Raises ProcessDiedError for a death, the task's own exception
        for a failed call, and WatchdogTimeoutError.
        """
        with contextlib.ExitStack() as stack:
            stack.callback(_discard_results, refs)
            self._wait(refs, target, progress)
            stack.pop_all()
        return ray.get(list(refs))

    def _wait(self, refs: Sequence[ObjectRef], target: WaitTarget, progress: Callable[[], None] | None) -> None:
        pending = dict.fromkeys(refs)
        wait = Wait(self._config, self._with_silent_nodes(target), self._report_suffix)
        while pending:
            times = [wait.remaining(), PROGRESS_INTERVAL_S if progress else None]
            times += [NODE_INTERVAL_S] if self._nodes is not None else []
            timeout = min((time_s for time_s in times if time_s is not None), default=None)
            event_handler = self._event_handler
            events = [event_handler.events()] if event_handler is not None else []
            ready = _ready([*self._watches, *events, *pending], timeout)
            if progress:
                progress()
            if died := [ref for ref in ready if ref in self._watches]:
                self._handle_death(self._death(died[0]))
                continue  # the watches are others now
            if self._nodes is not None and (lost := self._nodes.lost()):
                raise ProcessDiedError(lost)
            if ready == events and event_handler is not None:
                self._handle_events(event_handler)
                continue
            if not ready:
                wait.check([index for index, ref in enumerate(refs) if ref in pending])
            for ref in ready:
                if ref in pending:  # not an event
                    del pending[ref]
                    self._raise_failure(ref)

    def _with_silent_nodes(self, target: WaitTarget) -> WaitTarget:
        """`target` with reports that begin with the unresponsive nodes."""
        if (nodes := self._nodes) is None:
            return target

        def describe(pending: Sequence[int]) -> str:
            return "; ".join(filter(None, [nodes.unreachable(), target.describe(pending)]))

        return WaitTarget(target.what, describe)

    def _handle_events(self, event_handler: EventHandler) -> None:
        """Runs the handler; its own waits handle no events."""
        self._event_handler = None
        try:
            with self._naming_deaths():
                event_handler.handle_events()
        finally:
            self._event_handler = event_handler

    def _handle_death(self, death: ProcessDiedError) -> None:
        if self._loss_handler is None or not isinstance(death, TrainWorkerDiedError):
            raise death
        event_handler, self._event_handler = self._event_handler, None  # it would call the ranks
        try:
            self._loss_handler(death)
        finally:
            self._event_handler = event_handler

    def _death(self, ref: ObjectRef) -> ProcessDiedError:
        describe, died = self._watches[ref]
        try:
            message, actor_died = str(ray.get(ref)), False
        except (RayActorError, OutOfMemoryError) as error:
            message, actor_died = describe(_without_details(summarize_oom(error))), isinstance(error, RayActorError)
        lost = self._lost_nodes() if actor_died or died is TrainWorkerDiedError else ""
        if not lost:
            return died(message)
        assert self._nodes is not None
        replaceable = died is TrainWorkerDiedError and self._nodes.dead_are_replaceable()
        return (TrainNodeLostError if replaceable else ProcessDiedError)(f"{lost}: {message}")

    def _lost_nodes(self) -> str:
        """The nodes that go down while a process dies; their Ray may end a moment after the process."""
        deadline = time.monotonic() + NODE_DEATH_S
        while self._nodes is not None:
            if (lost := self._nodes.dead()) or time.monotonic() > deadline:
                return lost
            time.sleep(0.1)
        return ""

    def _raise_failure(self, ref: ObjectRef) -> None:
        with self._naming_deaths():
            ray.get(ref)

    @contextlib.contextmanager
    def _naming_deaths(self) -> Iterator[None]:
        try:
            yield
        except (RayActorError, OutOfMemoryError) as error:
            raise self._death_behind(error) from error
        except RayTaskError as error:
            self._raise_underlying_death(error)
            raise error.cause from None

    def _death_behind(self, error: RayActorError | OutOfMemoryError) -> ProcessDiedError:
        """The dead actor's own watch fails in the same moment: its description names the process."""
        ready, _ = ray.wait(list(self._watches), num_returns=1, timeout=5.0) if self._watches else ([], [])
        return self._death(ready[0]) if ready else ProcessDiedError(str(summarize_oom(error)))

    def _raise_underlying_death(self, error: RayTaskError) -> None:
        """A peer's failed collective or request often follows from a death: raises for the death instead."""
        ready, _ = ray.wait(list(self._watches), num_returns=1, timeout=3.0) if self._watches else ([], [])
        if ready:
            raise self._death(ready[0]) from error


def _ready(refs: Sequence[ObjectRef], timeout_s: float | None) -> list[ObjectRef]:
    """All refs that are ready when the first one is; none after `timeout_s`.

    One at a time, a wait for n calls would look at the square of n references.
    """
    first, _ = ray.wait(list(refs), num_returns=1, timeout=timeout_s)
    if not first or len(refs) == 1:
        return first
    found, _ = ray.wait(list(refs), num_returns=len(refs), timeout=0)
    return found or first


def _without_details(error: Exception) -> Exception:
    """Ray's report of a dead actor without the lines with its class, ids and address."""
    sentences = [line for line in str(error).splitlines() if line.startswith("The actor")]
    return RuntimeError(" ".join(sentences)) if sentences and isinstance(error, RayActorError) else error


def _discard_results(refs: Sequence[ObjectRef]) -> None:
    """Fetches the results of abandoned calls when they arrive: Ray prints unfetched failures to stderr."""
    for ref in refs:
        ref.future()
