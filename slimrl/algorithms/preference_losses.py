"""Table of the preference losses (DPO and its relatives, KTO), read by the flags, their rules and the formulas.

A row says which log-probabilities of a response its loss compares; the formulas are in `preference`. This module does
not import torch, so that the command line can list the names.
"""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True)
class PreferenceLoss:
    """One row of the table.

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


DEFAULT = "sigmoid"
_ROWS = (
    PreferenceLoss(
        DEFAULT, "Rafailov et al. 2023 (DPO), equation 7; smoothed: Mitchell 2023 (cDPO)", beta=0.1, smooths=True
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
PREFERENCE_LOSSES: dict[str, PreferenceLoss] = {row.name: row for row in _ROWS}

# The least samples of a comparison, in this order: the preferred response, then the other one or ones.
PAIR = 2
PAIR_METRICS = (
    "pair_accuracy",
    "reward_margin",
    "chosen_reward",
    "rejected_reward",
    "chosen_log_probs",
    "rejected_log_probs",
)
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
