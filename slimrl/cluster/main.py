"""What both entry points share: parse, run the loop, end with one clear message and a true exit code."""

from __future__ import annotations

import logging
import os
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slimrl.arguments import parse_args
from slimrl.arguments.redact import set_process_title, without_secrets
from slimrl.processes.ray_environment import prepare_ray_environment

if TYPE_CHECKING:
    from slimrl.arguments import Arguments
    from slimrl.cluster.run import Run


logger = logging.getLogger("slimrl")

EXIT_FAILED = 1
EXIT_REFUSED = 2
_EXIT_CODES = {signal.SIGINT: 130, signal.SIGTERM: 143, signal.SIGHUP: 129}


class _Interrupts:
    """Handles SIGINT, SIGTERM and SIGHUP, as Ctrl-C, `ray job stop` and a terminal that closes send them: the first one
    ends the run, further ones do not disturb its end. SIGHUP is left alone where it is ignored, as under `nohup`.
    """

    def __init__(self) -> None:
        self.first: int | None = None
        self._terminals = [number for number in (1, 2) if os.isatty(number)]
        for number in _EXIT_CODES:
            if number != signal.SIGHUP or signal.getsignal(number) != signal.SIG_IGN:
                signal.signal(number, self._handle)

    @property
    def exit_code(self) -> int:
        """By the first signal: of the exception Ray makes one of its own on the way."""
        return _EXIT_CODES[signal.Signals(self.first or signal.SIGINT)]

    def _handle(self, number: int, _: object) -> None:
        if number == signal.SIGHUP:
            self._leave_terminal()
        if self.first is not None:
            logger.warning("already ending what this run started; a moment")
            return
        self.first = number
        raise KeyboardInterrupt

    def _leave_terminal(self) -> None:
        """Writes to a terminal that is gone would fail, and with them the end of the run."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for number in self._terminals:
            os.dup2(nowhere, number)
        os.close(nowhere)


def passthrough_flags() -> dict[str, Callable]:
    """The `--sglang-*` and `--router-*` flags of the installed packages, read only when one is used."""
    from slimrl.engines.sglang.server_args import router_flags, server_flags

    return {"sglang": server_flags, "router": router_flags}


def main(entry: str, loop: Callable[[Run], None], argv: Sequence[str] | None = None) -> int:
    """Runs `loop` on a freshly opened run; returns the process's exit code."""
    args = parse_args(list(sys.argv[1:] if argv is None else argv), entry=entry, passthrough=passthrough_flags())
    set_process_title(without_secrets(sys.argv))

    prepare_ray_environment()
    if args.dry_run:
        from slimrl.cluster.dry_run import dry_run

        return dry_run(args, entry)
    code = _run(args, loop)
    from slimrl.observability.final_message import last_words

    logger.info("%s", last_words(args.run_dir, os.getpid()))
    return code


def _run(args: Arguments, loop: Callable[[Run], None]) -> int:
    from slimrl.cluster.launch import DriverWithoutGpuError
    from slimrl.cluster.ray_session import InsufficientGpusError
    from slimrl.cluster.run import open_run
    from slimrl.cluster.supervisor import ProcessDiedError
    from slimrl.cluster.training.train_group import RankFailedError
    from slimrl.cluster.watchdog import WatchdogTimeoutError
    from slimrl.data.watched_file import ChangedDataError
    from slimrl.engines.protocol import EngineError
    from slimrl.hooks import HookFailedError
    from slimrl.observability.ci_checks import RunCheckError
    from slimrl.observability.metrics.prometheus import PrometheusError
    from slimrl.observability.run_log import make_private
    from slimrl.observability.terminal import setup_logging
    from slimrl.processes import ProcessStartError
    from slimrl.processes.folders import FolderInUseError
    from slimrl.rollout.generation.sample_generator import SampleError
    from slimrl.rollout.rm_hub.scorer import TooManyGraderFailuresError
    from slimrl.weights.update.engine_control import WeightSyncError

    open_to_others = make_private(Path(args.run_dir))
    setup_logging(args.log_level, args.run_dir)
    if open_to_others is not None:
        logger.warning("%s", open_to_others)
    interrupts = _Interrupts()
    try:
        with open_run(args) as run:
            loop(run)
    except (InsufficientGpusError, DriverWithoutGpuError, PrometheusError, FolderInUseError) as error:
        logger.error("%s", error)
        return EXIT_REFUSED
    except (
        ProcessDiedError,
        ProcessStartError,
        RankFailedError,
        EngineError,
        WeightSyncError,
        WatchdogTimeoutError,
        SampleError,
        TooManyGraderFailuresError,
        HookFailedError,
        RunCheckError,
        ChangedDataError,
    ) as error:
        logger.error("%s", error)
        return EXIT_FAILED
    except KeyboardInterrupt:
        logger.error("interrupted; everything that this run started was ended")
        return interrupts.exit_code
    except Exception:
        logger.exception("the run failed")  # the last floor: into the run's log as well as onto the terminal
        return EXIT_FAILED
    return 0
