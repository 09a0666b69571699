"""Changes of a sample's reward before advantages are computed. Imports no torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class OverlongPenalty:
    """DAPO's soft overlong punishment: Yu et al. 2025, equation 13, times `factor`.

    0 for responses of up to `longest - buffer` tokens, then falling linearly to `-factor` at `longest` tokens, and
    `-factor` beyond. In the paper's symbols, `longest` is L_max and `buffer` L_cache; its factor is 1.
    """

    longest: int  # tokens
    buffer: int  # tokens
    factor: float  # in units of reward

    @classmethod
    def if_given(cls, longest: int, buffer: int | None, factor: float) -> OverlongPenalty | None:
        """None without a buffer."""
        return None if buffer is None else cls(longest, buffer, factor)

    def __call__(self, length: int) -> float:
        """What is added to the reward of a response of so many tokens, at most 0."""
        over = length - (self.longest - self.buffer)
        return -self.factor * min(max(over / self.buffer, 0.0), 1.0)


_KEY = "reward_moments"  # checkpoint key, next to the data source's keys


def merged_moments(first: tuple[float, float, float], second: tuple[float, float, float]) -> tuple[float, float, float]:
    """Count, mean and sum of squared deviations of two sets together; Chan, Golub and LeVeque 1983, equation 2.1."""
    (count, mean, squares), (added, other, more) = first, second
    if not added:
        return first
    total, apart = count + added, other - mean
    return total, mean + apart * added / total, squares + more + apart * apart * count * added / total


class RunningMoments:
    """Mean and standard deviation of all raw rewards of a run so far, in float64.

    Rollouts are merged by Chan, Golub and LeVeque 1983, equation 2.1, the form of Welford 1962 for many values at once:
    the result is that of one pass over all rewards, whatever their division into rollouts.
    """

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self._squares = 0.0  # sum of the squared deviations from `mean`

    def add(self, rewards: Sequence[float]) -> None:
        """Takes the rewards of one rollout into account."""
        mean = math.fsum(rewards) / max(len(rewards), 1)
        squares = math.fsum((reward - mean) ** 2 for reward in rewards)
        before = (self.count, self.mean, self._squares)
        _, self.mean, self._squares = merged_moments(before, (len(rewards), mean, squares))
        self.count += len(rewards)

    @property
    def std(self) -> float:
        """The unbiased standard deviation (n - 1); 0 for fewer than two rewards."""
        return math.sqrt(self._squares / (self.count - 1)) if self.count > 1 else 0.0

    def normalized(self, rewards: Sequence[float]) -> list[float]:
        """`(r - mean) / (std + 1e-8)` of each; 0 as long as all rewards of the run are equal."""
        return [(reward - self.mean) / (self.std + 1e-8) if self.std > 0 else 0.0 for reward in rewards]

    def metrics(self, *, reported: bool) -> dict[str, float]:
        """The moments after the last rollout; nothing unless `reported`."""
        if not reported:
            return {}
        return {"rollout/running_reward/mean": self.mean, "rollout/running_reward/std": self.std}

    def added_to(self, state: dict[str, Any]) -> dict[str, Any]:
        """The data source's state plus this one, as plain JSON data; floats survive JSON exactly."""
        return {**state, _KEY: {"count": self.count, "mean": self.mean, "squares": self._squares}}

    def restored(self, state: dict[str, Any]) -> dict[str, Any]:
        """Takes over the moments in `state`, a result of `added_to`, and returns the rest of it.

        The state of an older slimrl has no moments; they then begin with the next rollout.
        """
        saved = state.get(_KEY, {"count": 0, "mean": 0.0, "squares": 0.0})
        self.count, self.mean, self._squares = saved["count"], saved["mean"], saved["squares"]
        return {name: value for name, value in state.items() if name != _KEY}
