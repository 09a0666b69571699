"""Dynamic sampling filters: their result, what applies one to the finished groups, and the built-in ones.

These drop groups without a learning signal, as in DAPO (Yu et al. 2025, section 3.2). A filter that drops too many
groups in a row ends the run with an error.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
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


MAX_CONSECUTIVE_DROPS = 16  # in rollouts' groups; the limit is at least one epoch


class DynamicSampler:
    """Applies the dynamic sampling filter to groups in the order in which they finish."""

    def __init__(self, keep: GroupFilter | None, max_drops: int) -> None:
        """`keep` None accepts every group; `max_drops` drops in a row end the run."""
        self._keep = keep
        self._max_drops = max_drops
        self._dropped_in_a_row = 0
        self._dropped: list[tuple[str, list[Sample]]] = []
        self._reserve: list[tuple[str, list[Sample]]] = []
        self.accepted: list[list[Sample]] = []

    @property
    def dropped(self) -> list[list[Sample]]:
        """Groups that are not trained on."""
        return [group for _, group in self._dropped + self._reserve]

    @property
    def drops(self) -> dict[str, int]:
        """Number of groups that are not trained on, by reason."""
        return dict(Counter(reason for reason, _ in self._dropped + self._reserve))

    def add(self, group: list[Sample]) -> bool:
        """Accepts (True) or drops a finished group. Raises RuntimeError after `max_drops` drops in a row."""
        output = DynamicFilterOutput(True) if self._keep is None else self._keep(group)
        if output.keep:
            self._dropped_in_a_row = 0
            self.accepted.append(group)
            return True
        dropped = self._reserve if output.keep_when_insufficient else self._dropped
        dropped.append((output.reason or "unnamed", group))
        self._dropped_in_a_row += 1
        if self._dropped_in_a_row >= self._max_drops:
            raise RuntimeError(
                f"{self._keep} dropped"
                f" {self._dropped_in_a_row} groups in a row ({self.drops}): the data is too easy, too hard or wrongly"
                " scored for this model; change the data, the reward or the filter"
            )
        return False

    def fill_from_reserve(self, missing: int) -> bool:
        """Accepts up to `missing` groups that were dropped with `keep_when_insufficient`; False if there are none.

        Groups that finished earlier are accepted first.
        """
        chosen, self._reserve = self._reserve[:missing], self._reserve[missing:]
        self.accepted += [group for _, group in chosen]
        return bool(chosen)
