"""The advantage estimators: one row each, read by the flags, the rules, the rewards, the advantages and the loss.

A row says what an estimator is made of; the arithmetic is in `returns` and `policy_loss`. Imports no torch, so that the
command line can read the names. To add one that is made of these parts, add a row and its test.
"""

from __future__ import annotations

import dataclasses
from enum import Enum


class Baseline(Enum):
    """What is subtracted from a sample's reward."""

    NONE = "none"
    GROUP_MEAN = "group mean"  # of all samples of the prompt
    LEAVE_ONE_OUT = "leave one out"  # the mean of the prompt's other samples


class Returns(Enum):
    """How a sample's reward becomes a value for each of its tokens."""

    SAME_FOR_ALL = "same for all"  # every token has the sample's reward
    DISCOUNTED = "discounted"  # the reward is at the last trained token, and --gamma discounts what follows a token


class Objective(Enum):
    """The policy loss that the advantages weigh."""

    CLIPPED_TOKEN_RATIO = "clipped token ratio"  # PPO's, of each token
    CLIPPED_SEQUENCE_RATIO = "clipped sequence ratio"  # the same with one ratio for the whole response
    CLIPPED_WEIGHT = "clipped weight"  # the likelihood, weighted by a clipped ratio that has no gradient


@dataclasses.dataclass(frozen=True)
class Estimator:
    """One row. `divides_by_std`: by the standard deviation of the group, unless --disable-grpo-std-normalization.

    `whitens`: advantages are whitened over the trained tokens of the rollout, whether or not --normalize-advantages
    is given.
    """

    name: str
    source: str
    baseline: Baseline = Baseline.GROUP_MEAN
    divides_by_std: bool = True
    returns: Returns = Returns.SAME_FOR_ALL
    objective: Objective = Objective.CLIPPED_TOKEN_RATIO
    whitens: bool = False

    @property
    def compares_a_group(self) -> bool:
        """Whether a sample's advantage depends on the other samples of its prompt."""
        return self.baseline is not Baseline.NONE


DEFAULT = "grpo"
_ROWS = (
    Estimator(DEFAULT, "Shao et al. 2024 (DeepSeekMath), section 4.1"),
    Estimator(
        "gspo", "Zheng et al. 2025 (Group Sequence Policy Optimization)", objective=Objective.CLIPPED_SEQUENCE_RATIO
    ),
    Estimator("cispo", "MiniMax 2025 (MiniMax-M1), section 3.1", objective=Objective.CLIPPED_WEIGHT),
    Estimator(
        "reinforce_plus_plus",
        "Hu 2025 (REINFORCE++), equations 3 and 4",
        baseline=Baseline.NONE,
        divides_by_std=False,
        returns=Returns.DISCOUNTED,
        whitens=True,
    ),
    Estimator("reinforce_plus_plus_baseline", "Hu 2025 (REINFORCE++), section 3.2", divides_by_std=False, whitens=True),
    Estimator(
        "rloo",
        "Ahmadian et al. 2024 (Back to Basics), equation 8; Kool et al. 2019",
        baseline=Baseline.LEAVE_ONE_OUT,
        divides_by_std=False,
    ),
)
ESTIMATORS: dict[str, Estimator] = {row.name: row for row in _ROWS}
