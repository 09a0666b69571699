"""The driver's Ray session, and what every actor process sets up: its log file and its working folder.

The session joins the cluster that runs this job, or starts a local one for a bare `python train.py`. An actor process
writes everything to one log file, in order, also from C++ and from a crash. Actors work in the driver's folder, so that
relative paths in flags and modules of custom functions mean the same there.
"""

from __future__ import annotations

import contextlib
import faulthandler
import logging
import os
import signal
import sys
from collections import deque
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import ray
from ray._raylet import AuthenticationMode, get_authentication_mode  # type: ignore[attr-defined]

from slimrl.cluster.launch import check_driver_sees_gpus
from slimrl.platform.launch_env import Machine, this_machine
from slimrl.processes import stale_resources
from slimrl.processes.best_effort_files import optional_output

logger = logging.getLogger("slimrl")

DAEMON_END_TIMEOUT_S = 3.0
RAY_FOLDER = "r"  # the path of a socket in it may not be longer than 107 bytes


class InsufficientGpusError(RuntimeError):
    """The Ray cluster has fewer GPUs than the flags ask for."""


@contextlib.contextmanager
def ray_session(gpus_needed: int, log_level: str = "warning", machine: Machine | None = None) -> Iterator[None]:
    """Connects to the running cluster (as inside `ray job submit`), else starts a local one; leaves it at the end.

    A local cluster on a machine without GPUs is given `gpus_needed` logical GPUs. `machine` is the driver's.
    Raises InsufficientGpusError when the cluster can never place the job, DriverWithoutGpuError where it has GPUs that
    the driver does not see.
    """
    machine = machine if machine is not None else this_machine()
    if removed := stale_resources.sweep():
        logger.info("removed what killed runs had left: %s", ", ".join(removed))
    options = {"log_to_driver": False, "logging_level": log_level}
    with contextlib.ExitStack() as stack:
        stack.callback(ray.shutdown)
        if os.environ.get("RAY_ADDRESS"):
            with _own_signal_handler():
                ray.init(**options)
            _warn_of_open_cluster()
            check_driver_sees_gpus(machine, ray.cluster_resources(), os.environ)
        else:
            _start_local(stack, gpus_needed, options, machine)
        check_gpus(gpus_needed, int(ray.cluster_resources().get("GPU", 0)))
        yield


def _warn_of_open_cluster() -> None:
    """A cluster of the user's may be kept from strangers by other means, which nobody sees from here."""
    nodes = sorted({node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]})
    if len(nodes) > 1 and get_authentication_mode() != AuthenticationMode.TOKEN:
        logger.warning(
            "the Ray cluster spans %d nodes (%s) and asks nobody for a token: whoever reaches one of their ports runs"
            " commands as you; start it with RAY_AUTH_MODE=token and one RAY_AUTH_TOKEN on every node, or keep"
            " strangers out of its network (docs/install.md, several nodes)",
            len(nodes),
            ", ".join(nodes[:8]) + (", ..." if len(nodes) > 8 else ""),
        )


def _start_local(stack: contextlib.ExitStack, gpus: int, options: dict[str, Any], machine: Machine) -> None:
    # A folder of our own, short enough for the sockets inside it, so that nothing stays behind. Ray opens the folder
    # that it is given to everybody: it gets one inside.
    folder = stack.enter_context(stale_resources.owned_folder("slimrl-ray-")) / RAY_FOLDER
    stack.callback(ray.shutdown)  # before the folder goes
    logical = {} if machine.cuda else {"num_gpus": gpus}
    with contextlib.ExitStack() as unfinished:
        unfinished.callback(_end_children_but, psutil.Process().children())
        with _own_signal_handler(), _visible_to_ray(bool(logical)), _children_in_their_own_groups():
            ray.init(address="local", include_dashboard=False, _temp_dir=str(folder), **logical, **options)
        unfinished.pop_all()


@contextlib.contextmanager
def _own_signal_handler() -> Iterator[None]:
    """Ray replaces the handler of SIGTERM by one that leaves at once, with the signal's number as exit code.

    What an exception out of a handler meets, as code of Ray's that ignores every error, decides whether it is heard of:
    a signal that came in this block is handled after it once more.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    with _signals_noted() as came:
        try:
            yield
        except SystemExit as left:
            if left.code != signal.SIGTERM:
                raise
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        numbers = [number for number in came() if number in handlers]
    for first in numbers[:1]:
        signal.raise_signal(first)
        raise KeyboardInterrupt  # its handler says so only of the first signal, which may have been ignored


@contextlib.contextmanager
def _signals_noted() -> Iterator[Callable[[], bytes]]:
    """Yields what tells the numbers of the signals that came so far, whoever handles them."""
    reader, writer = os.pipe()
    for end in (reader, writer):
        os.set_blocking(end, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def came() -> bytes:
        try:
            return os.read(reader, 4096)
        except BlockingIOError:
            return b""

    try:
        yield came
    finally:
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)


@contextlib.contextmanager
def _children_in_their_own_groups() -> Iterator[None]:
    """Signals to the driver's process group, as of Ctrl-C and `timeout`, do not reach Ray's daemons.

    They are for the driver, which ends what it started in order, and needs the daemons for that. Ray offers no way to
    start them so; it prepares them in the child (`preexec_fn`), and with that Python runs hooks of forks there. A hook
    cannot be taken back: after this block it does nothing.
    """
    groups = contextlib.ExitStack()
    groups.callback(os.setpgrp)
    os.register_at_fork(after_in_child=groups.close)
    try:
        yield
    finally:
        groups.pop_all()


def _end_children_but(known: list[psutil.Process]) -> None:
    """Ends what a `ray.init` that was interrupted has started: Ray forgets it."""
    children = [child for child in psutil.Process().children() if child not in known]
    below = [process for child in children for process in child.children(recursive=True)]
    for child in children:
        child.terminate()
    _, alive = psutil.wait_procs([*children, *below], DAEMON_END_TIMEOUT_S)
    for process in alive:
        process.kill()
    psutil.wait_procs(alive, DAEMON_END_TIMEOUT_S)


@contextlib.contextmanager
def _visible_to_ray(logical: bool) -> Iterator[None]:
    """Ray refuses more logical GPUs than `CUDA_VISIBLE_DEVICES` names; an empty list there is meant for us alone."""
    hidden = os.environ.pop("CUDA_VISIBLE_DEVICES", None) if logical else None
    try:
        yield
    finally:
        if hidden is not None:
            os.environ["CUDA_VISIBLE_DEVICES"] = hidden


def check_gpus(needed: int, present: int) -> None:
    """Raises InsufficientGpusError when `present` < `needed`."""
    if present < needed:
        raise InsufficientGpusError(
            f"the flags ask for {needed} GPUs and the Ray cluster has {present}: start Ray with more"
            f" (`ray start --num-gpus {needed}` gives logical GPUs on a machine without GPUs) or lower"
            " --actor-num-nodes, --actor-num-gpus-per-node, --rollout-num-gpus or --rm-num-gpus"
        )


LOG_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


def redirect_to(path: Path, level: str) -> None:
    """Sends this process's stdout, stderr, log records and fatal-signal tracebacks to `path` (appending)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    file = open(path, "a", buffering=1)  # noqa: SIM115 - lives as long as the process
    sys.stdout.flush()
    sys.stderr.flush()
    os.dup2(file.fileno(), 1)
    os.dup2(file.fileno(), 2)
    faulthandler.enable(file=sys.__stderr__ or 2)
    # whoever prints, a reward function of the user's, say, is not ended by a full disk
    sys.stdout, sys.stderr = optional_output(1), optional_output(2)
    logging.basicConfig(stream=sys.stderr, level=level.upper(), format=LOG_FORMAT, force=True)


def last_lines(path: Path, count: int = 20) -> str:
    """The last `count` lines of a log, or a sentence saying why there are none."""
    try:
        with open(path, errors="replace") as file:
            lines = "".join(deque(file, maxlen=count)).rstrip()
    except OSError as error:
        return f"(no log can be read: {error})"
    return lines or f"({path} is empty)"


def enter(folder: Path) -> None:
    """Changes into the driver's folder; Ray leaves actors where it was started itself.

    On a node that has no such folder nothing changes: absolute paths are the only ones that can work there.
    """
    if folder.is_dir():
        os.chdir(folder)
