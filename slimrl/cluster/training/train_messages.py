"""The messages between a train worker and its rank's process: calls, and requests for the rank's state.

A batch is pickled once, by the rollout manager: it follows the call as a separate frame (`send_call`).

Requests for the state are on a socket beside that of the calls. A thread of the rank's process answers them
(`answer_requests`), since the main thread may wait in a collective for a lost rank. The actor sends them
(`StateRequests`). `StepState` has the state.
"""

from __future__ import annotations

import dataclasses
import pickle
import platform
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Protocol

from slimrl.arguments import Arguments


@dataclasses.dataclass(frozen=True)
class TrainRole:
    """What a group of training ranks trains, and its words in messages; names of files and metrics follow from these.

    The policy's ranks also train the critic, unless it has GPUs of its own.
    """

    worker: str
    rank: str
    short: str

    def log_name(self, rank: int) -> str:
        """The file name of a rank's log."""
        return f"{self.rank.replace(' ', '-')}{rank}.log"

    def metric(self, rank: int) -> str:
        """The start of the names of a rank's memory."""
        return f"{self.short.replace(' ', '_')}{rank}"


POLICY = TrainRole("train worker", "train rank", "rank")
CRITIC = TrainRole("critic worker", "critic rank", "critic rank")


@dataclasses.dataclass(frozen=True)
class TrainInit:
    """The first message to a rank's process."""

    args: Arguments
    rank: int
    world_size: int
    cuda: bool  # whether the run trains on GPUs
    role: TrainRole = POLICY


@dataclasses.dataclass(frozen=True)
class TrainReady:
    """A rank after loading: the first rollout id, the data state, its data-parallel rank, its part of the model.

    Ranks with the same `part` have the same weights.
    One rank of each data-parallel rank is its `leader`: it returns the columns that policy and critic exchange.
    """

    start_rollout_id: int
    data_state: dict[str, Any] | None
    data_parallel_rank: int
    leader: bool
    part: tuple[int, ...] = ()


def send_call(connection: Connection, method: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Sends a call of a rank's `method`; arguments of type `pickle.PickleBuffer` are neither copied nor pickled."""
    buffers: list[pickle.PickleBuffer] = []
    connection.send_bytes(pickle.dumps((method, arguments), protocol=5, buffer_callback=buffers.append))
    for buffer in buffers:
        connection.send_bytes(buffer)


def receive_call(connection: Connection) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Receives a method and its arguments, buffers as `bytes`. Raises EOFError if the other end closed."""
    return pickle.loads(connection.recv_bytes(), buffers=iter(connection.recv_bytes, None))


_REPORT, _READ = b"report", b"read"


@dataclasses.dataclass(frozen=True)
class StateReport:
    """Whether a rank's state can be taken over; `first`, `why` and `saved` are those of `StepState.report`.

    The state has `nbytes`, and the rank's `host` so many bytes of `free` memory.
    """

    first: int | None
    why: str
    saved: int | None
    nbytes: int = 0
    host: str = ""
    free: int = 0


class StateReadError(RuntimeError):
    """A rank cannot hand over its state; the message says why."""


class RankState(Protocol):
    """See `StepState`."""

    @property
    def nbytes(self) -> int: ...

    def report(self) -> tuple[int | None, str, int | None]: ...

    def read(self) -> memoryview: ...


def why_not_shared(args: Arguments) -> str | None:
    """Why a rank's state cannot come from another one; None if ranks with the same part of the model have the same."""
    reasons = {
        "--use-distributed-optimizer gives each data-parallel rank its own part of the optimizer": (
            args.use_distributed_optimizer
        ),
        "--use-megatron-fsdp gives each data-parallel rank its own part of the weights": args.use_megatron_fsdp,
        "the critic has ranks of its own": args.critic_num_gpus,
        "layers keep scales with --fp8-format": args.fp8_format,
        "--custom-megatron-before-train-step-hook-path may change it": args.custom_megatron_before_train_step_hook_path,
        "--custom-megatron-before-log-prob-hook-path may change it": args.custom_megatron_before_log_prob_hook_path,
    }
    return next((reason for reason, applies in reasons.items() if applies), None)


def shares_state(args: Arguments) -> bool:
    """Whether the ranks of a run keep their states for each other."""
    return args.use_fault_tolerance and not args.eval_only and why_not_shared(args) is None


def answer_requests(connection: Connection, find: Callable[[], RankState | None]) -> None:
    """Begins to answer the requests on `connection`, until its other end closes; `find` returns the rank's state."""

    def serve() -> None:
        while True:
            try:
                request = connection.recv_bytes()
            except EOFError:
                return
            if request == _REPORT:
                connection.send_bytes(pickle.dumps(_report(find())))
            else:
                _send_state(connection, find())

    threading.Thread(target=serve, name="state", daemon=True).start()


def _report(state: RankState | None) -> StateReport:
    # here, because modules that only use the data classes must not need psutil
    from slimrl.processes.process_info import free_memory

    if state is None:
        return StateReport(None, "is not loaded yet", None)
    return StateReport(*state.report(), state.nbytes, host_name(), free_memory())


def host_name() -> str:
    """Tells hosts, and containers of one host, from each other."""
    boot = Path("/proc/sys/kernel/random/boot_id")
    return f"{platform.node()} ({boot.read_text().strip()[:8]})" if boot.is_file() else platform.node()


def _send_state(connection: Connection, state: RankState | None) -> None:
    """Sends two frames: why the state cannot be read, which is empty if it can, and the state."""
    content: bytes | memoryview = b""
    try:
        content, why = (b"", "it is not loaded yet") if state is None else (state.read(), "")
    except Exception as error:  # whatever it is, the other end waits
        why = f"{type(error).__name__}: {error}"
    connection.send_bytes(why.encode())
    connection.send_bytes(content)


class StateRequests:
    """The actor's side."""

    def __init__(self, connection: Connection) -> None:
        self._connection = connection

    def report(self) -> StateReport | None:
        """Ends the training of the rank where it is; None if its process has ended."""
        try:
            self._connection.send_bytes(_REPORT)
            report: StateReport = pickle.loads(self._connection.recv_bytes())
        except (EOFError, OSError):
            return None
        return report

    def read(self) -> bytes:
        """The state, after a report of a whole one.

        Raises StateReadError if the rank cannot read it, EOFError or OSError if the process has ended.
        """
        self._connection.send_bytes(_READ)
        why, content = self._connection.recv_bytes().decode(), self._connection.recv_bytes()
        if why:
            raise StateReadError(why)
        return content
