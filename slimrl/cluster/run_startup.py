"""What `run.open_run` starts besides the train workers: timeline, rollout manager, recovery of weight updates."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Iterator
from pathlib import Path

from slimrl.arguments import Arguments
from slimrl.arguments.layout import data_parallel_sizes
from slimrl.cluster.engines.weight_update_recovery import WeightUpdateRecovery
from slimrl.cluster.launch import Launch
from slimrl.cluster.rollout_manager import RolloutManager
from slimrl.cluster.rollout_manager_proxy import RolloutManagerProxy
from slimrl.cluster.supervisor import Supervisor
from slimrl.cluster.training.train_group import TrainGroup
from slimrl.observability.timeline import merge_at_end
from slimrl.observability.tracer import Timeline
from slimrl.weights.update.topology import EngineEndpoint

logger = logging.getLogger("slimrl")


@contextlib.contextmanager
def open_timeline(args: Arguments) -> Iterator[Timeline]:
    """The driver's timeline; on exit it is merged with those of all processes."""
    timeline = Timeline.open(args, "driver")
    timeline.add_process_start()
    try:
        yield timeline
    finally:
        timeline.close()
        if args.timeline:
            logger.info("%s", merge_at_end(Path(args.run_dir)))


def weight_recovery(
    args: Arguments,
    manager: RolloutManagerProxy,
    supervisor: Supervisor,
    trainers: TrainGroup | None,
    endpoints: list[EngineEndpoint],
) -> WeightUpdateRecovery | None:
    """The object that sends weights to replaced servers; None without `--use-fault-tolerance` or without servers."""
    if not args.use_fault_tolerance or not endpoints:
        return None
    recovery = WeightUpdateRecovery(manager, supervisor, trainers, endpoints)
    supervisor.set_event_handler(recovery)
    return recovery


def start_manager(args: Arguments, launch: Launch) -> RolloutManagerProxy:
    """Starts the rollout manager without waiting for it."""
    options = {"runtime_env": {"env_vars": launch.environment}, "name": "rollout manager", "max_concurrency": 64}
    log_path = Path(args.run_dir).absolute() / "logs" / "rollout.log"
    actor = RolloutManager.options(**options)  # type: ignore[attr-defined]
    return RolloutManagerProxy(actor.remote(args, data_parallel_sizes(args), log_path, Path.cwd()))


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
