"""Watches the network between the nodes of a run, names one that is cut off, and lets spare nodes replace lost ones.

Ray notices such a node after more than a minute. `NodeWatch` repeatedly connects to Ray on every other node of the run.
The network may recover, so the run ends only after --node-timeout-seconds, and only for a node that it cannot replace.
A refused connection is a response of the machine, without Ray: the run ends after `REFUSED_S`. `SpareNodes` gives the
ranks and servers of a lost node the free GPUs of the Ray cluster.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence

import ray

from slimrl.arguments import Arguments
from slimrl.cluster.nodes.comparison import check_nodes
from slimrl.cluster.nodes.logs import NodeLogs
from slimrl.cluster.placement import GpuBundle, GpuBundles, PlacementPlan
from slimrl.cluster.ray_session import InsufficientGpusError
from slimrl.cluster.supervisor import Supervisor

logger = logging.getLogger("slimrl")

ACCEPTS, REFUSES = "accepts", "refuses"
REFUSAL_TIMEOUT_S = 1.0
REFUSED_S = 10.0
_HEAD = "node:__internal_head__"  # Ray's resource that only the head node has


@dataclasses.dataclass(frozen=True)
class ProbeIntervals:
    """Seconds. A node is reported within `silent_after_s + period_s + timeout_s` of its last response."""

    period_s: float = 2.5
    timeout_s: float = 2.5
    silent_after_s: float = 10.0


@dataclasses.dataclass(frozen=True)
class WatchedNode:
    """The address of its Ray, and the part of the run on it, such as "training ranks 2, 3".

    `required`: the run cannot continue without it. `replaceable_gpus`: its GPUs if all that it has, with or without
    training ranks (`trains`), may continue on a spare node with as many; else 0.
    """

    address: str
    port: int
    what: str
    required: bool = True
    replaceable_gpus: int = 0
    trains: bool = False
    node_id: str = dataclasses.field(default="", compare=False)

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
        self._refusing: dict[WatchedNode, float] = {}  # nodes without Ray, and since when
        self._tasks: dict[WatchedNode, asyncio.Task[None]] = {}
        self._loop: asyncio.AbstractEventLoop | None = None  # while it runs
        self._has_moved: Callable[[str], bool] | None = None  # where spare nodes are allowed
        self._training_may_move = False

    def __bool__(self) -> bool:
        """Whether there are nodes to watch."""
        return bool(self._nodes)

    def unreachable(self) -> str:
        """The unresponsive nodes, as text; "" if all respond."""
        now = time.monotonic()
        silent = [(node, last) for node, last in list(self._silent.items()) if node in self._nodes]
        return "; ".join(_unreachable_message(node, now - last) for node, last in silent)

    def lost(self) -> str:
        """The nodes that the run requires and that have been unresponsive for too long, as text; "" for none."""
        now, limit = time.monotonic(), self._lost_after_s
        refusing = list(self._refusing.items())
        refused = [node for node, since in refusing if now - since >= REFUSED_S and self._ends_run(node)]
        if refused:
            return _ended_message(refused)
        silent = [(node, now - last) for node, last in list(self._silent.items()) if 0 < limit <= now - last]
        lost = [f"{node} for {seconds:.0f} s" for node, seconds in silent if self._ends_run(node)]
        return (
            f"no answer on the network from {', '.join(lost)} (--node-timeout-seconds {limit:g}): look for a lost link"
            " or a machine that is down"
            if lost
            else ""
        )

    def _ends_run(self, node: WatchedNode) -> bool:
        """Whether the run ends without it, unless it has been replaced.

        Where a spare node is free, the run waits until Ray notices the loss. Then its GPUs are no longer free.
        """
        if node not in self._nodes:
            return False
        if not node.required or self._has_moved is None or not self._may_move(node):
            return node.required
        is_free = node.replaceable_gpus <= ray.available_resources().get("GPU", 0)
        return not is_free and not self._has_moved(node.node_id)

    def dead(self) -> str:
        """The nodes whose Ray has ended, as text; "" for none. Ray itself takes many seconds to notice."""
        gone = self._gone()
        return _ended_message(gone) if gone else ""

    def dead_are_replaceable(self) -> bool:
        """Whether spare nodes may replace all required nodes whose Ray has ended."""
        gone = self._gone()
        return bool(gone) and all(self._may_move(node) for node in gone)

    def _may_move(self, node: WatchedNode) -> bool:
        allowed = self._training_may_move if node.trains else self._has_moved is not None
        return allowed and node.replaceable_gpus > 0

    def _gone(self) -> list[WatchedNode]:
        alive = {(node["NodeManagerAddress"], node["NodeManagerPort"]) for node in ray.nodes() if node["Alive"]}
        return [
            node for node in self._nodes if node.required and ((node.address, node.port) not in alive or _refuses(node))
        ]

    def allow_spares(self, has_moved: Callable[[str], bool], *, of_training: bool) -> None:
        """From now on servers may continue on another node, and with `of_training` training ranks too.

        `has_moved` tells whether Ray has reserved other GPUs in the place of a node's, which has this id.
        """
        self._has_moved = has_moved
        self._training_may_move |= of_training

    def follow(self, gpus: Sequence[GpuBundle], plan: PlacementPlan, replaceable: bool) -> None:
        """Watches the nodes that have the GPUs of the run now, as `nodes_of` finds them, and no others."""
        nodes = nodes_of(gpus, plan, ray.nodes(), ray.get_runtime_context().get_node_id(), replaceable)
        self._nodes = nodes
        if self._loop is not None:
            self._loop.call_soon_threadsafe(self._watch_each, self._loop)

    @contextlib.contextmanager
    def running(self) -> Iterator[NodeWatch]:
        """Watches until the end of the block; does nothing without nodes."""
        if not self._nodes:
            yield self
            return
        self._loop = loop = asyncio.new_event_loop()
        thread = threading.Thread(target=self._watch_all, args=(loop,), name="node watch", daemon=True)
        thread.start()
        try:
            yield self
        finally:
            self._loop = None
            loop.call_soon_threadsafe(loop.stop)
            thread.join(self._pace.timeout_s)

    def _watch_all(self, loop: asyncio.AbstractEventLoop) -> None:
        with contextlib.closing(loop):
            loop.call_soon(self._watch_each, loop)
            loop.run_forever()
            for task in self._tasks.values():
                task.cancel()
            loop.run_until_complete(asyncio.gather(*self._tasks.values(), return_exceptions=True))

    def _watch_each(self, loop: asyncio.AbstractEventLoop) -> None:
        """Starts and ends tasks, so that each node has one; called in the loop's thread."""
        for node in set(self._tasks) - set(self._nodes):
            self._tasks.pop(node).cancel()
            self._silent.pop(node, None)
            self._refusing.pop(node, None)
        for node in set(self._nodes) - set(self._tasks):
            self._tasks[node] = loop.create_task(self._watch(node))

    async def _watch(self, node: WatchedNode) -> None:
        last = time.monotonic()
        while True:
            answer = await self._answer(node)
            if answer != REFUSES:
                self._refusing.pop(node, None)
            else:
                self._refusing.setdefault(node, time.monotonic())
            if answer is not None:
                last = time.monotonic()
                if self._silent.pop(node, None) is not None:
                    logger.warning("node %s answers on the network again", node.address)
            elif time.monotonic() - last >= self._pace.silent_after_s and node not in self._silent:
                self._silent[node] = last
                logger.warning("%s", _unreachable_message(node, time.monotonic() - last))
            await asyncio.sleep(self._pace.period_s)

    async def _answer(self, node: WatchedNode) -> str | None:
        """ACCEPTS, REFUSES, or None for no answer."""
        try:
            connecting = asyncio.open_connection(node.address, node.port)
            _, writer = await asyncio.wait_for(connecting, self._pace.timeout_s)
        except ConnectionRefusedError:
            return REFUSES
        except OSError:  # a timeout too
            return None
        writer.close()
        return ACCEPTS


def _ended_message(nodes: Sequence[WatchedNode]) -> str:
    return f"{', '.join(map(str, nodes))} is lost: the machine went down, or Ray ended on it"


def _refuses(node: WatchedNode) -> bool:
    """Whether the machine answers, and nothing listens at the port of its Ray."""
    try:
        socket.create_connection((node.address, node.port), REFUSAL_TIMEOUT_S).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        return False
    return False


def _unreachable_message(node: WatchedNode, seconds: float) -> str:
    return f"{node} has not answered on the network for {seconds:.0f} s: look for a lost link or a machine that is down"


def watch_nodes(
    gpus: Sequence[GpuBundle], plan: PlacementPlan, lost_after_s: float, replaceable: bool
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

    With `replaceable`, lost servers are replaced: the run does not require nodes that have nothing but rollout GPUs,
    and a spare node may take over any other servers, also together with training ranks.
    """
    rollout, training = "rollout GPUs", ("training ranks", "critic ranks")
    shares = (
        (training[0], plan.train),
        (training[1], plan.critic),
        (rollout, tuple(gpu for gpus in plan.engine_ranges for gpu in gpus)),
        ("GPUs of frozen models", tuple(gpu for gpus in plan.frozen_servers for gpu in gpus)),
        ("reward GPUs", plan.reward),
    )
    found = []
    for node in known:
        here = {index for index, gpu in enumerate(gpus) if gpu.node == node["NodeID"]}
        is_head = _HEAD in node["Resources"]
        if not (here or is_head) or node["NodeID"] == own:
            continue
        # indices within their kind, as ranks are numbered
        parts = [(name, [number for number, index in enumerate(share) if index in here]) for name, share in shares]
        parts = [(name, numbers) for name, numbers in parts if numbers]
        what = ["the head of Ray"] if is_head else []
        what += [f"{name} {', '.join(map(str, numbers))}" for name, numbers in parts]
        required = is_head or not replaceable or any(name != rollout for name, _ in parts)
        trains = any(name in training for name, _ in parts)
        may_move = required and not is_head and (replaceable or all(name in training for name, _ in parts))
        address = node["NodeManagerAddress"], node["NodeManagerPort"]
        gpus_to_move = len(here) if may_move else 0
        found.append(WatchedNode(*address, "; ".join(what), required, gpus_to_move, trains, node["NodeID"]))
    return found


class SpareNodes:
    """The free GPUs of the Ray cluster, for the training ranks and the servers of a node that is lost.

    Ray reserves them when it notices the loss. Its head is not replaced.
    """

    def __init__(
        self, args: Arguments, gpus: GpuBundles, supervisor: Supervisor, watch: NodeWatch, logs: NodeLogs
    ) -> None:
        self._args, self._gpus, self._supervisor = args, gpus, supervisor
        self._watch, self._logs = watch, logs

    def allow_of_servers(self) -> None:
        """From now on the loss of a node that has nothing but servers does not end the run, if it can be replaced."""
        self._watch.allow_spares(self._gpus.has_moved, of_training=False)

    def allow(self) -> None:
        """The same for a node with training ranks."""
        self._watch.allow_spares(self._gpus.has_moved, of_training=True)

    def follow_servers(self) -> None:
        """Watches the nodes on which servers were replaced, in the place of lost nodes that had nothing but servers."""
        try:
            found = self._gpus.follow(set(range(self._gpus.plan.total)) - self._gpus.beside_training())
        except InsufficientGpusError as error:
            logger.warning("the servers of a lost node are not replaced: %s", error)
            return
        if found:
            self._watch_nodes()
            self._copy_logs(found)
            logger.warning("servers continue on %s", ", ".join(sorted({gpu.node_ip for gpu in found})))

    def take_over(self, *, node_is_lost: bool) -> None:
        """Gives ranks and servers of lost nodes other GPUs, on nodes that are compared with the driver's, and watched.

        Raises InsufficientGpusError without such GPUs, NodesDifferError if their nodes cannot be used.
        """
        found = self._gpus.relocate(node_is_lost=node_is_lost)
        if not found:
            return
        self._watch_nodes()  # first: a wait would end with the lost node
        check_nodes(self._args, found, self._supervisor)
        self._copy_logs(found)
        logger.warning("training continues on %s", ", ".join(sorted({gpu.node_ip for gpu in found})))

    def _watch_nodes(self) -> None:
        self._watch.follow(self._gpus.gpus, self._gpus.plan, replaceable=self._args.use_fault_tolerance)

    def _copy_logs(self, found: Sequence[GpuBundle]) -> None:
        self._logs.follow({gpu.node for gpu in found})
        self._logs.wait()
