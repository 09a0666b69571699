"""One training run: starts all processes in order, provides the operations of the training loops, shuts down."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import ray

from slimrl.arguments import Arguments
from slimrl.arguments.engine_groups import policy_options
from slimrl.cluster.colocate import ColocatedMemory
from slimrl.cluster.engines.engine_group import adapter_owner
from slimrl.cluster.engines.weight_update_recovery import WeightUpdateRecovery, weight_recovery
from slimrl.cluster.launch import Launch, bind_config, check_machine, check_servers_reachable, with_key
from slimrl.cluster.nodes.comparison import check_nodes
from slimrl.cluster.nodes.logs import collected_logs
from slimrl.cluster.nodes.watch import SpareNodes, watch_nodes
from slimrl.cluster.placement import GpuBundles, PlacementPlan, plan_gpus
from slimrl.cluster.ray_session import ray_session
from slimrl.cluster.rollout_manager import RolloutResult
from slimrl.cluster.rollout_manager_proxy import (
    EngineMemoryProxy,
    RolloutManagerCleanup,
    RolloutManagerProxy,
    resolve_num_rollout,
    start_manager,
)
from slimrl.cluster.supervisor import Supervisor
from slimrl.cluster.training.train_recovery import Trainers, TrainRecovery, start_training
from slimrl.cluster.watchdog import WatchdogConfig, poll_actors
from slimrl.observability.ci_checks import RunCheckError, RunChecks
from slimrl.observability.metrics.prometheus import scrape_targets
from slimrl.observability.run_log import RunLog, StepRecord
from slimrl.observability.summary import package_versions
from slimrl.observability.terminal import ProgressBar
from slimrl.observability.timeline import open_timeline
from slimrl.observability.tracer import Timeline
from slimrl.processes.files import only_run_in
from slimrl.processes.process_info import resident_gib
from slimrl.rollout.metrics import EvaluationReport

logger = logging.getLogger("slimrl")


class Run:
    """The operations of the training loops, created by `open_run`. Each raises as soon as a process of the run dies."""

    def __init__(
        self,
        args: Arguments,
        start: int,
        trainers: Trainers | None,
        manager: RolloutManagerProxy,
        supervisor: Supervisor,
        log: RunLog,
        timeline: Timeline,
        weight_recovery: WeightUpdateRecovery | None = None,
    ) -> None:
        """`start` is the first rollout id; `trainers` is None with `--debug-rollout-only`.

        `weight_recovery` is set only with `--use-fault-tolerance`.
        """
        self.args = args
        self.rollout_ids = range(start, args.num_rollout)
        self.weight_version = self._trained_version = start
        self._weight_recovery = weight_recovery
        self._trainers = trainers
        self._manager = manager
        self._supervisor = supervisor
        self._log = log
        self._timeline = timeline
        self._checks = RunChecks.from_args(args, start)
        self._seconds: dict[str, float] = {}  # of the current step
        self._faults: dict[str, float] = {}
        self._updated: int | None = None  # the version last sent to the servers
        self._generation = manager.waiting_for("generate")
        self._next_generation: ray.ObjectRef | None = None  # by `generate_next`
        self._colocated = ColocatedMemory(
            trainers if args.offload_train else None,
            EngineMemoryProxy(manager, supervisor) if args.offload_rollout else None,
            self._timed,
            tokens_during_weight_update=any(stages > 1 for stages in policy_options(args, "pp_size")),
        )
        if self.rollout_ids:
            logger.info("running rollouts %d to %d", start, args.num_rollout - 1)
        elif args.eval_only:
            logger.info("--num-rollout 0: evaluation only, no training")
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
        self._generation = self._manager.waiting_for(f"generation of rollout {rollout_id}")
        return self._manager.generate(rollout_id, self._save_due(rollout_id))

    def finish_generation(self, generation: ray.ObjectRef) -> RolloutResult:
        """Waits for the rollout that `start_generation` started and returns it."""
        with (
            self._timed("wait_for_rollout"),
            self._trainers_idle(),
            self._progress("generate", self._manager.progress) as update,
        ):
            result: RolloutResult = self._supervisor.get([generation], self._generation, update)[0]
        self._seconds["generate"] = result.seconds
        return result

    def drain_generation(self, generation: ray.ObjectRef) -> None:
        """Waits until no request is in flight, except with `--update-weights-in-flight`.

        `generation` is the running one. A server replaced during the wait may receive the trained weights here, before
        the regular weight update.
        """
        if self.args.update_weights_in_flight:
            return
        target = self._generation
        if self.args.max_weight_staleness is not None and not self.args.debug_train_only:
            generation, target = self._manager.drain(), self._manager.waiting_for("the groups in flight")
        with self._timed("wait_for_rollout"), self._trainers_idle():
            self._supervisor.get([generation], target)

    def generate(self, rollout_id: int) -> RolloutResult:
        """Generates one rollout, unless `generate_next` has started it, and waits for it."""
        started, self._next_generation = self._next_generation, None
        return self.finish_generation(started or self.start_generation(rollout_id))

    def generate_next(self, rollout_id: int) -> None:
        """Starts the rollout after this one, so that the engines work while the driver records the step.

        Does nothing after the last rollout, or if an evaluation comes first.
        """
        if rollout_id + 1 in self.rollout_ids and not self.should_evaluate(rollout_id):
            self._next_generation = self.start_generation(rollout_id + 1)

    @contextlib.contextmanager
    def _progress(
        self, title: str, query: Callable[[], ray.ObjectRef], unit: str = "sample"
    ) -> Iterator[Callable[[], None] | None]:
        """Shows a progress bar of `query`'s (done, total); yields its update function, None if the bar is disabled.

        An actor that does not answer leaves the bar unchanged, so that the watchdog and the death watch still run.
        """
        with ProgressBar(title, unit=unit) as bar:

            def update() -> None:
                if (done_and_total := poll_actors([query()])[0]) is not None:
                    bar.update_to(*done_and_total)

            yield update if bar.enabled else None

    def train(self, rollout: RolloutResult) -> list[dict[str, float]]:
        """Trains on a rollout; metrics per optimizer step, none with `--debug-rollout-only`."""
        if self._trainers is None:
            return []
        for name in ("rollout/staleness/mean", "rollout/staleness/max"):
            if name in rollout.metrics:
                self._timeline.count(name, rollout.metrics[name])
        self._colocated.onload_trainer()
        self._trained_version = rollout.rollout_id + 1
        with self._timed("train"), self._progress("train", self._trainers.progress, "micro-batch") as update:
            metrics = self._trainers.train(rollout.rollout_id, rollout.batches, update)
        try:
            self._checks.check(rollout.rollout_id, metrics)
        except RunCheckError:
            self._log.expect(self._record(rollout, metrics))  # the metrics that failed the check
            raise
        return metrics

    def should_update_weights(self, rollout_id: int) -> bool:
        """Whether the asynchronous loop updates weights after this rollout: every `--update-weights-interval`, and
        after the last.
        """
        done = rollout_id + 1
        return done == self.rollout_ids.stop or done % self.args.update_weights_interval == 0

    def update_weights(self, version: int) -> None:
        """Sends the trained weights to every engine; requests may run only with `--update-weights-in-flight`."""
        if version != self._updated:  # engine recovery may have sent them already, and requests run again
            self._update_weights(version)
        self._resume_generation(version)

    def _resume_generation(self, version: int) -> None:
        if self.args.max_weight_staleness is not None or self.args.shared_adapter is not None:
            target = self._manager.waiting_for(f"generation continuing with weights {version}")
            self._supervisor.get([self._manager.set_weight_version(version, self.rollout_ids.stop)], target)

    def _update_weights(self, version: int) -> None:
        if self._trainers is None:
            return
        with self._colocated.weight_update():
            if self.args.debug_train_only:
                return
            with self._timed("update_weights"):
                if self._weight_recovery is None:
                    self._trainers.update_weights(version)
                else:
                    self._weight_recovery.sync_weights(version, self._trainers.update_weights)
        self.weight_version = self._updated = version

    def _trainers_idle(self) -> contextlib.AbstractContextManager[None]:
        """Context of a wait for the engines: a server replaced meanwhile gets the weights of the other servers."""
        if self._weight_recovery is None:
            return contextlib.nullcontext()
        current = self._trained_version == self.weight_version and not self._colocated.training_offloaded
        return self._weight_recovery.trainer_idle(self.weight_version if current else None, self._update_new_servers)

    def _update_new_servers(self) -> None:
        """Sends the latest trained weights to the waiting servers; called when no server serves any more."""
        self._colocated.onload_trainer()
        self._update_weights(self._trained_version)
        self._resume_generation(self._trained_version)

    def save_if_due(self, rollout: RolloutResult, train_metrics: list[dict[str, float]]) -> None:
        """Saves on `--save-interval` and after the last rollout; called right after training, before any offload.

        The step is in the summary before it is in a checkpoint, whenever the run is killed.
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
        """Evaluates the initial (or just loaded) model."""
        if self._has_evaluation and not self.args.skip_eval_before_train:
            self._evaluate(self.rollout_ids.start, "before")

    @property
    def _has_evaluation(self) -> bool:
        return bool(self.args.eval_interval) and (not self.args.debug_train_only or self.args.evaluates_held_out)

    def should_evaluate(self, rollout_id: int) -> bool:
        """Whether to evaluate after this rollout."""
        done, interval = rollout_id + 1, self.args.eval_interval
        return self._has_evaluation and (done == self.rollout_ids.stop or bool(interval and done % interval == 0))

    def evaluate_if_due(self, rollout_id: int) -> None:
        """Evaluates on `--eval-interval` and after the last rollout."""
        if self.should_evaluate(rollout_id):
            self.evaluate(rollout_id)

    def evaluate(self, rollout_id: int) -> None:
        """Evaluates after this rollout, whatever the interval; the engines must have its weights."""
        self._evaluate(rollout_id + 1, "after" if rollout_id + 1 == self.rollout_ids.stop else rollout_id + 1)

    def _evaluate(self, step: int, when: str | int) -> None:
        with (
            self._timed("evaluate"),
            self._trainers_idle(),
            self._progress("evaluate", self._manager.progress) as update,
        ):
            if self._trainers is not None and self.args.evaluates_held_out:
                self._colocated.onload_trainer()
                found = self._trainers.evaluate_held_out()
                results = {name: EvaluationReport.of_held_out(name, metrics) for name, metrics in found.items()}
            else:
                target = self._manager.waiting_for(f"evaluation after {step} rollouts")
                results = self._supervisor.get([self._manager.evaluate(step)], target, update)[0]
        self._log.evaluation(when, step, results)
        if step > self.rollout_ids.start:
            self._log.phase(step - 1, "evaluate", self._seconds["evaluate"])

    @contextlib.contextmanager
    def step(self, rollout_id: int) -> Iterator[None]:
        """Times one step of the loop; the loop reports it with `record`."""
        self._seconds, self._faults = {}, {}
        self._started = time.perf_counter()
        with self._timeline.span(f"step {rollout_id}", step=rollout_id):
            yield

    def record(self, rollout: RolloutResult, train_metrics: list[dict[str, float]]) -> None:
        """Writes one step's line, TensorBoard scalars and summary entry."""
        self._log.step(self._record(rollout, train_metrics))

    def _record(self, rollout: RolloutResult, train_metrics: list[dict[str, float]]) -> StepRecord:
        trainers = self._trainers
        updated = trainers.last_weight_update if trainers is not None and "update_weights" in self._seconds else {}
        if isinstance(trainers, TrainRecovery):  # a step with a save makes two records
            self._faults = {name: self._faults.get(name, 0.0) + new for name, new in trainers.take_metrics().items()}
        total = time.perf_counter() - self._started - self._seconds.get("save", 0.0)
        return StepRecord(
            step=rollout.rollout_id,
            weight_version=rollout.weight_version,
            rollout=rollout.metrics | updated | self._faults,
            train=train_metrics,
            seconds={**self._seconds, "total": total},
            memory=self._memory(),
        )

    def _memory(self) -> dict[str, float]:
        """Memory of every process in GiB by name, without processes that do not answer within seconds."""
        refs = [self._manager.memory(), *(self._trainers.memory() if self._trainers is not None else [])]
        memory = {"driver_rss_gib": resident_gib(with_children=False)}
        for of_actor in poll_actors(refs):
            memory |= of_actor or {}
        for name, gib in memory.items():
            self._timeline.count(name, gib)
        return memory


@contextlib.contextmanager
def open_run(args: Arguments) -> Iterator[Run]:
    """Reserves GPUs, starts the train workers and engines, loads the checkpoint; ends all processes on exit."""
    check_servers_reachable(args.rollout_external_engine_addrs or [])
    plan = plan_gpus(args)
    launch = Launch.of_run(args)
    check_machine(args, launch)
    with contextlib.ExitStack() as stack:
        if args.save is not None and not args.debug_rollout_only and not args.eval_only:
            stack.enter_context(only_run_in(args.save, flag="--save", name=Path(args.run_dir).name))
        timeline = stack.enter_context(open_timeline(args))  # merged on exit, when all processes have ended
        beginning = stack.enter_context(contextlib.ExitStack())
        beginning.enter_context(timeline.span("start"))
        timeline.mark("connect to Ray")
        stack.enter_context(ray_session(plan.total, machine=launch.machine))
        log = stack.enter_context(RunLog.open(args, package_versions()))
        args = dataclasses.replace(args, wandb_key=None)  # only the log needs it
        args = with_key(dataclasses.replace(args, adapter_owner=adapter_owner(args)))
        launch = launch.placed(bind_config(args))
        timeline.mark("reserve GPUs, start the rollout manager")
        manager, manager_end, gpus, supervisor, spares = _reserve(stack, args, plan, launch)
        args = resolve_num_rollout(args, manager, supervisor)

        logger.info("starting %s", plan.sentence)
        starting = manager.start(None if args.debug_train_only else gpus, launch)
        trainers, start, data_state = None, args.start_rollout_id or 0, None
        if not args.debug_rollout_only:
            trainers = start_training(args, gpus, supervisor, launch, spares)
            stack.callback(trainers.kill)
        if args.offload_rollout:  # before training allocates its memory
            timeline.mark("wait for the servers")
            supervisor.get([starting], manager.waiting_for("the start of the engines"))
            EngineMemoryProxy(manager, supervisor).release()
        if trainers is not None:
            timeline.mark("load the model in training")
            start, data_state = trainers.initialize()
        timeline.mark("wait for the servers")
        endpoints = supervisor.get([starting], manager.waiting_for("the start of the engines"))[0]
        timeline.mark("connect training with the servers")
        urls = [endpoint.url for endpoint in endpoints]
        manager_end.set_started(trainers, urls)
        if endpoints:
            supervisor.watch(manager.watch(), "the rollout manager died: {}".format)
            if trainers is not None:
                trainers.connect_engines(endpoints)
        recovery = weight_recovery(args, manager, supervisor, trainers, endpoints, spares)
        if data_state is not None and not args.eval_only:
            supervisor.get([manager.load_data_state(data_state)], manager.waiting_for("the position in the data"))
        timeline.mark("open the log")
        router = supervisor.get([manager.address()], manager.waiting_for("the router's address"))[0]
        log.announce(scrape_targets(args, urls, ray.util.get_node_ip_address(), router))
        log.begin(start)
        beginning.close()
        yield Run(args, start, trainers, manager, supervisor, log, timeline, recovery)
        if trainers is not None:
            trainers.close()
        supervisor.stop_watching()
        supervisor.get([manager.close()], manager.waiting_for("the end of the engines"))


def _reserve(
    stack: contextlib.ExitStack, args: Arguments, plan: PlacementPlan, launch: Launch
) -> tuple[RolloutManagerProxy, RolloutManagerCleanup, GpuBundles, Supervisor, SpareNodes]:
    """Starts the rollout manager and reserves the GPUs meanwhile; `stack` ends both."""
    reserved = stack.enter_context(contextlib.ExitStack())
    logs = stack.enter_context(collected_logs(Path(args.run_dir).absolute() / "logs"))
    manager = start_manager(args, launch)
    manager_end = stack.enter_context(RolloutManagerCleanup.of_manager(args, manager))
    gpus = GpuBundles(plan)
    reserved.callback(gpus.release)
    logs.follow(gpu.node for gpu in gpus.gpus)
    nodes = stack.enter_context(watch_nodes(gpus.gpus, plan, args.node_timeout_seconds, args.use_fault_tolerance))
    supervisor = Supervisor(WatchdogConfig.from_args(args), nodes or None)
    supervisor.set_report_suffix(manager.slow_servers)
    supervisor.watch(manager.watch_loop(), "the rollout manager died: {}".format)
    check_nodes(args, gpus.gpus, supervisor)
    logs.wait()
    return manager, manager_end, gpus, supervisor, SpareNodes(args, gpus, supervisor, nodes, logs)
