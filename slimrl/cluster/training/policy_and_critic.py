"""Policy and critic on GPUs of their own, as one group of training ranks.

They work at the same time. The driver begins all calls of a rollout at once; columns pass between the ranks through
Ray's object store, one object per data-parallel rank:

    policy   log-probability passes -> advantages -> optimizer steps
                                       ^     |
                                values |     | targets
                                       |     v
    critic   pass for the values  -----+     +-----> optimizer steps
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, Sequence
from typing import Any

from ray import ObjectRef

from slimrl.arguments import Arguments
from slimrl.cluster.launch import Launch
from slimrl.cluster.placement import GpuBundles
from slimrl.cluster.supervisor import Supervisor, TrainWorkerDiedError
from slimrl.cluster.training.train_group import LAST_SAVES, OFFLOADING, ONLOADING, START, TrainGroup, target_of
from slimrl.cluster.training.train_messages import CRITIC
from slimrl.cluster.training.train_worker import NotFiniteError
from slimrl.cluster.watchdog import WaitTarget


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
                parts.append(target_of(group.workers, what, group._role).describe(ranks))
            return "; ".join(parts)

        return WaitTarget(what, describe)

    def initialize(self) -> tuple[int, dict[str, Any] | None]:
        """Builds and loads both models. Raises RuntimeError if they begin with different rollouts."""
        of_critic = self._critic._starting()
        of_policy, of_critic = self._both(self._starting(), of_critic, START)
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
        values, with_values = zip(
            *(worker.values.remote(rollout_id, own) for worker, own in self._critic._with_batches(for_critic)),
            strict=True,
        )
        scored = [worker.score.remote(rollout_id, own) for worker, own in self._with_batches(for_policy)]
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
            self._both(self._finishing_saves(), self._critic._finishing_saves(), LAST_SAVES)
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
        given, of_critic = self._both(self._sleeping(keep_weights), of_critic, OFFLOADING)
        self._slept(given, keep_weights)
        if of_critic:
            self._critic._slept(of_critic, keep_weights=False)

    def wake(self) -> None:
        """Onloads every rank."""
        self._critic_sleeps = False
        self._both(self._waking(), self._critic._waking(), ONLOADING)

    def save(self, rollout_id: int, data_state: dict[str, Any] | None) -> str:
        """Writes both checkpoints at the same time; returns the folder of the policy's.

        With --async-save both are written in the background. The policy's becomes complete after the critic's.
        """
        # the end of the policy's previous save removes old folders of the critic, too
        self._get(self._finishing_saves(), LAST_SAVES)
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

    def find_lost(self) -> TrainWorkerDiedError | None:
        """A rank of either whose process has ended."""
        return super().find_lost() or self._critic.find_lost()

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
