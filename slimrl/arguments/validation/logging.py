"""Rules about what is recorded where: TensorBoard, W&B, Prometheus, the timeline, profilers and memory records.

What a profiler or memory record is asked for must exist: some rank, in some rollout.
"""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Iterator

from slimrl.arguments.flag import Problem, flag_specs
from slimrl.arguments.flags.logging import ProfilingArguments
from slimrl.arguments.namespace import Arguments
from slimrl.arguments.validation.rule import Context

_TENSORBOARD = ("tensorboard_dir", "tb_project_name", "tb_experiment_name")
_WANDB = (
    "wandb_mode",
    "wandb_dir",
    "wandb_key",
    "wandb_host",
    "wandb_team",
    "wandb_group",
    "wandb_project",
    "wandb_run_id",
)


def charts_have_their_switch(args: Arguments, context: Context) -> Iterator[Problem]:
    """What describes charts asks for them."""
    for switch, used, names in (
        ("--use-tensorboard", args.use_tensorboard, _TENSORBOARD),
        ("--use-wandb", args.use_wandb, _WANDB),
        ("--prometheus-port", args.prometheus_port is not None, ("prometheus_host",)),
    ):
        for name in names:
            if name in context.given and not used:
                flag = "--" + name.replace("_", "-")
                value = "" if name == "wandb_key" else f" {vars(args)[name]}"  # the key is shown nowhere
                yield Problem(flag, f"{flag}{value} belongs to {switch}: add it, or leave {flag} out.")
    if args.wandb_always_use_train_step and not args.use_wandb and not args.use_tensorboard:
        yield Problem(
            "--wandb-always-use-train-step",
            "--wandb-always-use-train-step belongs to --use-wandb or --use-tensorboard: add one of them, or leave it"
            " out.",
        )


def timeline_is_on(args: Arguments, context: Context) -> Iterator[Problem]:
    """What a timeline shows has one."""
    if "timeline_requests" in context.given and not args.timeline:
        yield Problem(
            "--timeline-requests",
            f"--timeline-requests {args.timeline_requests} belongs to a run with a timeline: leave --no-timeline out,"
            " or this.",
        )


def wandb_is_installed(args: Arguments, context: Context) -> Iterator[Problem]:
    """The package is there; a folder wandb/ in the working directory, as W&B itself leaves them, is no package."""
    if not args.use_wandb or args.wandb_mode == "disabled":
        return
    found = importlib.util.find_spec("wandb")
    if found is None or found.origin is None:
        yield Problem(
            "--use-wandb",
            "--use-wandb needs the package wandb, which is not installed: pip install 'slimrl[wandb]', or leave it"
            " out.",
        )


def prometheus_port_is_free(args: Arguments, context: Context) -> Iterator[Problem]:
    """Somebody else's port is known before anything starts."""
    port, host = args.prometheus_port, args.prometheus_host
    if port is None or "prometheus_port" in context.broken:
        return
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does, to bind it again at once
            probe.bind(address)
    except OSError as error:
        yield Problem(
            "--prometheus-port",
            f"--prometheus-port {port} on {host} cannot be opened ({error.strerror or error}): give another port or"
            " --prometheus-host, or end the program that listens there.",
        )


def ports_are_apart(args: Arguments, context: Context) -> Iterator[Problem]:
    """Each port has one owner: the driver's metrics, the router that slimrl starts, and that router's metrics."""
    ports = [
        ("--prometheus-port", args.prometheus_port),
        ("--sglang-router-port", args.sglang_router_port if args.sglang_router_ip is None else None),
        ("--router-prometheus-port", args.router_options.get("prometheus_port")),
    ]
    for place, (flag, port) in enumerate(ports):
        same = [earlier for earlier, number in ports[:place] if number == port]
        if port is not None and same:
            yield Problem(
                flag, f"{flag} {port} is the port of {same[0]} too, and both listen: give one of them another port."
            )


_OF_PROFILER = ("profile_step_start", "profile_step_end", "profile_ranks", "profile_target")
_OF_RECORD = ("memory_snapshot_dir", "memory_snapshot_path", "memory_snapshot_num_steps")
_PROFILER = "--use-pytorch-profiler"


def profiling_flags_have_their_switch(args: Arguments, context: Context) -> Iterator[Problem]:
    """A setting of what is off is a slip."""
    for spec in flag_specs(ProfilingArguments):
        for names, needed, given in (
            (_OF_PROFILER, _PROFILER, args.use_pytorch_profiler),
            (_OF_RECORD, "--record-memory-history", args.record_memory_history),
        ):
            if spec.dest in names and spec.dest in context.given and not given:
                yield Problem(spec.name, f"{spec.name} belongs to {needed}: add it, or leave {spec.name} out.")


def profiler_has_something_to_profile(args: Arguments, context: Context) -> Iterator[Problem]:
    """Rollouts, ranks and parts of training that are there."""
    if not args.use_pytorch_profiler:
        return
    start, end = args.profile_step_start, args.profile_step_end
    if end <= start:
        yield Problem(
            "--profile-step-end",
            f"--profile-step-end {end} is not above --profile-step-start {start}: no rollout would be profiled.",
        )
    elif args.num_rollout is not None and start >= args.num_rollout:
        yield Problem(
            "--profile-step-start",
            f"--profile-step-start {start} is not below --num-rollout {args.num_rollout}: no rollout would be profiled;"
            " lower it.",
        )
    absent = [rank for rank in args.profile_ranks if not 0 <= rank < args.actor_num_gpus]
    if absent:
        yield Problem(
            "--profile-ranks",
            f"--profile-ranks {' '.join(map(str, absent))}: there are the ranks 0 to {args.actor_num_gpus - 1}.",
        )
    if "train_overall" in args.profile_target and len(set(args.profile_target)) > 1:
        yield Problem(
            "--profile-target",
            "--profile-target train_overall holds the other parts: give it alone, or the others without it.",
        )
    if args.debug_rollout_only:
        yield Problem(_PROFILER, f"{_PROFILER} profiles training and --debug-rollout-only has none: leave one out.")


def memory_record_has_training(args: Arguments, context: Context) -> Iterator[Problem]:
    """Allocations are those of training ranks."""
    if args.record_memory_history and args.debug_rollout_only:
        yield Problem(
            "--record-memory-history",
            "--record-memory-history is about training and --debug-rollout-only has none: leave one out.",
        )
