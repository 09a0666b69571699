"""The Ray actor around one training rank: it starts the rank's process on its slot, forwards calls and watches it."""

from __future__ import annotations

import dataclasses
import os
import pickle
import socket
import sys
import time
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import ray
from ray import ObjectRef

from slimrl.arguments import Arguments
from slimrl.cluster import working_folder
from slimrl.cluster.launch import Launch, RankPlace
from slimrl.cluster.meeting import Meeting
from slimrl.cluster.rank_protocol import RankSetup, RankStart
from slimrl.cluster.whereabouts import RankWhere
from slimrl.platform.decisions import rank_environment
from slimrl.platform.machine import network_of, usable_cores
from slimrl.processes import ManagedProcess, importable, stacks
from slimrl.processes.memory import resident_gib

POLL_INTERVAL_S = 0.25
STOP_TIMEOUT_S = 10.0


class RankFailedError(RuntimeError):
    """A call failed inside a rank; the text holds the rank's own traceback."""


@ray.remote(concurrency_groups={"watch": 1, "progress": 1})
class TrainWorker:
    """One rank of training. Calls run one after another; `watch` is pending beside them."""

    def __init__(
        self, args: Arguments, rank: int, world_size: int, launch: Launch, place: RankPlace, folder: Path
    ) -> None:
        """Starts the rank's process on the GPU of `place`, in `folder`."""
        working_folder.enter(folder)
        network = network_of(launch.reach.here())
        node = dataclasses.replace(launch.machine, gpus=place.gpus_of_node, cores=usable_cores(), network=network)
        decided = rank_environment(
            node,
            launch.run,
            gpu=place.gpu,
            cumem=launch.nccl_cumem,
            given=args.train_env_vars,
            inherited=os.environ | launch.driver,
        )
        self._rank = rank
        self._reach = launch.reach
        self._progress = (0, 0)
        self._device_memory: dict[str, float] = {}
        self._method: str | None = None
        self._last_sign = time.monotonic()
        ours, theirs = socket.socketpair()
        self._connection = Connection(ours.detach())
        self._process = ManagedProcess(
            [sys.executable, "-m", "slimrl.cluster.rank_process", str(theirs.fileno())],
            name=f"train worker rank {rank}",
            log_path=Path(args.run_dir).absolute() / "logs" / f"train-rank{rank}.log",
            environment=decided | importable(os.environ | decided),
            pass_fds=(theirs.fileno(),),
        )
        self._process.start()
        theirs.close()
        self._connection.send_bytes(pickle.dumps(RankSetup(args, rank, world_size, launch.machine.cuda)))

    @ray.method(concurrency_group="watch")
    def watch(self) -> str:
        """Pending while the rank lives; then a message with its exit code and last log lines."""
        while (code := self._process.poll()) is None:
            time.sleep(POLL_INTERVAL_S)
        process = self._process
        return (
            f"train worker rank {self._rank} (pid {process.pid} on {ray.util.get_node_ip_address()}) died with exit"
            f" code {code}; last lines of {process.log_path}:\n{process.last_log_lines(20)}"
        )

    @ray.method(concurrency_group="progress")
    def progress(self) -> tuple[int, int]:
        """Micro-batches begun by the running `train`, and all of them, over its passes."""
        return self._progress

    @ray.method(concurrency_group="progress")
    def memory(self) -> dict[str, float]:
        """GiB by name: resident memory of the rank and of its actor, and the rank's device memory after its last call.

        See `platform.device_memory`.
        """
        name = f"rank{self._rank}"
        device = {f"{name}_{kind}": amount for kind, amount in self._device_memory.items()}
        actor = resident_gib(with_children=False)
        return {f"{name}_rss_gib": resident_gib(self._process.pid), f"{name}_actor_rss_gib": actor, **device}

    @ray.method(concurrency_group="progress")
    def where(self) -> RankWhere:
        """What the rank does and where in the code it is; the stacks of its threads are in its log then."""
        pid = stacks.guarded(self._process.pid)
        log = self._process.log_path
        return RankWhere(
            rank=self._rank,
            pid=pid,
            node=ray.util.get_node_ip_address(),
            method=self._method,
            micro_batch=self._progress[0],
            micro_batches=self._progress[1],
            seconds=time.monotonic() - self._last_sign,
            state="gone" if pid is None else stacks.state(pid),
            frames=[] if pid is None else stacks.frames_of(pid, log),
            log=os.fspath(log),
        )

    def open_store(self) -> Meeting:
        """Where all ranks meet; for rank 0."""
        return self.call("open_store", None if self._reach.one_machine else self._reach.here())

    def initialize(self, meeting: Meeting) -> RankStart:
        """Builds and loads the model in the rank."""
        self._start: RankStart = self.call("initialize", meeting)
        return self._start

    def train(self, rollout_id: int, batches: list[ObjectRef]) -> list[dict[str, float]]:
        """Trains on this rank's share, which stays pickled until the rank opens it."""
        return self.call("train", rollout_id, ray.get(batches[self._start.data_parallel_rank]))

    def call(self, method: str, *arguments: Any) -> Any:
        """Calls `Rank.<method>` in the rank's process. Raises RankFailedError with the rank's traceback."""
        self._progress, self._method, self._last_sign = (0, 0), method, time.monotonic()
        try:
            self._connection.send_bytes(pickle.dumps((method, arguments)))
            kind, value = pickle.loads(self._connection.recv_bytes())
            while kind in ("progress", "memory"):
                if kind == "progress":
                    self._progress, self._last_sign = value, time.monotonic()
                else:
                    self._device_memory = value
                kind, value = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise RankFailedError(f"train worker rank {self._rank} ended during {method}") from error
        self._method = None
        if kind == "error":
            summary, trace = value
            raise RankFailedError(f"train worker rank {self._rank}, {method}: {summary}\n{trace}")
        return value

    def stop(self) -> None:
        """Ends the rank: it leaves when its actor hangs up."""
        self._connection.close()
        self._process.stop(timeout_s=STOP_TIMEOUT_S)
