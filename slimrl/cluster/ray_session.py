"""The driver's Ray session, and the setup of every actor process: log file and working folder.

The session joins the cluster that runs this job, or starts a local one for a bare `python train.py`. An actor process
writes all output to one log file, including output of C++ code and crash tracebacks. Actors run in the driver's working
folder, so that relative paths in flags and modules of custom functions resolve as in the driver.
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
from slimrl.processes.files import optional_output

logger = logging.getLogger("slimrl")

DAEMON_END_TIMEOUT_S = 3.0
RAY_FOLDER = "r"  # short: socket paths inside are limited to 107 bytes


class InsufficientGpusError(RuntimeError):
    """The Ray cluster has fewer GPUs than the flags require."""


@contextlib.contextmanager
def ray_session(gpus_needed: int, log_level: str = "warning", machine: Machine | None = None) -> Iterator[None]:
    """Connects to the running cluster (as inside `ray job submit`), else starts a local one; disconnects at the end.

    A local cluster on a machine without GPUs gets `gpus_needed` logical GPUs. `machine` is the driver's.
    Raises InsufficientGpusError if the cluster has too few GPUs, DriverWithoutGpuError if it has GPUs and the driver's
    node has none.
    """
    machine = machine if machine is not None else this_machine()
    if removed := stale_resources.remove_stale():
        logger.info("removed leftovers of killed runs: %s", ", ".join(removed))
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
    """Warns if the cluster has several nodes and no token authentication.

    Only a warning: its network may be protected by means that cannot be checked from here.
    """
    nodes = sorted({node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]})
    if len(nodes) > 1 and get_authentication_mode() != AuthenticationMode.TOKEN:
        logger.warning(
            "the Ray cluster spans %d nodes (%s) and has no authentication: anyone who reaches one of their ports can"
            " run commands as you; start it with RAY_AUTH_MODE=token and one RAY_AUTH_TOKEN on every node, or restrict"
            " access to its network (docs/install.md, several nodes)",
            len(nodes),
            ", ".join(nodes[:8]) + (", ..." if len(nodes) > 8 else ""),
        )


def _start_local(stack: contextlib.ExitStack, gpus: int, options: dict[str, Any], machine: Machine) -> None:
    # Our own temporary folder, so that nothing stays behind; its path is short enough for sockets. Ray makes its
    # folder accessible to all users, so it gets a subfolder.
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
    """Keeps this process's signal handlers over `ray.init`, which installs a SIGTERM handler that exits at once.

    Code of Ray that ignores all exceptions may swallow the exception of a handler: a signal that arrives in this block
    is raised again after it.
    """
    handlers = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    with _signals_recorded() as received:
        try:
            yield
        except SystemExit as exit_:
            if exit_.code != signal.SIGTERM:
                raise
        finally:
            for number, handler in handlers.items():
                signal.signal(number, handler)
        numbers = [number for number in received() if number in handlers]
    for first in numbers[:1]:
        signal.raise_signal(first)
        raise KeyboardInterrupt  # the handler raises only for the first signal, whose exception may have been swallowed


@contextlib.contextmanager
def _signals_recorded() -> Iterator[Callable[[], bytes]]:
    """Yields a function that returns the numbers of the signals received so far, whatever handles them."""
    reader, writer = os.pipe()
    for end in (reader, writer):
        os.set_blocking(end, False)
    before = signal.set_wakeup_fd(writer, warn_on_full_buffer=False)

    def received() -> bytes:
        try:
            return os.read(reader, 4096)
        except BlockingIOError:
            return b""

    try:
        yield received
    finally:
        signal.set_wakeup_fd(before)
        os.close(reader)
        os.close(writer)


@contextlib.contextmanager
def _children_in_their_own_groups() -> Iterator[None]:
    """Keeps signals to the driver's process group (Ctrl-C, `timeout`) from Ray's daemons, which start in this block.

    The driver needs the daemons for an orderly shutdown. Ray has no option for this, but it starts them with a
    `preexec_fn`, which makes Python run its fork hooks in the child. A hook cannot be unregistered: after this block it
    does nothing.
    """
    groups = contextlib.ExitStack()
    groups.callback(os.setpgrp)
    os.register_at_fork(after_in_child=groups.close)
    try:
        yield
    finally:
        groups.pop_all()


def _end_children_but(known: list[psutil.Process]) -> None:
    """Ends the processes of an interrupted `ray.init`, which Ray itself does not clean up."""
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
    """Hides `CUDA_VISIBLE_DEVICES` from Ray if GPUs are `logical`: Ray rejects more GPUs than the variable lists."""
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
    # code that prints, such as a custom reward function, must not fail on a full disk
    sys.stdout, sys.stderr = optional_output(1), optional_output(2)
    logging.basicConfig(stream=sys.stderr, level=level.upper(), format=LOG_FORMAT, force=True)


def last_lines(path: Path, count: int = 20) -> str:
    """The last `count` lines of a log, or the reason that there are none."""
    try:
        with open(path, errors="replace") as file:
            lines = "".join(deque(file, maxlen=count)).rstrip()
    except OSError as error:
        return f"(no log can be read: {error})"
    return lines or f"({path} is empty)"
