"""The messages between a train worker and its rank's process, and the encoding of calls on the socket between them.

A batch is pickled once, by the rollout manager: it follows the call as a separate frame (`send_call`).
"""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

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
    """A rank's state after loading: the first rollout id, the data state, and its data-parallel rank.

    One rank of each data-parallel rank is its `leader`: it returns the columns that policy and critic exchange.
    """

    start_rollout_id: int
    data_state: dict[str, Any] | None
    data_parallel_rank: int
    leader: bool


def send_call(connection: Connection, method: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    """Sends a call of a rank's `method`; arguments of type `pickle.PickleBuffer` are neither copied nor pickled."""
    buffers: list[pickle.PickleBuffer] = []
    connection.send_bytes(pickle.dumps((method, arguments), protocol=5, buffer_callback=buffers.append))
    for buffer in buffers:
        connection.send_bytes(buffer)


def receive_call(connection: Connection) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Receives a method and its arguments, buffers as `bytes`. Raises EOFError if the other end closed."""
    return pickle.loads(connection.recv_bytes(), buffers=iter(connection.recv_bytes, None))
