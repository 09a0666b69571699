"""Losses on preferences: of a policy (DPO and its relatives, KTO) and of a reward model, one table each.

The flags, their rules and the trainer read the tables. torch is imported only where a loss is computed, so that the
command line can list the names.

Of a policy, with c for the chosen and r for the rejected response, pi(y) for the log-probability of y under the trained
policy (the sum over its trained tokens, or their mean where the table says so), ref(y) under the reference model, and

    reward(y) = beta (pi(y) - ref(y)),  margin = reward(c) - reward(r)

(without ref where a loss has none). Of a reward model, with r(y) for its number of response y, c for the preferred and
j = 1 .. k for the rejected responses to one prompt.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor

# ORPO's odds of a response whose probability rounds to 1 are infinite; the mean log-probability is at most minus this.
_LEAST_SURPRISE = 1e-9


@dataclasses.dataclass(frozen=True)
class PreferenceLoss:
    """One row of the table of a policy's losses.

    `averages`: the log-probability of a response is the mean over its trained tokens instead of their sum.
    `has_reference`: it is compared with that of the reference model.
    `smooths`: --preference-label-smoothing is the assumed probability of a wrong label.
    `compares`: it is a loss of a preferred and rejected responses, else of single responses that are desirable or not.
    `has_kl`: the reference point of a single response is the estimated KL to the reference model, else 0.
    """

    name: str
    source: str
    beta: float  # default of --preference-beta
    averages: bool = False
    has_reference: bool = True
    smooths: bool = False
    has_margin: bool = False  # whether --simpo-gamma is subtracted from the margin
    compares: bool = True
    has_kl: bool = False

    @property
    def metrics(self) -> tuple[str, ...]:
        """The metrics besides the loss itself, under train/."""
        return PAIR_METRICS if self.compares else (*LABEL_METRICS, *(("kto_kl",) if self.has_kl else ()))


DEFAULT_PREFERENCE_LOSS = "sigmoid"
_PREFERENCE_ROWS = (
    PreferenceLoss(
        DEFAULT_PREFERENCE_LOSS,
        "Rafailov et al. 2023 (DPO), equation 7; smoothed: Mitchell 2023 (cDPO)",
        beta=0.1,
        smooths=True,
    ),
    PreferenceLoss(
        "sigmoid_norm",
        "Lambert et al. 2024 (Tulu 3), length-normalized DPO",
        beta=5.0,
        averages=True,
        smooths=True,
    ),
    PreferenceLoss("robust", "Chowdhury et al. 2024 (Provably Robust DPO)", beta=0.1, smooths=True),
    PreferenceLoss("hinge", "Zhao et al. 2023 (SLiC-HF) in the form of Liu et al. 2024 (RSO)", beta=0.1),
    PreferenceLoss("ipo", "Azar et al. 2024 (IPO), equation 17, of mean log-probabilities", beta=0.1, averages=True),
    PreferenceLoss(
        "simpo",
        "Meng et al. 2024 (SimPO), equation 6",
        beta=2.0,
        averages=True,
        has_reference=False,
        has_margin=True,
    ),
    PreferenceLoss("orpo", "Hong et al. 2024 (ORPO), equations 6 and 7", beta=0.1, averages=True, has_reference=False),
    PreferenceLoss("kto", "Ethayarajh et al. 2024 (KTO), section 4.2", beta=0.1, compares=False, has_kl=True),
    PreferenceLoss(
        "apo_zero_unpaired",
        "D'Oosterlinck et al. 2024 (APO-zero), its two terms on single responses",
        beta=0.1,
        compares=False,
    ),
)
PREFERENCE_LOSSES: dict[str, PreferenceLoss] = {row.name: row for row in _PREFERENCE_ROWS}

# The least samples of a comparison, in this order: the preferred response, then the other one or ones.
PAIR = 2
_REWARD_METRICS = ("pair_accuracy", "reward_margin", "chosen_reward", "rejected_reward")
PAIR_METRICS = (*_REWARD_METRICS, "chosen_log_probs", "rejected_log_probs")
# Of single responses: those of the desirable ones are chosen_*, those of the undesirable ones rejected_*.
LABEL_METRICS = (
    "label_accuracy",
    "desirable_share",
    "chosen_reward",
    "rejected_reward",
    "chosen_log_probs",
    "rejected_log_probs",
)


def means_by_label(metrics: dict[str, float]) -> dict[str, float]:
    """Means over the responses of each kind, from the `LABEL_METRICS` divided by all responses.

    A kind without a response has none of its metrics. With both there is the margin of their rewards.
    """
    shares = {"chosen": metrics["desirable_share"], "rejected": 1 - metrics["desirable_share"]}
    found = {}
    for name, value in metrics.items():
        share = shares.get(name.partition("_")[0])
        if share is None:
            found[name] = value
        elif share > 0:
            found[name] = value / share
    if {"chosen_reward", "rejected_reward"} <= set(found):
        found["reward_margin"] = found["chosen_reward"] - found["rejected_reward"]
    return found


@dataclasses.dataclass(frozen=True)
class PreferenceConfig:
    """The settings of a preference loss; `name` is that of its row."""

    name: str
    beta: float
    label_smoothing: float = 0.0  # assumed probability that a pair's label is wrong, below 0.5
    gamma: float = 0.0  # target margin of SimPO
    nll_coef: float = 0.0  # weight of the chosen response's mean negative log-likelihood
    reference_free: bool = False  # the reference's log-probabilities count as equal
    desirable_weight: float = 1.0  # of the loss of a desirable response, where a loss is that of single ones
    undesirable_weight: float = 1.0


@dataclasses.dataclass(frozen=True)
class ResponseScores:
    """One response per pair, float64 [pairs] each."""

    log_probs: Tensor  # sum over the trained tokens; may carry a gradient
    tokens: Tensor  # number of trained tokens, at least 1
    ref_log_probs: Tensor | None = None  # as `log_probs`, of the reference model


@dataclasses.dataclass(frozen=True)
class PairLosses:
    """Results per pair, [pairs] each; only `loss` carries a gradient."""

    loss: Tensor
    chosen_reward: Tensor
    rejected_reward: Tensor

    @property
    def margin(self) -> Tensor:
        """Reward of the chosen response - reward of the rejected one."""
        return self.chosen_reward - self.rejected_reward


def pair_losses(chosen: ResponseScores, rejected: ResponseScores, settings: PreferenceConfig) -> PairLosses:
    """The loss and the implicit rewards of each pair.

    The loss is that of the row `settings.name`, plus
    `nll_coef` times the chosen response's mean negative log-likelihood over its tokens (Pang et al. 2024, "Iterative
    Reasoning Preference Optimization").

    Raises ValueError if the loss compares with a reference and there are no log-probabilities of one.
    """
    row = PREFERENCE_LOSSES[settings.name]
    compares = row.has_reference and not settings.reference_free
    rewards = [_reward(response, settings.beta, row.averages, compares) for response in (chosen, rejected)]
    loss = _LOSSES[settings.name](rewards[0] - rewards[1], chosen, rejected, settings)
    if settings.nll_coef != 0.0:
        loss = loss - settings.nll_coef * _mean(chosen)
    return PairLosses(loss, rewards[0].detach(), rewards[1].detach())


def _reward(response: ResponseScores, beta: float, averages: bool, compares: bool) -> Tensor:
    value = response.log_probs
    if compares:
        if response.ref_log_probs is None:
            raise ValueError("the loss compares with a reference model, whose log-probabilities are missing")
        value = value - response.ref_log_probs
    return beta * (value / response.tokens if averages else value)


def _mean(response: ResponseScores) -> Tensor:
    return response.log_probs / response.tokens


def _log_sigmoid(values: Tensor) -> Tensor:
    from torch.nn.functional import logsigmoid

    return logsigmoid(values)


def _sigmoid(margin: Tensor, chosen: ResponseScores, rejected: ResponseScores, settings: PreferenceConfig) -> Tensor:
    """-(1 - e) log sigmoid(margin) - e log sigmoid(-margin), e the label smoothing.

    Rafailov et al. 2023, equation 7; with e above 0 Mitchell 2023, "A note on DPO with noisy preferences" (cDPO).
    """
    wrong = settings.label_smoothing
    return -(1 - wrong) * _log_sigmoid(margin) - wrong * _log_sigmoid(-margin)


def _robust(margin: Tensor, chosen: ResponseScores, rejected: ResponseScores, settings: PreferenceConfig) -> Tensor:
    """(-(1 - e) log sigmoid(margin) + e log sigmoid(-margin)) / (1 - 2 e): unbiased if a part e of labels is flipped.

    Chowdhury et al. 2024, "Provably Robust DPO: Aligning Language Models with Noisy Feedback", section 3.
    """
    wrong = settings.label_smoothing
    return (-(1 - wrong) * _log_sigmoid(margin) + wrong * _log_sigmoid(-margin)) / (1 - 2 * wrong)


def _hinge(margin: Tensor, chosen: ResponseScores, rejected: ResponseScores, settings: PreferenceConfig) -> Tensor:
    """max(0, 1 - margin): Liu et al. 2024 (RSO), hinge-norm, after the calibration loss of SLiC."""
    return (1 - margin).relu()


def _ipo(margin: Tensor, chosen: ResponseScores, rejected: ResponseScores, settings: PreferenceConfig) -> Tensor:
    """(margin / beta - 1 / (2 beta))^2: Azar et al. 2024, equation 17, with beta for their tau.

    The log-probabilities are means, as in the published code of the authors' experiments; the equation has sums.
    """
    return (margin / settings.beta - 1 / (2 * settings.beta)).square()


def _simpo(margin: Tensor, chosen: ResponseScores, rejected: ResponseScores, settings: PreferenceConfig) -> Tensor:
    """-log sigmoid(margin - gamma): Meng et al. 2024, equation 6."""
    return -_log_sigmoid(margin - settings.gamma)


def _orpo(margin: Tensor, chosen: ResponseScores, rejected: ResponseScores, settings: PreferenceConfig) -> Tensor:
    """-mean pi(c) - beta log sigmoid(log odds(c) - log odds(r)), odds(y) = P / (1 - P) with P = exp(mean pi(y)).

    Hong et al. 2024, equations 3, 4, 6 and 7; beta is their lambda.
    """
    log_odds_ratio = _log_odds(_mean(chosen)) - _log_odds(_mean(rejected))
    return -_mean(chosen) - settings.beta * _log_sigmoid(log_odds_ratio)


def _log_odds(log_probs: Tensor) -> Tensor:
    bounded = log_probs.clamp(max=-_LEAST_SURPRISE)
    return bounded - (-bounded.expm1()).log()


def label_losses(
    responses: ResponseScores, desirable: Tensor, kl: Tensor, settings: PreferenceConfig
) -> tuple[Tensor, Tensor]:
    """Loss and implicit reward of single responses, [responses] each; only the loss carries a gradient.

    With z = beta * `kl` it is desirable_weight * (1 - sigmoid(reward - z)) where `desirable` (bool), else
    undesirable_weight * (1 - sigmoid(z - reward)): Ethayarajh et al. 2024, "KTO: Model Alignment as Prospect Theoretic
    Optimization", section 4.2: lambda_y - v(x, y). `kl` is that of `mismatched_kl`, or 0:
    D'Oosterlinck et al. 2024, "Anchored Preference Optimization", whose APO-zero has these two terms.

    Raises ValueError without log-probabilities of a reference.
    """
    import torch

    reward = _reward(responses, settings.beta, averages=False, compares=True)
    distance = reward - settings.beta * kl
    weight = torch.where(desirable, settings.desirable_weight, settings.undesirable_weight)
    return weight * torch.sigmoid(torch.where(desirable, -distance, distance)), reward.detach()


def mismatched_kl(total: Tensor, responses: Tensor) -> Tensor:
    """The reference point of KTO, without beta: max(0, `total` / `responses`), without gradient.

    `total` is the sum of pi(y) - ref(y) over `responses` responses y to other prompts than their own (section 4.2).
    """
    return (total / responses.clamp(min=1)).clamp(min=0).detach()


_LOSSES: dict[str, Callable[[Tensor, ResponseScores, ResponseScores, PreferenceConfig], Tensor]] = {
    "sigmoid": _sigmoid,
    "sigmoid_norm": _sigmoid,
    "robust": _robust,
    "hinge": _hinge,
    "ipo": _ipo,
    "simpo": _simpo,
    "orpo": _orpo,
}


@dataclasses.dataclass(frozen=True)
class RewardModelLoss:
    """One row of the table of a reward model's losses.

    `compares`: a group is a preferred and the rejected responses, else it is one response.

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
    gaps = rewards[:, :1] - rewards[:, 1:]
    with_gradient = -_log_sigmoid(gaps - targets[:, :1]).mean(dim=1)
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


DEFAULT_REWARD_MODEL_LOSS = "bradley_terry"
_REWARD_MODEL_ROWS = (
    RewardModelLoss(
        DEFAULT_REWARD_MODEL_LOSS,
        "Ouyang et al. 2022 (InstructGPT), equation 1; with a margin Touvron et al. 2023 (Llama 2), equation 2",
        compares=True,
        metrics=_REWARD_METRICS,
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
REWARD_MODEL_LOSSES: dict[str, RewardModelLoss] = {row.name: row for row in _REWARD_MODEL_ROWS}
