"""The command line of a run: both entry points parse it, run the loop, and exit with one message and an exit code.

With `--dry-run` they inspect the machine or cluster and print the plan, and start no Ray, no model and no server.

`python -m slimrl.cluster.command_line --entry train.py --made-later runs/x <flags` checks the flags of a run, fast, and
starts nothing. It needs only the standard library. The scripts call it before they create a model, an environment or a
Ray cluster.
"""

from __future__ import annotations

import argparse
import importlib.util
import logging
import os
import signal
import socket
import sys
from collections.abc import Callable, Container, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimrl.arguments import Problem, parse_args, read_args
from slimrl.arguments.flag import report
from slimrl.arguments.namespace import all_flag_specs
from slimrl.arguments.redact import set_process_title, without_secrets
from slimrl.engines.backend import SGLANG, backend, passthrough_flags
from slimrl.platform.launch_env import prepare_ray_environment

if TYPE_CHECKING:
    from slimrl.arguments import Arguments
    from slimrl.arguments.parser import PassthroughTables
    from slimrl.cluster.run import Run

logger = logging.getLogger("slimrl")

EXIT_FAILED = 1  # the same command would fail again
EXIT_REFUSED = 2
# EX_TEMPFAIL of sysexits.h: a process, server or node was lost; the same command continues from the last checkpoint
EXIT_RESUMABLE = 75
_EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


class _Interrupts:
    """Handles SIGINT (Ctrl-C), SIGTERM (`ray job stop`) and SIGHUP (closed terminal).

    The first signal ends the run; later ones do not interrupt the shutdown. SIGHUP stays ignored under `nohup`.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        self._terminals = [descriptor for descriptor in (1, 2) if os.isatty(descriptor)]
        for number in _EXIT_CODES:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._handle)

    @property
    def exit_code(self) -> int:
        """Exit code of the first signal; Ray turns the exception into one of its own."""
        return _EXIT_CODES[signal.Signals(self.first or signal.SIGINT)]

    def _handle(self, number: int, _: object) -> None:
        if number == signal.SIGHUP:
            self._leave_terminal()
        if self.first is not None:
            logger.warning("shutdown in progress")
            return
        self.first = number
        raise KeyboardInterrupt

    def _leave_terminal(self) -> None:
        """Redirects terminal output to /dev/null: writes to a closed terminal would fail and break the shutdown."""
        devnull = os.open(os.devnull, os.O_WRONLY)
        for descriptor in self._terminals:
            os.dup2(devnull, descriptor)
        os.close(devnull)


def main(entry: str, loop: Callable[[Run], None], argv: Sequence[str] | None = None) -> int:
    """Opens a run and runs `loop` on it; returns the process's exit code."""
    words = list(sys.argv[1:] if argv is None else argv)
    args = parse_args(words, entry=entry, passthrough=passthrough_flags(words))
    set_process_title(without_secrets(sys.argv))

    prepare_ray_environment()
    if args.dry_run:
        try:
            return dry_run(args, entry)
        except BrokenPipeError:  # of `| head`; what is left is not written when Python ends
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
            return EXIT_FAILED
    code = _run(args, loop)
    from slimrl.observability.summary import final_message

    logger.info("%s", final_message(args.run_dir, os.getpid()))
    return code


def _run(args: Arguments, loop: Callable[[Run], None]) -> int:
    from slimrl.cluster.run import open_run
    from slimrl.observability.run_log import make_private
    from slimrl.observability.terminal import setup_logging

    open_to_others = make_private(Path(args.run_dir))
    setup_logging(args.log_level, args.run_dir)
    if open_to_others is not None:
        logger.warning("%s", open_to_others)
    interrupts, codes = _Interrupts(), exit_codes()
    try:
        with open_run(args) as run:
            loop(run)
    except KeyboardInterrupt:
        logger.error("interrupted: all processes of this run were stopped")
        return interrupts.exit_code
    except Exception as error:
        code = next((codes[kind] for kind in type(error).__mro__ if kind in codes), None)
        if code is None:
            logger.exception("the run failed")  # writes the traceback to the run's log and the terminal
            return EXIT_FAILED
        logger.error("%s", error)
        return code
    return 0


def exit_codes() -> dict[type[BaseException], int]:
    """The exit code of a run for each of slimrl's own errors, and for those derived from it that have no row."""
    from slimrl.cluster.launch import DriverWithoutGpuError, MachineLacksOperatorsError
    from slimrl.cluster.nodes.comparison import NodesDifferError
    from slimrl.cluster.ray_session import InsufficientGpusError
    from slimrl.cluster.supervisor import ProcessDiedError
    from slimrl.cluster.training.train_worker import RankFailedError
    from slimrl.cluster.watchdog import WatchdogTimeoutError
    from slimrl.data.readers import ChangedDataError
    from slimrl.data.sample import RewardError
    from slimrl.engines.protocol import EngineError, EngineRequestError, EngineUnsupportedError
    from slimrl.hooks import HookFailedError
    from slimrl.observability.ci_checks import RunCheckError
    from slimrl.observability.metrics.prometheus import PrometheusError
    from slimrl.processes import ProcessStartError
    from slimrl.processes.files import FolderInUseError
    from slimrl.rollout.generation.sample_generator import SampleError
    from slimrl.rollout.rm_hub.scorer import TooManyGraderFailuresError
    from slimrl.weights.update.engine_fanout import WeightSyncError

    return {
        InsufficientGpusError: EXIT_REFUSED,
        DriverWithoutGpuError: EXIT_REFUSED,
        EngineUnsupportedError: EXIT_REFUSED,
        MachineLacksOperatorsError: EXIT_REFUSED,
        NodesDifferError: EXIT_REFUSED,
        PrometheusError: EXIT_REFUSED,
        FolderInUseError: EXIT_REFUSED,
        EngineRequestError: EXIT_FAILED,  # it would be rejected again
        RankFailedError: EXIT_FAILED,  # raised by the same code again
        SampleError: EXIT_FAILED,
        TooManyGraderFailuresError: EXIT_FAILED,
        HookFailedError: EXIT_FAILED,
        RunCheckError: EXIT_FAILED,
        ChangedDataError: EXIT_FAILED,
        RewardError: EXIT_FAILED,
        ProcessDiedError: EXIT_RESUMABLE,
        ProcessStartError: EXIT_RESUMABLE,
        EngineError: EXIT_RESUMABLE,
        WeightSyncError: EXIT_RESUMABLE,
        WatchdogTimeoutError: EXIT_RESUMABLE,
    }


ANSWER_TIMEOUT_S = 3.0


class ClusterAbsentError(ConnectionError):
    """RAY_ADDRESS names a cluster that does not answer."""


def dry_run(args: Arguments, entry: str) -> int:
    """Prints the plan; returns the exit code, 2 if the plan is invalid."""
    from slimrl.arguments.dry_run import PlanContext, print_plan, this_machine

    machine = this_machine()
    model = f"--model-path={args.hf_checkpoint}"
    # with --gpu-memory-gib the plan is for another machine, which has GPUs
    on_cpu = not machine.gpus and args.gpu_memory_gib is None
    words = [word for word in backend(args.rollout_engine).cpu_options([model]) if word != model] if on_cpu else []
    try:
        nodes = gpus_of_nodes(os.environ.get("RAY_ADDRESS"))
    except ClusterAbsentError as error:
        print(f"{entry}: {error}", file=sys.stderr)
        return EXIT_REFUSED
    return print_plan(args, entry, PlanContext(machine, nodes, words))


def gpus_of_nodes(address: str | None) -> list[int] | None:
    """Numbers of GPUs of the nodes of the cluster at `address` (RAY_ADDRESS), descending; None without an address.

    Raises ClusterAbsentError if nothing responds there; Ray itself would retry for minutes.
    """
    if not address:
        return None
    _check_answers(address)
    import ray

    ray.init(address, log_to_driver=False, logging_level="error")
    try:
        nodes = [node for node in ray.nodes() if node["Alive"]]
    finally:
        ray.shutdown()
    return sorted((int(node["Resources"].get("GPU", 0)) for node in nodes), reverse=True)


def _check_answers(address: str) -> None:
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return  # "auto": Ray looks for a cluster on this machine
    try:
        socket.create_connection((host, int(port)), ANSWER_TIMEOUT_S).close()
    except OSError as error:
        raise ClusterAbsentError(
            f"the Ray cluster at RAY_ADDRESS={address} does not answer ({error}): start it, or unset RAY_ADDRESS to"
            " plan without a cluster."
        ) from error


PREFIXES = ("sglang", "vllm", "router")


def check_flags(argv: Sequence[str]) -> int:
    """Checks the flags on standard input, each word terminated by a zero byte.

    Reports the same problems as the entry point, except for files that do not exist yet. Flags --vllm-*, and --sglang-*
    without an installed SGLang, are not checked. Exit code 0, or 2 with all problems on stderr.
    """
    parser = argparse.ArgumentParser(
        prog="python -m slimrl.cluster.command_line", description=check_flags.__doc__, allow_abbrev=False
    )
    parser.add_argument("--entry", required=True, help="program that the flags are for: train.py or train_async.py")
    parser.add_argument(
        "--made-later",
        type=Path,
        metavar="FOLDER",
        help="do not check that paths in this folder exist: they are created later or elsewhere (/: any path)",
    )
    options = parser.parse_args(argv)
    flags = [os.fsdecode(word) for word in sys.stdin.buffer.read().split(b"\0")[:-1]]
    problems = early_problems(flags, options.entry, options.made_later, passthrough())
    if problems:
        print(report(problems, options.entry), file=sys.stderr)
        return EXIT_REFUSED
    return 0


def early_problems(
    flags: Sequence[str], entry: str, made_later: Path | None, passthrough: PassthroughTables
) -> list[Problem]:
    """The problems of `flags`, without those about paths in `made_later`."""
    fields = {name: spec.dest for spec in all_flag_specs() for name in spec.on + spec.off}
    flags = _without_unchecked(flags, fields, passthrough)
    args, problems = read_args(flags, entry=entry, passthrough=passthrough)
    if made_later is None:
        return problems
    folder = made_later.absolute()
    values = {name: vars(args)[field] for name, field in fields.items()}
    return [problem for problem in problems if not _is_about_a_path_in(folder, problem, values.get(problem.flag))]


def passthrough() -> PassthroughTables:
    """The flags of SGLang and the router; empty if they are not installed (yet)."""
    engine = backend(SGLANG)
    installed = all(importlib.util.find_spec(name) is not None for name in engine.packages)
    return engine.flags(()) if installed else {}


def _without_unchecked(flags: Sequence[str], own: Container[str], checked: Container[str]) -> list[str]:
    """Removes the flags, and their values, that pass through under a prefix that is not in `checked`."""
    unchecked = tuple(f"--{prefix}-" for prefix in PREFIXES if prefix not in checked)
    kept, passing = [], False
    for word in flags:
        if word.startswith("--"):
            name = word.partition("=")[0]
            passing = name.startswith(unchecked) and name not in own
        if not passing:
            kept.append(word)
    return kept


def _is_about_a_path_in(folder: Path, problem: Problem, value: Any) -> bool:
    """By the flag's value, or by the message, which may name the file of another flag."""
    words = [word for word in (value if isinstance(value, list) else [value]) if isinstance(word, str)]
    if any(os.sep in word and Path(word).absolute().is_relative_to(folder) for word in words):
        return True
    return folder != Path(folder.anchor) and f"{folder}{os.sep}" in problem.sentence


if __name__ == "__main__":
    sys.exit(check_flags(sys.argv[1:]))
