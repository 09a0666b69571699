"""`PointToPointUpdater`: weight updates in which each trainer rank sends its own shards to the engine ranks.

The first update makes the plan (`plan.make_plan`), compares it with the tensors of every engine rank, and links all
trainer ranks with all engine ranks. Every update then packs and sends each rank's copies, round by round (`Sender`),
and unpacks them; nothing is gathered. Pausing, commit, checks and attempts are those of `WeightUpdater`. After a
failure all links are made anew. Engine ranks are called while their servers are paused only: a serving one would admit
no request before its running ones have ended. So they keep the link of a closed updater until the next one's.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable, Mapping, Sequence

import torch
import xxhash
from torch import Tensor, nn
from torch.distributed import PrefixStore, TCPStore

from slimrl.engines.server_protocol import RunningRequests
from slimrl.observability.tracer import Timeline
from slimrl.platform.collective_errors import RANK_ZERO
from slimrl.weights.adapters import merged_weights
from slimrl.weights.point_to_point.engine_side import WHAT, EngineSide, members
from slimrl.weights.point_to_point.links import Buffers, Link, LinkError, MooncakeLink, ProcessGroupLink, Readiness
from slimrl.weights.point_to_point.plan import Holding, Message, Plan, make_plan
from slimrl.weights.reshard import find, global_tensors
from slimrl.weights.update.engine_fanout import WeightSyncError, connect
from slimrl.weights.update.export import check_complete
from slimrl.weights.update.topology import EngineEndpoint, check_without_stages
from slimrl.weights.update.transport_distributed import own_address
from slimrl.weights.update.weight_updater import BUCKET_BYTES, TIMEOUT_S, ModelSource, WeightUpdater


class Weights:
    """This rank's tensors by global name, with LoRA adapters merged; the last merged one is kept."""

    def __init__(self, model: nn.Module | Sequence[nn.Module]) -> None:
        self.tensors = global_tensors(model)
        self._merged: Mapping[str, Callable[[], Tensor]] = merged_weights(model)
        self._last: tuple[str, Tensor] | None = None

    def __getitem__(self, name: str) -> Tensor:
        if name not in self._merged:
            return self.tensors[name].detach()
        if self._last is None or self._last[0] != name:
            self._last = (name, self._merged[name]())
        return self._last[1]


class Sender:
    """Sends `messages`, by the member number of the engine rank, through `link`."""

    def __init__(self, plan: Plan, messages: Mapping[int, Sequence[Message]], link: Link, readiness: Readiness) -> None:
        self.updates = 0  # that have been sent
        self._plan, self._messages, self._link, self._readiness = plan, messages, link, readiness
        self._starts = {peer: [plan.offsets(one)[0] for one in own] for peer, own in messages.items()}
        self._sizes = {peer: [plan.offsets(one)[1] for one in own] for peer, own in messages.items()}

    @torch.no_grad()
    def send(self, model: nn.Module | Sequence[nn.Module]) -> tuple[int, int]:
        """Sends all weights; returns the bytes and the number of messages. Raises LinkError."""
        update, self.updates = self.updates, self.updates + 1
        self._readiness.wait(update)
        weights = Weights(model)
        rounds = max(map(len, self._messages.values()), default=0)
        for number in range(rounds):
            if number > 1:
                self._link.wait(number - 2)
            present = [peer for peer, own in self._messages.items() if number < len(own)]
            for peer in present:
                self._pack(self._link.outbox(peer, number), peer, number, weights)
            self._link.start(number, {peer: self._sizes[peer][number] for peer in present}, {})
        for number in range(max(0, rounds - 2), rounds):
            self._link.wait(number)
        return sum(sum(own) for own in self._sizes.values()), sum(len(own) for own in self._sizes.values())

    def _pack(self, into: Tensor, peer: int, number: int, weights: Weights) -> None:
        message, starts = self._messages[peer][number], self._starts[peer][number]
        for copy, start in zip(message, starts, strict=True):
            part = copy.of_source(weights[copy.source])
            into[start : start + part.nbytes].view(part.dtype).view(part.shape).copy_(part)

    def close(self, *, failed: bool) -> None:
        """Closes the link."""
        self._link.close(failed=failed)


MOONCAKE = "mooncake"  # of --update-weight-transport
Model = nn.Module | Sequence[nn.Module]


class PointToPointUpdater(WeightUpdater):
    """Created collectively over all trainer ranks."""

    def __init__(
        self,
        source: ModelSource,
        engines: Sequence[EngineEndpoint],
        *,
        transport: str = "nccl",
        bucket_bytes: int = BUCKET_BYTES,
        timeout_s: float = TIMEOUT_S,
        timeline: Timeline | None = None,
    ) -> None:
        """`transport` is nccl (gloo without a GPU) or mooncake. Raises ValueError for engines with pipeline stages."""
        check_without_stages(engines)
        servers, sizes = connect(engines, timeout_s, timeline)
        super().__init__(source, servers, sizes, [], set(), bucket_bytes, timeline=timeline)
        self._transport, self._timeout_s = transport, timeout_s
        self._plan: Plan | None = None
        self._sender: Sender | None = None
        self._engine_side: EngineSide | None = None  # on rank 0
        self._paused = False  # all servers, since this attempt

    @property
    def plan(self) -> Plan | None:
        """None before the first update; on rank 0 that of all ranks."""
        return self._plan

    def close(self) -> None:
        """Closes this rank's end of the links."""
        self._disconnect(failed=False)

    def _attempt(
        self, model: Model, version: str, check_equal: bool, running: RunningRequests
    ) -> tuple[tuple[int, int], float, tuple[str, bool] | None]:
        self._paused = False
        return super()._attempt(model, version, check_equal, running)

    def _prepare(self, model: Model) -> None:
        self._paused = True
        if self._sender is None:
            self._timeline.mark("link trainer and engine ranks")
            self._connect(model)

    def _after_failure(self, error: WeightSyncError, version: str, attempt: int) -> None:
        self._disconnect(failed=True)
        super()._after_failure(error, version, attempt)

    def _send(self, model: Model) -> tuple[int, int]:
        """Sends this rank's shards; returns (bytes, messages) of this rank."""
        assert self._sender is not None  # `_prepare` has connected
        if self._engine_side is not None:
            self._engine_side.start("receive", update=self._sender.updates)
        try:
            sent = self._sender.send(model)
        except RuntimeError as error:  # also of the device, such as too little memory
            # at once, so that the engine ranks that wait for this rank fail, and with them the other trainer ranks
            sender, self._sender = self._sender, None
            sender.close(failed=True)
            raise self._failure(error) from error
        if self._engine_side is not None:
            self._engine_side.finish()
        return sent

    def _failure(self, error: RuntimeError) -> WeightSyncError:
        """The error of a server if rank 0 knows one, else that of the link; the other members give up, too."""
        if self._engine_side is not None:
            self._engine_side.give_up()
            try:
                self._engine_side.finish()
            except WeightSyncError as of_server:
                return of_server
        peer = error.peer if isinstance(error, LinkError) else None
        return WeightSyncError(f"{WHAT} failed{self._where(peer)}: {error}")

    def _failed_call(self) -> str | None:
        return None if self._engine_side is None else self._engine_side.failed_call()

    def _where(self, member: int | None) -> str:
        trainers = self._source.parallel.world_size
        if member is None or member < trainers:
            return ""
        place = list(members(self._engine_sizes))[member - trainers]
        return f" on {self._servers[place.engine].url} rank {place.rank}"

    def _connect(self, model: Model) -> None:
        """Makes the plan and the links; collective. Raises WeightSyncError on every rank."""
        if self._plan is None:
            holdings = self._holdings(model)
            self._ranks.run_on_all_ranks(lambda: self._make_plan(holdings))
        name, host, port = self._ranks.run_on_rank_zero(self._open)
        self._ranks.run_on_all_ranks(lambda: self._join(name, host, port))

    def _holdings(self, model: Model) -> list[Holding]:
        """What every trainer rank has. Ranks with the same tensors send their names once."""
        dtypes = {name: tensor.dtype for name, tensor in global_tensors(model).items()}
        digest = xxhash.xxh3_128_hexdigest(repr(list(dtypes.items())).encode())
        digests = self._ranks.gather(digest)
        first = digests.index(digest) == self._source.parallel.rank
        named = enumerate(self._ranks.gather(dtypes if first else None))
        known = {digests[rank]: own for rank, own in named if own is not None}
        groups = self._source.parallel.tp_group, self._source.parallel.etp_group
        places = self._ranks.gather(tuple((group.rank(), group.size()) for group in groups))
        return [
            Holding(known[digest], *dense, *expert) for digest, (dense, expert) in zip(digests, places, strict=True)
        ]

    def _make_plan(self, holdings: Sequence[Holding]) -> None:
        spec, family = self._source.spec, self._source.family
        owners = {name for holding in holdings for name in holding.dtypes}
        check_complete([(row, find(row, owners)) for row in family.rows(spec)], owners, spec, family)
        plan = make_plan(
            holdings,
            self._engine_sizes,
            spec,
            family,
            on_host=self._source.parallel.device.type == "cpu",
            buffer_bytes=self._bucket_bytes,
        )
        rank = self._source.parallel.rank
        self._plan = plan if rank == RANK_ZERO else plan.of_sender(rank)  # rank 0 tells the engines theirs

    def _open(self) -> tuple[str, str, int]:
        """On rank 0: opens the store and compares the engines' tensors with the plan; returns where members meet."""
        assert self._plan is not None
        self._engine_side = EngineSide(
            self._servers,
            self._engine_sizes,
            trainers=self._source.parallel.world_size,
            transport=self._transport,
            timeout_s=self._timeout_s,
        )
        self._engine_side.describe(self._plan)
        return self._engine_side.name, self._engine_side.host, self._engine_side.port

    def _join(self, name: str, host: str, port: int) -> None:
        plan = self._plan
        assert plan is not None
        if self._engine_side is not None:
            self._engine_side.start("join", plan)
        numbers, rank = members(self._engine_sizes), self._source.parallel.rank
        trainers = self._source.parallel.world_size
        messages = {trainers + numbers[place]: own for place, own in plan.sent_by(rank).items()}
        try:
            store = self._store(host, port)
            link = self._link(name, store, trainers + len(numbers), list(messages))
        except RuntimeError as error:  # also too little memory for the buffers
            raise self._failure(error) from error
        ready = Readiness(store, name, list(messages), self._failed_call, self._timeout_s)
        self._sender = Sender(plan, messages, link, ready)
        if self._engine_side is not None:
            self._engine_side.finish()

    def _store(self, host: str, port: int) -> TCPStore:
        timeout = datetime.timedelta(seconds=self._timeout_s)
        try:
            return TCPStore(host, port, is_master=False, timeout=timeout)
        except RuntimeError as error:
            raise LinkError(f"the store at {host}:{port} cannot be reached: {error}") from error

    def _link(self, name: str, store: TCPStore, count: int, peers: Sequence[int]) -> Link:
        plan, parallel, own = self._plan, self._source.parallel, PrefixStore(name, store)
        assert plan is not None
        sizes = dict.fromkeys(peers, plan.message_bytes)
        if self._transport == MOONCAKE:
            pinned = parallel.device.type == "cuda"
            buffers = Buffers(sizes, {}, torch.device("cpu"), pinned=pinned)
            host = own_address([server.url for server in self._servers])
            return MooncakeLink(own, parallel.rank, host, buffers, self._timeout_s)
        buffers = Buffers(sizes, {}, parallel.device)
        return ProcessGroupLink(own, parallel.rank, count, buffers, parallel.device, self._timeout_s)

    def _disconnect(self, *, failed: bool) -> None:
        """Closes this rank's end; after a failure while all servers are paused, rank 0 also those of the engines."""
        sender, self._sender = self._sender, None
        if sender is not None:
            sender.close(failed=failed)
        side, self._engine_side = self._engine_side, None
        if side is not None:
            if failed and self._paused:
                side.leave()
            side.close()
