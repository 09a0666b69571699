"""The training ranks of a run: one group of actors per role, and policy and critic as one.

A call goes to every rank: `TrainGroup.train`, `TrainWorker.train` (Ray), `PolicyRank.train` (socket),
`MegatronTrainer`. Results come from rank 0.

Policy and critic on GPUs of their own work at the same time. The driver begins all calls of a rollout at once; columns
pass between the ranks through Ray's object store, one object per data-parallel rank:

    policy   log-probability passes -> advantages -> optimizer steps
                                       ^     |
                                values |     | targets
                                       |     v
    critic   pass for the values  -----+     +-----> optimizer steps
"""

from __future__ import annotations

import logging
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import ray
from ray import ObjectRef

from slimrl.arguments import Arguments
from slimrl.cluster.launch import Launch, RankLocation
from slimrl.cluster.placement import TRAIN_SHARE, GpuBundles, gpus_of_nodes
from slimrl.cluster.supervisor import Supervisor, TrainWorkerDiedError
from slimrl.cluster.training.train_messages import CRITIC, POLICY, TrainInit, TrainReady, TrainRole
from slimrl.cluster.training.train_worker import NotFiniteError, TrainWorker
from slimrl.cluster.watchdog import WaitTarget, format_rank_status, poll_actors
from slimrl.megatron.training.pass_plan import PassPlan
from slimrl.weights.update.topology import EngineEndpoint

if TYPE_CHECKING:
    from slimrl.megatron.offload import Part

_START = "the start of training"
_OFFLOADING, _ONLOADING = "offloading training", "onloading training"
_LAST_SAVES = "the end of the saves in the background"

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
        # once initialized: the leader of each data-parallel rank, and the data-parallel rank of each rank
        self.leaders: list[int] = []
        self.data_parallel_ranks: list[int] = []
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
        gpus_by_node = gpus_of_nodes()
        again = f", restart {self._restarts}" if self._restarts else ""
        self.workers = [
            TrainWorker.options(  # type: ignore[attr-defined]
                **gpus.options(gpu, TRAIN_SHARE),
                runtime_env={"env_vars": launch.environment},
                name=f"{role.worker} {rank}{again}",
            ).remote(
                TrainInit(args, rank, len(ranks), launch.machine.cuda, role),
                launch,
                RankLocation(gpus.gpus[gpu].gpu_id, gpus_by_node[gpus.gpus[gpu].node]),
                Path.cwd(),
            )
            for rank, gpu in enumerate(ranks)
        ]
        self._watches = [worker.watch.remote() for worker in self.workers]
        for rank, watch in enumerate(self._watches):
            self._supervisor.watch(watch, _death_of(f"{role.worker} rank {rank}"), TrainWorkerDiedError)
        for worker in self.workers:
            worker.prepare.remote()  # not awaited: calls run in order

    def restart(self, args: Arguments) -> int:
        """Replaces all ranks by new ones with the checkpoint of `args`; returns the first rollout to train on."""
        self._replace_workers(args)
        return self.initialize()[0]

    def _replace_workers(self, args: Arguments) -> None:
        self.forget()
        self.kill()
        self._restarts += 1
        self._start_workers(args)

    def _get(self, calls: list[ObjectRef], what: str) -> list[Any]:
        """The results of one call per worker."""
        return self._supervisor.get(calls, _target(self.workers, what, self._role))

    def initialize(self) -> tuple[int, dict[str, Any] | None]:
        """Builds and loads the model on every rank; returns the first rollout id and the saved data state, if any."""
        return self._started(self._get(self._starting(), _START))

    def _starting(self) -> list[ObjectRef]:
        """Begins `initialize`: a call per worker."""
        first = self.workers[0]
        store = self._supervisor.get([first.open_store.remote()], _target([first], _START, self._role))[0]
        return [worker.initialize.remote(store) for worker in self.workers]

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
        return starts[0].start_rollout_id, starts[0].data_state

    def connect_engines(self, endpoints: list[EngineEndpoint]) -> None:
        """Connects all ranks to the engines for weight updates."""
        calls = [worker.connect_engines.remote(endpoints) for worker in self.workers]
        self._get(calls, "connecting training with the engines")

    def train(
        self,
        rollout_id: int,
        batches: Sequence[list[ObjectRef]],
        progress: Callable[[], None] | None = None,
    ) -> list[dict[str, float]]:
        """Trains on one rollout, with the `batches` of a `RolloutResult`; metrics per optimizer step."""
        (own,) = batches
        calls = [worker.train.remote(rollout_id, own) for worker in self.workers]
        return self._supervisor.get(
            calls, _target(self.workers, f"training on rollout {rollout_id}", self._role), progress
        )[0]

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
        self._slept(self._get(self._sleeping(keep_weights), _OFFLOADING), keep_weights)

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
        self._get(self._waking(), _ONLOADING)

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


def _target(workers: Sequence[ray.actor.ActorHandle], what: str, role: TrainRole) -> WaitTarget:
    """The wait target of one call on each of these workers of a role, in order."""

    def describe(pending: Sequence[int]) -> str:
        return format_rank_status(poll_actors([worker.status.remote() for worker in workers]), pending, role.short)

    return WaitTarget(what, describe)


class PolicyAndCritic(TrainGroup):
    """The policy's group, whose methods also reach the critic's ranks where these have a part in it."""

    def __init__(self, args: Arguments, gpus: GpuBundles, supervisor: Supervisor, launch: Launch) -> None:
        super().__init__(args, gpus, supervisor, launch)
        self._critic = TrainGroup(args, gpus, supervisor, launch, CRITIC)
        self._critic_sleeps = False

    def _replace_workers(self, args: Arguments) -> None:
        for group in (self, self._critic):
            TrainGroup._replace_workers(group, args)  # the policy's first: it ends both
        self._critic_sleeps = False

    def _both(
        self,
        policy: list[ObjectRef],
        critic: list[ObjectRef],
        what: str,
        progress: Callable[[], None] | None = None,
    ) -> tuple[list[Any], list[Any]]:
        """The results of calls to the workers of both groups: each list has a multiple of its workers, in order."""
        found = self._supervisor.get([*critic, *policy], self._target(len(critic), len(policy), what), progress)
        return found[len(critic) :], found[: len(critic)]

    def _target(self, of_critic: int, of_policy: int, what: str) -> WaitTarget:
        groups = ((self._critic, range(of_critic)), (self, range(of_critic, of_critic + of_policy)))

        def describe(pending: Sequence[int]) -> str:
            parts = []
            for group, calls in groups:
                ranks = sorted({(call - calls.start) % len(group.workers) for call in pending if call in calls})
                parts.append(_target(group.workers, what, group._role).describe(ranks))
            return "; ".join(parts)

        return WaitTarget(what, describe)

    def initialize(self) -> tuple[int, dict[str, Any] | None]:
        """Builds and loads both models. Raises RuntimeError if they begin with different rollouts."""
        of_critic = self._critic._starting()
        of_policy, of_critic = self._both(self._starting(), of_critic, _START)
        first, _ = self._critic._started(of_critic)
        start, data_state = self._started(of_policy)
        if first != start:
            raise RuntimeError(f"the critic starts with rollout {first} and the policy with {start}")
        return start, data_state

    def train(
        self,
        rollout_id: int,
        batches: Sequence[list[ObjectRef]],
        progress: Callable[[], None] | None = None,
    ) -> list[dict[str, float]]:
        """Trains both on one rollout; metrics per optimizer step.

        If a value is not finite, the saves of both groups that are in the background are complete before it raises.
        """
        policy, critic = self.workers, self._critic.workers
        for_policy, for_critic = batches
        # two results each: the columns, which stay in the object store, and the end of the call
        values, with_values = zip(*(worker.values.remote(rollout_id, for_critic) for worker in critic), strict=True)
        scored = [worker.score.remote(rollout_id, for_policy) for worker in policy]
        targets, with_targets = zip(
            *(worker.targets.remote(_passed(values, self._critic, self, rank)) for rank, worker in enumerate(policy)),
            strict=True,
        )
        of_critic = [
            worker.train_values.remote(rollout_id, _passed(targets, self, self._critic, rank))
            for rank, worker in enumerate(critic)
        ]
        of_policy = [worker.train_scored.remote() for worker in policy]
        what = f"training on rollout {rollout_id}"
        try:
            found, of_values = self._both(
                [*scored, *with_targets, *of_policy], [*with_values, *of_critic], what, progress
            )
        except NotFiniteError:
            self._both(self._finishing_saves(), self._critic._finishing_saves(), _LAST_SAVES)
            raise
        steps, of_steps = found[-len(policy)], of_values[-len(critic)]
        return [critic_step | step for critic_step, step in zip(of_steps, steps, strict=True)]

    def memory(self) -> list[ObjectRef]:
        """References to the memory of every rank, GiB by name."""
        return super().memory() + self._critic.memory()

    def sleep(self, *, keep_weights: bool) -> None:
        """Offloads every rank; the critic's weights too, since no engine needs them."""
        of_critic = [] if self._critic_sleeps else self._critic._sleeping(keep_weights=False)
        self._critic_sleeps = True
        given, of_critic = self._both(self._sleeping(keep_weights), of_critic, _OFFLOADING)
        self._slept(given, keep_weights)
        if of_critic:
            self._critic._slept(of_critic, keep_weights=False)

    def wake(self) -> None:
        """Onloads every rank."""
        self._critic_sleeps = False
        self._both(self._waking(), self._critic._waking(), _ONLOADING)

    def save(self, rollout_id: int, data_state: dict[str, Any] | None) -> str:
        """Writes both checkpoints at the same time; returns the folder of the policy's.

        With --async-save both are written in the background. The policy's becomes complete after the critic's.
        """
        # the end of the policy's previous save removes old folders of the critic, too
        self._get(self._finishing_saves(), _LAST_SAVES)
        saved_with = uuid.uuid4().hex
        of_critic = [worker.save_critic.remote(rollout_id, saved_with) for worker in self._critic.workers]
        of_policy = self._saving(rollout_id, data_state, saved_with)
        return self._both(of_policy, of_critic, f"save after rollout {rollout_id}")[0][0]

    def leave(self) -> None:
        """Finishes saving and leaves the process groups; the critic first, on whose checkpoint the policy's waits."""
        self._critic.leave()
        super().leave()

    def stop(self) -> None:
        """Ends the ranks' processes."""
        self._critic.stop()
        super().stop()

    def kill(self) -> None:
        """Kills the actors."""
        self._critic.kill()
        super().kill()

    def forget(self) -> None:
        """Stops watching the ranks of both."""
        self._critic.forget()
        super().forget()


def _passed(columns: Sequence[ObjectRef], of: TrainGroup, to: TrainGroup, rank: int) -> list[ObjectRef]:
    """The columns that a rank of `to` needs, of those that the workers of `of` return.

    With equal data-parallel sizes both groups have the same batches; otherwise a rank finds its samples in all of them.
    """
    if len(of.leaders) == len(to.leaders):
        return [columns[of.leaders[to.data_parallel_ranks[rank]]]]
    return [columns[leader] for leader in of.leaders]
