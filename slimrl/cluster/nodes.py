"""The nodes of a run: what they must have in common, compared before the model is loaded, and whether they answer.

Packages and slimrl's own code must be equal on all nodes, checkpoints that are loaded must exist on each, and --save
must be the same folder everywhere: a checkpoint has a part of every rank (`check_nodes`).
SGLang detects by a name in shared memory which of its processes are on one machine, and connects them over loopback.
Containers of one host that share /dev/shm but not their network would hang without a message: see
`shared_memory_conflict`.
`NodeWatch` reports a node that is cut off from the network long before Ray does, which takes more than a minute. It
repeatedly connects to Ray on every other node of the run. The network may recover, so the run ends only after
--node-timeout-seconds, and only for a node that it cannot replace. A refused connection is a response of the machine,
without Ray: the run ends after `REFUSED_S`.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import hashlib
import logging
import os
import socket
import threading
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import slimrl
from slimrl.arguments import Arguments
from slimrl.cluster.network import node_address
from slimrl.cluster.placement import GpuBundle, PlacementPlan
from slimrl.cluster.supervisor import Supervisor
from slimrl.cluster.watchdog import WaitTarget
from slimrl.observability.summary import package_versions
from slimrl.processes import stale_resources
from slimrl.processes.folders import LOCK_NAME

logger = logging.getLogger("slimrl")

CODE = "slimrl's code"
ACCEPTS, REFUSES = "accepts", "refuses"
REFUSAL_TIMEOUT_S = 1.0
REFUSED_S = 10.0
SHARED_WITHIN_S = 5.0  # a network file system may show an older file for seconds
_HEAD = "node:__internal_head__"  # Ray's resource that only the head node has


class NodesDifferError(RuntimeError):
    """Nodes of the run differ in what they must have in common."""


@dataclasses.dataclass(frozen=True)
class CommonPath:
    """A path that a flag names. `lock` is the text of the run's lock file in a folder that all nodes must share."""

    flag: str
    path: str
    lock: str | None = None

    def problem(self) -> str:
        """Why this node cannot use it; "" if it can."""
        if self.lock is not None:
            deadline = time.monotonic() + SHARED_WITHIN_S
            while time.monotonic() < deadline:
                with contextlib.suppress(OSError):
                    if (Path(self.path) / LOCK_NAME).read_text() == self.lock:
                        return ""
                time.sleep(0.5)
            return (
                f"has another folder at {self.flag} {self.path} than the driver's node: a checkpoint needs the files of"
                " all ranks in one folder; give one on a file system that all nodes share"
            )
        if os.path.exists(self.path):
            return ""
        return f"has no {self.flag} {self.path}: copy it there, or give a path on a file system that all nodes share"


@dataclasses.dataclass(frozen=True)
class NodeState:
    """What one node has: versions by package, the hash of slimrl's code among them, and problems with paths."""

    address: str
    versions: dict[str, str]
    problems: list[str]


def check_nodes(args: Arguments, gpus: Iterable[GpuBundle], supervisor: Supervisor) -> None:
    """Compares every node with a GPU of the run with the driver's; raises NodesDifferError with all problems.

    Starts a process on each, which takes as long as the start of the rollout manager meanwhile.
    """
    own = ray.get_runtime_context().get_node_id()
    nodes = sorted({gpu.node for gpu in gpus} - {own})
    if not nodes:
        return
    paths = common_paths(args)
    checks = [_state_on(node, paths) for node in nodes]
    target = WaitTarget("the checks of the nodes", lambda _: "a node has not started a process yet")
    problems = differences(NodeState(node_address(), versions(), []), supervisor.get(checks, target))
    if problems:
        raise NodesDifferError("; ".join(problems))


async def check_node(args: Arguments, node: str) -> None:
    """Compares one node with this one, as `check_nodes` does, for servers only."""
    served = [path for path in common_paths(args) if path.flag == "--hf-checkpoint"]
    theirs = await _state_on(node, served)
    if problems := differences(NodeState(node_address(), versions(), []), [theirs]):
        raise NodesDifferError("; ".join(problems))


def _state_on(node: str, paths: Sequence[CommonPath]) -> ray.ObjectRef:
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    return _state_of_node.options(num_cpus=0, max_retries=0, scheduling_strategy=strategy).remote(paths)


@ray.remote
def _state_of_node(paths: Sequence[CommonPath]) -> NodeState:
    return NodeState(node_address(), versions(), [problem for path in paths if (problem := path.problem())])


def common_paths(args: Arguments) -> list[CommonPath]:
    """The folders of checkpoints that exist on this machine. Names of the Hugging Face Hub do not."""
    given = {
        "--hf-checkpoint": args.hf_checkpoint,
        "--ref-load": args.ref_load,
        "--load": args.load,
        "--critic-load": args.critic_load,
        "--opd-teacher-load": args.opd_teacher_load,
    }
    found = [CommonPath(flag, os.path.abspath(path)) for flag, path in given.items() if path and os.path.exists(path)]
    if args.save is not None:
        with contextlib.suppress(OSError):  # a run that saves nothing has no lock
            lock = (Path(args.save) / LOCK_NAME).read_text()
            found = [path for path in found if path.path != os.path.abspath(args.save)]
            found.append(CommonPath("--save", os.path.abspath(args.save), lock))
    return found


def versions() -> dict[str, str]:
    """`package_versions` and a hash of slimrl's code, which may differ between checkouts of one version."""
    root = Path(slimrl.__file__).parent
    digest = hashlib.blake2b(digest_size=6)
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return package_versions() | {CODE: digest.hexdigest()}


def differences(own: NodeState, others: Sequence[NodeState]) -> list[str]:
    """One sentence per node that differs from the driver's, and one per path that it cannot use."""
    found = []
    for node in others:
        theirs, ours = node.versions, own.versions
        names = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
        if names:
            pairs = [f"{name} {theirs.get(name, 'not installed')} (here {ours.get(name, 'none')})" for name in names]
            found.append(
                f"node {node.address} has other versions than the driver's node {own.address}: {', '.join(pairs)}:"
                " install the same lock and use the same checkout on every node"
            )
        found += [f"node {node.address} {problem}" for problem in node.problems]
    return found


@dataclasses.dataclass(frozen=True)
class NodeMark:
    """A node at `address`: the name of its mark in shared memory, and its network namespace (inode number)."""

    address: str
    name: str
    network: int


@contextlib.contextmanager
def place_node_mark(address: str, shared_memory: str = stale_resources.SHARED_MEMORY) -> Iterator[NodeMark]:
    """Places a mark in this node's shared memory for the length of the block."""
    with stale_resources.owned_folder("slimrl-node-", shared_memory) as folder:
        yield NodeMark(address, folder.name, _network())


def _network() -> int:
    """The inode number of the network namespace; 0 without /proc namespaces."""
    try:
        return os.stat("/proc/self/ns/net").st_ino
    except FileNotFoundError:
        return 0


def visible_marks(marks: Sequence[NodeMark], shared_memory: str = stale_resources.SHARED_MEMORY) -> set[str]:
    """The names of the marks that are in this node's shared memory."""
    return {mark.name for mark in marks if os.path.isdir(os.path.join(shared_memory, mark.name))}


def shared_memory_conflict(marks: Sequence[NodeMark], seen: Sequence[Collection[str]]) -> str | None:
    """The reason that these nodes cannot host one server, or None. `seen[i]` are the marks visible on node i."""
    for index, own in enumerate(marks):
        for other in marks[:index]:
            if other.name in seen[index] and other.network != own.network:
                return (
                    f"the nodes {other.address} and {own.address} share /dev/shm but not their network, as containers"
                    " of one host may: SGLang takes them for one machine and would hang; give each its own /dev/shm"
                    " (no --ipc=host, no common volume), or both the host's network"
                )
    return None


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
        self._refusing: dict[WatchedNode, float] = {}  # nodes without Ray, and since when

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
        refused = [node for node, since in list(self._refusing.items()) if node.required and now - since >= REFUSED_S]
        if refused:
            return _ended_message(refused)
        silent = [(node, now - last) for node, last in list(self._silent.items()) if node.required]
        lost = [f"{node} for {seconds:.0f} s" for node, seconds in silent if 0 < limit <= seconds]
        return (
            f"no answer on the network from {', '.join(lost)} (--node-timeout-seconds {limit:g}): look for a lost link"
            " or a machine that is down"
            if lost
            else ""
        )

    def dead(self) -> str:
        """The nodes whose Ray has ended, as text; "" for none. Ray itself takes many seconds to notice."""
        alive = {(node["NodeManagerAddress"], node["NodeManagerPort"]) for node in ray.nodes() if node["Alive"]}
        gone = [
            node for node in self._nodes if node.required and ((node.address, node.port) not in alive or _refuses(node))
        ]
        return _ended_message(gone) if gone else ""

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
