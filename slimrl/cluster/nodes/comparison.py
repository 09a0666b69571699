"""What the nodes of a run must have in common, compared before the model is loaded.

Packages and slimrl's own code must be equal on all nodes, checkpoints that are loaded must exist on each, and folders
that all nodes write to or read from must be the same everywhere: a checkpoint has a part of every rank (`check_nodes`).
SGLang detects by a name in shared memory which of its processes are on one machine, and connects them over loopback.
Containers of one host that share /dev/shm but not their network would hang without a message: see
`shared_memory_conflict`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import os
import tempfile
import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

import slimrl
from slimrl.arguments import Arguments
from slimrl.cluster.launch import node_address
from slimrl.cluster.placement import GpuBundle
from slimrl.cluster.supervisor import Supervisor
from slimrl.cluster.watchdog import WaitTarget
from slimrl.observability.summary import package_versions
from slimrl.processes import stale_resources
from slimrl.processes.files import LOCK_NAME

CODE = "slimrl's code"
SHARED_WITHIN_S = 5.0  # a network file system may show an older file for seconds
_OF_ALL_RANKS = "a checkpoint needs the files of all ranks in one folder"


class NodesDifferError(RuntimeError):
    """Nodes of the run differ in what they must have in common."""


@dataclasses.dataclass(frozen=True)
class SharedFile:
    """A file of the driver, in a folder that all nodes must share."""

    path: Path
    text: str
    reason: str  # why the folder must be the same one


@dataclasses.dataclass(frozen=True)
class CommonPath:
    """A path that a flag names; with `shared`, the folder must be the driver's."""

    flag: str
    path: str
    shared: SharedFile | None = None

    def problem(self) -> str:
        """Why this node cannot use it; "" if it can."""
        if self.shared is not None:
            deadline = time.monotonic() + SHARED_WITHIN_S
            while time.monotonic() < deadline:
                with contextlib.suppress(OSError):
                    if self.shared.path.read_text() == self.shared.text:
                        return ""
                time.sleep(0.5)
            return (
                f"has another folder at {self.flag} {self.path} than the driver's node: {self.shared.reason}; give one"
                " on a file system that all nodes share"
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
    target = WaitTarget("the checks of the nodes", lambda _: "a node has not started a process yet")
    with common_paths(args) as paths:
        checks = [_state_on(node, paths) for node in nodes]
        problems = differences(NodeState(node_address(), versions(), []), supervisor.get(checks, target))
    if problems:
        raise NodesDifferError("; ".join(problems))


async def check_node(args: Arguments, node: str, model: tuple[str, str] | None = None) -> None:
    """Compares one node with this one, as `check_nodes` does, for servers only.

    Those of the policy, or of another `model`: the flag that names it, and its folder.
    """
    with common_paths(args) as paths:
        served = [path for path in paths if path.flag in ("--hf-checkpoint", "--update-weight-disk-dir")]
        if model is not None:
            flag, folder = model
            served = [CommonPath(flag, os.path.abspath(folder))] if os.path.exists(folder) else []
        theirs = await _state_on(node, served)
    own = NodeState(node_address(), versions(), [])
    if problems := differences(own, [theirs], whose="the rollout manager's"):
        raise NodesDifferError("; ".join(problems))


def _state_on(node: str, paths: Sequence[CommonPath]) -> ray.ObjectRef:
    strategy = NodeAffinitySchedulingStrategy(node, soft=False)
    return _state_of_node.options(num_cpus=0, max_retries=0, scheduling_strategy=strategy).remote(paths)


@ray.remote
def _state_of_node(paths: Sequence[CommonPath]) -> NodeState:
    with ThreadPoolExecutor(max(len(paths), 1)) as pool:  # each may wait for a file system
        problems = list(filter(None, pool.map(CommonPath.problem, paths)))
    return NodeState(node_address(), versions(), problems)


@contextlib.contextmanager
def common_paths(args: Arguments) -> Iterator[list[CommonPath]]:
    """The folders of checkpoints that exist on this machine, and those that all nodes must share.

    Names of the Hugging Face Hub are not among them. Within the block, each shared folder has a file to find it by: the
    lock of a run that saves in it, else a hidden file that is removed afterwards.
    """
    loaded = {
        "--hf-checkpoint": args.hf_checkpoint,
        "--ref-load": args.ref_load,
        "--load": args.load,
        "--critic-load": args.critic_load,
        "--opd-teacher-load": args.opd_teacher_load,
    }
    written = {"--update-weight-disk-dir": (args.update_weight_disk_dir, "engines read there what training writes")}
    if args.save is not None and (Path(args.save) / LOCK_NAME).exists():  # else the run saves nothing
        written |= {"--save": (args.save, _OF_ALL_RANKS), "--critic-save": (args.critic_save, _OF_ALL_RANKS)}
    with contextlib.ExitStack() as files:
        shared = []
        for flag, (folder, reason) in written.items():
            file = None if folder is None else files.enter_context(shared_file(Path(folder), reason))
            if folder is not None and file is not None:
                shared.append(CommonPath(flag, os.path.abspath(folder), file))
        those = {path.path for path in shared}
        found = [
            CommonPath(flag, os.path.abspath(path)) for flag, path in loaded.items() if path and os.path.exists(path)
        ]
        yield [path for path in found if path.path not in those] + shared


@contextlib.contextmanager
def shared_file(folder: Path, reason: str) -> Iterator[SharedFile | None]:
    """A file in `folder`, or in its nearest parent that exists, which shows it to other nodes; None if unwritable."""
    with contextlib.suppress(OSError):
        lock = folder / LOCK_NAME
        yield SharedFile(lock, lock.read_text(), reason)
        return
    there = next(path for path in (folder, *folder.absolute().parents) if path.is_dir())
    if not os.access(there, os.W_OK):
        yield None  # the run itself says so when it writes
        return
    with tempfile.NamedTemporaryFile("w", prefix=".slimrl_shared_", dir=there) as file:
        os.fchmod(file.fileno(), 0o644)
        file.write(file.name)
        file.flush()
        yield SharedFile(Path(file.name), file.name, reason)


def versions() -> dict[str, str]:
    """`package_versions` and a hash of slimrl's code, which may differ between checkouts of one version."""
    root = Path(slimrl.__file__).parent
    digest = hashlib.blake2b(digest_size=6)
    for path in sorted(root.rglob("*.py")):
        digest.update(f"{path.relative_to(root)}\0".encode() + path.read_bytes())
    return package_versions() | {CODE: digest.hexdigest()}


def differences(own: NodeState, others: Sequence[NodeState], whose: str = "the driver's") -> list[str]:
    """One sentence per node that differs from the `own` one, that of `whose` process, and one per unusable path."""
    found = []
    for node in others:
        theirs, ours = node.versions, own.versions
        names = sorted(name for name in {*ours, *theirs} if ours.get(name) != theirs.get(name))
        if names:
            pairs = [f"{name} {theirs.get(name, 'not installed')} (here {ours.get(name, 'none')})" for name in names]
            found.append(
                f"node {node.address} has other versions than {whose} node {own.address}: {', '.join(pairs)}:"
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
