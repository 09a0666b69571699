"""Every estimator, trained in layouts against plain float64: baselines, returns and whitening by hand."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest
import torch
from torch import Tensor

from slimrl.algorithms.estimators import ESTIMATORS
from slimrl.algorithms.returns import group_normalized_rewards
from slimrl.data.train_batch import RolloutBatch
from tests.megatron import layouts, reference, test_corrected_loss
from tests.megatron.layouts import TP2_SP, Layout

LAYOUTS = {"one rank": Layout(1, {}), "TP2 SP": Layout(2, TP2_SP)} | test_corrected_loss.LAYOUTS
GAMMA, KL_COEF = 0.9, 0.1


def assert_trains_like(truth: reference.ReferenceResult, models: Any, rollout: Any, pools: Any, **flags: Any) -> None:
    """In every layout; the loss is a sum of terms that nearly cancel."""
    flags["normalize_advantages"] = ESTIMATORS[flags["advantage_estimator"]].whitens  # as the parser sets it
    for name, layout in LAYOUTS.items():
        args = dataclasses.replace(models.args(layout, "dense"), **flags)
        found = layouts.train(pools[layout.ranks], args, rollout)
        differences = layouts.differences(args, found, truth)
        assert max(differences.grad_norm, differences.weights) < 1e-5, (name, differences)
        assert differences.loss < 1e-4, (name, differences)


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


@pytest.mark.slow
@pytest.mark.parametrize("estimator", ["grpo", "rloo", "opo", "reinforce_plus_plus_baseline"])
def test_baselines_of_groups_train_like_float64_in_every_layout(
    estimator: str, one_rank: Any, two_ranks: Any, tmp_path: Any
):
    models, row = layouts.Models(tmp_path), ESTIMATORS[estimator]
    folders = [models.folder("dense", LAYOUTS["PP2"].layers, role) for role in ("policy", "reference")]
    masks = [sample["mask"] for sample in reference._split(models.rollout)]
    advantages = [
        torch.full_like(mask, one) for one, mask in zip(baselined(estimator, models.rollout), masks, strict=True)
    ]
    if row.whitens:
        advantages = whitened(advantages, masks)
    truth = reference.train(*folders, models.rollout, layouts.SETTINGS, advantages=advantages)
    trained = torch.stack([mask.sum() for mask in masks])
    rewards = group_normalized_rewards(
        models.rollout.raw_rewards,
        models.rollout.group_ids,
        scale_by_std=row.normalizes_by_std,
        leave_one_out=estimator == "rloo",
        weights=trained if estimator == "opo" else None,
    )
    rollout = dataclasses.replace(models.rollout, rewards=rewards)
    assert_trains_like(truth, models, rollout, {1: one_rank, 2: two_ranks}, advantage_estimator=estimator)


@pytest.mark.slow
def test_reinforce_plus_plus_trains_like_float64_in_every_layout(one_rank: Any, two_ranks: Any, tmp_path: Any):
    """The KL penalty is a reward of its token; returns are discounted over the tokens of a response, then whitened."""
    models = layouts.Models(tmp_path)
    folders = [models.folder("dense", LAYOUTS["PP2"].layers, role) for role in ("policy", "reference")]
    policy, anchor = (reference.load_model(folder) for folder in folders)
    returns, masks = [], []
    for sample in reference._split(models.rollout):
        with torch.no_grad():
            old, ref = (reference._log_probs(model, sample, 0.8)[0] for model in (policy, anchor))
        mask = sample["mask"]
        rewards = -KL_COEF * (old - ref) * mask
        if mask.any():
            rewards[int(mask.nonzero().max())] += float(sample["reward"])
        sums = [sum(GAMMA ** (s - t) * float(rewards[s]) for s in range(t, len(rewards))) for t in range(len(rewards))]
        returns.append(torch.tensor(sums, dtype=torch.float64))
        masks.append(mask)
    settings = dataclasses.replace(layouts.SETTINGS, kl_coef=0.0)
    truth = reference.train(*folders, models.rollout, settings, advantages=whitened(returns, masks))
    flags = {"advantage_estimator": "reinforce_plus_plus", "gamma": GAMMA, "kl_coef": KL_COEF, "kl_loss_type": "k1"}
    off = {"use_kl_loss": False, "kl_loss_coef": 0.0}
    assert_trains_like(truth, models, models.rollout, {1: one_rank, 2: two_ranks}, **flags, **off)


@pytest.mark.slow
def test_dr_grpo_trains_like_float64_in_every_layout(one_rank: Any, two_ranks: Any, tmp_path: Any):
    """Each trained token has the same weight, 1 / (samples of the step x 24), in every micro-batch and rank."""
    models, longest = layouts.Models(tmp_path), 24
    settings = dataclasses.replace(layouts.SETTINGS, tokens_per_sample=longest)
    folders = [models.folder("dense", Layout(1, {}).layers, role) for role in ("policy", "reference")]
    truth = reference.train(*folders, models.rollout, settings)
    of_own_length = reference.train(*folders, models.rollout, layouts.SETTINGS)
    assert layouts.furthest(of_own_length.gradient_norms, truth.gradient_norms) > 1e-2  # the divisor matters
    flags = {"advantage_estimator": "dr_grpo", "rollout_max_response_len": longest}
    assert_trains_like(truth, models, models.rollout, {1: one_rank, 2: two_ranks}, **flags)


@pytest.mark.slow
@pytest.mark.parametrize("objective", ["gspo", "cispo"])
def test_gspo_and_cispo_train_like_float64_in_every_layout(
    objective: str, one_rank: Any, two_ranks: Any, tmp_path: Any
):
    """The second step is off-policy, so that ratios are clipped; those of GSPO sum over tokens of several ranks."""
    models = layouts.Models(tmp_path)
    folders = [models.folder("dense", Layout(1, {}).layers, role) for role in ("policy", "reference")]
    truth = reference.train(*folders, models.rollout, dataclasses.replace(layouts.SETTINGS, objective=objective))
    of_ppo = reference.train(*folders, models.rollout, layouts.SETTINGS)
    assert layouts.furthest(of_ppo.gradient_norms, truth.gradient_norms) > 1e-3  # the objective matters
    assert truth.clip_fractions[1] > 0.05
    assert_trains_like(truth, models, models.rollout, {1: one_rank, 2: two_ranks}, advantage_estimator=objective)
