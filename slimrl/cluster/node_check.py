"""What the nodes of a run must have in common, compared before the model is loaded.

Packages and slimrl's own code must be equal on all nodes, paths must exist on each, and the folders of checkpoints must
be the same folder everywhere: a checkpoint has a part of every rank.
SGLang detects by a name in shared memory which of its processes are on one machine, and connects them over loopback.
Containers of one host that share /dev/shm but not their network would hang without a message: see
`shared_memory_conflict`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import slimrl
from slimrl.arguments import Arguments
from slimrl.cluster.network import node_address
from slimrl.cluster.placement import GpuBundle
from slimrl.cluster.supervisor import Supervisor
from slimrl.cluster.watchdog import WaitTarget
from slimrl.observability.summary import package_versions
from slimrl.processes import stale_resources
from slimrl.processes.folders import LOCK_NAME

CODE = "slimrl's code"


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
            with contextlib.suppress(OSError):
                if (Path(self.path) / LOCK_NAME).read_text() == self.lock:
                    return ""
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
    checks = [
        _state_of_node.options(
            num_cpus=0, max_retries=0, scheduling_strategy=NodeAffinitySchedulingStrategy(node, soft=False)
        ).remote(paths)
        for node in nodes
    ]
    target = WaitTarget("the checks of the nodes", lambda _: "a node has not started a process yet")
    problems = differences(NodeState(node_address(), versions(), []), supervisor.get(checks, target))
    if problems:
        raise NodesDifferError("; ".join(problems))


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
