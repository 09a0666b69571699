"""Copies the logs of other nodes into the run folder of the driver's node while they are written.

Every process of a run writes its log to `logs/` of the run folder on its own node. Where that folder is not on a file
system that the nodes share, a reader process on each other node returns what was appended, and the driver appends it to
the file of the same name here: one folder has the logs of all ranks and servers, also after the loss of a node.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import queue
import threading
import time
from collections.abc import Iterable, Iterator
from pathlib import Path

import ray
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slimrl.cluster.launch import node_address
from slimrl.cluster.nodes.comparison import CommonPath, SharedFile, shared_file

logger = logging.getLogger("slimrl")

PERIOD_S = 2.0
TIMEOUT_S, SLICE_S = 5.0, 0.5
START_S = 60.0  # of the readers
BYTES_PER_READ = 2**22  # of one file
FAILURES = 3  # in a row, before a node is given up


class LogFolder:
    """The folder of logs on one node; `sizes` are bytes by file name."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def sizes(self) -> dict[str, int]:
        """Of the logs that are there; the folder need not exist."""
        return {path.name: path.stat().st_size for path in sorted(self._folder.glob("*.log"))}

    def read(self, offsets: dict[str, int]) -> dict[str, bytes]:
        """The bytes of each log after its offset, at most BYTES_PER_READ; only logs with any or without an offset."""
        found = {}
        for name, size in self.sizes().items():
            offset = offsets.get(name, 0)
            if size > offset or name not in offsets:
                with open(self._folder / name, "rb") as file:
                    file.seek(offset)
                    found[name] = file.read(BYTES_PER_READ)
        return found

    def append(self, news: dict[str, bytes]) -> None:
        """Appends to the logs by name."""
        self._folder.mkdir(parents=True, exist_ok=True)
        for name, added in news.items():
            with open(self._folder / Path(name).name, "ab") as file:
                file.write(added)


class _LogReader:
    """Reads the logs of its node. A folder that is the driver's has nothing to copy."""

    def __init__(self, folder: Path, shared: SharedFile | None) -> None:
        there = CommonPath("logs", str(folder), shared)
        self._logs = None if shared is None or not there.problem() else LogFolder(folder)

    def begin(self) -> tuple[str, dict[str, int]] | None:
        """The node's address and the logs of earlier runs there; None if the folder is the driver's."""
        return None if self._logs is None else (node_address(), self._logs.sizes())

    def read(self, offsets: dict[str, int]) -> dict[str, bytes]:
        """`LogFolder.read`."""
        return {} if self._logs is None else self._logs.read(offsets)


@dataclasses.dataclass
class _Source:
    """A node whose logs are copied."""

    reader: ray.actor.ActorHandle
    address: str
    offsets: dict[str, int]
    failures: int = 0


class NodeLogs:
    """Follows the logs of other nodes from a thread of its own; created by `collected_logs`."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._here = LogFolder(folder)
        self._starting: dict[ray.ObjectRef, ray.actor.ActorHandle] = {}
        self._new: queue.SimpleQueue[_Source] = queue.SimpleQueue()
        self._sources: list[_Source] = []  # of the thread alone
        self._files = contextlib.ExitStack()
        self._shared: SharedFile | None = None  # by which readers find the folder
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def follow(self, nodes: Iterable[str]) -> None:
        """Starts readers on the nodes (Ray's ids), without this node; `wait` ends their start.

        A node that another process of the run follows is left to that one.
        """
        others = sorted(set(nodes) - {ray.get_runtime_context().get_node_id()})
        if not others:
            return
        self._folder.mkdir(parents=True, exist_ok=True)
        if self._shared is None:
            shown = shared_file(self._folder, "the logs of all processes are there")
            self._shared = self._files.enter_context(shown)
        actor = ray.remote(num_cpus=0, max_restarts=0)(_LogReader)
        for node in others:
            where = NodeAffinitySchedulingStrategy(node, soft=False)
            named = actor.options(scheduling_strategy=where, name=f"reader of {self._folder} on {node}")
            with contextlib.suppress(ValueError):  # the name is taken
                reader = named.remote(self._folder, self._shared)
                self._starting[reader.begin.remote()] = reader

    def wait(self) -> None:
        """Waits until the readers have begun. The run's processes start on these nodes afterwards: the logs that a
        reader finds when it begins are those of earlier runs.
        """
        starting, self._starting = self._starting, {}
        ready, _ = ray.wait(list(starting), num_returns=len(starting), timeout=START_S) if starting else ([], [])
        for begun, reader in starting.items():
            source = None
            with contextlib.suppress(ray.exceptions.RayError):  # a node that is lost at once is named by others
                source = ray.get(begun) if begun in ready else None
            if source is None:
                ray.kill(reader)
            else:
                self._new.put(_Source(reader, *source))
        if self._thread is None and not self._new.empty():
            self._thread = threading.Thread(target=self._copy_until_end, name="node logs", daemon=True)
            self._thread.start()

    def close(self) -> None:
        """Copies the rest and ends the readers; waits for no node that did not answer the last time."""
        self._ended.set()
        if self._thread is not None:
            self._thread.join(3 * TIMEOUT_S)
        for reader in self._starting.values():
            ray.kill(reader)
        self._files.close()

    def _copy_until_end(self) -> None:
        try:
            while not self._ended.wait(PERIOD_S):
                self._copy()
            while self._copy(last=True):
                pass
        finally:
            for source in self._sources:
                ray.kill(source.reader)

    def _copy(self, *, last: bool = False) -> bool:
        """Appends what is new on all nodes, at the `last` time on those that answer; whether a node had something."""
        while not self._new.empty():
            self._sources.append(self._new.get())
        sources = [source for source in self._sources if not (last and source.failures)]
        asked = {source.reader.read.remote(source.offsets): source for source in sources}
        answered, deadline = set[ray.ObjectRef](), time.monotonic() + TIMEOUT_S
        while (waiting := [ref for ref in asked if ref not in answered]) and time.monotonic() < deadline:
            if self._ended.is_set() and not last:
                return True  # they are asked once more, for the last time
            answered.update(ray.wait(waiting, num_returns=len(waiting), timeout=SLICE_S)[0])
        found = False
        for answer, source in asked.items():
            try:
                news = ray.get(answer, timeout=0) if answer in answered else None
            except ray.exceptions.RayError:
                news = None
            if news is None:
                source.failures += 1
                continue
            source.failures = 0
            self._here.append(news)
            for name, added in news.items():
                source.offsets[name] = source.offsets.get(name, 0) + len(added)
                found |= bool(added)
        for source in [source for source in self._sources if source.failures >= FAILURES]:
            self._sources.remove(source)
            ray.kill(source.reader)
            logger.warning(
                "the logs of node %s are no longer copied: it does not answer; what it wrote since is in %s there",
                source.address,
                self._folder,
            )
        return found


@contextlib.contextmanager
def collected_logs(folder: Path) -> Iterator[NodeLogs]:
    """`folder` has the logs of all nodes that `NodeLogs.follow` is called with, until the end of the block."""
    logs = NodeLogs(folder)
    try:
        yield logs
    finally:
        logs.close()
