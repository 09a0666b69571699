"""One training run: starts everything in order, offers the loops their verbs, and ends all that it started."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import ray

from slimrl.arguments import Arguments
from slimrl.arguments.checkpoints import start_of
from slimrl.cluster.colocate import ColocatedMemory
from slimrl.cluster.engine_resync import EngineResync
from slimrl.cluster.launch import Launch
from slimrl.cluster.network import reach_of
from slimrl.cluster.placement import GpuBundles, PlacementPlan, plan_gpus
from slimrl.cluster.ray_session import ray_session
from slimrl.cluster.rollout_manager import RolloutManager, RolloutResult
from slimrl.cluster.rollout_manager_proxy import EngineMemoryProxy, RolloutManagerCleanup, manager_wait, of_servers
from slimrl.cluster.supervisor import Supervisor, watching
from slimrl.cluster.training.train_group import TrainGroup
from slimrl.cluster.watchdog import WatchdogConfig, answers
from slimrl.engines.auth import with_key
from slimrl.engines.sglang.external_server_check import check_somebody_listens
from slimrl.observability.ci_checks import RunCheckError, RunChecks
from slimrl.observability.metrics.prometheus import scrape_targets
from slimrl.observability.run_log import RunLog, StepRecord
from slimrl.observability.summary import package_versions
from slimrl.observability.terminal import ProgressBar
from slimrl.observability.timeline import merge_at_end
from slimrl.observability.tracer import Timeline
from slimrl.processes.folders import only_run_in
from slimrl.processes.process_info import resident_gib
from slimrl.weights.update.topology import EngineEndpoint

logger = logging.getLogger("slimrl")


class Run:
    """The verbs of the loops. Made by `open_run`; every verb fails at once when any process has died."""

    def __init__(
        self,
        args: Arguments,
        start: int,
        trainers: TrainGroup | None,
        manager: ray.actor.ActorHandle,
        supervisor: Supervisor,
        log: RunLog,
        timeline: Timeline,
        resync: EngineResync | None = None,
    ) -> None:
        """`start` is the first rollout to do; `trainers` is None with `--debug-rollout-only`.

        `resync` is there with `--use-fault-tolerance`.
        """
        self.args = args
        self.rollout_ids = range(start, args.num_rollout)
        self.weight_version = self._trained_version = start
        self._resync = resync
        self._trainers = trainers
        self._manager = manager
        self._supervisor = supervisor
        self._log = log
        self._timeline = timeline
        self._checks = RunChecks.from_args(args, start)
        self._seconds: dict[str, float] = {}
        self._updated: int | None = None  # the version that the servers were given
        self._generation = manager_wait(manager, "generate")
        self._turns = ColocatedMemory(
            trainers if args.offload_train else None,
            EngineMemoryProxy(manager, supervisor) if args.offload_rollout else None,
            self._timed,
            tokens_during_weight_update=args.sglang_options.get("pp_size", 1) > 1,
        )
        if self.rollout_ids:
            logger.info("rollouts %d to %d are to be done", start, args.num_rollout - 1)
        elif args.only_evaluates:
            logger.info("--num-rollout 0: the weights are evaluated, and nothing is trained")
        else:
            logger.info(
                "nothing is left to do: the next rollout is %d and --num-rollout is %d", start, args.num_rollout
            )

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        with self._timeline.span(phase):
            yield
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - started

    def start_generation(self, rollout_id: int) -> ray.ObjectRef:
        """Starts generating a rollout; `finish_generation` waits for it."""
        self._generation = manager_wait(self._manager, f"generate of rollout {rollout_id}")
        return self._manager.generate.remote(rollout_id, self._save_due(rollout_id))

    def finish_generation(self, generation: ray.ObjectRef) -> RolloutResult:
        """The generated rollout, once it is complete."""
        with (
            self._timed("wait_for_rollout"),
            self._trainers_idle(),
            self._progress("generate", self._manager.progress.remote) as update,
        ):
            result: RolloutResult = self._supervisor.get([generation], self._generation, update)[0]
        self._seconds["generate"] = result.seconds
        return result

    def drain_generation(self, generation: ray.ObjectRef) -> None:
        """Waits until no request is in flight, unless weights change under requests; `generation` is what runs.

        Servers that are replaced meanwhile may get the trained weights already: then there is no weight update to make
        way for.
        """
        if self.args.update_weights_in_flight:
            return
        awaited = self._generation
        if self.args.max_weight_staleness is not None and not self.args.debug_train_only:
            generation, awaited = self._manager.drain.remote(), manager_wait(self._manager, "the groups in flight")
        with self._timed("wait_for_rollout"), self._trainers_idle():
            self._supervisor.get([generation], awaited)

    def generate(self, rollout_id: int) -> RolloutResult:
        """Generates one rollout and waits for it."""
        return self.finish_generation(self.start_generation(rollout_id))

    @contextlib.contextmanager
    def _progress(
        self, title: str, ask: Callable[[], ray.ObjectRef], unit: str = "sample"
    ) -> Iterator[Callable[[], None] | None]:
        """A bar that shows what `ask` answers with; None where nobody watches.

        Who does not answer leaves the bar as it is: the watchdog and the watch over the actor must have their turn.
        """
        with ProgressBar(title, unit=unit) as bar:

            def update() -> None:
                if (answer := answers([ask()])[0]) is not None:
                    bar.update_to(*answer)

            yield update if bar.enabled else None

    def train(self, rollout: RolloutResult) -> list[dict[str, float]]:
        """Trains on a rollout; metrics per optimizer step, none with `--debug-rollout-only`."""
        if self._trainers is None:
            return []
        for name in ("rollout/staleness/mean", "rollout/staleness/max"):
            if name in rollout.metrics:
                self._timeline.count(name, rollout.metrics[name])
        self._turns.onload_trainer()
        self._trained_version = rollout.rollout_id + 1
        with self._timed("train"), self._progress("train", self._trainers.progress, "micro-batch") as update:
            metrics = self._trainers.train(rollout.rollout_id, rollout.batches, update)
        try:
            self._checks.check(rollout.rollout_id, metrics)
        except RunCheckError:
            self._log.expect(self._record(rollout, metrics))  # the numbers that it complains of
            raise
        return metrics

    def should_update_weights(self, rollout_id: int) -> bool:
        """Whether the asynchronous loop updates weights after this rollout (`--update-weights-interval`, and the
        last).
        """
        done = rollout_id + 1
        return done == self.rollout_ids.stop or done % self.args.update_weights_interval == 0

    def update_weights(self, version: int) -> None:
        """Sends the trained weights to every engine; requests may run with `--update-weights-in-flight` alone."""
        if version != self._updated:  # a rescue brought them already, and requests run again
            self._update_weights(version)
        self._go_on(version)

    def _go_on(self, version: int) -> None:
        if self.args.max_weight_staleness is not None:  # fully asynchronous generation continues with them
            awaited = manager_wait(self._manager, f"generation continuing with weights {version}")
            self._supervisor.get([self._manager.set_weight_version.remote(version, self.rollout_ids.stop)], awaited)

    def _update_weights(self, version: int) -> None:
        if self._trainers is None:
            return
        with self._turns.weight_update():
            if self.args.debug_train_only:
                return
            with self._timed("update_weights"):
                if self._resync is None:
                    self._trainers.update_weights(version)
                else:
                    self._resync.sync_weights(version, self._trainers.update_weights)
        self.weight_version = self._updated = version

    def _trainers_idle(self) -> contextlib.AbstractContextManager[None]:
        """Around a wait for the engines: a server that is replaced meanwhile gets the weights of the others."""
        if self._resync is None:
            return contextlib.nullcontext()
        current = self._trained_version == self.weight_version and not self._turns.training_sleeps
        return self._resync.trainer_idle(self.weight_version if current else None, self._update_new_servers)

    def _update_new_servers(self) -> None:
        """No server works any more that has weights: those which wait get what was trained last."""
        self._turns.onload_trainer()
        self._update_weights(self._trained_version)
        self._go_on(self._trained_version)

    def save_if_due(self, rollout: RolloutResult, train_metrics: list[dict[str, float]]) -> None:
        """Saves on `--save-interval` and after the last rollout, right after training: what is saved is awake then.

        A step that a checkpoint knows is in the summary, whenever the run is killed.
        """
        if self._trainers is not None and self._save_due(rollout.rollout_id):
            self._log.expect(self._record(rollout, train_metrics))
            with self._timed("save"):
                folder = self._trainers.save(rollout.rollout_id, rollout.data_state)
            logger.info("saving %s in the background" if self.args.async_save else "saved %s", folder)

    def _save_due(self, rollout_id: int) -> bool:
        done, interval = rollout_id + 1, self.args.save_interval
        return bool(self.args.save) and (done == self.rollout_ids.stop or bool(interval and done % interval == 0))

    def evaluate_before_training(self) -> None:
        """The evaluation of the untrained (or just loaded) model."""
        if self.args.eval_interval and not self.args.skip_eval_before_train and not self.args.debug_train_only:
            self._evaluate(self.rollout_ids.start, "before")

    def should_evaluate(self, rollout_id: int) -> bool:
        """Whether the weights after this rollout are to be evaluated."""
        if not self.args.eval_interval or self.args.debug_train_only:
            return False
        done = rollout_id + 1
        return done == self.rollout_ids.stop or done % self.args.eval_interval == 0

    def evaluate_if_due(self, rollout_id: int) -> None:
        """Evaluates on `--eval-interval` and after the last rollout."""
        if self.should_evaluate(rollout_id):
            self._evaluate(rollout_id + 1, "after" if rollout_id + 1 == self.rollout_ids.stop else rollout_id + 1)

    def _evaluate(self, step: int, when: str | int) -> None:
        with (
            self._timed("evaluate"),
            self._trainers_idle(),
            self._progress("evaluate", self._manager.progress.remote) as update,
        ):
            awaited = manager_wait(self._manager, f"evaluate after {step} rollouts")
            results = self._supervisor.get([self._manager.evaluate.remote(step)], awaited, update)[0]
        self._log.evaluation(when, step, results)
        if step > self.rollout_ids.start:
            self._log.phase(step - 1, "evaluate", self._seconds["evaluate"])

    @contextlib.contextmanager
    def step(self, rollout_id: int) -> Iterator[None]:
        """Times one turn of the loop; the loop reports it with `record`."""
        self._seconds = {}
        self._started = time.perf_counter()
        with self._timeline.span(f"step {rollout_id}", step=rollout_id):
            yield

    def record(self, rollout: RolloutResult, train_metrics: list[dict[str, float]]) -> None:
        """Writes one step's line, TensorBoard scalars and summary entry."""
        self._log.step(self._record(rollout, train_metrics))

    def _record(self, rollout: RolloutResult, train_metrics: list[dict[str, float]]) -> StepRecord:
        updated = (
            self._trainers.last_weight_update
            if self._trainers is not None and "update_weights" in self._seconds
            else {}
        )
        total = time.perf_counter() - self._started - self._seconds.get("save", 0.0)
        return StepRecord(
            step=rollout.rollout_id,
            weight_version=rollout.weight_version,
            rollout=rollout.metrics | updated,
            train=train_metrics,
            seconds={**self._seconds, "total": total},
            memory=self._memory(),
        )

    def _memory(self) -> dict[str, float]:
        """Memory of every process, GiB by name; without those that do not answer within seconds."""
        refs = [self._manager.memory.remote(), *(self._trainers.memory() if self._trainers is not None else [])]
        known = {"driver_rss_gib": resident_gib(with_children=False)}
        for answer in answers(refs):
            known |= answer or {}
        for name, amount in known.items():
            self._timeline.count(name, amount)
        return known


@contextlib.contextmanager
def open_run(args: Arguments) -> Iterator[Run]:
    """Reserves GPUs, starts train workers and the inference fleet, loads the checkpoint; ends them all at the end."""
    check_somebody_listens(args.rollout_external_engine_addrs or [])
    plan = plan_gpus(args)
    launch = Launch.of_run(args)
    with contextlib.ExitStack() as stack:
        if args.save is not None and not args.debug_rollout_only and not args.only_evaluates:
            stack.enter_context(only_run_in(args.save, flag="--save", name=Path(args.run_dir).name))
        timeline = stack.enter_context(_timeline(args))  # put together when everybody has ended
        beginning = stack.enter_context(contextlib.ExitStack())
        beginning.enter_context(timeline.span("start"))
        stack.enter_context(ray_session(plan.total, machine=launch.machine))
        log = stack.enter_context(RunLog.open(args, package_versions()))
        args = with_key(dataclasses.replace(args, wandb_key=None))  # nobody else needs that one
        gpus = GpuBundles(plan)
        stack.callback(gpus.release)
        launch = launch.placed(reach_of(args))
        nodes = stack.enter_context(watching(gpus.gpus, plan))
        supervisor = Supervisor(WatchdogConfig.from_args(args), nodes.silent)
        manager = _start_manager(args, plan, launch)
        manager_end = stack.enter_context(RolloutManagerCleanup.of_actor(args, manager))
        supervisor.ask_too(functools.partial(of_servers, manager))
        supervisor.watch(manager.watch_loop.remote(), lambda error: f"the rollout manager died: {error}")
        args = _resolve_num_rollout(args, manager, supervisor)

        logger.info("starting %d train workers and %d rollout GPUs", len(plan.train), len(plan.rollout))
        starting = manager.start.remote(None if args.debug_train_only else gpus, launch)
        trainers, start, data_state = None, args.start_rollout_id or 0, None
        if not args.debug_rollout_only:
            logger.info("%s", start_of(args).sentence)
            trainers = TrainGroup(args, gpus, supervisor, launch)
            stack.callback(trainers.kill)
        if args.offload_rollout:  # before training takes its memory
            supervisor.get([starting], manager_wait(manager, "the start of the engines"))
            EngineMemoryProxy(manager, supervisor).release()
        if trainers is not None:
            start, data_state = trainers.initialize()
        endpoints = supervisor.get([starting], manager_wait(manager, "the start of the engines"))[0]
        manager_end.set_started(trainers, [endpoint.url for endpoint in endpoints])
        if endpoints:
            supervisor.watch(manager.watch.remote(), lambda error: f"the rollout manager died: {error}")
            if trainers is not None:
                trainers.connect_engines(endpoints)
        resync = _resync(args, manager, supervisor, trainers, endpoints)
        if data_state is not None and not args.only_evaluates:
            awaited = manager_wait(manager, "the position in the data")
            supervisor.get([manager.load_data_state.remote(data_state)], awaited)
        router = supervisor.get([manager.address.remote()], manager_wait(manager, "the router's address"))[0]
        urls = [endpoint.url for endpoint in endpoints]
        log.announce(scrape_targets(args, urls, ray.util.get_node_ip_address(), router))
        log.begin(start)
        beginning.close()
        yield Run(args, start, trainers, manager, supervisor, log, timeline, resync)
        if trainers is not None:
            trainers.close()
        supervisor.stop_watching()
        supervisor.get([manager.close.remote()], manager_wait(manager, "the end of the engines"))


@contextlib.contextmanager
def _timeline(args: Arguments) -> Iterator[Timeline]:
    timeline = Timeline.open(args, "driver")
    try:
        yield timeline
    finally:
        timeline.close()
        if args.timeline:
            logger.info("%s", merge_at_end(Path(args.run_dir)))


def _resync(
    args: Arguments,
    manager: ray.actor.ActorHandle,
    supervisor: Supervisor,
    trainers: TrainGroup | None,
    endpoints: list[EngineEndpoint],
) -> EngineResync | None:
    """Who brings weights to replaced servers; None without `--use-fault-tolerance`, or without servers."""
    if not args.use_fault_tolerance or not endpoints:
        return None
    where = functools.partial(manager_wait, manager)
    resync = EngineResync(manager.recover.remote, where, supervisor, trainers, endpoints)
    supervisor.set_event_handler(resync)
    return resync


def _start_manager(args: Arguments, plan: PlacementPlan, launch: Launch) -> ray.actor.ActorHandle:
    options = {"runtime_env": {"env_vars": launch.environment}, "name": "rollout manager", "max_concurrency": 64}
    log_path = Path(args.run_dir).absolute() / "logs" / "rollout.log"
    actor = RolloutManager.options(**options)  # type: ignore[attr-defined]
    return actor.remote(args, args.data_parallel_size if plan.train else 1, log_path, Path.cwd())


def _resolve_num_rollout(args: Arguments, manager: ray.actor.ActorHandle, supervisor: Supervisor) -> Arguments:
    """`args` with `num_rollout` filled in from `--num-epoch` and the number of prompts, where only that is given.

    Raises ValueError where the data set is smaller than one rollout.
    """
    if args.num_rollout is not None:
        return args
    prompts = supervisor.get([manager.prompts_per_epoch.remote()], manager_wait(manager, "the prompts"))[0]
    per_epoch = prompts // args.rollout_batch_size
    if per_epoch == 0:
        raise ValueError(
            f"--num-epoch {args.num_epoch} gives no rollout: --prompt-data has {prompts} prompts and"
            f" --rollout-batch-size is {args.rollout_batch_size}; lower it or give --num-rollout"
        )
    return dataclasses.replace(args, num_rollout=args.num_epoch * per_epoch)
