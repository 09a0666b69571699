"""Table of the advantage estimators, read by the flags, their validation, the rewards, the advantages and the loss.

A row lists the parts of one estimator. To add an estimator made of these parts, add a row and its test. The arithmetic
of the parts is in `returns` and `policy_loss`; `rollout.convert_samples` applies the baseline to rewards,
`megatron.training.advantages` computes values per token, `megatron.training.loss` the loss. This module does not import
torch, so that the command line can list the names.
"""

from __future__ import annotations

import dataclasses
from enum import Enum


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
