"""Table of the preference losses (DPO and its relatives), read by the flags, their rules and the formulas.

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
    """

    name: str
    source: str
    beta: float  # default of --preference-beta
    averages: bool = False
    has_reference: bool = True
    smooths: bool = False
    has_margin: bool = False  # whether --simpo-gamma is subtracted from the margin


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
)
PREFERENCE_LOSSES: dict[str, PreferenceLoss] = {row.name: row for row in _ROWS}

# The samples of a pair, in this order: the preferred response, then the other one.
PAIR = 2
# The metrics of a preference loss besides the loss itself, under train/.
PAIR_METRICS = (
    "pair_accuracy",
    "reward_margin",
    "chosen_reward",
    "rejected_reward",
    "chosen_log_probs",
    "rejected_log_probs",
)
