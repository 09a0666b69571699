"""The plan of a point-to-point weight update: which trainer rank sends which copies to which engine rank.

All trainer ranks compute the same plan, from the tensors that each of them has. Trainer ranks that hold the same shard
(data parallelism, replicated tensors) share its receivers, or a receiver's copies if they are more than those.

A copy is a rectangle of a shard. The layouts of both sides are those of `weights.reshard` and `weights.update.verify`,
which gather, join, pad and shard real tensors. Here they get tensors of the same length along the sharded dimension
that have the place of each element as its value, so that the result says where every element comes from. Rows of one
kind share a result. A tensor is a matrix here: its first dimension and all others. A stack of matrices is one below the
other.

A pair of ranks exchanges messages of bounded size, in rounds: a round has one message of every pair. Copies in a
message begin at multiples of `ALIGNMENT` bytes and are in the trainer's dtype.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import torch
from torch import Tensor

from slimrl.models.families import ModelMapping, ParamMapping
from slimrl.models.model_spec import ModelSpec
from slimrl.weights.reshard import find, from_shards, local_shape
from slimrl.weights.update.verify import EngineLayout, engine_parts, engine_tensor, padded_dim_of_tower


@dataclasses.dataclass(frozen=True, slots=True)
class Copy:
    """A rectangle of shard `shard` of the trainer's tensor `source`, and its place in the engine's tensor `target`."""

    source: str
    shard: int
    target: str
    source_row: int
    source_column: int
    target_row: int
    target_column: int
    rows: int
    columns: int

    @property
    def elements(self) -> int:
        """Their number."""
        return self.rows * self.columns

    def of_source(self, tensor: Tensor) -> Tensor:
        """The rectangle, a view of the shard."""
        part = tensor.view(tensor.shape[0], -1).narrow(0, self.source_row, self.rows)
        return part.narrow(1, self.source_column, self.columns)

    def split(self, rows: int) -> Iterator[Copy]:
        """The same as copies of at most `rows` rows."""
        for start in range(0, self.rows, rows):
            yield dataclasses.replace(
                self,
                source_row=self.source_row + start,
                target_row=self.target_row + start,
                rows=min(rows, self.rows - start),
            )


@dataclasses.dataclass
class Target:
    """A tensor of an engine rank as a matrix, and how many of its elements are copied; the others are zero."""

    rows: int
    columns: int
    copied: int


@dataclasses.dataclass(frozen=True)
class _Run:
    """Consecutive elements along the sharded dimension: of shard `shard` from `source` on, to `target` on."""

    shard: int
    source: int
    target: int
    length: int


class EngineRankLayout:
    """All copies into the tensors of one rank of an engine.

    `name_of` is the trainer's name of a row's tensor; `shards_of` the number of shards that its tensors have.
    """

    def __init__(self, spec: ModelSpec, family: ModelMapping, layout: EngineLayout, rank: int) -> None:
        self.targets: dict[str, Target] = {}
        self._spec, self._family = spec, family
        self._layout, self._rank = layout, rank
        self._known: dict[tuple[object, ...], tuple[list[_Run], int]] = {}

    def copies(
        self, name_of: Callable[[ParamMapping], str], shards_of: Callable[[ParamMapping], int]
    ) -> Iterator[Copy]:
        """In the order of the mapping; fills `targets`."""
        for row in self._family.rows(self._spec):
            shards = shards_of(row)
            runs, length = self._runs(row, shards)
            shape = local_shape(row, self._spec, size=shards)
            rows, columns = shape[0], math.prod(shape[1:])
            along_columns = _axis(row) == 1
            name = engine_tensor(row, self._spec, self._family).name
            target = self.targets.setdefault(name, Target(0, length if along_columns else columns, 0))
            for run in runs:
                if along_columns:
                    place = (0, run.source, target.rows, run.target, rows, run.length)
                else:
                    place = (run.source, 0, target.rows + run.target, 0, run.length, columns)
                copy = Copy(name_of(row), run.shard, name, *place)
                target.copied += copy.elements
                yield copy
            target.rows += rows if along_columns else length

    def _runs(self, row: ParamMapping, shards: int) -> tuple[list[_Run], int]:
        """The runs along the row's sharded dimension, and its length on the engine rank."""
        kind = (row.layout, row.shard_dim, tuple(part.dims for part in row.hf), ".shared_experts." in row.hf[0].name)
        key = (*kind, row.expert is None, padded_dim_of_tower(row), shards)
        if key not in self._known:
            self._known[key] = self._find_runs(row, shards)
        return self._known[key]

    def _find_runs(self, row: ParamMapping, shards: int) -> tuple[list[_Run], int]:
        axis = _axis(row)
        shape = local_shape(row, self._spec, size=shards)
        length = shape[axis]
        thin = [length if dim == axis else 1 for dim in range(len(shape))]
        places = [(torch.arange(length) + 1 + shard * length).view(thin) for shard in range(shards)]
        parts = engine_parts(row, from_shards(row, places, self._spec), self._spec, self._layout, self._rank)
        whole = torch.cat(parts)
        if whole.numel() != whole.shape[axis]:
            raise ValueError(f"{row.hf[0].name} is padded in two dimensions: it cannot be sent point to point")
        return list(_runs_of(whole.flatten(), length)), whole.numel()


def _axis(row: ParamMapping) -> int:
    """The dimension along which the layouts of both sides differ."""
    return (padded_dim_of_tower(row) or 0) if row.shard_dim is None else row.shard_dim


def _runs_of(places: Tensor, shard_length: int) -> Iterator[_Run]:
    """The runs of consecutive `places`: 0 is padding, the others count all elements of all shards from 1."""
    shards = (places - 1).div(shard_length, rounding_mode="floor")
    breaks = (places[1:] != places[:-1] + 1) | (shards[1:] != shards[:-1]) | (places[1:] == 0)
    starts = [0, *(breaks.nonzero().flatten() + 1).tolist(), len(places)]
    for start, end in itertools.pairwise(starts):
        first = int(places[start])
        if first:
            shard, source = divmod(first - 1, shard_length)
            yield _Run(shard, source, start, end - start)


ALIGNMENT = 16


@dataclasses.dataclass(frozen=True)
class Holding:
    """What a trainer rank has: its tensors by global name, and its place among the ranks that shard them."""

    dtypes: Mapping[str, torch.dtype]
    shard: int
    shards: int
    expert_shard: int
    expert_shards: int


@dataclasses.dataclass(frozen=True)
class Place:
    """Rank `rank` of engine number `engine`."""

    engine: int
    rank: int


Message = list[Copy]


@dataclasses.dataclass(frozen=True)
class Plan:
    """`messages` of each pair (trainer rank, engine rank), in order; `targets` of each engine size and rank.

    `dtypes` are those of the trainer's tensors, `message_bytes` the largest message.
    """

    messages: Mapping[tuple[int, Place], Sequence[Message]]
    targets: Mapping[tuple[int, int], Mapping[str, Target]]
    dtypes: Mapping[str, torch.dtype]
    message_bytes: int

    @property
    def total_bytes(self) -> int:
        """Of all messages."""
        return sum(self.offsets(message)[1] for own in self.messages.values() for message in own)

    @property
    def peers(self) -> tuple[int, int]:
        """The most engine ranks that one trainer rank sends to, and the most trainer ranks that one receives from."""
        senders = collections.Counter(sender for sender, _ in self.messages)
        places = collections.Counter(place for _, place in self.messages)
        return max(senders.values()), max(places.values())

    def sent_by(self, rank: int) -> dict[Place, Sequence[Message]]:
        """The messages of a trainer rank."""
        return {place: messages for (sender, place), messages in self.messages.items() if sender == rank}

    def of_sender(self, rank: int) -> Plan:
        """The same with the messages of one trainer rank alone, to save memory."""
        return dataclasses.replace(self, messages={pair: own for pair, own in self.messages.items() if pair[0] == rank})

    def received_by(self, place: Place) -> dict[int, Sequence[Message]]:
        """The messages for an engine rank, by trainer rank."""
        return {sender: messages for (sender, to), messages in self.messages.items() if to == place}

    def offsets(self, message: Message) -> tuple[list[int], int]:
        """The byte at which each copy begins, and the length of the message."""
        starts, end = [], 0
        for copy in message:
            starts.append(end)
            end += aligned(copy.elements * self.dtypes[copy.source].itemsize)
        return starts, end


def aligned(num_bytes: int) -> int:
    """`num_bytes`, rounded up to a multiple of `ALIGNMENT`."""
    return -(-num_bytes // ALIGNMENT) * ALIGNMENT


def make_plan(
    holdings: Sequence[Holding],
    engine_sizes: Sequence[int],
    spec: ModelSpec,
    family: ModelMapping,
    *,
    on_host: bool,
    buffer_bytes: int,
) -> Plan:
    """The plan for trainer ranks with these `holdings` and engines of these tensor-parallel sizes.

    The messages of one round that a process sends, or receives, have at most `buffer_bytes`, unless a row of one tensor
    is longer than its part of them. Raises ValueError for a tensor that no rank has.
    """
    sources = _Sources(holdings)
    copies: dict[tuple[int, int], list[Copy]] = {}
    targets: dict[tuple[int, int], dict[str, Target]] = {}
    for size in sorted(set(engine_sizes)):
        for rank in range(size):
            layout = EngineRankLayout(spec, family, EngineLayout(size, on_host), rank)
            copies[size, rank] = list(layout.copies(sources.name_of, sources.shards_of))
            targets[size, rank] = layout.targets
    pairs = _divided(copies, engine_sizes, sources)
    dtypes = sources.dtypes
    unbounded = Plan({pair: [own] for pair, own in pairs.items()}, targets, dtypes, 0)
    limit = max(1, buffer_bytes // max(unbounded.peers))
    messages = {pair: _messages(own, dtypes, limit) for pair, own in pairs.items()}
    longest = max(
        sum(aligned(copy.elements * dtypes[copy.source].itemsize) for copy in message)
        for of_pair in messages.values()
        for message in of_pair
    )
    return Plan(messages, targets, dtypes, longest)


class _Sources:
    """Who has the shards of the trainer's tensors."""

    def __init__(self, holdings: Sequence[Holding]) -> None:
        self._first = holdings[0]
        self.dtypes: dict[str, torch.dtype] = {}
        holders: dict[tuple[str, int], list[int]] = collections.defaultdict(list)
        self._any: dict[str, list[int]] = collections.defaultdict(list)
        for rank, holding in enumerate(holdings):
            self.dtypes |= holding.dtypes
            for name in holding.dtypes:
                holders[name, holding.expert_shard if ".experts." in name else holding.shard].append(rank)
                self._any[name].append(rank)
        self._holders = {key: tuple(ranks) for key, ranks in holders.items()}
        self._whole: set[str] = set()

    def name_of(self, row: ParamMapping) -> str:
        """The row's name in the trainer."""
        name = find(row, self.dtypes)
        if name is None:
            raise ValueError(f"no trainer rank has {row.megatron[0]}: the model was built from other flags")
        if row.shard_dim is None:
            self._whole.add(name)
        return name

    def shards_of(self, row: ParamMapping) -> int:
        """The number of shards of the row's tensor."""
        if row.shard_dim is None:
            return 1
        return self._first.shards if row.expert is None else self._first.expert_shards

    def holders(self, copy: Copy) -> tuple[int, ...]:
        """The ranks that have the shard of the copy."""
        return tuple(self._any[copy.source]) if copy.source in self._whole else self._holders[copy.source, copy.shard]


def _divided(
    copies: Mapping[tuple[int, int], Sequence[Copy]], engine_sizes: Sequence[int], sources: _Sources
) -> dict[tuple[int, Place], list[Copy]]:
    """The copies of each pair, in the order of the mapping."""
    places = [Place(engine, rank) for engine, size in enumerate(engine_sizes) for rank in range(size)]
    wanted: dict[tuple[int, ...], list[Place]] = collections.defaultdict(list)
    grouped = {key: _by_holders(own, sources) for key, own in copies.items()}
    for place in places:
        for holders in grouped[engine_sizes[place.engine], place.rank]:
            wanted[holders].append(place)
    pairs: dict[tuple[int, Place], list[Copy]] = collections.defaultdict(list)
    for holders, receivers in wanted.items():
        parts = -(-len(holders) // len(receivers))
        for number, place in enumerate(receivers):
            own = grouped[engine_sizes[place.engine], place.rank][holders]
            for part, some in enumerate(_parts(own, parts, sources.dtypes)):
                pairs[holders[(number * parts + part) % len(holders)], place] += some
    return pairs


def _by_holders(copies: Iterable[Copy], sources: _Sources) -> dict[tuple[int, ...], list[Copy]]:
    found: dict[tuple[int, ...], list[Copy]] = collections.defaultdict(list)
    for copy in copies:
        found[sources.holders(copy)].append(copy)
    return found


def _parts(copies: Sequence[Copy], count: int, dtypes: Mapping[str, torch.dtype]) -> list[list[Copy]]:
    """The copies in `count` parts of about as many bytes each; empty ones are left out."""
    sizes = [copy.elements * dtypes[copy.source].itemsize for copy in copies]
    total, before = sum(sizes), 0
    parts: list[list[Copy]] = [[] for _ in range(count)]
    for copy, size in zip(copies, sizes, strict=True):
        parts[min(count - 1, (before + size // 2) * count // total)].append(copy)
        before += size
    return [part for part in parts if part]


def _messages(copies: Iterable[Copy], dtypes: Mapping[str, torch.dtype], limit: int) -> list[Message]:
    """Messages of at most `limit` bytes; copies that are longer are split by rows, of which each has at least one."""
    messages: list[Message] = [[]]
    used = 0
    for whole in copies:
        row_bytes = whole.columns * dtypes[whole.source].itemsize
        for copy in whole.split(max(1, (limit - limit % ALIGNMENT) // row_bytes)):
            size = aligned(copy.rows * row_bytes)
            if messages[-1] and used + size > limit:
                messages.append([])
                used = 0
            messages[-1].append(copy)
            used += size
    return messages
