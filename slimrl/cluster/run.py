"""One training run: starts everything in order, offers the loops their verbs, and ends all that it started."""

from __future__ import annotations

import contextlib
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import ray

from slimrl.arguments import Arguments
from slimrl.cluster.rollout_manager import RolloutManager, RolloutResult
from slimrl.cluster.session import ray_session, worker_environment
from slimrl.cluster.slots import Slots, plan_slots
from slimrl.cluster.supervise import Supervisor
from slimrl.cluster.train_group import TrainGroup
from slimrl.observability.progress import ProgressBar
from slimrl.observability.run_log import RunLog, StepRecord
from slimrl.observability.versions import package_versions

logger = logging.getLogger("slimrl")


class Run:
    """The verbs of the loops. Made by `open_run`; every verb fails at once when any process has died."""

    def __init__(
        self, args: Arguments, trainers: TrainGroup, manager: ray.actor.ActorHandle, supervisor: Supervisor, log: RunLog
    ) -> None:
        self.args = args
        self.weight_version = 0
        self._trainers = trainers
        self._manager = manager
        self._supervisor = supervisor
        self._log = log
        self._seconds: dict[str, float] = {}
        self.rollout_ids = range(0)

    @contextlib.contextmanager
    def _timed(self, phase: str) -> Iterator[None]:
        started = time.perf_counter()
        yield
        self._seconds[phase] = self._seconds.get(phase, 0.0) + time.perf_counter() - started

    def initialize(self, start: int, prompts_per_epoch: int) -> None:
        """Fixes which rollouts this run does: from the checkpoint's next one up to `--num-rollout`."""
        total = self.args.num_rollout
        if total is None:
            total = self.args.num_epoch * (prompts_per_epoch // self.args.rollout_batch_size)
        self.rollout_ids = range(start, total)
        self.weight_version = start
        logger.info("rollouts %d to %d will be generated and trained on", start, total - 1)

    def start_generation(self, rollout_id: int) -> ray.ObjectRef:
        """Starts generating a rollout; `finish_generation` waits for it."""
        return self._manager.generate.remote(rollout_id)

    def finish_generation(self, generation: ray.ObjectRef) -> RolloutResult:
        """The generated rollout, once it is complete."""
        with self._timed("wait_for_rollout"), self._progress("generate") as update:
            result: RolloutResult = self._supervisor.get([generation], progress=update)[0]
        self._seconds["generate"] = result.seconds
        return result

    def wait_for(self, generation: ray.ObjectRef) -> None:
        """Waits until a generation is complete, so that no request is in flight when weights change."""
        with self._timed("wait_for_rollout"):
            self._supervisor.get([generation])

    def generate(self, rollout_id: int) -> RolloutResult:
        """Generates one rollout and waits for it."""
        return self.finish_generation(self.start_generation(rollout_id))

    @contextlib.contextmanager
    def _progress(self, title: str) -> Iterator[object]:
        with ProgressBar(title) as bar:
            if not bar.enabled:
                yield None
                return
            yield lambda: bar.update_to(*ray.get(self._manager.progress.remote()))

    def train(self, rollout: RolloutResult) -> list[dict[str, float]]:
        """Trains on a rollout; metrics per optimizer step."""
        with self._timed("train"):
            return self._trainers.train(rollout.rollout_id, rollout.batches)

    def weights_due(self, rollout_id: int) -> bool:
        """Whether the asynchronous loop pushes after this rollout (`--update-weights-interval`, and the last)."""
        done = rollout_id + 1
        return done == self.rollout_ids.stop or done % self.args.update_weights_interval == 0

    def update_weights(self, version: int) -> None:
        """Pushes the trained weights to every engine; no generation may be running."""
        if self.args.debug_train_only:
            return
        with self._timed("update_weights"):
            self._trainers.update_weights(version)
        self.weight_version = version

    def save_if_due(self, rollout: RolloutResult) -> None:
        """Saves on `--save-interval` and after the last rollout."""
        done = rollout.rollout_id + 1
        last = done == self.rollout_ids.stop
        if self.args.save and self.args.save_interval and (last or done % self.args.save_interval == 0):
            with self._timed("save"):
                folder = self._trainers.save(rollout.rollout_id, rollout.data_state)
            logger.info("saved %s", folder)

    def evaluate_before_training(self) -> None:
        """The evaluation of the untrained (or just loaded) model."""
        if self.args.eval_interval and not self.args.skip_eval_before_train and not self.args.debug_train_only:
            self._evaluate(self.rollout_ids.start, "before")

    def evaluation_due(self, rollout_id: int) -> bool:
        """Whether the weights after this rollout are to be evaluated."""
        if not self.args.eval_interval or self.args.debug_train_only:
            return False
        done = rollout_id + 1
        return done == self.rollout_ids.stop or done % self.args.eval_interval == 0

    def evaluate_if_due(self, rollout_id: int) -> None:
        """Evaluates on `--eval-interval` and after the last rollout."""
        if self.evaluation_due(rollout_id):
            self._evaluate(rollout_id + 1, "after" if rollout_id + 1 == self.rollout_ids.stop else rollout_id + 1)

    def _evaluate(self, step: int, when: str | int) -> None:
        with self._timed("evaluate"), self._progress("evaluate") as update:
            results = self._supervisor.get([self._manager.evaluate.remote(step)], progress=update)[0]
        self._log.evaluation(when, step, results)

    @contextlib.contextmanager
    def step(self, rollout_id: int) -> Iterator[None]:
        """Times one turn of the loop; the loop reports it with `record`."""
        self._seconds = {}
        self._started = time.perf_counter()
        yield

    def record(self, rollout: RolloutResult, train_metrics: list[dict[str, float]]) -> None:
        """Writes one step's line, TensorBoard scalars and summary entry."""
        seconds = {**self._seconds, "total": time.perf_counter() - self._started}
        self._log.step(
            StepRecord(
                step=rollout.rollout_id,
                weight_version=rollout.weight_version,
                rollout=rollout.metrics,
                train=train_metrics,
                seconds=seconds,
            )
        )


@contextlib.contextmanager
def open_run(args: Arguments) -> Iterator[Run]:
    """Reserves slots, starts train workers and the inference fleet, loads the checkpoint; ends them all at the end."""
    run_dir = Path(args.run_dir).absolute()
    plan = plan_slots(args)
    environment = worker_environment(args.train_env_vars)
    with contextlib.ExitStack() as stack:
        stack.enter_context(ray_session(plan.total))
        log = stack.enter_context(RunLog.open(args, package_versions()))
        slots = Slots(plan)
        stack.callback(slots.release)
        supervisor = Supervisor()
        trainers = TrainGroup(args, slots, supervisor, environment)
        stack.callback(trainers.kill)
        data_parallel_size = len(plan.train) // args.tensor_model_parallel_size
        manager = RolloutManager.options(
            runtime_env={"env_vars": environment}, name="rollout manager", max_concurrency=64
        ).remote(args, data_parallel_size, run_dir / "logs" / "rollout.log")
        stack.callback(ray.kill, manager)

        logger.info("starting %d train workers and %d rollout slots", len(plan.train), len(plan.rollout))
        starting = manager.start.remote(None if args.debug_train_only else slots, environment)
        start, data_state = trainers.initialize()
        endpoints = supervisor.get([starting])[0]
        if endpoints:
            supervisor.watch(manager.watch.remote(), lambda error: f"the rollout manager died: {error}")
            trainers.connect_engines(endpoints)
        if data_state is not None:
            supervisor.get([manager.load_data_state.remote(data_state)])
        run = Run(args, trainers, manager, supervisor, log)
        run.initialize(start, supervisor.get([manager.prompts_per_epoch.remote()])[0])
        yield run
        trainers.close()
        ray.get(manager.close.remote())
