"""The `Sample`: one prompt and its response, from the data source to training; version spans and slime's methods.

Version spans say which weights sampled which tokens: `[version, number of tokens]` pairs over a response, oldest first.
Neighbours differ and no span is empty. They are lists, so that JSON gives them back unchanged. The staleness bound
reads them.
`SlimeSample` has what functions written for slime call on a sample; `Sample` inherits it, so that one class serves both
kinds of functions. It does the accounting of `slimrl.rollout.generation.multi_turn`: after every call masks,
log-probabilities and version spans cover every response token.
"""

from __future__ import annotations

import dataclasses
import math
from enum import StrEnum
from typing import TYPE_CHECKING, Any, ClassVar

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping


Span = list[Any]  # [version, tokens]: a list, because it is written as JSON

NO_VERSION = ""  # tokens that no model drew (the words of a tool), or of which nobody said who did


def add_span(spans: list[Span], version: str, count: int) -> None:
    """Appends `count` tokens of `version`, in place."""
    if count <= 0:
        return
    if spans and spans[-1][0] == version:
        spans[-1][1] += count
    else:
        spans.append([version, count])


def clip_spans(spans: list[Span], length: int) -> list[Span]:
    """The spans over a response of `length` tokens, whose end was cut off, or to which somebody added tokens."""
    made: list[Span] = []
    left = length
    for version, count in spans:
        add_span(made, version, min(count, left))
        left -= min(count, left)
    add_span(made, NO_VERSION, left)
    return made


def format_spans(spans: list[Span]) -> str:
    """ "3: 120 tokens, 4: 17 tokens"."""
    return ", ".join(f"{version or 'none'}: {count} token{'s' * (count != 1)}" for version, count in spans)


# slime's fields that nothing reads here, and what to do instead of setting them
NOT_SERVED = {
    "generate_function_path": "give the evaluation set a custom_generate_function_path (--eval-config)",
    "mopd_teacher_log_probs": "distillation from teachers is not served",
    "multimodal_inputs": "images, videos and sounds are not served: leave it None",
    "multimodal_train_inputs": "images, videos and sounds are not served: leave it None",
    "rollout_routed_experts": "replay of the routing is not served: leave it None",
    "teacher_log_probs": "distillation from teachers is not served",
    "train_metadata": "put it into metadata, which --rollout-sample-filter-path and reward functions see",
}
_STATUS_BY_FINISH = {"stop": "completed", "length": "truncated", "abort": "aborted"}


class SlimeSample:
    """The methods; `self` is always a `Sample`. The fields of `NOT_SERVED` read as None."""

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

    def __getattr__(self, name: str) -> None:
        if name in NOT_SERVED:
            return None
        raise AttributeError(
            f"a Sample has no {name}: its fields are those of slimrl.data.sample, and what is your own belongs into"
            " metadata",
            name=name,
            obj=self,
        )

    @property
    def effective_response_length(self) -> int:
        """Response tokens that are trained on."""
        return self.response_length if self.loss_mask is None else sum(self.loss_mask)

    def get_reward_value(self, args: Any) -> float:
        """The reward that counts, by `args.reward_key` where it is a dict. Raises ValueError as `reward_value` does."""
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
        """Adds tokens of the model (`trainable`, with a log-probability each), or of a tool (without), to the response.

        `text` is added to the response's text, and of `meta_info` what `update_from_meta_info` takes, the status
        unless `update_terminal_info` is False. The list `loss_mask` is extended in place. Raises ValueError where
        log-probabilities are missing, superfluous or of another number.
        """
        new_tokens = [int(token) for token in tokens or ()]
        values = None if log_probs is None else [float(value) for value in log_probs]
        if new_tokens and trainable and values is None:
            raise ValueError(f"{len(new_tokens)} tokens to train on came without log_probs: give one for each")
        if new_tokens and not trainable and values is not None:
            raise ValueError("tokens that are not trained on came with log_probs: leave them out, nothing reads them")
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
        """Takes the weight version and the status from an engine's `meta_info`.

        Caches and drafts are counted where the requests are (rollout/prefix_cache_hit_rate and others), not per sample.
        """
        if "weight_version" in meta_info:
            self.weight_versions.append(str(meta_info["weight_version"]))
        finish = meta_info["finish_reason"]["type"]
        if finish in _STATUS_BY_FINISH:
            self.status = self.Status(_STATUS_BY_FINISH[finish])


def unserved_field(sample: Sample) -> str | None:
    """What is wrong with a field that nothing here reads and that somebody filled; None where there is none."""
    for name in NOT_SERVED.keys() & vars(sample).keys():
        if getattr(sample, name) is not None:
            return f"it has {name}, which nothing here reads: {NOT_SERVED[name]}"
    return None


class SampleStatus(StrEnum):
    """Where a sample stands: only PENDING and ABORTED samples may be (further) generated."""

    PENDING = "pending"
    COMPLETED = "completed"
    TRUNCATED = "truncated"
    ABORTED = "aborted"
    FAILED = "failed"


@dataclasses.dataclass
class Sample(SlimeSample):
    """One prompt with one response.

    Invariants once generated: `len(tokens) == prompt length + response_length` and
    `len(loss_mask) == len(rollout_log_probs) == response_length` where those are set.
    `version_spans` say which weights drew which tokens of the response (`slimrl.data.sample`; empty where nobody
    knows); `weight_versions` has one entry per request, the version that it ended with.
    Log-probabilities are natural logarithms of the sampling policy at temperature-scaled logits.
    """

    prompt: str | list[dict[str, Any]] = ""
    group_index: int | None = None
    index: int | None = None
    label: Any = None
    tokens: list[int] = dataclasses.field(default_factory=list)
    response: str = ""
    response_length: int = 0
    loss_mask: list[int] | None = None
    rollout_log_probs: list[float] | None = None
    weight_versions: list[str] = dataclasses.field(default_factory=list)
    version_spans: list[Span] = dataclasses.field(default_factory=list)
    reward: float | dict[str, Any] | None = None
    status: SampleStatus = SampleStatus.PENDING
    remove_sample: bool = False
    session_id: str | None = None
    custom_rm_path: str | None = None
    metadata: dict[str, Any] = dataclasses.field(default_factory=dict)

    # the name under which hooks written for slime know it
    Status: ClassVar[type[SampleStatus]] = SampleStatus

    @property
    def prompt_length(self) -> int:
        """Number of prompt tokens."""
        return len(self.tokens) - self.response_length

    def reward_value(self, key: str | None = None) -> float:
        """The reward as a float; `key` picks an entry where the reward is a dict.

        Raises ValueError where the sample has no reward, the key is missing or the reward is NaN or infinite.
        """
        reward = self.reward
        if isinstance(reward, dict):
            if key is None or key not in reward:
                raise ValueError(
                    f"sample {self.index}: the reward is a dict with keys {sorted(reward)} and --reward-key is"
                    f" {key!r}: give --reward-key one of those keys"
                )
            reward = reward[key]
        if reward is None:
            raise ValueError(f"sample {self.index} has no reward: the reward function returned nothing for it")
        if not math.isfinite(value := float(reward)):
            entry = "" if key is None or not isinstance(self.reward, dict) else f" (--reward-key {key})"
            raise ValueError(f"sample {self.index}: the reward{entry} is {value}: judge it with a finite number")
        return value

    def to_dict(self) -> dict[str, Any]:
        """Plain data (status as a string), for dumps."""
        return {**dataclasses.asdict(self), "status": self.status.value}

    @classmethod
    def from_dict(cls, data: dict[str, Any]) -> Sample:
        """The inverse of `to_dict`. Raises TypeError on a key that is not a field."""
        return cls(**{**data, "status": SampleStatus(data["status"])})
