"""What both entry points share: parse, run the loop, end with one clear message and a true exit code."""

from __future__ import annotations

import logging
import signal
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from slimrl.arguments import parse_args
from slimrl.arguments.secrets import without_secrets
from slimrl.cluster.ray_environment import prepare_ray_environment
from slimrl.processes.command_line import show_as

if TYPE_CHECKING:
    from slimrl.cluster.run import Run

logger = logging.getLogger("slimrl")

EXIT_FAILED = 1
EXIT_REFUSED = 2
EXIT_INTERRUPTED = 130
EXIT_TERMINATED = 143


class _Interrupts:
    """Handles SIGINT and SIGTERM, as Ctrl-C and `ray job stop` send them: the first one ends the run, further ones do
    not disturb its end."""

    def __init__(self) -> None:
        self.first: int | None = None
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, self._handle)

    @property
    def exit_code(self) -> int:
        """By the first signal: of the exception Ray makes one of its own on the way."""
        return EXIT_TERMINATED if self.first == signal.SIGTERM else EXIT_INTERRUPTED

    def _handle(self, number: int, _: object) -> None:
        if self.first is not None:
            logger.warning("already ending what this run started; a moment")
            return
        self.first = number
        raise KeyboardInterrupt


def passthrough_flags() -> dict[str, Callable]:
    """The `--sglang-*` and `--router-*` flags of the installed packages, read only when one is used."""
    from slimrl.sglang.flags import router_flags, server_flags

    return {"sglang": server_flags, "router": router_flags}


def main(entry: str, loop: Callable[[Run], None], argv: Sequence[str] | None = None) -> int:
    """Runs `loop` on a freshly opened run; returns the process's exit code."""
    args = parse_args(list(sys.argv[1:] if argv is None else argv), entry=entry, passthrough=passthrough_flags())
    show_as(without_secrets(sys.argv))

    prepare_ray_environment()
    if args.dry_run:
        from slimrl.cluster.dry_run import dry_run

        return dry_run(args, entry)
    from slimrl.cluster.run import open_run
    from slimrl.cluster.session import SlotsMissingError
    from slimrl.cluster.supervise import ProcessDiedError
    from slimrl.cluster.train_worker import RankFailedError
    from slimrl.cluster.watchdog import WaitedTooLongError
    from slimrl.hooks import HookFailedError
    from slimrl.observability.logs import setup_logging
    from slimrl.observability.prometheus import PrometheusError
    from slimrl.observability.run_checks import RunCheckError
    from slimrl.processes import ProcessStartError
    from slimrl.rollout.failures import SampleError
    from slimrl.rollout.rm_hub.failures import NoVerdictsError
    from slimrl.sglang.errors import EngineError
    from slimrl.weights.servers import WeightSyncError

    setup_logging(args.log_level, args.run_dir)
    interrupts = _Interrupts()
    try:
        with open_run(args) as run:
            loop(run)
    except (SlotsMissingError, PrometheusError) as error:
        logger.error("%s", error)
        return EXIT_REFUSED
    except (
        ProcessDiedError,
        ProcessStartError,
        RankFailedError,
        EngineError,
        WeightSyncError,
        WaitedTooLongError,
        SampleError,
        NoVerdictsError,
        HookFailedError,
        RunCheckError,
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
