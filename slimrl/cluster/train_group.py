"""All train workers as one: calls go to every rank, answers come from rank 0."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray

from slimrl.arguments import Arguments
from slimrl.cluster.launch import Launch, RankPlace
from slimrl.cluster.slots import TRAIN_SHARE, Slots, gpus_of_nodes
from slimrl.cluster.supervise import Supervisor
from slimrl.cluster.train_worker import TrainWorker
from slimrl.cluster.watchdog import Awaited, answers
from slimrl.cluster.whereabouts import of_ranks
from slimrl.weights.sync import EngineEndpoint

logger = logging.getLogger("slimrl")


class TrainGroup:
    """One worker per training slot. Every method blocks until all ranks have answered."""

    def __init__(self, args: Arguments, slots: Slots, supervisor: Supervisor, launch: Launch) -> None:
        """Starts the actors and watches them; the model is built by `initialize`."""
        self._supervisor = supervisor
        self._check_equal = args.check_weight_update_equal  # until the first push
        self._has_slept = False
        self.pushing: int | None = None  # the version of a push that has begun and is not complete
        self.last_push: dict[str, float] = {}  # its metrics by their full names
        ranks = slots.plan.train
        gpus = gpus_of_nodes()
        self.workers = [
            TrainWorker.options(
                **slots.options(slot, TRAIN_SHARE),
                runtime_env={"env_vars": launch.environment},
                name=f"train worker {rank}",
            ).remote(
                args,
                rank,
                len(ranks),
                launch,
                RankPlace(slots.slots[slot].gpu_id, gpus[slots.slots[slot].node]),
                Path.cwd(),
            )
            for rank, slot in enumerate(ranks)
        ]
        for rank, worker in enumerate(self.workers):
            supervisor.watch(worker.watch.remote(), lambda error, rank=rank: f"train worker rank {rank} died: {error}")
        for worker in self.workers:
            worker.call.remote("prepare")  # calls run in order: nobody has to wait for this one

    def _call(self, method: str, *arguments: Any, what: str) -> list[Any]:
        calls = [worker.call.remote(method, *arguments) for worker in self.workers]
        return self._supervisor.get(calls, _of(self.workers, what))

    def initialize(self) -> tuple[int, dict[str, Any] | None]:
        """Builds and loads the model on every rank; the first rollout id and the saved data state, if any."""
        first, what = self.workers[0], "the start of training"
        store = self._supervisor.get([first.open_store.remote()], _of([first], what))[0]
        starts = self._supervisor.get(
            [worker.initialize.remote(store) for worker in self.workers], _of(self.workers, what)
        )
        first_ids = {start.start_rollout_id for start in starts}
        if len(first_ids) != 1:
            raise RuntimeError(f"the train workers loaded different checkpoints: they start at {sorted(first_ids)}")
        return starts[0].start_rollout_id, starts[0].data_state

    def connect_engines(self, endpoints: list[EngineEndpoint]) -> None:
        """Prepares weight pushes to the engines."""
        self._call("connect_engines", endpoints, what="connecting training with the engines")

    def train(
        self, rollout_id: int, batches: list[ray.ObjectRef], progress: Callable[[], None] | None = None
    ) -> list[dict[str, float]]:
        """Trains on one rollout (`batches`: one object per data-parallel rank); metrics per optimizer step."""
        calls = [worker.train.remote(rollout_id, batches) for worker in self.workers]
        return self._supervisor.get(calls, _of(self.workers, f"train of rollout {rollout_id}"), progress)[0]

    def memory(self) -> list[ray.ObjectRef]:
        """References to the memory of every rank, GiB by name."""
        return [worker.memory.remote() for worker in self.workers]

    def progress(self) -> ray.ObjectRef:
        """A reference to how far rank 0 is in its training: (micro-batches begun, all)."""
        return self.workers[0].progress.remote()

    def sleep(self, *, keep_weights: bool) -> None:
        """Takes every rank off its device: gradients and optimizer state, and the weights unless they are kept."""
        given = self._call("sleep", keep_weights, what="training going to sleep")
        if not keep_weights and not self._has_slept:
            self._has_slept = True
            for rank, parts in enumerate(given):
                sizes = ", ".join(f"{part} {size / 2**20:,.1f} MiB" for part, size in parts.items())
                logger.info("training rank %d sleeps: %s are off its device", rank, sizes)

    def wake(self) -> None:
        """Brings every rank back onto its device."""
        self._call("wake", what="training waking up")

    def update_weights(self, version: int) -> dict[str, float]:
        """Pushes the weights under `version`; every engine reports it before this returns."""
        check_equal, self._check_equal = self._check_equal, False
        self.pushing = version
        report = self._call("update_weights", str(version), check_equal, what=f"the push of weights {version}")[0]
        self.pushing = None
        if check_equal:
            taken = report["check_seconds"]
            logger.info("the weights of every engine equal the trained ones, bit for bit (compared in %.1f s)", taken)
        self.last_push = {
            "perf/update_weights_wire_bytes": float(report["bytes"]),
            "perf/update_weights_bytes_per_second": report["bytes"] / (report["seconds"] - report["check_seconds"]),
        }
        return report

    def save(self, rollout_id: int, data_state: dict[str, Any]) -> str:
        """Writes the checkpoint that resumes after `rollout_id`; returns its folder."""
        calls = [
            worker.call.remote("save", rollout_id, data_state if rank == 0 else None)  # who writes it; it may be large
            for rank, worker in enumerate(self.workers)
        ]
        return self._supervisor.get(calls, _of(self.workers, f"save after rollout {rollout_id}"))[0]

    def close(self) -> None:
        """Leaves the process groups in order, then ends the actors."""
        self._call("close", what="the end of training")
        self._supervisor.forget()  # from here on ranks end because they are told to
        stops = [worker.stop.remote() for worker in self.workers]
        self._supervisor.get(stops, _of(self.workers, "the end of the training processes"))
        self.kill()

    def kill(self) -> None:
        """Ends the actors at once."""
        for worker in self.workers:
            ray.kill(worker)


def _of(workers: Sequence[ray.actor.ActorHandle], what: str) -> Awaited:
    """A wait for one call on each of these workers, in their order."""
    return Awaited(what, lambda pending: of_ranks(answers([worker.where.remote() for worker in workers]), pending))
