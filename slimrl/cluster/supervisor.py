"""`ray.get` that watches every process of the run: the first death ends the wait with one message that names it.

`brief` makes one sentence of Ray's page about a process that it ended because the machine ran out of memory.
`NodeWatch` names a node that is cut off from the network long before Ray does, which takes a minute and more. It asks
every other node of the run, over and over, whether its Ray answers a connection. A refused connection is an answer too:
the machine is up, and Ray reports at once what ended on it. The watch only reports; the run continues, because a
network may come back.
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
_MEND = (
    "give the machine more memory, or start fewer or smaller processes on it (--dry-run shows what each GPU needs);"
    " Ray's limit is RAY_memory_usage_threshold"
)


class OutOfMemorySummary(RuntimeError):
    """Ray ended a process for the machine's memory."""


def brief(error: Exception) -> Exception:
    """`error`, or OutOfMemorySummary with a sentence where it is Ray's page about the machine's memory.

    The numbers are left out where Ray says them in other words.
    """
    text = str(error)
    if not any(sign in text for sign in _SIGNS):
        return error
    node, process = _NODE.search(text), _PROCESS.search(text)
    who = f"process {process[1]}, which had {float(process[2]):.1f} GB," if process else "it"
    where = f": {float(node[2]):.1f} of the {float(node[3]):.1f} GB of machine {node[1]} were in use" if node else ""
    return OutOfMemorySummary(f"Ray ended {who} for want of memory{where}; {_MEND}")


PROGRESS_INTERVAL_S = 0.5


class ProcessDiedError(RuntimeError):
    """A train worker, a server, the router or the rollout manager ended before its time."""


class EventHandler(Protocol):
    """Something that may have to be done while the driver waits."""

    def news(self) -> ObjectRef:
        """Ready when there is something to do; the same until `act`."""

    def act(self) -> None:
        """Does it; may wait for calls of its own."""


class Supervisor:
    """Owns the watches: object refs that stay pending while a process lives.

    A watch becomes ready (with a message) or fails (with Ray's actor error) when its process dies.
    """

    def __init__(self, patience: WatchdogConfig, silent_nodes: Callable[[], str] = str) -> None:
        """`silent_nodes` tells which nodes do not answer on the network, in words."""
        self._patience = patience
        self._silent_nodes = silent_nodes
        self._watches: dict[ObjectRef, Callable[[Exception | None], str]] = {}
        self._attendant: EventHandler | None = None
        self._bystanders: Callable[[], str] = lambda: ""

    def watch(self, ref: ObjectRef, describe: Callable[[Exception | None], str]) -> None:
        """Watches `ref`; `describe(error)` makes the message from Ray's error where the ref holds no text."""
        self._watches[ref] = describe

    def set_event_handler(self, attendant: EventHandler) -> None:
        """From now on every wait heeds its news."""
        self._attendant = attendant

    def ask_too(self, bystanders: Callable[[], str]) -> None:
        """Every report of a long wait ends with what this says of those that are not waited for themselves, or ""."""
        self._bystanders = bystanders

    def stop_watching(self) -> None:
        """Drops every watch: from here on processes end because they are told to."""
        self._watches.clear()
        self._attendant = None
        self._bystanders = lambda: ""

    def get(
        self, refs: Sequence[ObjectRef], awaited: WaitTarget, progress: Callable[[], None] | None = None
    ) -> list[Any]:
        """`ray.get`, ended early by the first failure among `refs` or the watched processes; `awaited` says what for.

        Raises ProcessDiedError for a death, the task's own exception for a failed call, and WatchdogTimeoutError.
        """
        with contextlib.ExitStack() as stack:
            stack.callback(_read_by_nobody, refs)
            self._wait(refs, awaited, progress)
            stack.pop_all()
        return ray.get(list(refs))

    def _wait(self, refs: Sequence[ObjectRef], awaited: WaitTarget, progress: Callable[[], None] | None) -> None:
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

    def _with_silent_nodes(self, awaited: WaitTarget) -> WaitTarget:
        """A wait whose report begins with the nodes that keep everybody else waiting."""

        def describe(places: Sequence[int]) -> str:
            return "; ".join(filter(None, [self._silent_nodes(), awaited.describe(places)]))

        return WaitTarget(awaited.what, describe)

    def _act(self, attendant: EventHandler) -> None:
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


logger = logging.getLogger("slimrl")

_HEAD = "node:__internal_head__"  # a resource that Ray gives the head alone


@dataclasses.dataclass(frozen=True)
class Pace:
    """Seconds. A node is named at the latest `silent_after_s + period_s + timeout_s` after its last answer."""

    period_s: float = 5.0
    timeout_s: float = 5.0
    silent_after_s: float = 15.0


@dataclasses.dataclass(frozen=True)
class WatchedNode:
    """Where its Ray listens, and what of the run is there: "training ranks 2, 3"."""

    address: str
    port: int
    what: str


class NodeWatch:
    """Watches nodes from a thread of its own; made by `watching`."""

    def __init__(self, nodes: Sequence[WatchedNode], pace: Pace = Pace()) -> None:
        self._nodes = nodes
        self._pace = pace
        self._silent: dict[WatchedNode, float] = {}  # those that are named, and when each answered last

    def silent(self) -> str:
        """The nodes that are named now, in words; empty where all answer."""
        now = time.monotonic()
        return "; ".join(_silence(node, now - last) for node, last in list(self._silent.items()))

    @contextlib.contextmanager
    def running(self) -> Iterator[NodeWatch]:
        """Watches until the end of the block; without nodes there is nothing to do."""
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
            if await self._answers(node):
                last = time.monotonic()
                if self._silent.pop(node, None) is not None:
                    logger.warning("node %s answers on the network again", node.address)
            elif time.monotonic() - last >= self._pace.silent_after_s and node not in self._silent:
                self._silent[node] = last
                logger.warning("%s", _silence(node, time.monotonic() - last))
            await asyncio.sleep(self._pace.period_s)

    async def _answers(self, node: WatchedNode) -> bool:
        try:
            connecting = asyncio.open_connection(node.address, node.port)
            _, writer = await asyncio.wait_for(connecting, self._pace.timeout_s)
        except ConnectionRefusedError:
            return True
        except OSError:  # a timeout too
            return False
        writer.close()
        return True


def _silence(node: WatchedNode, seconds: float) -> str:
    return (
        f"node {node.address} ({node.what}) has not answered on the network for {seconds:.0f} s: look for a lost link"
        " or a machine that is down; Ray ends what is on it when it notices, after a minute or more"
    )


def watching(gpus: Sequence[GpuBundle], plan: PlacementPlan) -> contextlib.AbstractContextManager[NodeWatch]:
    """The watch over all nodes of the run but the driver's own."""
    own = ray.get_runtime_context().get_node_id()
    return NodeWatch(nodes_of(gpus, plan, ray.nodes(), own)).running()


def nodes_of(gpus: Sequence[GpuBundle], plan: PlacementPlan, known: Iterable[dict], own: str) -> list[WatchedNode]:
    """What is to be watched: the head and the nodes that hold a GPU, but for `own`; `known` are Ray's own words."""
    shares = (("training ranks", plan.train), ("rollout GPUs", plan.rollout), ("reward GPUs", plan.reward))
    found = []
    for node in known:
        here = {index for index, gpu in enumerate(gpus) if gpu.node == node["NodeID"]}
        is_head = _HEAD in node["Resources"]
        if not (here or is_head) or node["NodeID"] == own:
            continue
        # counted from the first of their kind, as ranks are
        parts = [(name, [index - share.start for index in share if index in here]) for name, share in shares]
        what = ["the head of Ray"] if is_head else []
        what += [f"{name} {', '.join(map(str, numbers))}" for name, numbers in parts if numbers]
        found.append(WatchedNode(node["NodeManagerAddress"], node["NodeManagerPort"], "; ".join(what)))
    return found
