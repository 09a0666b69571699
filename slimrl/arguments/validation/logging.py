"""Rules about TensorBoard, W&B, Prometheus, timeline, profilers, dumps and memory records.

The ranks and rollouts of a profiler or memory record must exist.
"""

from __future__ import annotations

import importlib.util
import socket
from collections.abc import Iterator
from pathlib import Path

from slimrl.arguments.flag import Problem, flag_specs
from slimrl.arguments.flags.logging import ProfilingArguments
from slimrl.arguments.namespace import Arguments, Context

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
    """Settings of a metric writer need its switch."""
    for switch, used, names in (
        ("--use-tensorboard", args.use_tensorboard, _TENSORBOARD),
        ("--use-wandb", args.use_wandb, _WANDB),
        ("--prometheus-port", args.prometheus_port is not None, ("prometheus_host",)),
    ):
        for name in names:
            if name in context.given and not used:
                flag = "--" + name.replace("_", "-")
                value = "" if name == "wandb_key" else f" {vars(args)[name]}"  # never print the key
                yield Problem(flag, f"{flag}{value} belongs to {switch}: add it, or leave {flag} out.")
    if args.wandb_always_use_train_step and not args.use_wandb and not args.use_tensorboard:
        yield Problem(
            "--wandb-always-use-train-step",
            "--wandb-always-use-train-step belongs to --use-wandb or --use-tensorboard: add one of them, or leave it"
            " out.",
        )


def timeline_is_on(args: Arguments, context: Context) -> Iterator[Problem]:
    """--timeline-requests needs a timeline."""
    if "timeline_requests" in context.given and not args.timeline:
        yield Problem(
            "--timeline-requests",
            f"--timeline-requests {args.timeline_requests} has no effect with --no-timeline: leave one of them out.",
        )


def wandb_is_installed(args: Arguments, context: Context) -> Iterator[Problem]:
    """The package wandb is installed; a folder wandb/ that W&B left in the working directory does not count."""
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
    """--prometheus-port is free."""
    port, host = args.prometheus_port, args.prometheus_host
    if port is None or "prometheus_port" in context.broken:
        return
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # as the server does
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
            yield Problem(flag, f"{flag} {port} is also the port of {same[0]}: give one of them another port.")


_OF_PROFILER = ("profile_step_start", "profile_step_end", "profile_ranks", "profile_target")
_OF_RECORD = ("memory_snapshot_dir", "memory_snapshot_path", "memory_snapshot_num_steps")
_PROFILER = "--use-pytorch-profiler"


def profiling_flags_have_their_switch(args: Arguments, context: Context) -> Iterator[Problem]:
    """Settings of a profiler need its switch."""
    for spec in flag_specs(ProfilingArguments):
        for names, needed, given in (
            (_OF_PROFILER, _PROFILER, args.use_pytorch_profiler),
            (_OF_RECORD, "--record-memory-history", args.record_memory_history),
        ):
            if spec.dest in names and spec.dest in context.given and not given:
                yield Problem(spec.name, f"{spec.name} belongs to {needed}: add it, or leave {spec.name} out.")


def profiler_has_something_to_profile(args: Arguments, context: Context) -> Iterator[Problem]:
    """The profiled rollouts, ranks and parts of training exist."""
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
            f"--profile-ranks {' '.join(map(str, absent))}: ranks are 0 to {args.actor_num_gpus - 1}; correct them.",
        )
    if "train_overall" in args.profile_target and len(set(args.profile_target)) > 1:
        yield Problem(
            "--profile-target",
            "--profile-target train_overall includes the other parts: give it alone, or the others without it.",
        )
    if args.debug_rollout_only:
        yield Problem(_PROFILER, f"{_PROFILER} profiles training and --debug-rollout-only has none: leave one out.")


def memory_record_has_training(args: Arguments, context: Context) -> Iterator[Problem]:
    """--record-memory-history needs training."""
    if args.record_memory_history and args.debug_rollout_only:
        yield Problem(
            "--record-memory-history",
            "--record-memory-history records training and --debug-rollout-only has none: leave one out.",
        )


_LONGEST_NAME = 200  # bytes; file systems allow 255, and file names are derived from it


def run_has_a_plain_name(args: Arguments, context: Context) -> Iterator[Problem]:
    """The name is that of a single folder in --runs-dir."""
    name = args.run_name
    if name is None:
        return
    fix = "give a plain name, such as my-run"
    if "/" in name or "\\" in name:
        fault, fix = "is a path", f"{fix}, and the folder above it with --runs-dir"
    elif name.startswith("."):
        fault = "begins with a dot"
    elif not name.isprintable() or name != name.strip():
        name, fault = ascii(name), "has non-printable characters or outer spaces"
    elif (length := len(name.encode())) > _LONGEST_NAME:
        name, fault = f"{name[:20]}...", f"has {length} bytes, more than {_LONGEST_NAME}"
    else:
        return
    yield Problem("--run-name", f"--run-name {name} {fault}, and it is the name of a folder: {fix}.")


def outputs_can_be_written(args: Arguments, context: Context) -> Iterator[Problem]:
    """No output folder is below an existing file."""
    for flag, value in (
        ("--save", args.save),
        ("--save-hf", args.save_hf),
        ("--runs-dir", args.runs_dir),
        ("--tensorboard-dir", args.tensorboard_dir),
        ("--wandb-dir", args.wandb_dir),
        ("--update-weight-disk-dir", args.update_weight_disk_dir),
        ("--update-weight-local-checkpoint-dir", args.update_weight_local_checkpoint_dir),
        ("--precompute-ref-log-probs", args.precompute_ref_log_probs),
    ):
        if value is not None:
            file = next((path for path in (Path(value), *Path(value).parents) if path.is_file()), None)
            if file is not None:
                yield Problem(flag, f"{flag} {value} cannot be a folder, {file} is a file: choose another path.")


def dump_templates_name_the_rollout(args: Arguments, context: Context) -> Iterator[Problem]:
    """Templates give one file per rollout; recorded rollouts to replay exist."""
    templates = {
        "--save-debug-rollout-data": args.save_debug_rollout_data,
        "--save-debug-train-data": args.save_debug_train_data,
        "--load-debug-rollout-data": args.load_debug_rollout_data,
        "--load-forge-rollout-data": args.load_forge_rollout_data,
        "--ci-save-grad-norm": args.ci_save_grad_norm,
        "--ci-load-grad-norm": args.ci_load_grad_norm,
    }
    for flag, template in templates.items():
        needed = ("{rollout_id}", "{step_id}") if flag.endswith("grad-norm") else ("{rollout_id}",)
        missing = [name for name in needed if template is not None and name not in template]
        if missing:
            what = "every rollout" if "{rollout_id}" in missing else "every optimizer step of a rollout"
            yield Problem(
                flag, f"{flag} {template} is the same file for {what}: put {' and '.join(missing)} into the path."
            )
    if args.save_debug_rollout_limit is not None and args.save_debug_rollout_data is None:
        yield Problem(
            "--save-debug-rollout-limit",
            f"--save-debug-rollout-limit {args.save_debug_rollout_limit} limits recorded rollouts, and none are"
            f" recorded:"
            " give --save-debug-rollout-data, or leave it out.",
        )
    if args.save_debug_rollout_data is not None and args.save_debug_rollout_data == args.save_debug_train_data:
        yield Problem(
            "--save-debug-train-data",
            f"--save-debug-train-data {args.save_debug_train_data} is also --save-debug-rollout-data, and one would"
            " overwrite the other: give two paths.",
        )
    for flag in ("--load-debug-rollout-data", "--load-forge-rollout-data"):
        template = templates[flag]
        if template is not None and "{rollout_id}" in template:
            folder, pattern = Path(template).parent, Path(template).name.replace("{rollout_id}", "*")
            if "{rollout_id}" not in str(folder) and not any(folder.glob(pattern)):
                yield Problem(flag, f"{flag} {template} matches no file: check the path.")


def recorded_rollouts_have_one_use(args: Arguments, context: Context) -> Iterator[Problem]:
    """Recorded rollouts are trained on either with engines or without; a subsample needs recorded rollouts."""
    debug, forge, part = (
        args.load_debug_rollout_data,
        args.load_forge_rollout_data,
        args.load_debug_rollout_data_subsample,
    )
    if debug is not None and forge is not None:
        yield Problem(
            "--load-forge-rollout-data",
            "--load-forge-rollout-data trains on recorded rollouts with engines running and --load-debug-rollout-data"
            " without: give one of them.",
        )
    if forge is not None and (args.debug_train_only or args.debug_rollout_only):
        other = "--debug-train-only" if args.debug_train_only else "--debug-rollout-only"
        if debug is None:
            yield Problem(
                "--load-forge-rollout-data",
                f"--load-forge-rollout-data trains with engines and {other} leaves one side out: leave {other} out.",
            )
    if part is not None and debug is None and forge is None:
        yield Problem(
            "--load-debug-rollout-data-subsample",
            f"--load-debug-rollout-data-subsample {part:g} needs recorded rollouts: give --load-debug-rollout-data"
            f" too.",
        )


def ci_checks_have_their_switch(args: Arguments, context: Context) -> Iterator[Problem]:
    """Settings of --ci-test need it; gradient norms are not written to the file that they are compared with."""
    if not args.ci_test:
        for name in ("ci_disable_kl_checker", "ci_train_rollout_logprob_abs_diff_threshold"):
            if name in context.given:
                flag = "--" + name.replace("_", "-")
                yield Problem(flag, f"{flag} belongs to --ci-test: add it, or leave {flag} out.")
    if args.ci_save_grad_norm is not None and args.ci_save_grad_norm == args.ci_load_grad_norm:
        yield Problem(
            "--ci-load-grad-norm",
            f"--ci-load-grad-norm {args.ci_load_grad_norm} is also --ci-save-grad-norm, which overwrites it: give"
            " another path.",
        )
