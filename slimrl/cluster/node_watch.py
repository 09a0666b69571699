"""Names a node that is cut off from the network, long before Ray does, which takes a minute and more.

Asks every other node of the run, over and over, whether its Ray answers a connection. A connection that is refused is
an answer too: the machine is there, and Ray itself reports at once what ended on it. Only says what it sees: the run
goes on, for a network may come back.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import threading
import time
from collections.abc import Iterable, Iterator, Sequence

import ray

from slimrl.cluster.slots import Slot, SlotPlan

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


def watching(slots: Sequence[Slot], plan: SlotPlan) -> contextlib.AbstractContextManager[NodeWatch]:
    """The watch over all nodes of the run but the driver's own."""
    own = ray.get_runtime_context().get_node_id()
    return NodeWatch(nodes_of(slots, plan, ray.nodes(), own)).running()


def nodes_of(slots: Sequence[Slot], plan: SlotPlan, known: Iterable[dict], own: str) -> list[WatchedNode]:
    """What is to be watched: the head and the nodes that hold a slot, but for `own`; `known` are Ray's own words."""
    shares = (("training ranks", plan.train), ("rollout slots", plan.rollout), ("reward slots", plan.reward))
    found = []
    for node in known:
        here = {index for index, slot in enumerate(slots) if slot.node == node["NodeID"]}
        is_head = _HEAD in node["Resources"]
        if not (here or is_head) or node["NodeID"] == own:
            continue
        # counted from the first of their kind, as ranks are
        parts = [(name, [index - share.start for index in share if index in here]) for name, share in shares]
        what = ["the head of Ray"] if is_head else []
        what += [f"{name} {', '.join(map(str, numbers))}" for name, numbers in parts if numbers]
        found.append(WatchedNode(node["NodeManagerAddress"], node["NodeManagerPort"], "; ".join(what)))
    return found
