"""All training ranks as one group, and the Ray actor of each: starts its process on its GPU, forwards calls, watches.

A call goes to every rank: `TrainGroup.train`, `TrainWorker.train` (Ray), `Rank.train` (socket), `MegatronTrainer`.
Results come from rank 0.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import pickle
import socket
import sys
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, TypeVarTuple

import ray
from ray import ObjectRef

from slimrl.arguments import Arguments
from slimrl.cluster import ray_session
from slimrl.cluster.launch import Launch, RankLocation, Rendezvous
from slimrl.cluster.placement import TRAIN_SHARE, GpuBundles, gpus_of_nodes
from slimrl.cluster.supervisor import Supervisor
from slimrl.cluster.training.train_messages import TrainInit, TrainReady, send_call
from slimrl.cluster.training.train_process import Rank
from slimrl.cluster.watchdog import RankStatus, WaitTarget, format_rank_status, poll_actors
from slimrl.megatron.training.pass_plan import PassPlan
from slimrl.platform.launch_env import network_of, rank_environment, usable_cores
from slimrl.processes import ManagedProcess, importable, process_info
from slimrl.processes.process_info import resident_gib
from slimrl.weights.update.topology import EngineEndpoint

if TYPE_CHECKING:
    from slimrl.megatron.offload import Part

POLL_INTERVAL_S = 0.25
STOP_TIMEOUT_S = 10.0

Inputs = TypeVarTuple("Inputs")
Result = TypeVar("Result")


class RankFailedError(RuntimeError):
    """A call failed inside a rank; the text holds the rank's own traceback."""


@ray.remote(concurrency_groups={"watch": 1, "progress": 1})
class TrainWorker:
    """One training rank. Calls run one after another; `watch` stays pending concurrently."""

    def __init__(
        self, args: Arguments, rank: int, world_size: int, launch: Launch, location: RankLocation, folder: Path
    ) -> None:
        """Starts the rank's process on the GPU at `location`, in `folder`."""
        ray_session.enter(folder)
        network = network_of(launch.bind.local_address())
        node = dataclasses.replace(launch.machine, gpus=location.gpus_of_node, cores=usable_cores(), network=network)
        decided = rank_environment(
            node,
            launch.run,
            gpu=location.gpu,
            cumem=launch.nccl_cumem,
            given=args.train_env_vars,
            inherited=os.environ | launch.driver,
        )
        self._rank = rank
        self._bind = launch.bind
        self._progress = (0, 0)
        self._device_memory: dict[str, float] = {}
        self._method: str | None = None
        self._last_message = time.monotonic()
        ours, theirs = socket.socketpair()
        self._connection = Connection(ours.detach())
        self._process = ManagedProcess(
            [sys.executable, "-m", "slimrl.cluster.training.train_process", str(theirs.fileno())],
            name=f"train worker rank {rank}",
            log_path=Path(args.run_dir).absolute() / "logs" / f"train-rank{rank}.log",
            environment=decided | importable(os.environ | decided),
            pass_fds=(theirs.fileno(),),
        )
        self._process.start()
        theirs.close()
        self._connection.send_bytes(pickle.dumps(TrainInit(args, rank, world_size, launch.machine.cuda)))

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
        """(started, total) micro-batches of the running `train`, over all its passes."""
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
    def status(self) -> RankStatus:
        """The rank's current call and position in the code; also dumps the stacks of its threads to its log."""
        pid = process_info.worker_pid(self._process.pid)
        log = self._process.log_path
        return RankStatus(
            rank=self._rank,
            pid=pid,
            node=ray.util.get_node_ip_address(),
            method=self._method,
            micro_batch=self._progress[0],
            micro_batches=self._progress[1],
            seconds=time.monotonic() - self._last_message,
            state="gone" if pid is None else process_info.state(pid),
            frames=[] if pid is None else process_info.frames_of(pid, log),
            log=os.fspath(log),
        )

    def open_store(self) -> Rendezvous:
        """Opens the rendezvous of all ranks; called on rank 0."""
        return self._call(Rank.open_store, None if self._bind.one_machine else self._bind.local_address())

    def prepare(self) -> None:
        """Imports the modules for training."""
        self._call(Rank.prepare)

    def initialize(self, rendezvous: Rendezvous) -> TrainReady:
        """Builds and loads the model in the rank."""
        self._start = self._call(Rank.initialize, rendezvous)
        return self._start

    def connect_engines(self, endpoints: list[EngineEndpoint]) -> None:
        """Connects to these engines for weight updates, replacing earlier connections."""
        self._call(Rank.connect_engines, endpoints)

    def train(self, rollout_id: int, batches: list[ObjectRef]) -> list[dict[str, float]]:
        """Trains on this rank's batch, which is passed on pickled."""
        batch: bytes = ray.get(batches[self._start.data_parallel_rank])
        return self._call(Rank.train, rollout_id, pickle.PickleBuffer(batch))

    def evaluate_held_out(self) -> dict[str, dict[str, float]]:
        """The metrics of every set of held-out pairs, by name."""
        return self._call(Rank.evaluate_held_out)

    def sleep(self, keep_weights: bool) -> dict[Part, int]:
        """Offloads the rank, with or without its weights; returns the offloaded bytes by part."""
        return self._call(Rank.sleep, keep_weights)

    def wake(self) -> None:
        """Onloads the rank."""
        self._call(Rank.wake)

    def update_weights(self, version: str, check_equal: bool) -> dict[str, float]:
        """Sends the weights to every engine."""
        return self._call(Rank.update_weights, version, check_equal)

    def save(self, rollout_id: int, data_state: dict[str, Any] | None) -> str:
        """Writes the checkpoint of `rollout_id`, with the data state on rank 0; returns its folder."""
        return self._call(Rank.save, rollout_id, data_state)

    def close(self) -> None:
        """Leaves the process groups."""
        self._call(Rank.close)

    def _call(self, method: Callable[[Rank, *Inputs], Result], *arguments: *Inputs) -> Result:
        """Calls `method` in the rank's process. Raises RankFailedError with the rank's traceback."""
        name = method.__name__
        self._progress, self._method, self._last_message = (0, 0), name, time.monotonic()
        try:
            send_call(self._connection, method, arguments)
            kind, value = pickle.loads(self._connection.recv_bytes())
            while kind in ("progress", "memory"):
                if kind == "progress":
                    self._progress, self._last_message = value, time.monotonic()
                else:
                    self._device_memory = value
                kind, value = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError) as error:
            raise RankFailedError(f"train worker rank {self._rank} ended during {name}") from error
        self._method = None
        if kind == "error":
            summary, trace = value
            raise RankFailedError(f"train worker rank {self._rank}, {name}: {summary}\n{trace}")
        return value

    def stop(self) -> None:
        """Ends the rank: its process exits when the connection closes."""
        self._connection.close()
        self._process.stop(timeout_s=STOP_TIMEOUT_S)


logger = logging.getLogger("slimrl")


def _death_of(rank: int) -> Callable[[Exception | None], str]:
    return lambda error: f"train worker rank {rank} died: {error}"


class TrainGroup:
    """One worker per training GPU. Every method blocks until all ranks have answered."""

    def __init__(self, args: Arguments, gpus: GpuBundles, supervisor: Supervisor, launch: Launch) -> None:
        """Starts the actors and watches them; the model is built by `initialize`."""
        if not args.eval_only:
            logger.info("%s", PassPlan.from_args(args).sentence())
        self._supervisor = supervisor
        self._check_equal = args.check_weight_update_equal  # until the first weight update
        self._has_slept = False
        self.updating_weights: int | None = None  # the version of a weight update that has begun and is not complete
        self.last_weight_update: dict[str, float] = {}  # its metrics by full name
        ranks = gpus.plan.train
        gpus_by_node = gpus_of_nodes()
        self.workers = [
            TrainWorker.options(  # type: ignore[attr-defined]
                **gpus.options(gpu, TRAIN_SHARE),
                runtime_env={"env_vars": launch.environment},
                name=f"train worker {rank}",
            ).remote(
                args,
                rank,
                len(ranks),
                launch,
                RankLocation(gpus.gpus[gpu].gpu_id, gpus_by_node[gpus.gpus[gpu].node]),
                Path.cwd(),
            )
            for rank, gpu in enumerate(ranks)
        ]
        for rank, worker in enumerate(self.workers):
            supervisor.watch(worker.watch.remote(), _death_of(rank))
        for worker in self.workers:
            worker.prepare.remote()  # not awaited: calls run in order

    def _get(self, calls: list[ObjectRef], what: str) -> list[Any]:
        """The results of one call per worker."""
        return self._supervisor.get(calls, _target(self.workers, what))

    def initialize(self) -> tuple[int, dict[str, Any] | None]:
        """Builds and loads the model on every rank; returns the first rollout id and the saved data state, if any."""
        first, what = self.workers[0], "the start of training"
        store = self._supervisor.get([first.open_store.remote()], _target([first], what))[0]
        starts = self._get([worker.initialize.remote(store) for worker in self.workers], what)
        first_ids = {start.start_rollout_id for start in starts}
        if len(first_ids) != 1:
            raise RuntimeError(f"the train workers loaded different checkpoints: they start at {sorted(first_ids)}")
        return starts[0].start_rollout_id, starts[0].data_state

    def connect_engines(self, endpoints: list[EngineEndpoint]) -> None:
        """Connects all ranks to the engines for weight updates."""
        calls = [worker.connect_engines.remote(endpoints) for worker in self.workers]
        self._get(calls, "connecting training with the engines")

    def train(
        self, rollout_id: int, batches: list[ray.ObjectRef], progress: Callable[[], None] | None = None
    ) -> list[dict[str, float]]:
        """Trains on one rollout (`batches`: one object per data-parallel rank); metrics per optimizer step."""
        calls = [worker.train.remote(rollout_id, batches) for worker in self.workers]
        return self._supervisor.get(calls, _target(self.workers, f"training on rollout {rollout_id}"), progress)[0]

    def evaluate_held_out(self) -> dict[str, dict[str, float]]:
        """The metrics of every set of held-out pairs, by name."""
        return self._get([worker.evaluate_held_out.remote() for worker in self.workers], "evaluating held-out data")[0]

    def memory(self) -> list[ray.ObjectRef]:
        """References to the memory of every rank, GiB by name."""
        return [worker.memory.remote() for worker in self.workers]

    def progress(self) -> ray.ObjectRef:
        """A reference to rank 0's progress: (started, total) micro-batches."""
        return self.workers[0].progress.remote()

    def sleep(self, *, keep_weights: bool) -> None:
        """Offloads every rank: gradients and optimizer state, and the weights unless `keep_weights`."""
        given = self._get([worker.sleep.remote(keep_weights) for worker in self.workers], "offloading training")
        if not keep_weights and not self._has_slept:
            self._has_slept = True
            for rank, parts in enumerate(given):
                sizes = ", ".join(f"{part} {size / 2**20:,.1f} MiB" for part, size in parts.items())
                logger.info("training rank %d is offloaded: %s are off its device", rank, sizes)

    def wake(self) -> None:
        """Onloads every rank."""
        self._get([worker.wake.remote() for worker in self.workers], "onloading training")

    def update_weights(self, version: int) -> dict[str, float]:
        """Sends the weights as `version`; returns when every engine reports it."""
        check_equal, self._check_equal = self._check_equal, False
        self.updating_weights = version
        calls = [worker.update_weights.remote(str(version), check_equal) for worker in self.workers]
        report = self._get(calls, f"the weight update {version}")[0]
        self.updating_weights = None
        if check_equal:
            seconds = report["check_seconds"]
            logger.info("the weights of every engine equal the trained ones, bit for bit (compared in %.1f s)", seconds)
        self.last_weight_update = {
            "perf/update_weights_wire_bytes": float(report["bytes"]),
            "perf/update_weights_bytes_per_second": report["bytes"] / (report["seconds"] - report["check_seconds"]),
        }
        return report

    def save(self, rollout_id: int, data_state: dict[str, Any] | None) -> str:
        """Writes the checkpoint that resumes after `rollout_id`; returns its folder."""
        calls = [
            worker.save.remote(rollout_id, data_state if rank == 0 else None)  # rank 0 writes it; it may be large
            for rank, worker in enumerate(self.workers)
        ]
        return self._get(calls, f"save after rollout {rollout_id}")[0]

    def close(self) -> None:
        """Leaves the process groups in order, then ends the actors."""
        self._get([worker.close.remote() for worker in self.workers], "the end of training")
        self._supervisor.stop_watching()  # from here on ranks end on request
        stops = [worker.stop.remote() for worker in self.workers]
        self._get(stops, "the end of the training processes")
        self.kill()

    def kill(self) -> None:
        """Kills the actors."""
        for worker in self.workers:
            ray.kill(worker)


def _target(workers: Sequence[ray.actor.ActorHandle], what: str) -> WaitTarget:
    """The wait target of one call on each of these workers, in order."""
    return WaitTarget(
        what, lambda pending: format_rank_status(poll_actors([worker.status.remote() for worker in workers]), pending)
    )
