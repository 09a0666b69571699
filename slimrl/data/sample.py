"""The `Sample`: one prompt and its response, from the data source to training; version spans and slime's methods.

Version spans record which weights sampled which tokens: `[version, number of tokens]` pairs over a response, oldest
first. Neighbours differ and no span is empty. They are lists, so that JSON preserves them. The staleness bound uses
them.

Values per token stay packed in bytes until code reads them as a list (`PackedFields`): a list of numbers takes 32 to 40
bytes per token and is visited by every garbage collection, packed values take 1 to 8 bytes.

`SlimeSample` has the methods that functions written for slime call on a sample; `Sample` inherits them. After every
call, masks, log-probabilities and version spans cover every response token, as with
`slimrl.rollout.generation.multi_turn`.
"""

from __future__ import annotations

import dataclasses
import math
import struct
from collections.abc import Callable, Iterable
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from slimrl.data.routed_experts import as_plain, from_plain

if TYPE_CHECKING:
    from collections.abc import Mapping

_PREFIX = "_packed_"


class PackedColumn:
    """An immutable column: the list `head`, then packed numbers of `dtype` [n]."""

    __slots__ = ("_count", "_data", "_dtype", "head")

    def __init__(self, data: bytes, dtype: str, head: list[Any] | None = None) -> None:
        """`data` has numbers of `dtype`: "u1", "i4" or "f8". Raises ValueError if it has part of one."""
        count, rest = divmod(len(data), int(dtype[1]))
        if rest:
            raise ValueError(f"{len(data)} bytes are no whole numbers of {dtype}")
        self.head: list[Any] = [] if head is None else head
        self._count = len(self.head) + count
        self._data = data
        self._dtype = dtype

    def __len__(self) -> int:
        return self._count

    @property
    def values(self) -> np.ndarray[Any, Any]:
        """The numbers after the head, dtype as given, [n], read-only."""
        return np.frombuffer(self._data, self._dtype)

    def is_all_ones(self) -> bool:
        """Whether every number of a "u1" column is 1."""
        return self._data.count(1) == self._count == len(self._data)

    def after(self, head: list[Any]) -> PackedColumn:
        """The same numbers behind a copy of `head`."""
        return PackedColumn(self._data, self._dtype, [*head, *self.head])

    def tolist(self) -> list[Any]:
        """All values as a new list of Python numbers."""
        return [*self.head, *self.values.tolist()]


_STRUCT_CODES = {"int64": "q", "float32": "f"}


def end_to_end(
    columns: Iterable[Any], field: str, lengths: list[int], dtype: type[np.number], name: Callable[[int], str]
) -> np.ndarray[Any, Any]:
    """The values of columns (packed, lists, or None for none) end to end, of so many entries each.

    `struct` is 3 times faster than NumPy and 12 times faster than torch. Raises ValueError with the `name` of the
    sample whose `field` has other values than `dtype`.
    """
    values = np.empty(sum(lengths), dtype)
    code, start = _STRUCT_CODES[values.dtype.name], 0
    for position, (column, length) in enumerate(zip(columns, lengths, strict=True)):
        packed = isinstance(column, PackedColumn)
        listed = column.head if packed else column or ()
        count = len(listed) if packed else length
        try:
            struct.pack_into(f"{count}{code}", values.data, start * values.itemsize, *listed)
        except struct.error as error:
            raise ValueError(f"{name(position)} has {field} that are not {values.dtype}: {error}") from error
        if packed:
            values[start + count : start + length] = column.values
        start += length
    return values


class _Plain:
    """Has the ordinary `__dict__`, which `PackedFields` replaces."""


# of an object, with packed columns under other names
_attributes: Callable[[_Plain], dict[str, Any]] = _Plain.__dict__["__dict__"].__get__


class PackedFields(_Plain):
    """Base of a dataclass whose fields `PACKABLE` may be packed; they have no default value in the class."""

    PACKABLE: ClassVar[frozenset[str]] = frozenset()

    def pack(self, name: str, column: PackedColumn) -> None:
        """Sets the field `name`, one of `PACKABLE`, to a column."""
        if name not in self.PACKABLE:
            raise ValueError(f"{name} cannot be packed: only {', '.join(sorted(self.PACKABLE))}")
        attributes = _attributes(self)
        attributes.pop(name, None)
        attributes[_PREFIX + name] = column

    def column(self, name: str) -> Any:
        """The field `name` as it is stored: a PackedColumn, or its value."""
        attributes = _attributes(self)
        if name in attributes:  # also if it was assigned after it was packed
            return attributes[name]
        return attributes.get(_PREFIX + name)

    def columns(self, names: Iterable[str]) -> list[Any]:
        """`column` of several fields."""
        attributes = _attributes(self)
        return [attributes[name] if name in attributes else attributes.get(_PREFIX + name) for name in names]

    def has_own(self, names: Any) -> Any:
        """Those of `names` (a set) that were set on the object, without unpacking anything."""
        return names & _attributes(self).keys()

    def __getattr__(self, name: str) -> Any:
        if name not in self.PACKABLE:
            raise AttributeError(f"{type(self).__name__!r} object has no attribute {name!r}", name=name, obj=self)
        attributes = _attributes(self)
        column = attributes.get(_PREFIX + name)
        if column is not None:
            attributes.setdefault(name, column.tolist())  # at once: two threads must get the same list
            attributes.pop(_PREFIX + name, None)
        if name not in attributes:
            raise AttributeError(f"{type(self).__name__!r} object has no {name} yet", name=name, obj=self)
        return attributes[name]

    def __getstate__(self) -> dict[str, Any]:
        """Without packed columns: a shallow copy shares the lists, and pickles have only the fields."""
        return dict(self.__dict__)

    @property
    def __dict__(self) -> dict[str, Any]:  # type: ignore[override]
        """The attributes, none of them packed."""
        attributes = _attributes(self)
        for key in [key for key in attributes if key.startswith(_PREFIX)]:
            getattr(self, key.removeprefix(_PREFIX))
            attributes.pop(key, None)
        return attributes


Span = list[Any]  # [version, tokens]: a list, because it is written as JSON

NO_VERSION = ""  # tokens that no model sampled (tool output), or whose version is unknown


def add_span(spans: list[Span], version: str, count: int) -> None:
    """Appends `count` tokens of `version`, in place."""
    if count <= 0:
        return
    if spans and spans[-1][0] == version:
        spans[-1][1] += count
    else:
        spans.append([version, count])


def clip_spans(spans: list[Span], length: int) -> list[Span]:
    """The spans for a response of `length` tokens: truncated, or extended with `NO_VERSION`."""
    clipped: list[Span] = []
    left = length
    for version, count in spans:
        add_span(clipped, version, min(count, left))
        left -= min(count, left)
    add_span(clipped, NO_VERSION, left)
    return clipped


def format_spans(spans: list[Span]) -> str:
    """ "3: 120 tokens, 4: 17 tokens"."""
    return ", ".join(f"{version or 'none'}: {count} token{'s' * (count != 1)}" for version, count in spans)


# unsupported fields of slime's Sample -> what to do instead of setting them
NOT_SERVED = {
    "generate_function_path": "give the evaluation set a custom_generate_function_path (--eval-config)",
    "mopd_teacher_log_probs": "the values of a sample's teacher are teacher_log_probs, also with several teachers",
    "train_metadata": "put it into metadata, which --rollout-sample-filter-path and reward functions receive",
}
_STATUS_BY_FINISH = {"stop": "completed", "length": "truncated", "abort": "aborted"}


class SlimeSample(PackedFields):
    """The methods of slime's Sample; `self` is always a `Sample`. The fields of `NOT_SERVED` read as None."""

    if TYPE_CHECKING:  # the fields of `Sample` that the methods use
        Status: ClassVar[type[SampleStatus]]
        tokens: list[int]
        response: str
        response_length: int
        loss_mask: list[int] | None
        rollout_log_probs: list[float] | None
        weight_versions: list[str]
        version_spans: list[Span]
        status: SampleStatus

        def reward_value(self, key: str | None = None) -> float:
            """See `Sample`."""

    def __getattr__(self, name: str) -> Any:
        if name in self.PACKABLE:
            return super().__getattr__(name)
        if name in NOT_SERVED:
            return None
        raise AttributeError(
            f"a Sample has no {name}: its fields are those of slimrl.data.sample; store custom values in metadata",
            name=name,
            obj=self,
        )

    @property
    def effective_response_length(self) -> int:
        """Response tokens that are trained on, unless `remove_sample` is set."""
        mask = self.column("loss_mask")
        if isinstance(mask, PackedColumn):
            return int(mask.values.sum())
        return self.response_length if mask is None else sum(mask)

    def get_reward_value(self, args: Any) -> float:
        """The reward to train on, by `args.reward_key` if it is a dict. Raises ValueError like `reward_value`."""
        return self.reward_value(args.reward_key)

    def append_response_tokens(
        self,
        args: Any = None,
        *,
        tokens: Iterable[int] | None = None,
        log_probs: Iterable[float] | None = None,
        trainable: bool = True,
        meta_info: Mapping[str, Any] | None = None,
        text: str | None = None,
        update_terminal_info: bool = True,
    ) -> None:
        """Appends tokens of the model (`trainable`, with log-probabilities) or of a tool (without) to the response.

        `text` is appended to the response's text. `meta_info` is passed to `update_from_meta_info`; the status does not
        change if `update_terminal_info` is False. The list `loss_mask` is extended in place. Raises ValueError if
        log-probabilities are missing, superfluous or of the wrong number.
        """
        new_tokens = [int(token) for token in tokens or ()]
        values = None if log_probs is None else [float(value) for value in log_probs]
        if new_tokens and trainable and values is None:
            raise ValueError(f"{len(new_tokens)} trainable tokens came without log_probs: give one for each")
        if new_tokens and not trainable and values is not None:
            raise ValueError("tokens with trainable=False came with log_probs: omit log_probs, they are unused")
        values = [0.0] * len(new_tokens) if values is None else values
        if len(values) != len(new_tokens):
            raise ValueError(f"{len(new_tokens)} tokens came with {len(values)} log_probs: give one for each")
        before = self.response_length
        spans = clip_spans(self.version_spans, before)
        version = str((meta_info or {}).get("weight_version", "")) if trainable else NO_VERSION
        add_span(spans, version, len(new_tokens))
        self.version_spans = spans
        self.tokens = [*self.tokens, *new_tokens]
        self.response_length = before + len(new_tokens)
        if self.loss_mask is None:
            self.loss_mask = [1] * before
        self.loss_mask += [int(trainable)] * len(new_tokens)
        self.rollout_log_probs = [*(self.rollout_log_probs or [0.0] * before), *values]
        self.response += text or ""
        if meta_info is not None:
            status = self.status
            self.update_from_meta_info(args, meta_info)
            if not update_terminal_info:
                self.status = status

    def update_from_meta_info(self, args: Any, meta_info: Mapping[str, Any]) -> None:
        """Sets the weight version and the status from an engine's `meta_info`.

        Cache hits and draft tokens are counted per request (rollout/prefix_cache_hit_rate and others), not per sample.
        """
        if "weight_version" in meta_info:
            self.weight_versions.append(str(meta_info["weight_version"]))
        finish = meta_info["finish_reason"]["type"]
        if finish in _STATUS_BY_FINISH:
            self.status = self.Status(_STATUS_BY_FINISH[finish])


def unserved_field(sample: Sample) -> str | None:
    """The message for an unsupported field that is set; None if there is none."""
    for name in sample.has_own(NOT_SERVED.keys()):
        if getattr(sample, name) is not None:
            return f"the sample sets {name}, which slimrl does not use: {NOT_SERVED[name]}"
    return None


class RewardError(ValueError):
    """The reward of a sample is no number to train on or to report."""


class SampleStatus(StrEnum):
    """Generation status; only PENDING and ABORTED samples can be generated or continued."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


def _nothing() -> None:
    """The default of a field that may be packed, which must not be an attribute of the class."""


@dataclasses.dataclass
class Sample(SlimeSample):
    """One prompt with one response.

    Invariants once generated: `len(tokens) == prompt length + response_length` and
    `loss_mask`, `rollout_log_probs`, `teacher_log_probs` and `token_rewards` have `response_length` entries if set.
    The teacher's most probable tokens, `teacher_top_ids` and `teacher_top_log_probs`, are as many for each response
    token, end to end. `version_spans` record which weights sampled which tokens of the response (see the module; empty
    if unknown); `weight_versions` has one entry per request, the version that it ended with.
    Log-probabilities are natural logarithms of the sampling policy at temperature-scaled logits.
    """

    prompt: str | list[dict[str, Any]] = ""
    group_index: int | None = None
    index: int | None = None
    label: Any = None
    tokens: list[int] = dataclasses.field(default_factory=list)
    response: str = ""
    response_length: int = 0
    loss_mask: list[int] | None = dataclasses.field(default_factory=_nothing)
    rollout_log_probs: list[float] | None = dataclasses.field(default_factory=_nothing)
    teacher_log_probs: list[float] | None = dataclasses.field(default_factory=_nothing)
    token_rewards: list[float] | None = dataclasses.field(default_factory=_nothing)  # of each token, besides `reward`
    teacher_top_ids: list[int] | None = dataclasses.field(default_factory=_nothing)
    teacher_top_log_probs: list[float] | None = dataclasses.field(default_factory=_nothing)
    weight_versions: list[str] = dataclasses.field(default_factory=list)
    version_spans: list[Span] = dataclasses.field(default_factory=list)
    reward: float | dict[str, Any] | None = None
    status: SampleStatus = SampleStatus.PENDING
    remove_sample: bool = False
    session_id: str | None = None
    custom_rm_path: str | None = None
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)
    rollout_routed_experts: Any = dataclasses.field(default=None, compare=False)  # see `slimrl.data.routed_experts`
    # of prompts with images or videos (keys: `data.images`), shared by a prompt's samples, and transformers' tensors
    multimodal_inputs: dict[str, Any] | None = None
    multimodal_train_inputs: dict[str, Any] | None = None

    PACKABLE: ClassVar[frozenset[str]] = frozenset(
        {"tokens", "loss_mask", "rollout_log_probs", "teacher_log_probs", "token_rewards"}
        | {"teacher_top_ids", "teacher_top_log_probs"}
    )

    Status: ClassVar[type[SampleStatus]] = SampleStatus  # slime's name

    @property
    def prompt_length(self) -> int:
        """Number of prompt tokens."""
        return len(self.column("tokens")) - self.response_length

    def reward_value(self, key: str | None = None, evaluation: str | None = None) -> float:
        """The reward as a float, of the evaluation set `evaluation`; `key` selects an entry if the reward is a dict.

        Raises RewardError if the sample has no reward, the key is missing, or the reward is NaN or infinite.
        """
        reward, entry, flag = self.reward, "", "--reward-key" if evaluation is None else "--eval-reward-key"
        name = f"sample {self.index}" + ("" if evaluation is None else f" of evaluation set {evaluation!r}")
        if isinstance(reward, dict):
            if key is None or key not in reward:
                raise RewardError(
                    f"{name}: the reward is a dict with keys {sorted(reward)} and {flag} is {key!r}: give {flag} one of"
                    " those keys, or return that key"
                )
            reward, entry = reward[key], f" ({flag} {key})"
        if reward is None:
            raise RewardError(f"{name} has no reward: the reward function returned nothing for it")
        if not math.isfinite(value := float(reward)):
            raise RewardError(f"{name}: the reward{entry} is {value}: return a finite number")
        return value

    def to_dict(self) -> dict[str, Any]:
        """Plain data (status as a string), for dumps; without the tensors that are made of the images."""
        fields = dataclasses.asdict(dataclasses.replace(self, multimodal_train_inputs=None))
        return as_plain(fields | {"status": self.status.value})

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Sample:
        """The inverse of `to_dict`. Raises TypeError on a key that is not a field."""
        return cls(**from_plain({**data, "status": SampleStatus(data["status"])}))
