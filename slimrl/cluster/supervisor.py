"""A `ray.get` that watches every process of the run: the first death ends the wait with one message that names it.

`summarize_oom` shortens Ray's page of text about a process that it killed for lack of memory to one sentence.
`NodeWatch` reports a node that is cut off from the network long before Ray does, which takes more than a minute. It
repeatedly connects to Ray on every other node of the run. A refused connection counts as a response: the machine is up,
and Ray reports dead processes there at once. The network may recover, so the wait ends only after
--node-timeout-seconds, and only for a node that the run cannot replace.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

import ray
from ray import ObjectRef
from ray.exceptions import OutOfMemoryError, RayActorError, RayTaskError

from slimrl.cluster.placement import GpuBundle, PlacementPlan
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


class Supervisor:
    """Owns the watches: object refs that stay pending while a process lives.

    A watch becomes ready (with a message) or fails (with Ray's actor error) when its process dies.
    """

    def __init__(self, config: WatchdogConfig, nodes: Nodes | None = None) -> None:
        """`nodes` are the other nodes of the run, None if there are none."""
        self._config = config
        self._nodes = nodes
        self._watches: dict[ObjectRef, Callable[[Exception | None], str]] = {}
        self._event_handler: EventHandler | None = None
        self._report_suffix: Callable[[], str] = lambda: ""

    def watch(self, ref: ObjectRef, describe: Callable[[Exception | None], str]) -> None:
        """Watches `ref`; `describe(error)` makes the message from Ray's error if the ref fails."""
        self._watches[ref] = describe

    def set_event_handler(self, event_handler: EventHandler) -> None:
        """Makes every later wait handle its events."""
        self._event_handler = event_handler

    def set_report_suffix(self, report_suffix: Callable[[], str]) -> None:
        """Appends the text of `report_suffix()`, if any, to every report of a long wait."""
        self._report_suffix = report_suffix

    def stop_watching(self) -> None:
        """Drops every watch: from here on processes end on request."""
        self._watches.clear()
        self._event_handler = None
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
        pending = list(dict.fromkeys(refs))
        wait = Wait(self._config, self._with_silent_nodes(target), self._report_suffix)
        while pending:
            times = [wait.remaining(), PROGRESS_INTERVAL_S if progress else None]
            times += [NODE_INTERVAL_S] if self._nodes is not None else []
            timeout = min((time_s for time_s in times if time_s is not None), default=None)
            event_handler = self._event_handler
            events = [event_handler.events()] if event_handler is not None else []
            ready, _ = ray.wait([*self._watches, *events, *pending], num_returns=1, timeout=timeout)
            if progress:
                progress()
            if self._nodes is not None and (lost := self._nodes.lost()):
                raise ProcessDiedError(lost)
            if ready == events and event_handler is not None:
                self._handle_events(event_handler)
                continue
            if not ready:
                wait.check([index for index, ref in enumerate(refs) if ref in pending])
            for ref in ready:
                if ref in self._watches:
                    raise ProcessDiedError(self._message(ref))
                pending.remove(ref)
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

    def _message(self, ref: ObjectRef) -> str:
        describe = self._watches[ref]
        try:
            return str(ray.get(ref))
        except (RayActorError, OutOfMemoryError) as error:
            message = describe(_without_details(summarize_oom(error)))
            return f"{lost}: {message}" if (lost := self._lost_with(error)) else message

    def _lost_with(self, error: Exception) -> str:
        """The nodes that went down when this actor died; Ray learns of the node a moment after the actor."""
        deadline = time.monotonic() + NODE_DEATH_S
        while self._nodes is not None and isinstance(error, RayActorError):
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
            raise ProcessDiedError(self._death_message(error)) from error
        except RayTaskError as error:
            self._raise_underlying_death(error)
            raise error.cause from None

    def _death_message(self, error: RayActorError | OutOfMemoryError) -> str:
        """The dead actor's own watch fails in the same moment: its description names the process."""
        ready, _ = ray.wait(list(self._watches), num_returns=1, timeout=5.0) if self._watches else ([], [])
        return self._message(ready[0]) if ready else str(summarize_oom(error))

    def _raise_underlying_death(self, error: RayTaskError) -> None:
        """A peer's failed collective or request often follows from a death: raises for the death instead."""
        ready, _ = ray.wait(list(self._watches), num_returns=1, timeout=3.0) if self._watches else ([], [])
        if ready:
            raise ProcessDiedError(self._message(ready[0])) from error


def _without_details(error: Exception) -> Exception:
    """Ray's report of a dead actor without the lines with its class, ids and address."""
    sentences = [line for line in str(error).splitlines() if line.startswith("The actor")]
    return RuntimeError(" ".join(sentences)) if sentences and isinstance(error, RayActorError) else error


def _discard_results(refs: Sequence[ObjectRef]) -> None:
    """Fetches the results of abandoned calls when they arrive: Ray prints unfetched failures to stderr."""
    for ref in refs:
        ref.future()


logger = logging.getLogger("slimrl")

_HEAD = "node:__internal_head__"  # Ray's resource that only the head node has


@dataclasses.dataclass(frozen=True)
class ProbeIntervals:
    """Seconds. A node is reported within `silent_after_s + period_s + timeout_s` of its last response."""

    period_s: float = 5.0
    timeout_s: float = 5.0
    silent_after_s: float = 15.0


@dataclasses.dataclass(frozen=True)
class WatchedNode:
    """The address of its Ray, and the part of the run on it, such as "training ranks 2, 3".

    `required`: the run cannot continue without it.
    """

    address: str
    port: int
    what: str
    required: bool = True

    def __str__(self) -> str:
        return f"node {self.address} ({self.what})"


class NodeWatch:
    """Watches nodes from its own thread; created by `watch_nodes`. Implements `Nodes`."""

    def __init__(
        self, nodes: Sequence[WatchedNode], pace: ProbeIntervals = ProbeIntervals(), lost_after_s: float = 0.0
    ) -> None:
        """`lost_after_s` is --node-timeout-seconds, counted from the last response; 0: never."""
        self._nodes = nodes
        self._pace = pace
        self._lost_after_s = lost_after_s
        self._silent: dict[WatchedNode, float] = {}  # reported nodes, and when each responded last

    def __bool__(self) -> bool:
        """Whether there are nodes to watch."""
        return bool(self._nodes)

    def unreachable(self) -> str:
        """The unresponsive nodes, as text; "" if all respond."""
        now = time.monotonic()
        return "; ".join(_unreachable_message(node, now - last) for node, last in list(self._silent.items()))

    def lost(self) -> str:
        """The nodes that the run requires and that have been unresponsive for too long, as text; "" for none."""
        now, limit = time.monotonic(), self._lost_after_s
        silent = [(node, now - last) for node, last in list(self._silent.items())]
        lost = [f"{node} for {seconds:.0f} s" for node, seconds in silent if node.required and 0 < limit <= seconds]
        return (
            f"no answer on the network from {', '.join(lost)} (--node-timeout-seconds {limit:g}): look for a lost link"
            " or a machine that is down"
            if lost
            else ""
        )

    def dead(self) -> str:
        """The nodes whose Ray has ended, as text; "" for none."""
        alive = {(node["NodeManagerAddress"], node["NodeManagerPort"]) for node in ray.nodes() if node["Alive"]}
        gone = [str(node) for node in self._nodes if (node.address, node.port) not in alive]
        return f"{', '.join(gone)} is lost: the machine went down, or Ray ended on it" if gone else ""

    @contextlib.contextmanager
    def running(self) -> Iterator[NodeWatch]:
        """Watches until the end of the block; does nothing without nodes."""
        if not self._nodes:
            yield self
            return
        loop = asyncio.new_event_loop()
        tasks = [loop.create_task(self._watch(node)) for node in self._nodes]
        thread = threading.Thread(target=self._watch_all, args=(loop, tasks), name="node watch", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            loop.call_soon_threadsafe(lambda: [task.cancel() for task in tasks])
            thread.join(self._pace.timeout_s)

    def _watch_all(self, loop: asyncio.AbstractEventLoop, tasks: Sequence[asyncio.Task[None]]) -> None:
        with contextlib.closing(loop):
            loop.run_until_complete(asyncio.wait(tasks))

    async def _watch(self, node: WatchedNode) -> None:
        last = time.monotonic()
        while True:
            if await self._is_reachable(node):
                last = time.monotonic()
                if self._silent.pop(node, None) is not None:
                    logger.warning("node %s answers on the network again", node.address)
            elif time.monotonic() - last >= self._pace.silent_after_s and node not in self._silent:
                self._silent[node] = last
                logger.warning("%s", _unreachable_message(node, time.monotonic() - last))
            await asyncio.sleep(self._pace.period_s)

    async def _is_reachable(self, node: WatchedNode) -> bool:
        try:
            connecting = asyncio.open_connection(node.address, node.port)
            _, writer = await asyncio.wait_for(connecting, self._pace.timeout_s)
        except ConnectionRefusedError:
            return True
        except OSError:  # a timeout too
            return False
        writer.close()
        return True


def _unreachable_message(node: WatchedNode, seconds: float) -> str:
    return f"{node} has not answered on the network for {seconds:.0f} s: look for a lost link or a machine that is down"


def watch_nodes(
    gpus: Sequence[GpuBundle], plan: PlacementPlan, *, lost_after_s: float, replaceable: bool
) -> contextlib.AbstractContextManager[NodeWatch]:
    """Watches all nodes of the run except the driver's, for `lost_after_s` as in `NodeWatch`.

    `replaceable`: servers of other nodes take over the samples of a lost one (--use-fault-tolerance).
    """
    own = ray.get_runtime_context().get_node_id()
    return NodeWatch(nodes_of(gpus, plan, ray.nodes(), own, replaceable), lost_after_s=lost_after_s).running()


def nodes_of(
    gpus: Sequence[GpuBundle], plan: PlacementPlan, known: Iterable[dict], own: str, replaceable: bool = False
) -> list[WatchedNode]:
    """The nodes to watch: Ray's head and the nodes with a GPU of the run, except `own`; `known` are `ray.nodes()`.

    With `replaceable`, the run does not require nodes that have nothing but rollout GPUs.
    """
    rollout = "rollout GPUs"
    shares = (
        ("training ranks", plan.train),
        ("critic ranks", plan.critic),
        (rollout, plan.rollout),
        ("reward GPUs", plan.reward),
    )
    found = []
    for node in known:
        here = {index for index, gpu in enumerate(gpus) if gpu.node == node["NodeID"]}
        is_head = _HEAD in node["Resources"]
        if not (here or is_head) or node["NodeID"] == own:
            continue
        # indices within their kind, as ranks are numbered
        parts = [(name, [index - share.start for index in share if index in here]) for name, share in shares]
        parts = [(name, numbers) for name, numbers in parts if numbers]
        what = ["the head of Ray"] if is_head else []
        what += [f"{name} {', '.join(map(str, numbers))}" for name, numbers in parts]
        required = is_head or not replaceable or any(name != rollout for name, _ in parts)
        address = node["NodeManagerAddress"], node["NodeManagerPort"]
        found.append(WatchedNode(*address, "; ".join(what), required))
    return found
