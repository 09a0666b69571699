"""The calls of trainer rank 0 to the engine ranks in a point-to-point weight update, through their servers.

A call is a payload of named tensors, as SGLang's custom weight loaders get them: a description in JSON, and where an
engine rank joins, the places of all pieces that it will receive. The servers do not pass on what their ranks return, so
the ranks answer in a store that listens on trainer rank 0. `serialize_call` and `deserialize_call` are the two ends.
"""

from __future__ import annotations

import base64
import contextlib
import dataclasses
import datetime
import functools
import json
import math
import pickle
import uuid
from collections.abc import Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Literal
from urllib.parse import urlsplit

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import TCPStore

from slimrl.engines.server_protocol import WeightControl
from slimrl.processes.files import listed
from slimrl.weights.point_to_point.links import failure_key, ready_key
from slimrl.weights.point_to_point.plan import Message, Place, Plan, Target, aligned
from slimrl.weights.update.engine_fanout import WeightSyncError, call_all, collect_results
from slimrl.weights.update.transport_distributed import LEAVE_TIMEOUT_S, listening_store, own_address
from slimrl.weights.update.transport_tensor import Rebuilt
from slimrl.weights.update.verify import COMPUTED

_COLUMNS = 9  # of the table of pieces: see `encode_pieces`


Action = Literal["describe", "join", "receive", "leave"]


@dataclasses.dataclass(frozen=True)
class Call:
    """One call of an engine rank.

    describe: close all older links, and answer with the shapes of all tensors. join: make the link, as `member` of
    `members`. receive: update number `update` of the link. leave: close the link. `name` is that of the link, `store`
    the trainer's host and port, `key` where the answer goes.
    """

    action: Action
    name: str
    key: str
    store: tuple[str, int]
    timeout_s: float
    transport: str = "nccl"
    host: str = ""  # where the trainer reaches the server
    member: int = 0
    members: int = 0
    update: int = 0


@dataclasses.dataclass(frozen=True)
class Piece:
    """A rectangle of the engine's tensor `target`, and the byte of the message at which its values begin.

    The tensor is a matrix of `width` columns.
    """

    target: str
    width: int
    dtype: torch.dtype
    start: int
    row: int
    column: int
    rows: int
    columns: int

    @property
    def nbytes(self) -> int:
        """In the message."""
        return self.rows * self.columns * self.dtype.itemsize


Pieces = dict[int, list[list[Piece]]]  # by sender, those of each message


def encode_pieces(
    plan: Plan, messages: Mapping[int, Sequence[Message]], columns: Mapping[str, int]
) -> tuple[dict[str, Any], np.ndarray[Any, Any]]:
    """The names and dtypes of the pieces, and a table of int64 with a row for each piece.

    `columns` has the width of each target as a matrix. Columns of the table: sender, message, first byte, number of the
    target and of the dtype, row, column, rows, columns.
    """
    targets = {name: number for number, name in enumerate(columns)}
    dtypes: dict[str, int] = {}
    table = []
    for sender, own in messages.items():
        for number, message in enumerate(own):
            for copy, start in zip(message, plan.offsets(message)[0], strict=True):
                dtype = dtypes.setdefault(str(plan.dtypes[copy.source]).removeprefix("torch."), len(dtypes))
                place = (copy.target_row, copy.target_column, copy.rows, copy.columns)
                table.append((sender, number, start, targets[copy.target], dtype, *place))
    names = {"targets": list(columns), "columns": list(columns.values()), "dtypes": list(dtypes)}
    return names, np.array(table, dtype=np.int64).reshape(-1, _COLUMNS)


def decode_pieces(names: Mapping[str, Any], table: np.ndarray[Any, Any]) -> Pieces:
    """The inverse of `encode_pieces`."""
    pieces: Pieces = {}
    dtypes = [getattr(torch, name) for name in names["dtypes"]]
    for sender, number, start, target, dtype, *place in table.tolist():
        messages = pieces.setdefault(sender, [])
        if number == len(messages):
            messages.append([])
        messages[number].append(Piece(names["targets"][target], names["columns"][target], dtypes[dtype], start, *place))
    return pieces


def message_bytes(pieces: Sequence[Piece]) -> int:
    """The length of a message."""
    return pieces[-1].start + aligned(pieces[-1].nbytes)


def serialize_call(
    call: Call, names: Mapping[str, Any] | None = None, table: np.ndarray[Any, Any] | None = None
) -> str:
    """SGLang's payload for one engine rank."""
    described = {"call": dataclasses.asdict(call), "names": names}
    parts = {"described": json.dumps(described).encode(), "table": b"" if table is None else table.tobytes()}
    make = functools.partial(torch.frombuffer, dtype=torch.uint8)
    # a buffer must not be empty
    named = [(name, Rebuilt(make, (bytearray(data + b"\0"),))) for name, data in parts.items()]
    return base64.b64encode(pickle.dumps(named, protocol=5)).decode("ascii")


def deserialize_call(named_tensors: Sequence[tuple[str, Tensor]]) -> tuple[Call, list[str], Pieces]:
    """The call, and what comes with it: the names of all targets, and the pieces."""
    parts = {name: tensor[:-1].cpu().numpy().tobytes() for name, tensor in named_tensors}
    described = json.loads(parts["described"])
    call = Call(**described["call"] | {"store": tuple(described["call"]["store"])})
    if described["names"] is None:
        return call, [], {}
    names = described["names"]
    return call, names["targets"], decode_pieces(names, np.frombuffer(parts["table"], np.int64).reshape(-1, _COLUMNS))


WHAT = "updating weights point to point"


class EngineSide:
    """All engine ranks, as members of one link after the trainer's ranks. For trainer rank 0."""

    def __init__(
        self,
        servers: Sequence[WeightControl],
        sizes: Sequence[int],
        *,
        trainers: int,
        transport: str,
        timeout_s: float,
    ) -> None:
        """`sizes` are the servers' tensor-parallel sizes. Opens the store."""
        self.name = f"slimrl-{uuid.uuid4().hex[:12]}"
        self.host = own_address([server.url for server in servers])
        self._servers, self._sizes = list(servers), list(sizes)
        self._trainers, self._transport, self._timeout_s = trainers, transport, timeout_s
        self._store: TCPStore = listening_store(self.host, datetime.timedelta(seconds=timeout_s))
        self._pool = ThreadPoolExecutor(max_workers=len(servers), thread_name_prefix="weight-shards")
        self._count = 0
        self._calls: list[Future[None]] = []
        self._received: int | None = None  # the number of the update in progress

    @property
    def port(self) -> int:
        """Of the store."""
        return self._store.port

    def describe(self, plan: Plan) -> None:
        """Compares the tensors of every engine rank with the plan. Raises WeightSyncError naming what differs."""
        self.start("describe")
        problems = []
        for place, answer in self.finish().items():
            url = self._servers[place.engine].url
            targets = plan.targets[self._sizes[place.engine], place.rank]
            problems += [f"{url} rank {place.rank}: {text}" for text in differences(answer, targets)]
        if problems:
            raise WeightSyncError(
                f"weights cannot be sent point to point: {'; '.join(problems)}; leave --update-weight-transfer-mode p2p"
                " out, then the model's own loader takes them",
                final=True,
            )

    def start(self, action: Action, plan: Plan | None = None, update: int = 0) -> None:
        """Calls all servers; with a `plan` each rank gets the places of its pieces."""
        self._count += 1
        self._received = update if action == "receive" else None
        self._calls = [
            self._pool.submit(server.update_weights_from_shards, self._payloads(engine, action, plan, update))
            for engine, server in enumerate(self._servers)
        ]

    def finish(self) -> dict[Place, dict[str, Any]]:
        """The answers to the last call. Raises WeightSyncError naming every server that failed; then all give up."""
        try:
            return self._answers()
        except WeightSyncError:
            self.give_up()
            raise

    def _answers(self) -> dict[Place, dict[str, Any]]:
        calls, self._calls = self._calls, []
        collect_results(self._servers, calls, WHAT)
        try:
            answers = {place: json.loads(self._store.get(self._key(place))) for place in members(self._sizes)}
            for place, number in members(self._sizes).items():
                self._store.delete_key(self._key(place))
                if self._received is not None:
                    self._store.delete_key(ready_key(self.name, self._received, self._trainers + number))
        except dist.DistError as error:
            raise WeightSyncError(f"{WHAT} failed: a server's rank does not answer ({error})", final=True) from error
        failed = [
            f"{self._servers[place.engine].url} rank {place.rank}: {answer['error']}"
            for place, answer in answers.items()
            if "error" in answer
        ]
        if failed:
            raise WeightSyncError(f"{WHAT} failed on {'; '.join(failed)}")
        return answers

    def failed_call(self) -> str | None:
        """Why a call in progress has failed already, if one has."""
        failed = [call.exception() for call in self._calls if call.done() and call.exception() is not None]
        return str(failed[0]) if failed else None

    def give_up(self) -> None:
        """Tells all members to give up the update."""
        self._store.set(failure_key(self.name), "")

    def close(self) -> None:
        """Ends the threads: a call to a hung server ends with its own time limit."""
        self._pool.shutdown(wait=False)

    def leave(self) -> None:
        """All ranks close their ends; ignores servers that are gone. The servers are paused."""
        with contextlib.suppress(WeightSyncError):
            self._count += 1
            payloads = [self._payloads(engine, "leave") for engine in range(len(self._servers))]
            numbers = {server.url: number for number, server in enumerate(self._servers)}
            call_all(
                self._servers,
                lambda server: server.update_weights_from_shards(payloads[numbers[server.url]], LEAVE_TIMEOUT_S),
                "leaving the link of a weight update",
            )

    def _payloads(self, engine: int, action: Action, plan: Plan | None = None, update: int = 0) -> list[str]:
        """One for each rank of the engine."""
        numbers = members(self._sizes)
        payloads = []
        for rank in range(self._sizes[engine]):
            place = Place(engine, rank)
            call = Call(
                action,
                self.name,
                self._key(place),
                (self.host, self.port),
                self._timeout_s,
                self._transport,
                urlsplit(self._servers[engine].url).hostname or "",
                self._trainers + numbers[place],
                self._trainers + len(numbers),
                update,
            )
            payloads.append(serialize_call(call, *(self._pieces(plan, place) if plan is not None else ())))
        return payloads

    def _pieces(self, plan: Plan, place: Place) -> tuple[dict[str, Any], np.ndarray[Any, Any]]:
        targets = plan.targets[self._sizes[place.engine], place.rank]
        columns = {name: target.columns for name, target in targets.items()}
        return encode_pieces(plan, plan.received_by(place), columns)

    def _key(self, place: Place) -> str:
        return f"answers/{self.name}/{self._count}/{place.engine}/{place.rank}"


def members(sizes: Sequence[int]) -> dict[Place, int]:
    """Number of each engine rank among all of them."""
    places = [Place(engine, rank) for engine, size in enumerate(sizes) for rank in range(size)]
    return {place: number for number, place in enumerate(places)}


def differences(answer: Mapping[str, Any], targets: Mapping[str, Target]) -> list[str]:
    """How a rank's tensors (`engines.sglang.weight_loaders.describe`) differ from those of the plan."""
    shapes = {name: shape for name, shape in answer["shapes"].items() if not name.endswith(COMPUTED)}
    found = []
    if other := answer["other_form"]:
        found.append(f"the weights of {listed(other)} are quantised or packed")
    if missing := targets.keys() - shapes.keys():
        found.append(f"it has no {listed(missing)}")
    if more := shapes.keys() - targets.keys():
        found.append(f"it has {listed(more)}, which the trainer does not send")
    wrong = [
        f"{name} {shapes[name]} instead of {target.rows} x {target.columns}"
        for name, target in targets.items()
        if name in shapes and not _fits(shapes[name], target)
    ]
    if wrong:
        found.append(f"it has other shapes: {listed(wrong)}")
    if strided := targets.keys() & set(answer["not_contiguous"]):
        found.append(f"{listed(strided)} are not contiguous")
    return found


def _fits(shape: Sequence[int], target: Target) -> bool:
    """Whether a tensor of this shape is the matrix, or a stack of matrices one below the other."""
    same = target.rows == shape[0] or target.columns == shape[-1]
    return same and math.prod(shape) == target.rows * target.columns
