"""What the driver asks of the rollout manager and waits for: how such a wait is described, and the engines' memory.

Used by `run`.
"""

from __future__ import annotations

from collections.abc import Sequence

import ray

from slimrl.cluster.supervise import Supervisor
from slimrl.cluster.watchdog import Awaited, answers
from slimrl.cluster.whereabouts import of_generation


def of_manager(manager: ray.actor.ActorHandle, what: str) -> Awaited:
    """A wait for the rollout manager."""
    return Awaited(what, lambda _: of_generation(answers([manager.where.remote()])[0]))


def of_servers(manager: ray.actor.ActorHandle) -> str:
    """The servers that keep somebody waiting, whoever is waited for; "" for none."""
    return "; ".join(answers([manager.server_states.remote()])[0] or [])


class EngineMemory:
    """The memory of the servers, which the rollout manager looks after."""

    def __init__(self, manager: ray.actor.ActorHandle, supervisor: Supervisor) -> None:
        self._manager = manager
        self._supervisor = supervisor

    def release(self) -> None:
        awaited = of_manager(self._manager, "the release of the engines' memory")
        self._supervisor.get([self._manager.release_memory.remote()], awaited)

    def resume(self, tags: Sequence[str]) -> None:
        awaited = of_manager(self._manager, f"the engines' memory for {' and '.join(tags)}")
        self._supervisor.get([self._manager.resume_memory.remote(tags)], awaited)
