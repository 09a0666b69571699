"""Preference losses: from the log-probabilities of responses to the loss of their pair, or of each one by its label.

Written with c for the chosen and r for the rejected response, pi(y) for the log-probability of y under the trained
policy (the sum over its trained tokens, or their mean where the table says so), ref(y) under the reference model, and

    reward(y) = beta (pi(y) - ref(y)),  margin = reward(c) - reward(r)

(without ref where a loss has none). `preference_losses` has the table of the losses.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from slimrl.algorithms.preference_losses import PREFERENCE_LOSSES

# ORPO's odds of a response whose probability rounds to 1 are infinite; the mean log-probability is at most minus this.
_LEAST_SURPRISE = 1e-9


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

    The reward of a response is that of the module's docstring. The loss is that of the row `settings.name`, plus
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


def _sigmoid(margin: Tensor, chosen: ResponseScores, rejected: ResponseScores, settings: PreferenceConfig) -> Tensor:
    """-(1 - e) log sigmoid(margin) - e log sigmoid(-margin), e the label smoothing.

    Rafailov et al. 2023, equation 7; with e above 0 Mitchell 2023, "A note on DPO with noisy preferences" (cDPO).
    """
    wrong = settings.label_smoothing
    return -(1 - wrong) * logsigmoid(margin) - wrong * logsigmoid(-margin)


def _robust(margin: Tensor, chosen: ResponseScores, rejected: ResponseScores, settings: PreferenceConfig) -> Tensor:
    """(-(1 - e) log sigmoid(margin) + e log sigmoid(-margin)) / (1 - 2 e): unbiased if a part e of labels is flipped.

    Chowdhury et al. 2024, "Provably Robust DPO: Aligning Language Models with Noisy Feedback", section 3.
    """
    wrong = settings.label_smoothing
    return (-(1 - wrong) * logsigmoid(margin) + wrong * logsigmoid(-margin)) / (1 - 2 * wrong)


def _hinge(margin: Tensor, chosen: ResponseScores, rejected: ResponseScores, settings: PreferenceConfig) -> Tensor:
    """max(0, 1 - margin): Liu et al. 2024 (RSO), hinge-norm, after the calibration loss of SLiC."""
    return torch.relu(1 - margin)


def _ipo(margin: Tensor, chosen: ResponseScores, rejected: ResponseScores, settings: PreferenceConfig) -> Tensor:
    """(margin / beta - 1 / (2 beta))^2: Azar et al. 2024, equation 17, with beta for their tau.

    The log-probabilities are means, as in the published code of the authors' experiments; the equation has sums.
    """
    return (margin / settings.beta - 1 / (2 * settings.beta)).square()


def _simpo(margin: Tensor, chosen: ResponseScores, rejected: ResponseScores, settings: PreferenceConfig) -> Tensor:
    """-log sigmoid(margin - gamma): Meng et al. 2024, equation 6."""
    return -logsigmoid(margin - settings.gamma)


def _orpo(margin: Tensor, chosen: ResponseScores, rejected: ResponseScores, settings: PreferenceConfig) -> Tensor:
    """-mean pi(c) - beta log sigmoid(log odds(c) - log odds(r)), odds(y) = P / (1 - P) with P = exp(mean pi(y)).

    Hong et al. 2024, equations 3, 4, 6 and 7; beta is their lambda.
    """
    log_odds_ratio = _log_odds(_mean(chosen)) - _log_odds(_mean(rejected))
    return -_mean(chosen) - settings.beta * logsigmoid(log_odds_ratio)


def _log_odds(log_probs: Tensor) -> Tensor:
    bounded = log_probs.clamp(max=-_LEAST_SURPRISE)
    return bounded - torch.log(-torch.expm1(bounded))


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
    reward = _reward(responses, settings.beta, averages=False, compares=True)
    distance = reward - settings.beta * kl
    weight = torch.where(desirable, settings.desirable_weight, settings.undesirable_weight)
    return weight * torch.sigmoid(torch.where(desirable, -distance, distance)), reward.detach()


def mismatched_kl(total: Tensor, responses: Tensor) -> Tensor:
    """The reference point of KTO, without beta: max(0, `total` / `responses`), without gradient.

    `total` is the sum of pi(y) - ref(y) over `responses` responses y to other prompts than their own (section 4.2).
    """
    return (total / responses.clamp(min=1)).clamp(min=0).detach()


_Formula = Callable[[Tensor, ResponseScores, ResponseScores, PreferenceConfig], Tensor]
_LOSSES: dict[str, _Formula] = {
    "sigmoid": _sigmoid,
    "sigmoid_norm": _sigmoid,
    "robust": _robust,
    "hinge": _hinge,
    "ipo": _ipo,
    "simpo": _simpo,
    "orpo": _orpo,
}
