"""Losses of a reward model: a number for a prompt with a response, learned from preferences or from scores.

With r(y) for the model's number of response y, c for the preferred and j = 1 .. k for the rejected responses to one
prompt. The table is read by the flags, their rules and the trainer; torch is imported only where a loss is computed.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


@dataclasses.dataclass(frozen=True)
class RewardModelLoss:
    """One row of the table. `compares`: a group is a preferred and the rejected responses, else it is one response.

    `formula` gets the rewards and the targets, float64 [groups, responses] each, the preferred response first, and
    returns the loss and the other `metrics` by name, float64 [groups] each; only the loss carries a gradient. The
    target of a preferred response is the margin of its pairs; of a scored response it is the score.
    """

    name: str
    source: str
    compares: bool
    metrics: tuple[str, ...]
    formula: Callable[[Tensor, Tensor], dict[str, Tensor]]


def bradley_terry(rewards: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """-mean over j of log sigmoid(r(c) - r(j) - m), m the margin.

    Bradley and Terry 1952 as in Ouyang et al. 2022 (InstructGPT), equation 1, where all comparisons of a prompt are one
    element of the batch; with a margin Touvron et al. 2023 (Llama 2), equation 2.
    """
    from torch.nn.functional import logsigmoid

    gaps = rewards[:, :1] - rewards[:, 1:]
    with_gradient = -logsigmoid(gaps - targets[:, :1]).mean(dim=1)
    gaps = gaps.detach()
    return {
        "loss": with_gradient,
        "pair_accuracy": (gaps > 0).double().mean(dim=1),
        "reward_margin": gaps.mean(dim=1),
        "chosen_reward": rewards[:, 0].detach(),
        "rejected_reward": rewards[:, 1:].detach().mean(dim=1),
    }


def squared_error(rewards: Tensor, targets: Tensor) -> dict[str, Tensor]:
    """(r(y) - s)^2, s the score of the row: least squares."""
    errors = rewards[:, 0] - targets[:, 0]
    return {
        "loss": errors.square(),
        "absolute_error": errors.detach().abs(),
        "predicted_reward": rewards[:, 0].detach(),
        "target_reward": targets[:, 0],
    }


DEFAULT = "bradley_terry"
_PAIR_METRICS = ("pair_accuracy", "reward_margin", "chosen_reward", "rejected_reward")
_ROWS = (
    RewardModelLoss(
        DEFAULT,
        "Ouyang et al. 2022 (InstructGPT), equation 1; with a margin Touvron et al. 2023 (Llama 2), equation 2",
        compares=True,
        metrics=_PAIR_METRICS,
        formula=bradley_terry,
    ),
    RewardModelLoss(
        "mse",
        "least squares",
        compares=False,
        metrics=("absolute_error", "predicted_reward", "target_reward"),
        formula=squared_error,
    ),
)
REWARD_MODEL_LOSSES: dict[str, RewardModelLoss] = {row.name: row for row in _ROWS}
