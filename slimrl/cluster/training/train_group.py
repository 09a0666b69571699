"""The training ranks of a run: one group of actors per role (`policy_and_critic` has two as one).

A call goes to every rank: `TrainGroup.train`, `TrainWorker.train` (Ray), `PolicyRank.train` (socket),
`MegatronTrainer`. Results come from rank 0.

When a rank is lost, new ones take over the state of their data-parallel peers (`PeerState`). Ranks with the same part
of the model have the same weights, optimizer state and schedule. So the survivors still have the state of a lost rank
if one of them has the same part, and is at the end of the rollout that the run has trained on last: had it begun the
optimizer steps of the next one, its state would be that of no complete rollout. Otherwise the state is that of the
newest checkpoint.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import ray
from ray import ObjectRef
from ray.exceptions import RayError

from slimrl.arguments import Arguments
from slimrl.cluster.launch import Launch, RankLocation
from slimrl.cluster.placement import TRAIN_SHARE, GpuBundles, gpus_of_nodes
from slimrl.cluster.supervisor import Supervisor, TrainWorkerDiedError
from slimrl.cluster.training.train_messages import (
    POLICY,
    StateReadError,
    StateReport,
    TrainInit,
    TrainReady,
    TrainRole,
    why_not_shared,
)
from slimrl.cluster.training.train_worker import TrainWorker
from slimrl.cluster.watchdog import WaitTarget, format_rank_status, poll_actors
from slimrl.megatron.training.pass_plan import PassPlan
from slimrl.weights.update.topology import EngineEndpoint

if TYPE_CHECKING:
    from slimrl.megatron.offload import Part

START = "the start of training"
OFFLOADING, ONLOADING = "offloading training", "onloading training"
_ENDED = ("gone", "zombie")  # states of a process
LAST_SAVES = "the end of the saves in the background"

logger = logging.getLogger("slimrl")


def _death_of(worker: str) -> Callable[[Exception | None], str]:
    return lambda error: f"{worker} died: {error}"


class TrainGroup:
    """One worker per GPU of a role. Every method blocks until all ranks have answered, unless it says otherwise."""

    def __init__(
        self, args: Arguments, gpus: GpuBundles, supervisor: Supervisor, launch: Launch, role: TrainRole = POLICY
    ) -> None:
        """Starts the actors and watches them; the model is built by `initialize`."""
        if role == POLICY and not args.eval_only:
            logger.info("%s", PassPlan.from_args(args).sentence())
        self._role = role
        self._supervisor = supervisor
        self._has_slept = False
        # once initialized: the leader of each data-parallel rank; the data-parallel rank of each rank, and its part of
        # the model
        self.leaders: list[int] = []
        self.data_parallel_ranks: list[int] = []
        self.parts: list[tuple[int, ...]] = []
        self.updating_weights: int | None = None  # the version of a weight update that has begun and is not complete
        self.last_weight_update: dict[str, float] = {}  # its metrics by full name
        self._gpus, self._launch = gpus, launch
        self._restarts = 0
        self._start_workers(args)

    def _start_workers(self, args: Arguments) -> None:
        """Starts an actor per rank and watches it."""
        self._check_equal = args.check_weight_update_equal  # until the first weight update of these processes
        role, gpus, launch = self._role, self._gpus, self._launch
        ranks = gpus.plan.train if role == POLICY else gpus.plan.critic
        gpus_by_node, setup = gpus_of_nodes(), launch.actor_setup()
        again = f", restart {self._restarts}" if self._restarts else ""
        self.workers = [
            TrainWorker.options(  # type: ignore[attr-defined]
                **gpus.options(gpu, TRAIN_SHARE),
                **setup.options(),
                name=f"{role.worker} {rank}{again}",
            ).remote(
                TrainInit(args, rank, len(ranks), launch.machine.cuda, role),
                launch,
                RankLocation(gpus.gpus[gpu].gpu_id, gpus_by_node.get(gpus.gpus[gpu].node, 0)),
                setup,
            )
            for rank, gpu in enumerate(ranks)
        ]
        self._watches = [worker.watch.remote() for worker in self.workers]
        for rank, watch in enumerate(self._watches):
            self._supervisor.watch(watch, _death_of(f"{role.worker} rank {rank}"), TrainWorkerDiedError)
        for worker in self.workers:
            worker.prepare.remote()  # not awaited: calls run in order

    def restart(self, args: Arguments, states: Sequence[ObjectRef] | None = None) -> int:
        """Replaces all ranks by new ones with the checkpoint of `args`; returns the first rollout to train on.

        With `states` each begins with one of them, of `TrainWorker.read_state`, in place of the checkpoint.
        """
        self._replace_workers(args)
        if states is None:
            return self.initialize()[0]
        return self._started(self._get(self._starting(states), START))[0]

    def _replace_workers(self, args: Arguments) -> None:
        self.forget()
        self.kill()
        self._restarts += 1
        self._start_workers(args)

    def _get(self, calls: list[ObjectRef], what: str) -> list[Any]:
        """The results of one call per worker."""
        return self._supervisor.get(calls, target_of(self.workers, what, self._role))

    def initialize(self) -> tuple[int, dict[str, Any] | None]:
        """Builds and loads the model on every rank; returns the first rollout id and the saved data state, if any."""
        return self._started(self._get(self._starting(), START))

    def _starting(self, states: Sequence[ObjectRef | None] | None = None) -> list[ObjectRef]:
        """Begins `initialize`: a call per worker."""
        first = self.workers[0]
        store = self._supervisor.get([first.open_store.remote()], target_of([first], START, self._role))[0]
        states = [None] * len(self.workers) if states is None else states
        return [worker.initialize.remote(store, state) for worker, state in zip(self.workers, states, strict=True)]

    def _started(self, starts: list[TrainReady]) -> tuple[int, dict[str, Any] | None]:
        """Takes over the results of `_starting`; returns as `initialize`."""
        first_ids = {start.start_rollout_id for start in starts}
        if len(first_ids) != 1:
            raise RuntimeError(
                f"the {self._role.worker}s loaded different checkpoints: they start at {sorted(first_ids)}"
            )
        leaders = {start.data_parallel_rank: rank for rank, start in enumerate(starts) if start.leader}
        self.leaders = [leaders[replica] for replica in sorted(leaders)]
        self.data_parallel_ranks = [start.data_parallel_rank for start in starts]
        self.parts = [start.part for start in starts]
        return starts[0].start_rollout_id, starts[0].data_state

    def connect_engines(self, endpoints: list[EngineEndpoint]) -> None:
        """Connects all ranks to the engines for weight updates."""
        shared = ray.put(endpoints)  # pickled once, not once for each rank
        calls = [worker.connect_engines.remote(shared) for worker in self.workers]
        self._get(calls, "connecting training with the engines")

    def train(
        self,
        rollout_id: int,
        batches: Sequence[list[ObjectRef]],
        progress: Callable[[], None] | None = None,
    ) -> list[dict[str, float]]:
        """Trains on one rollout, with the `batches` of a `RolloutResult`; metrics per optimizer step."""
        (own,) = batches
        calls = [worker.train.remote(rollout_id, batch) for worker, batch in self._with_batches(own)]
        return self._supervisor.get(
            calls, target_of(self.workers, f"training on rollout {rollout_id}", self._role), progress
        )[0]

    def _with_batches(self, batches: list[ObjectRef]) -> Iterator[tuple[ray.actor.ActorHandle, list[ObjectRef]]]:
        """Each worker with its batch: references to all, passed to all, would be the square of their number."""
        for worker, replica in zip(self.workers, self.data_parallel_ranks, strict=True):
            yield worker, [batches[replica]]

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
        self._slept(self._get(self._sleeping(keep_weights), OFFLOADING), keep_weights)

    def _sleeping(self, keep_weights: bool) -> list[ObjectRef]:
        return [worker.sleep.remote(keep_weights) for worker in self.workers]

    def _slept(self, given: list[dict[Part, int]], keep_weights: bool) -> None:
        """Logs the first time what every rank has given back."""
        if not keep_weights and not self._has_slept:
            self._has_slept = True
            for rank, parts in enumerate(given):
                sizes = ", ".join(f"{part} {size / 2**20:,.1f} MiB" for part, size in parts.items())
                name = "training rank" if self._role == POLICY else self._role.rank
                logger.info("%s %d is offloaded: %s are off its device", name, rank, sizes)

    def wake(self) -> None:
        """Onloads every rank."""
        self._get(self._waking(), ONLOADING)

    def _waking(self) -> list[ObjectRef]:
        return [worker.wake.remote() for worker in self.workers]

    def update_weights(self, version: int) -> dict[str, float]:
        """Sends the weights as `version`; returns when every engine reports it."""
        check_equal = self._check_equal
        self.updating_weights = version
        calls = [worker.update_weights.remote(str(version), check_equal) for worker in self.workers]
        report = self._get(calls, f"the weight update {version}")[0]
        self.updating_weights, self._check_equal = None, False
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
        return self._get(self._saving(rollout_id, data_state), f"save after rollout {rollout_id}")[0]

    def _saving(
        self, rollout_id: int, data_state: dict[str, Any] | None, saved_with: str | None = None
    ) -> list[ObjectRef]:
        """Begins a save: a call per worker. `saved_with` as in `MegatronTrainer.save`."""
        return [
            # rank 0 writes the data state; it may be large
            worker.save.remote(rollout_id, data_state if rank == 0 else None, saved_with)
            for rank, worker in enumerate(self.workers)
        ]

    def _finishing_saves(self) -> list[ObjectRef]:
        """Begins to wait for the saves in the background: a call per worker."""
        return [worker.finish_saves.remote() for worker in self.workers]

    def close(self) -> None:
        """Leaves the process groups in order, then ends the actors."""
        self.leave()
        self.end()

    def end(self) -> None:
        """Ends the actors after `leave`."""
        self._supervisor.stop_watching()  # from here on ranks end on request
        self.stop()
        self.kill()

    def find_lost(self) -> TrainWorkerDiedError | None:
        """A rank whose process has ended; asks all of them. The watch of a busy node may report it seconds later."""
        for status in poll_actors([worker.status.remote() for worker in self.workers]):
            if status is not None and status.state in _ENDED:
                where = f"{self._role.worker} rank {status.rank} on {status.node}"
                return TrainWorkerDiedError(f"{where} has ended; its log: {status.log}")
        return None

    def forget(self) -> None:
        """Stops watching the ranks: one of them is lost, and all are to be replaced."""
        self._supervisor.unwatch(self._watches)

    def leave(self) -> None:
        """Finishes saving and leaves the process groups."""
        self._get([worker.close.remote() for worker in self.workers], "the end of training")

    def stop(self) -> None:
        """Ends the ranks' processes."""
        self._get([worker.stop.remote() for worker in self.workers], "the end of the training processes")

    def kill(self) -> None:
        """Kills the actors."""
        for worker in self.workers:
            ray.kill(worker)


def target_of(workers: Sequence[ray.actor.ActorHandle], what: str, role: TrainRole) -> WaitTarget:
    """The wait target of one call on each of these workers of a role, in order."""

    def describe(pending: Sequence[int]) -> str:
        return format_rank_status(poll_actors([worker.status.remote() for worker in workers]), pending, role.short)

    return WaitTarget(what, describe)


READ_TIMEOUT_S = 600.0
# of a state at the same time on its host: tensors, their bytes, those of the actor, those in Ray's object store
STATE_COPIES = 4


class NoPeerStateError(RuntimeError):
    """The survivors do not have the state of every rank; the message says why."""


@dataclasses.dataclass(frozen=True)
class PeerState:
    """The state before rollout `first`: for every new rank that of the rank in `sources`, in Ray's object store.

    `saved` is the newest checkpoint that a survivor knows to be complete.
    """

    first: int
    states: list[ObjectRef]
    sources: list[int]
    saved: int | None

    @property
    def sentence(self) -> str:
        """Where the state comes from."""
        ranks = sorted(set(self.sources))
        one = f"rank {ranks[0]}" if len(ranks) == 1 else f"ranks {', '.join(map(str, ranks))}"
        return f"the state of their data-parallel peers in memory ({one})"


def take_over(group: TrainGroup, args: Arguments, first: int) -> PeerState:
    """The state before rollout `first`, from the surviving ranks of `group`, which can only be replaced afterwards.

    Raises NoPeerStateError.
    """
    if (why := why_not_shared(args)) is not None:
        raise NoPeerStateError(why)
    reports: list[StateReport | None] = poll_actors([worker.report_state.remote() for worker in group.workers])
    sources = choose_sources(group.parts, reports, first)
    check_memory([report for rank in sorted(set(sources)) if (report := reports[rank]) is not None])
    reads = {source: group.workers[source].read_state.remote() for source in sorted(set(sources))}
    ends = [end for _, end in reads.values()]
    ready, _ = ray.wait(ends, num_returns=len(ends), timeout=READ_TIMEOUT_S)
    if len(ready) < len(ends):
        raise NoPeerStateError(f"a surviving rank did not hand over its state within {READ_TIMEOUT_S:.0f} s")
    try:
        ray.get(ready)
    except StateReadError as error:
        raise NoPeerStateError(f"a surviving rank could not hand over its state: {error}") from error
    except RayError as error:
        raise NoPeerStateError("a surviving rank ended while it handed over its state") from error
    saved = max((report.saved for report in reports if report is not None and report.saved is not None), default=None)
    return PeerState(first, [reads[source][0] for source in sources], sources, saved)


def choose_sources(parts: Sequence[tuple[int, ...]], reports: Sequence[StateReport | None], first: int) -> list[int]:
    """The rank whose state each rank gets: a survivor with the same part of the model.

    All ranks with a part get the state of the same one, so that memory has each part once.
    `parts` names the part of the model of every rank, `reports` are None for lost ranks. Raises NoPeerStateError if no
    survivor with some part has the whole state before rollout `first`.
    """
    whole = [rank for rank, report in enumerate(reports) if report is not None and report.first == first]
    sources = []
    for rank, part in enumerate(parts):
        if not (usable := [other for other in whole if parts[other] == part]):
            raise NoPeerStateError(_why_none(rank, parts, reports, first))
        sources.append(usable[0])
    return sources


def check_memory(reports: Sequence[StateReport]) -> None:
    """Raises NoPeerStateError if the states of these ranks do not fit into the free memory of a host."""
    for host in sorted({report.host for report in reports}):
        here = [report for report in reports if report.host == host]
        needed, free = STATE_COPIES * sum(report.nbytes for report in here), min(report.free for report in here)
        if needed > free:
            raise NoPeerStateError(
                f"handing over {needed / STATE_COPIES / 2**30:.1f} GiB of state takes {needed / 2**30:.1f} GiB of host"
                f" memory, and {host} has {free / 2**30:.1f} GiB"
            )


def _why_none(rank: int, parts: Sequence[tuple[int, ...]], reports: Sequence[StateReport | None], first: int) -> str:
    for other, report in enumerate(reports):
        if report is None or parts[other] != parts[rank]:
            continue
        if report.first is None:
            return f"rank {other} {report.why}"
        return f"rank {other} has trained up to rollout {report.first - 1}, the run up to {first - 1}"
    return f"no rank that is left has the part of the model of rank {rank}"
