"""Rollout data as columns, one tensor per field with samples end to end.

The rollout manager makes a batch of a rollout's samples, and `data.batch_schedule` one for each data-parallel rank.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from slimrl.data.images.batch import BatchImages
from slimrl.data.routed_experts import Routes, RoutingShape
from slimrl.data.routed_experts import joined as joined_routes
from slimrl.data.sample import PackedColumn, Sample, SampleStatus, end_to_end

_TOKEN_COLUMNS = ("tokens",)
ROUTED_EXPERTS = "routed_experts"  # None without --use-rollout-routing-replay
_RESPONSE_COLUMNS = ("loss_mask", "rollout_log_probs")
_OPTIONAL_RESPONSE_COLUMNS = ("teacher_log_probs", "token_rewards")  # None if the run does not have it
_OPTIONAL_COLUMNS = (*_OPTIONAL_RESPONSE_COLUMNS, "teacher_top_ids", "teacher_top_log_probs")
_SAMPLE_COLUMNS = (
    "total_lengths",
    "response_lengths",
    "raw_rewards",
    "rewards",
    "group_ids",
    "sample_ids",
    "truncated",
)
_SCHEDULE_COLUMNS = ("micro_batches", "samples_per_step", "tokens_per_step")
_FILE_FORMAT = "slimrl-rollout-batch-1"


@dataclasses.dataclass
class RolloutBatch:
    """`n` samples as columns: the training data of one data-parallel rank for one rollout.

    `tokens` has every sample's prompt and response end to end; response columns (`loss_mask`,
    `rollout_log_probs`) have the responses only. The schedule columns split the samples into
    optimizer steps and micro-batches; the per-step counts are global over data-parallel ranks.
    """

    tokens: Tensor  # int64 [sum(total_lengths)]
    total_lengths: Tensor  # int64 [n], prompt + response
    response_lengths: Tensor  # int64 [n]
    loss_mask: Tensor  # float32 [sum(response_lengths)], 1 where the token is trained on
    rollout_log_probs: Tensor  # float32 [sum(response_lengths)], from the rollout engine
    raw_rewards: Tensor  # float32 [n], as the reward function returned them
    rewards: Tensor  # float32 [n], after the group's normalisation
    group_ids: Tensor  # int64 [n], samples of one prompt share it
    sample_ids: Tensor  # int64 [n], unique over the run
    truncated: Tensor  # bool [n]
    micro_batches: list[list[list[int]]] = dataclasses.field(default_factory=list)  # [step][micro-batch] -> rows
    samples_per_step: list[int] = dataclasses.field(default_factory=list)  # global
    tokens_per_step: list[int] = dataclasses.field(default_factory=list)  # trained tokens, global
    teacher_log_probs: Tensor | None = None  # float32 [sum(response_lengths)], from the server of a teacher
    token_rewards: Tensor | None = None  # float32 [sum(response_lengths)], besides the reward of the sample
    teacher_top_ids: Tensor | None = None  # int64 [sum(response_lengths), k], the teacher's most probable tokens
    teacher_top_log_probs: Tensor | None = None  # float32, like these
    images: BatchImages | None = None  # and videos
    routed_experts: Tensor | None = None  # int16 [sum(total_lengths), layers, experts per token], the engine's choice

    def __len__(self) -> int:
        return self.total_lengths.numel()

    def __getstate__(self) -> dict[str, Any]:
        """For pickle: tensors as NumPy arrays, whose bytes are copied once. Torch takes 0.2 ms for each tensor."""
        images = None if self.images is None else _as_arrays(vars(self.images))
        return _as_arrays(vars(self)) | {"images": images}

    def __setstate__(self, state: dict[str, Any]) -> None:
        images = None if state["images"] is None else BatchImages(**_as_tensors(state["images"]))
        vars(self).update(_as_tensors(state) | {"images": images})

    @property
    def token_offsets(self) -> Tensor:
        """int64 [n + 1]: sample i is `tokens[offsets[i]:offsets[i + 1]]`."""
        return _offsets(self.total_lengths)

    @property
    def response_offsets(self) -> Tensor:
        """int64 [n + 1]: the response of sample i is `[offsets[i]:offsets[i + 1]]` of a response column."""
        return _offsets(self.response_lengths)

    def select(self, rows: Sequence[int] | Tensor) -> RolloutBatch:
        """A copy with these rows in this order (a row may repeat) and no schedule. Raises IndexError on a bad row."""
        index = torch.as_tensor(rows, dtype=torch.int64)
        if index.numel() and not 0 <= int(index.min()) <= int(index.max()) < len(self):
            raise IndexError(f"rows run from {int(index.min())} to {int(index.max())}: the batch has {len(self)}")
        chosen = index.tolist()
        columns: dict[str, Any] = {
            **{name: _chosen(getattr(self, name), self.total_lengths, chosen) for name in self._token_columns()},
            **{
                name: _chosen(getattr(self, name), self.response_lengths, chosen)
                for name in (*_RESPONSE_COLUMNS, *self._optional_columns())
            },
            **{name: getattr(self, name)[index] for name in _SAMPLE_COLUMNS},
        }
        return RolloutBatch(**columns, images=None if self.images is None else self.images.select(index))

    def _token_columns(self) -> list[str]:
        return [name for name in (*_TOKEN_COLUMNS, ROUTED_EXPERTS) if getattr(self, name) is not None]

    def _optional_columns(self) -> list[str]:
        return [name for name in _OPTIONAL_COLUMNS if getattr(self, name) is not None]

    def save(self, path: str | Path) -> None:
        """Write one safetensors file, the schedule in its metadata as JSON; replaces `path` atomically."""
        from safetensors.torch import save_file

        names = {*_tensor_columns(), *self._token_columns(), *self._optional_columns()}
        columns = {name: getattr(self, name).contiguous() for name in names}
        columns |= {} if self.images is None else self.images.tensors()
        schedule = json.dumps({name: getattr(self, name) for name in _SCHEDULE_COLUMNS})
        unfinished = f"{path}.{os.getpid()}.tmp"
        save_file(columns, unfinished, metadata={"format": _FILE_FORMAT, "schedule": schedule})
        os.replace(unfinished, path)

    @classmethod
    def load(cls, path: str | Path) -> RolloutBatch:
        """The inverse of `save`. Raises ValueError if the file is not such a batch."""
        from safetensors import safe_open

        with safe_open(str(path), framework="pt") as file:
            metadata = file.metadata() or {}
            if metadata.get("format") != _FILE_FORMAT:
                raise ValueError(f"{path} is not a rollout batch: its format is {metadata.get('format')!r}")
            names = file.keys()
            optional = [name for name in (*_OPTIONAL_COLUMNS, ROUTED_EXPERTS) if name in names]
            columns = {name: file.get_tensor(name) for name in (*_tensor_columns(), *optional)}
            images = BatchImages.from_tensors({name: file.get_tensor(name) for name in names if "." in name})
        return cls(**columns, images=images, **json.loads(metadata["schedule"]))


def _as_arrays(columns: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value.numpy() if isinstance(value, Tensor) else value for name, value in columns.items()}


def _as_tensors(columns: Mapping[str, Any]) -> dict[str, Any]:
    return {
        name: torch.from_numpy(value) if isinstance(value, np.ndarray) else value for name, value in columns.items()
    }


def batch_from_samples(
    samples: list[Sample],
    raw_rewards: Tensor,
    rewards: Tensor,
    images: Sequence[Mapping[str, Any] | None] = (),
    routing: RoutingShape | None = None,
) -> RolloutBatch:
    """Converts generated samples to columns, in order and without a schedule.

    `raw_rewards` [n] are as scored, `rewards` [n] those to train on (normalized within groups), `images` the tensors of
    each sample's images (see `BatchImages.of_samples`), `routing` the shape of the samples' routed experts; None: the
    batch has none.
    A sample without a loss mask trains on its whole response; one with `remove_sample` on nothing.

    Raises ValueError with the sample's name if it is incomplete or its lengths disagree.
    """
    for name, column in (("raw_rewards", raw_rewards), ("rewards", rewards)):
        if column.shape != (len(samples),):
            raise ValueError(f"{len(samples)} samples came with {name} of shape {list(column.shape)}: give one each")
    stored = _stored_columns(samples)
    total_lengths = [len(tokens) for tokens in stored["tokens"]]
    response_lengths = [sample.response_length for sample in samples]

    def joined(field: str, lengths: list[int], dtype: type[np.number]) -> Tensor:
        return torch.from_numpy(end_to_end(stored[field], field, lengths, dtype, lambda at: _name(samples[at], at)))

    def optional(field: str) -> Tensor | None:
        if not _is_given(field, stored[field], samples):
            return None
        column = joined(field, response_lengths, np.float32)
        if not bool((finite := column.isfinite()).all()):
            ends = torch.tensor(response_lengths).cumsum(0)
            at = int(torch.searchsorted(ends, int((~finite).nonzero()[0]), right=True))
            raise ValueError(f"{_name(samples[at], at)}: {field} are not all finite: give finite numbers")
        return column

    def top(field: str, dtype: type[np.number]) -> Tensor | None:
        if (width := _top_width(field, stored[field], response_lengths)) == 0:
            return None
        return joined(field, [width * length for length in response_lengths], dtype).view(-1, width)

    return RolloutBatch(
        tokens=joined("tokens", total_lengths, np.int64),
        total_lengths=torch.tensor(total_lengths, dtype=torch.int64),
        response_lengths=torch.tensor(response_lengths, dtype=torch.int64),
        loss_mask=_loss_mask(samples, stored["loss_mask"], response_lengths),
        rollout_log_probs=joined("rollout_log_probs", response_lengths, np.float32),
        raw_rewards=raw_rewards.to(torch.float32),
        rewards=rewards.to(torch.float32),
        group_ids=torch.tensor([sample.group_index for sample in samples], dtype=torch.int64),
        sample_ids=torch.tensor([sample.index for sample in samples], dtype=torch.int64),
        truncated=torch.tensor([sample.status is SampleStatus.TRUNCATED for sample in samples], dtype=torch.bool),
        teacher_log_probs=optional("teacher_log_probs"),
        token_rewards=optional("token_rewards"),
        teacher_top_ids=top("teacher_top_ids", np.int64),
        teacher_top_log_probs=top("teacher_top_log_probs", np.float32),
        images=BatchImages.of_samples(images, [sample.multimodal_inputs for sample in samples]),
        routed_experts=None if routing is None else _routed_experts(samples, total_lengths, routing),
    )


def _routed_experts(samples: list[Sample], lengths: list[int], shape: RoutingShape) -> Tensor:
    columns: list[Routes | None] = []
    for position, sample in enumerate(samples):
        try:
            found = sample.rollout_routed_experts
            columns.append(None if found is None else shape.checked(found))
        except ValueError as error:
            raise ValueError(f"{_name(sample, position)}: {error}") from error
    return torch.from_numpy(joined_routes(columns, lengths, shape))


def _stored_columns(samples: list[Sample]) -> dict[str, tuple[Any, ...]]:
    """The stored columns of all samples by field, one entry per sample. Raises ValueError for an incomplete sample."""
    names = (*_TOKEN_COLUMNS, *_RESPONSE_COLUMNS, *_OPTIONAL_COLUMNS)
    stored = [sample.columns(names) for sample in samples]
    for position, (sample, (tokens, mask, log_probs, *others, _, _)) in enumerate(zip(samples, stored, strict=True)):
        length = sample.response_length
        fits = all(column is None or len(column) == length for column in (mask, log_probs, *others))
        known = sample.index is not None and sample.group_index is not None
        if not (fits and known and 0 <= length < len(tokens) and (log_probs is not None or not length)):
            raise ValueError(_fault(sample, position))
    return dict(zip(names, zip(*stored, strict=True) if stored else [()] * len(names), strict=True))


def _is_given(field: str, columns: Sequence[Any], samples: list[Sample]) -> bool:
    """Whether the samples have an optional column. Raises ValueError if only some of those with a response have it."""
    answered = [(sample, column) for sample, column in zip(samples, columns, strict=True) if sample.response_length]
    lacking = [sample for sample, column in answered if column is None]
    if lacking and len(lacking) < len(answered):
        raise ValueError(
            f"{len(lacking)} of {len(answered)} samples have no {field}, the first is sample {lacking[0].index}: give"
            " one number per response token of each sample"
        )
    return bool(answered) and not lacking


def _top_width(field: str, columns: Sequence[Any], lengths: list[int]) -> int:
    """Values of `field` per response token; 0 if no sample has it. Raises ValueError unless all have as many."""
    found = {len(column or ()) / length for column, length in zip(columns, lengths, strict=True) if length} or {0.0}
    width = found.pop()
    if found or not width.is_integer():
        raise ValueError(f"the samples have different numbers of {field} per response token: give each one as many")
    return int(width)


def _name(sample: Sample, position: int) -> str:
    return f"sample {sample.index} (number {position} of the rollout)"


def _fault(sample: Sample, position: int) -> str:
    """What makes a sample unusable."""
    name = _name(sample, position)
    if sample.index is None or sample.group_index is None:
        return f"{name} has no index or no group_index: the data source sets both, keep them when copying"
    tokens = len(sample.column("tokens"))
    if not 0 <= sample.response_length < tokens:
        return (
            f"{name} has {tokens} tokens and response_length {sample.response_length}:"
            " tokens must hold the prompt (at least one token) and the response"
        )
    if sample.column("rollout_log_probs") is None and sample.response_length:
        return f"{name} has no rollout_log_probs: give one log-probability per response token"
    fields = (*_RESPONSE_COLUMNS, *_OPTIONAL_RESPONSE_COLUMNS)
    counts = {field: len(values) for field in fields if (values := sample.column(field)) is not None}
    wrong = next(field for field, count in counts.items() if count != sample.response_length)
    return f"{name} has {counts[wrong]} {wrong} for {sample.response_length} response tokens"


def _loss_mask(samples: list[Sample], masks: Sequence[Any], lengths: list[int]) -> Tensor:
    values = np.ones(sum(lengths), np.float32)
    end = 0
    for position, (sample, mask, length) in enumerate(zip(samples, masks, lengths, strict=True)):
        end += length
        if isinstance(mask, PackedColumn):
            mask = None if mask.is_all_ones() else mask.tolist()
        if mask is not None and mask.count(1) == len(mask):
            mask = None
        if mask is not None and not set(mask) <= {0, 1}:
            raise ValueError(
                f"{_name(sample, position)} has a loss_mask with other values than 0 and 1: use 1 for trained tokens,"
                " 0 for the others"
            )
        if sample.remove_sample:
            values[end - length : end] = 0
        elif mask is not None:
            values[end - length : end] = mask
    return torch.from_numpy(values)


def _offsets(lengths: Tensor) -> Tensor:
    return torch.cat([lengths.new_zeros(1), lengths.cumsum(0)])


def _chosen(column: Tensor, lengths: Tensor, rows: list[int]) -> Tensor:
    """The values of `rows`, end to end; NumPy's slices are cheaper than torch's."""
    if not rows:
        return column[:0].clone()
    values, ends = column.numpy(), lengths.cumsum(0).tolist()
    starts = [0, *ends]
    return torch.from_numpy(np.concatenate([values[starts[row] : ends[row]] for row in rows]))


def _tensor_columns() -> tuple[str, ...]:
    return _TOKEN_COLUMNS + _RESPONSE_COLUMNS + _SAMPLE_COLUMNS
