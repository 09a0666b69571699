"""The driver's side of the rollout manager: waits for it, its engines' memory, and the cleanup after a failed run.

After a failure or an interrupt, `RolloutManagerCleanup` removes the run's servers from an external router, so that the
next run can use it, and names external servers that may hold a partial weight update. A run that ends normally needs
neither.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from types import TracebackType

import ray

from slimrl.arguments import Arguments
from slimrl.cluster.supervisor import Supervisor
from slimrl.cluster.training.train_group import TrainGroup
from slimrl.cluster.watchdog import WaitTarget, answers, format_rollout_status
from slimrl.engines.auth import key_of
from slimrl.engines.protocol import EngineError
from slimrl.engines.sglang.router import ExternalRouter

logger = logging.getLogger("slimrl")


class RolloutManagerCleanup:
    """Ends the rollout manager with the run: `kill()`, before which `registered()` tells its servers.

    `registered` returns None where the manager does not answer any more.
    """

    def __init__(self, args: Arguments, registered: Callable[[], list[str] | None], kill: Callable[[], None]) -> None:
        self._args, self._registered, self._kill = args, registered, kill
        self._started: Sequence[str] = ()
        self._trainers: TrainGroup | None = None

    @classmethod
    def of_actor(cls, args: Arguments, manager: ray.actor.ActorHandle) -> RolloutManagerCleanup:
        """For the rollout manager itself."""
        return cls(args, lambda: answers([manager.registered.remote()])[0], lambda: ray.kill(manager))

    def set_started(self, trainers: TrainGroup | None, urls: Sequence[str]) -> None:
        """Who updates weights, and the servers that have started."""
        self._trainers, self._started = trainers, urls

    def __enter__(self) -> RolloutManagerCleanup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._kill()
            return
        self._name_the_paused()
        if self._args.sglang_router_ip is None:
            self._kill()
            return
        registered = self._registered()
        self._kill()  # first: it keeps the router's list right
        urls = self._started if registered is None else registered
        try:
            ExternalRouter(self._args.sglang_router_ip, self._args.sglang_router_port, urls, key_of(self._args)).stop()
        except EngineError as failure:  # the run ends with what ended it
            logger.warning("the router of --sglang-router-ip may still have %s: %s", ", ".join(urls), failure)

    def _name_the_paused(self) -> None:
        addresses = self._args.rollout_external_engine_addrs
        if addresses and self._trainers is not None and self._trainers.updating_weights is not None:
            logger.error(
                "the run ended while it updated weights %s: the servers %s of --rollout-external-engine-addrs may be"
                " paused and hold only some of them; the next run updates all of them again, for any other use start"
                " the servers again",
                self._trainers.updating_weights,
                ", ".join(addresses),
            )


def manager_wait(manager: ray.actor.ActorHandle, what: str) -> WaitTarget:
    """A wait for the rollout manager."""
    return WaitTarget(what, lambda _: format_rollout_status(answers([manager.where.remote()])[0]))


def of_servers(manager: ray.actor.ActorHandle) -> str:
    """The servers that keep somebody waiting, whoever is waited for; "" for none."""
    return "; ".join(answers([manager.server_states.remote()])[0] or [])


class EngineMemoryProxy:
    """The memory of the servers, which the rollout manager looks after."""

    def __init__(self, manager: ray.actor.ActorHandle, supervisor: Supervisor) -> None:
        self._manager = manager
        self._supervisor = supervisor

    def release(self) -> None:
        awaited = manager_wait(self._manager, "the release of the engines' memory")
        self._supervisor.get([self._manager.release_memory.remote()], awaited)

    def resume(self, tags: Sequence[str]) -> None:
        awaited = manager_wait(self._manager, f"the engines' memory for {' and '.join(tags)}")
        self._supervisor.get([self._manager.resume_memory.remote(tags)], awaited)
