"""The `Sample`: one prompt and its response, from birth in the data source to the training batch."""

from __future__ import annotations

import dataclasses
import math
from enum import StrEnum
from typing import Any, ClassVar

from slimrl.data.slime_sample import SlimeSample
from slimrl.data.version_spans import Span


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
    `version_spans` say which weights drew which tokens of the response (`slimrl.data.version_spans`; empty where nobody
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
