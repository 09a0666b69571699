"""The driver's side of the rollout manager: calls, waits, engine memory, and the cleanup after a failed run.

Every call of the driver goes through `RolloutManagerProxy`. After a failure or an interrupt, `RolloutManagerCleanup`
removes the run's servers from an external router, so that the next run can use it, unloads the run's adapters from
external servers, and names those that may hold a partial weight update. A run that ends normally needs neither.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

import ray
from ray import ObjectRef
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from slimrl.arguments import Arguments
from slimrl.arguments.layout import data_parallel_sizes
from slimrl.cluster.launch import Launch, key_of
from slimrl.cluster.rollout_manager import RolloutManager
from slimrl.cluster.supervisor import Supervisor
from slimrl.cluster.training.train_recovery import Trainers
from slimrl.cluster.watchdog import WaitTarget, format_rollout_status, poll_actors
from slimrl.engines.backend import backend
from slimrl.engines.protocol import EngineError
from slimrl.engines.shared_adapters import UNLOAD_TIMEOUT_S, remove_from_all
from slimrl.models.adapters import SharedAdapter

if TYPE_CHECKING:
    from slimrl.cluster.engines.health_monitor import EngineGroupStatus, RecoveryEvents
    from slimrl.cluster.placement import GpuBundles
    from slimrl.cluster.rollout_manager import RolloutResult
    from slimrl.cluster.watchdog import RolloutStatus
    from slimrl.rollout.metrics import EvaluationReport
    from slimrl.weights.update.topology import EngineEndpoint

logger = logging.getLogger("slimrl")
_REMOVAL_TIMEOUT_S = 30.0  # of the removal of the run's adapters from all servers
_DUMP_WAIT_S = 120.0  # after which a failed run ends without its last dump


class RolloutManagerProxy:
    """The rollout manager's actor. Each method calls the `RolloutManager` method of the same name, documented there,
    and returns a reference to the result without waiting.
    """

    def __init__(self, actor: ray.actor.ActorHandle) -> None:
        self._actor = actor

    def start(self, gpus: GpuBundles | None, launch: Launch) -> ObjectRef[list[EngineEndpoint]]:
        """Starts the engines."""
        return self._actor.start.remote(gpus, launch)

    def watch(self) -> ObjectRef[str]:
        """Pending while the engines live."""
        return self._actor.watch.remote()

    def watch_loop(self) -> ObjectRef[str]:
        """Pending while its event loop runs."""
        return self._actor.watch_loop.remote()

    def engine_events(self, serial: int) -> ObjectRef[RecoveryEvents]:
        """Pending until the engines have more than `serial` events."""
        return self._actor.engine_events.remote(serial)

    def engine_status(self) -> ObjectRef[EngineGroupStatus]:
        """The status of the engines."""
        return self._actor.engine_status.remote()

    def begin_weight_update(self, only_waiting: bool) -> ObjectRef[list[EngineEndpoint]]:
        """The engines to update."""
        return self._actor.begin_weight_update.remote(only_waiting)

    def end_weight_update(self, urls: list[str], version: str) -> ObjectRef[None]:
        """Reports that these engines have weights `version`."""
        return self._actor.end_weight_update.remote(urls, version)

    def weight_update_failed(self, urls: list[str]) -> ObjectRef[list[str]]:
        """The lost ones of these engines."""
        return self._actor.weight_update_failed.remote(urls)

    def release_memory(self) -> ObjectRef[None]:
        """Releases the memory of every engine."""
        return self._actor.release_memory.remote()

    def resume_memory(self, tags: Sequence[str]) -> ObjectRef[None]:
        """Reallocates it."""
        return self._actor.resume_memory.remote(tags)

    def address(self) -> ObjectRef[str]:
        """The address of its machine."""
        return self._actor.address.remote()

    def prompts_per_epoch(self) -> ObjectRef[int]:
        """Number of prompts."""
        return self._actor.prompts_per_epoch.remote()

    def load_data_state(self, state: dict[str, Any]) -> ObjectRef[None]:
        """Restores the data source."""
        return self._actor.load_data_state.remote(state)

    def drain(self) -> ObjectRef[None]:
        """Ready when no group is in flight."""
        return self._actor.drain.remote()

    def set_weight_version(self, version: int, end: int) -> ObjectRef[None]:
        """Reports that the engines hold weights `version`."""
        return self._actor.set_weight_version.remote(version, end)

    def progress(self) -> ObjectRef[tuple[int, int]]:
        """Finished and expected samples."""
        return self._actor.progress.remote()

    def memory(self) -> ObjectRef[dict[str, float]]:
        """Resident memory in GiB, by name."""
        return self._actor.memory.remote()

    def finish_dumps(self) -> ObjectRef[None]:
        """Ready when the dump of the last rollout is written."""
        return self._actor.finish_dumps.remote()

    def registered(self) -> ObjectRef[list[str]]:
        """The servers that the run registered with an external router."""
        return self._actor.registered.remote()

    def server_states(self) -> ObjectRef[list[str]]:
        """One sentence per server that blocks others."""
        return self._actor.server_states.remote()

    def status(self) -> ObjectRef[RolloutStatus]:
        """The current phase, samples and server load."""
        return self._actor.status.remote()

    def generate(self, rollout_id: int, saved: bool) -> ObjectRef[RolloutResult]:
        """Generates one rollout."""
        return self._actor.generate.remote(rollout_id, saved)

    def evaluate(self, rollout_id: int) -> ObjectRef[dict[str, EvaluationReport]]:
        """Evaluates every data set."""
        return self._actor.evaluate.remote(rollout_id)

    def close(self) -> ObjectRef[None]:
        """Ends the engines."""
        return self._actor.close.remote()

    def kill(self) -> None:
        """Kills the actor."""
        ray.kill(self._actor)

    def waiting_for(self, what: str) -> WaitTarget:
        """A wait target whose watchdog reports contain the rollout manager's status."""
        return WaitTarget(what, lambda _: format_rollout_status(poll_actors([self.status()])[0]))

    def slow_servers(self) -> str:
        """The servers that block the run, as text; "" for none. Takes a few seconds at most."""
        return "; ".join(poll_actors([self.server_states()])[0] or [])


class RolloutManagerCleanup:
    """Ends the rollout manager with the run: `registered()` returns its servers, then `kill()` ends it.

    `registered` returns None if the manager does not respond any more.
    """

    def __init__(self, args: Arguments, registered: Callable[[], list[str] | None], kill: Callable[[], None]) -> None:
        self._args, self._registered, self._kill = args, registered, kill
        self._started: Sequence[str] = ()
        self._trainers: Trainers | None = None

    @classmethod
    def of_manager(cls, args: Arguments, manager: RolloutManagerProxy) -> RolloutManagerCleanup:
        """The cleanup of `manager`, which may still write the dump of the last rollout."""

        def kill() -> None:
            written = manager.finish_dumps()
            try:
                if not ray.wait([written], timeout=_DUMP_WAIT_S)[0]:
                    logger.warning("the dump of the last rollout was not written within %.0f s", _DUMP_WAIT_S)
            finally:
                manager.kill()

        return cls(args, lambda: poll_actors([manager.registered()])[0], kill)

    def set_started(self, trainers: Trainers | None, urls: Sequence[str]) -> None:
        """Sets the trainers, and the URLs of the started servers."""
        self._trainers, self._started = trainers, urls

    def __enter__(self) -> RolloutManagerCleanup:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._kill()
            return
        self._report_paused()
        own_router = self._args.sglang_router_ip is None
        registered = None if own_router else self._registered()
        self._kill()  # first: it would restore the router's list, and it ends the requests of the run's adapters
        if (adapter := self._args.shared_adapter) is not None:
            self._remove_adapters(adapter)
        if own_router:
            return
        urls = self._started if registered is None else registered
        try:
            address = self._args.sglang_router_ip, self._args.sglang_router_port
            backend(self._args.rollout_engine).external_router(*address, urls, key_of(self._args)).stop()
        except EngineError as failure:  # not raised: the run's own error must be reported
            logger.warning("the router of --sglang-router-ip may still have %s: %s", ", ".join(urls), failure)

    def _remove_adapters(self, adapter: SharedAdapter) -> None:
        engine, key = backend(self._args.rollout_engine), key_of(self._args)
        urls = [f"http://{address}" for address in self._args.rollout_external_engine_addrs or ()]
        servers = [engine.control(url, UNLOAD_TIMEOUT_S, key) for url in urls]
        remove_from_all(servers, adapter, _REMOVAL_TIMEOUT_S)

    def _report_paused(self) -> None:
        addresses = self._args.rollout_external_engine_addrs
        if self._args.shared_adapter is not None:  # an update of adapters pauses nothing
            return
        if addresses and self._trainers is not None and self._trainers.updating_weights is not None:
            logger.error(
                "the run ended during weight update %s: the servers %s of --rollout-external-engine-addrs may be paused"
                " and hold a partial update; the next run updates all weights; restart the servers for any other use",
                self._trainers.updating_weights,
                ", ".join(addresses),
            )


class EngineMemoryProxy:
    """`ReleasableMemory` by calls to the rollout manager; every method waits for the result."""

    def __init__(self, manager: RolloutManagerProxy, supervisor: Supervisor) -> None:
        self._manager = manager
        self._supervisor = supervisor

    def release(self) -> None:
        """Releases all memory of every server."""
        target = self._manager.waiting_for("the release of the engines' memory")
        self._supervisor.get([self._manager.release_memory()], target)

    def resume(self, tags: Sequence[str]) -> None:
        """Reallocates the memory of `tags` on every server."""
        target = self._manager.waiting_for(f"the engines' memory for {' and '.join(tags)}")
        self._supervisor.get([self._manager.resume_memory(tags)], target)


def start_manager(args: Arguments, launch: Launch) -> RolloutManagerProxy:
    """Starts the rollout manager without waiting for it; on the driver's node, whose loss ends the run anyway, unless
    that is a head without GPUs, which may be a small machine.
    """
    setup = launch.actor_setup()
    options: dict[str, Any] = {**setup.options(), "name": "rollout manager", "max_concurrency": 64}
    own = ray.get_runtime_context().get_node_id()
    if any(node["NodeID"] == own and node["Resources"].get("GPU") for node in ray.nodes()):
        options["scheduling_strategy"] = NodeAffinitySchedulingStrategy(own, soft=False)
    log_path = Path(args.run_dir).absolute() / "logs" / "rollout.log"
    actor = RolloutManager.options(**options)  # type: ignore[attr-defined]
    return RolloutManagerProxy(actor.remote(args, data_parallel_sizes(args), log_path, setup))


def resolve_num_rollout(args: Arguments, manager: RolloutManagerProxy, supervisor: Supervisor) -> Arguments:
    """`args` with `num_rollout` computed from `--num-epoch` and the number of prompts, if only `--num-epoch` is given.

    Raises ValueError if the data set is smaller than one rollout.
    """
    if args.num_rollout is not None:
        return args
    prompts = supervisor.get([manager.prompts_per_epoch()], manager.waiting_for("the prompts"))[0]
    per_epoch = prompts // args.rollout_batch_size
    if per_epoch == 0:
        raise ValueError(
            f"--num-epoch {args.num_epoch} gives no rollout: --prompt-data has {prompts} prompts and"
            f" --rollout-batch-size is {args.rollout_batch_size}; lower it or give --num-rollout"
        )
    return dataclasses.replace(args, num_rollout=args.num_epoch * per_epoch)
