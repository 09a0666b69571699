"""Advantage estimators as a table that flags, rules, rewards, advantages and loss read; changes of rewards before them.

A row lists the parts of one estimator. To add an estimator made of these parts, add a row and its test. The arithmetic
of the parts is in `returns` and `policy_loss`; `rollout.convert_samples` applies the baseline to rewards,
`megatron.training.advantages` computes values per token, `megatron.training.loss` the loss. This module does not import
torch, so that the command line can list the names.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from enum import Enum
from typing import Any


class Baseline(Enum):
    """What is subtracted from a sample's reward."""

    NONE = "none"
    GROUP_MEAN = "group mean"  # of all samples of the prompt
    LEAVE_ONE_OUT = "leave one out"  # the mean of the prompt's other samples
    LENGTH_WEIGHTED = "length weighted"  # the mean of all, each with the weight of its trained tokens


class Returns(Enum):
    """How a sample's reward becomes a value for each of its tokens."""

    BROADCAST = "broadcast"  # every token has the sample's reward
    DISCOUNTED = "discounted"  # the reward is at the last trained token; a token's value is its return under --gamma
    GENERALIZED = "generalized"  # the same rewards, less a critic's values (GAE), under --gamma and --lambd


class Objective(Enum):
    """The policy loss that the advantages weight."""

    PPO_CLIP = "ppo clip"  # PPO: one ratio per token
    GSPO_CLIP = "gspo clip"  # the same with one ratio for the whole response
    CISPO = "cispo"  # the likelihood, weighted by a clipped ratio that has no gradient


class LengthNormalization(Enum):
    """What the sum over a sample's trained tokens is divided by in the policy loss, before the mean over samples."""

    SAMPLE = "sample"  # the sample's own number of trained tokens, unless --calculate-per-token-loss is given
    LONGEST = "longest"  # the same constant for all samples, --rollout-max-response-len


@dataclasses.dataclass(frozen=True)
class Estimator:
    """One row of the table.

    `normalizes_by_std`: divide by the group's standard deviation, unless --disable-grpo-std-normalization is given.
    `whitens`: always whiten advantages over the trained tokens of the rollout, as --normalize-advantages does.
    """

    name: str
    source: str
    baseline: Baseline = Baseline.GROUP_MEAN
    normalizes_by_std: bool = True
    returns: Returns = Returns.BROADCAST
    objective: Objective = Objective.PPO_CLIP
    whitens: bool = False
    length_normalization: LengthNormalization = LengthNormalization.SAMPLE

    @property
    def divides_by_longest(self) -> bool:
        """Whether every trained token has the same weight in the loss, in samples and steps of any length."""
        return self.length_normalization is LengthNormalization.LONGEST

    @property
    def is_group_relative(self) -> bool:
        """Whether a sample's advantage depends on the other samples of its prompt."""
        return self.baseline is not Baseline.NONE

    @property
    def has_critic(self) -> bool:
        """Whether a critic is trained beside the policy, whose values the advantages are relative to."""
        return self.returns is Returns.GENERALIZED


DEFAULT = "grpo"
_ROWS = (
    Estimator(DEFAULT, "Shao et al. 2024 (DeepSeekMath), section 4.1"),
    Estimator(
        "dr_grpo",
        "Liu et al. 2025 (Understanding R1-Zero-Like Training), section 3.2 and listing 1",
        normalizes_by_std=False,
        length_normalization=LengthNormalization.LONGEST,
    ),
    Estimator("gspo", "Zheng et al. 2025 (Group Sequence Policy Optimization)", objective=Objective.GSPO_CLIP),
    Estimator("cispo", "MiniMax 2025 (MiniMax-M1), section 3.1", objective=Objective.CISPO),
    Estimator(
        "reinforce_plus_plus",
        "Hu 2025 (REINFORCE++), equations 3 and 4",
        baseline=Baseline.NONE,
        normalizes_by_std=False,
        returns=Returns.DISCOUNTED,
        whitens=True,
    ),
    Estimator(
        "reinforce_plus_plus_baseline", "Hu 2025 (REINFORCE++), section 3.2", normalizes_by_std=False, whitens=True
    ),
    Estimator(
        "rloo",
        "Ahmadian et al. 2024 (Back to Basics), equation 8; Kool et al. 2019",
        baseline=Baseline.LEAVE_ONE_OUT,
        normalizes_by_std=False,
    ),
    Estimator(
        "opo",
        "Hao et al. 2025 (On-Policy RL with Optimal Reward Baseline), section 3.2",
        baseline=Baseline.LENGTH_WEIGHTED,
        normalizes_by_std=False,
    ),
    Estimator(
        "ppo",
        "Schulman et al. 2017 (PPO), equations 7 and 11; Schulman et al. 2016 (GAE)",
        baseline=Baseline.NONE,
        normalizes_by_std=False,
        returns=Returns.GENERALIZED,
    ),
)
ESTIMATORS: dict[str, Estimator] = {row.name: row for row in _ROWS}


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
