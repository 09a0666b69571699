"""Dynamic sampling filters: their result, the wrapper that calls one, and the built-in ones.

These drop groups without a learning signal, as in DAPO (Yu et al. 2025, section 3.2).
"""

from __future__ import annotations

import dataclasses
from typing import Any

from slimrl.data.sample import Sample, SampleStatus
from slimrl.hooks import DynamicSamplingFilter, naming, resolve
from slimrl.hooks.contracts import RunArguments


@dataclasses.dataclass(frozen=True)
class DynamicFilterOutput:
    """Whether a group is trained on; `reason` names the drop in `rollout/dynamic_filter/drop_<reason>`.

    A dropped group with `keep_when_insufficient` is trained on if the submitted prompts do not fill the rollout; no
    more prompts are submitted then. With `--max-weight-staleness` prompts are always submitted: it stays dropped.
    """

    keep: bool
    reason: str | None = None
    keep_when_insufficient: bool = False

    @classmethod
    def of(cls, returned: Any) -> DynamicFilterOutput:
        """Converts a filter's result: this class, an object with `keep` and `reason`, a bool or a scalar tensor.

        Raises TypeError for anything else, including None.
        """
        keep = getattr(returned, "keep", returned)
        if keep is None or isinstance(keep, str | list | tuple | dict):
            raise TypeError(f"the filter returned {returned!r}: return a bool, a scalar tensor or DynamicFilterOutput")
        reason = getattr(returned, "reason", None)
        return cls(bool(keep), reason, bool(getattr(returned, "keep_when_insufficient", False)))


class GroupFilter:
    """Calls `--dynamic-sampling-filter-path` on a finished group; `str()` is flag and path."""

    def __init__(self, path: str, hook_args: RunArguments) -> None:
        """`hook_args` is passed to the function. Raises HookError if the path cannot be resolved."""
        self._named = ("--dynamic-sampling-filter-path", path)
        self._function = resolve(path, DynamicSamplingFilter)
        self._hook_args = hook_args

    def __call__(self, group: list[Sample]) -> DynamicFilterOutput:
        """Raises HookFailedError if the function fails or returns anything else."""
        with naming(*self._named):
            return DynamicFilterOutput.of(self._function(self._hook_args, group))

    def __str__(self) -> str:
        return " ".join(self._named)


def check_reward_nonzero_std(args: RunArguments, samples: list[Sample]) -> DynamicFilterOutput:
    """Keeps a group if its rewards differ by more than 1e-6: equal rewards have advantage zero."""
    rewards = [sample.reward_value(args.reward_key) for sample in samples]
    if max(rewards) - min(rewards) > 1e-6:
        return DynamicFilterOutput(keep=True)
    return DynamicFilterOutput(keep=False, reason=f"zero_std_{rewards[0]:.1f}")


def check_reward_nonzero_std_with_fallback(args: RunArguments, samples: list[Sample]) -> DynamicFilterOutput:
    """Like `check_reward_nonzero_std`, but groups with equal rewards fill up the rollout if too few groups pass."""
    return dataclasses.replace(check_reward_nonzero_std(args, samples), keep_when_insufficient=True)


def check_any_completed(args: RunArguments, samples: list[Sample]) -> DynamicFilterOutput:
    """Keeps a group if at least one response ended before the length limit."""
    if any(sample.status is SampleStatus.COMPLETED for sample in samples):
        return DynamicFilterOutput(keep=True)
    return DynamicFilterOutput(keep=False, reason="all_truncated")
