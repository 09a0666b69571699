"""Every estimator, trained in layouts against plain float64: baselines, returns and whitening by hand."""

from __future__ import annotations

import dataclasses
import itertools
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slimrl.algorithms.estimators import ESTIMATORS
from slimrl.algorithms.returns import group_normalized_rewards
from slimrl.data.train_batch import RolloutBatch
from tests.megatron import layouts, ranks, reference, test_corrected_loss
from tests.megatron.layouts import DYNAMIC, EP2, SETTINGS, SPREAD, Layout, fsdp

LAYOUTS: dict[str, tuple[Layout, str]] = {
    **{name: (layout, "dense") for name, layout in test_corrected_loss.WITH_WEIGHTS.items()},
    "EP2, packed": (Layout(2, EP2 | SPREAD | DYNAMIC), "MoE"),
    "DP2, Megatron-FSDP, packed": (Layout(2, fsdp("optim_grads_params") | DYNAMIC), "dense"),
}
OF_BASELINES = ("grpo", "rloo", "opo", "reinforce_plus_plus_baseline")
ALL = (*OF_BASELINES, "reinforce_plus_plus", "dr_grpo", "gspo", "cispo")
GAMMA, KL_COEF = 0.9, 0.1
LONGEST = 24  # tokens of --rollout-max-response-len


@dataclasses.dataclass
class Case:
    """An estimator: its flags, the rollout with its training rewards, and what float64 makes of them."""

    flags: dict[str, Any]
    rollout: RolloutBatch
    truth: reference.ReferenceResult


def baselined(estimator: str, rollout: RolloutBatch) -> list[float]:
    """The rewards less their baselines, in plain Python."""
    rewards, lengths = rollout.raw_rewards.double().tolist(), rollout.response_lengths.tolist()
    masks = [mask.tolist() for mask in rollout.loss_mask.split(lengths)]
    found = []
    for row, group in enumerate(rollout.group_ids.tolist()):
        others = [other for other, own in enumerate(rollout.group_ids.tolist()) if own == group]
        mean = math.fsum(rewards[other] for other in others) / len(others)
        if estimator == "rloo":
            mean = math.fsum(rewards[other] for other in others if other != row) / (len(others) - 1)
        if estimator == "opo":
            weights = {other: sum(masks[other]) for other in others}
            mean = math.fsum(weights[other] * rewards[other] for other in others) / sum(weights.values())
        scale = 1.0
        if estimator == "grpo":
            scale = math.sqrt(math.fsum((rewards[other] - mean) ** 2 for other in others) / (len(others) - 1)) + 1e-6
        found.append((rewards[row] - mean) / scale)
    return found


def whitened(advantages: list[Tensor], masks: list[Tensor]) -> list[Tensor]:
    every = torch.cat(advantages)[torch.cat(masks) != 0]
    return [(values - every.mean()) / (every.std() + 1e-8) for values in advantages]


class Estimators(layouts.Models):
    """The models of the layouts, the cases of all estimators, and their training in each layout; each made once."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        self._cases: dict[tuple[str, str], Case] = {}
        self._trained: dict[str, dict[str, ranks.StepResult]] = {}

    def plain(self, kind: str, settings: reference.ReferenceSettings = SETTINGS, **more: Any) -> Any:
        """What float64 makes of the rollout."""
        folders = [self.folder(kind, 2, role) for role in ("policy", "reference")]
        return reference.train(*folders, self.rollout, settings, **more)

    def case(self, estimator: str, kind: str) -> Case:
        """Of an estimator and a model type."""
        if (estimator, kind) not in self._cases:
            if estimator in OF_BASELINES:
                case = self._of_baseline(estimator, kind)
            elif estimator == "reinforce_plus_plus":
                case = self._of_returns(kind)
            elif estimator == "dr_grpo":
                case = self._of_constant(kind)
            else:
                case = self._of_objective(estimator, kind)
            case.flags |= {"advantage_estimator": estimator, "normalize_advantages": ESTIMATORS[estimator].whitens}
            self._cases[estimator, kind] = case
        return self._cases[estimator, kind]

    def _of_baseline(self, estimator: str, kind: str) -> Case:
        row, masks = ESTIMATORS[estimator], [sample["mask"] for sample in reference._split(self.rollout)]
        rewards = baselined(estimator, self.rollout)
        advantages = [torch.full_like(mask, reward) for mask, reward in zip(masks, rewards, strict=True)]
        if row.whitens:
            advantages = whitened(advantages, masks)
        trained = torch.stack([mask.sum() for mask in masks])
        own = group_normalized_rewards(
            self.rollout.raw_rewards,
            self.rollout.group_ids,
            scale_by_std=row.normalizes_by_std,
            leave_one_out=estimator == "rloo",
            weights=trained if estimator == "opo" else None,
        )
        rollout = dataclasses.replace(self.rollout, rewards=own)
        return Case({}, rollout, self.plain(kind, advantages=advantages))

    def _of_returns(self, kind: str) -> Case:
        """The KL penalty is a reward of its token; discounted returns over the tokens of a response, then whitened."""
        policy, anchor = (reference.load_model(self.folder(kind, 2, role)) for role in ("policy", "reference"))
        returns, masks = [], []
        for sample in reference._split(self.rollout):
            with torch.no_grad():
                old, ref = (reference._log_probs(model, sample, 0.8)[0] for model in (policy, anchor))
            mask = sample["mask"]
            rewards = -KL_COEF * (old - ref) * mask
            if mask.any():
                rewards[int(mask.nonzero().max())] += float(sample["reward"])
            tokens = range(len(rewards))
            sums = [sum(GAMMA ** (s - t) * float(rewards[s]) for s in tokens if s >= t) for t in tokens]
            returns.append(torch.tensor(sums, dtype=torch.float64))
            masks.append(mask)
        settings = dataclasses.replace(SETTINGS, kl_coef=0.0)
        flags = {"gamma": GAMMA, "kl_coef": KL_COEF, "kl_loss_type": "k1", "use_kl_loss": False, "kl_loss_coef": 0.0}
        return Case(flags, self.rollout, self.plain(kind, settings, advantages=whitened(returns, masks)))

    def _of_constant(self, kind: str) -> Case:
        """Each trained token has the same weight, 1 / (samples of the step x LONGEST)."""
        settings = dataclasses.replace(SETTINGS, tokens_per_sample=LONGEST)
        return Case({"rollout_max_response_len": LONGEST}, self.rollout, self.plain(kind, settings))

    def _of_objective(self, estimator: str, kind: str) -> Case:
        """The second step is off-policy, so that ratios are clipped; those of GSPO sum over tokens of several ranks."""
        return Case({}, self.rollout, self.plain(kind, dataclasses.replace(SETTINGS, objective=estimator)))

    def trained(self, name: str, pools: dict[int, Any]) -> dict[str, ranks.StepResult]:
        """The results of all estimators in a layout, one after the other in the same ranks."""
        layout, kind = LAYOUTS[name]
        if name not in self._trained:
            cases = [self.case(estimator, kind) for estimator in ALL]
            args = self.args(layout, kind)
            runs = [(dataclasses.replace(args, **case.flags), case.rollout) for case in cases]
            self._trained[name] = dict(zip(ALL, layouts.train_each(pools[layout.ranks], runs), strict=True))
        return self._trained[name]


@pytest.fixture(scope="module")
def estimators(tmp_path_factory: pytest.TempPathFactory) -> Estimators:
    return Estimators(tmp_path_factory.mktemp("estimators"))


@pytest.fixture(scope="module")
def pools(one_rank: Any, two_ranks: Any) -> dict[int, Any]:
    return {1: one_rank, 2: two_ranks}


@pytest.mark.slow
@pytest.mark.parametrize(("name", "estimator"), list(itertools.product(LAYOUTS, ALL)))
def test_estimator_trains_like_float64_in_every_layout(name: str, estimator: str, estimators: Estimators, pools: Any):
    layout, kind = LAYOUTS[name]
    found = estimators.trained(name, pools)[estimator]
    differences = layouts.differences(estimators.args(layout, kind), found, estimators.case(estimator, kind).truth)
    assert max(differences.grad_norm, differences.weights) < 1e-5, differences
    assert differences.loss < 1e-4, differences  # a sum of terms that nearly cancel


def test_every_estimator_without_a_critic_is_trained_in_every_layout():
    assert set(ALL) == {name for name, row in ESTIMATORS.items() if not row.has_critic}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "MoE"])
def test_float64_of_every_estimator_is_another(kind: str, estimators: Estimators):
    """The divisor, the objective, and the baseline matter, and ratios are clipped."""
    truths = {estimator: estimators.case(estimator, kind).truth for estimator in ALL}
    truths["reward alone"] = estimators.plain(kind)
    for one, other in itertools.combinations(truths, 2):
        apart = layouts.furthest(truths[one].gradient_norms, truths[other].gradient_norms)
        assert apart > 1e-3, (one, other, apart)
    clipped = ("gspo", "cispo") if kind == "dense" else ("cispo",)  # the responses of MoE move to the other side
    assert min(truths[objective].clip_fractions[1] for objective in clipped) > 0.05
