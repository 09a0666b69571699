"""Off-policy corrections in the policy loss: weights in the policy term, rejection in all, sums over any split."""

from __future__ import annotations

import dataclasses
import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from slimrl.algorithms.off_policy import ImportanceWeighting, Rejection
from slimrl.data.train_batch import RolloutBatch
from slimrl.megatron.training.loss.loss_sums import reduce_step
from slimrl.megatron.training.loss.policy_loss import PolicyLossConfig, PolicyLossInputs, policy_loss_sums
from tests import accuracy
from tests.megatron import layouts, ranks, reference
from tests.megatron.layouts import CP2, DYNAMIC, PP2, SPREAD, TP2_SP, Layout

SETTINGS = PolicyLossConfig(
    eps_clip=0.2,
    eps_clip_high=0.3,
    eps_clip_c=None,
    entropy_coef=0.1,
    kl_loss_coef=0.2,
    kl_loss_type="k3",
    per_token=False,
)
CORRECTIONS = {
    "truncated tokens": {"weighting": ImportanceWeighting(0.0, 1.1)},
    "IcePop": {"weighting": ImportanceWeighting(0.7, 1.2, "token", masks=True)},
    "truncated samples": {"weighting": ImportanceWeighting(0.5, 1.2, "sequence")},
    "MIS": {"weighting": ImportanceWeighting(0.0, 1.2, "sequence", masks=True)},
    "geometric": {"weighting": ImportanceWeighting(0.9, 1.05, "geometric")},
    "rejected tokens": {"rejection": Rejection("token", 0.7, 1.3)},
    "rejected samples": {"rejection": Rejection("sequence", 0.5, 2.0)},
    "vetoed": {"rejection": Rejection(veto=0.6)},
    "all": {
        "weighting": ImportanceWeighting(0.5, 1.2, "token"),
        "rejection": Rejection("geometric", 0.9, 1.2, veto=0.6),
    },
}
LENGTHS = (3, 7, 1, 5, 4, 6)


def rollout() -> dict[str, torch.Tensor]:
    """Six samples in float64: the columns of the loss; one token of the second and all of the fifth are masked."""
    draw = torch.Generator().manual_seed(3)

    def normal(scale: float) -> torch.Tensor:
        return scale * torch.randn(sum(LENGTHS), generator=draw, dtype=torch.float64)

    train = -normal(1.0).abs()
    mask = torch.ones(sum(LENGTHS), dtype=torch.float64)
    mask[4] = 0
    mask[16:20] = 0
    return {
        "log_probs": train + normal(0.2),
        "entropy": normal(1.0).abs(),
        "old_log_probs": train,
        "train_log_probs": train,
        "rollout_log_probs": train + normal(0.3),
        "ref_log_probs": train + normal(0.1),
        "advantages": normal(1.0),
        "loss_mask": mask,
    }


def parts(groups: list[list[int]]) -> list[PolicyLossInputs]:
    """The micro-batches of these samples, each with log-probabilities that have a gradient of their own."""
    spans = list(itertools.pairwise([0, *itertools.accumulate(LENGTHS)]))
    found = []
    for group in groups:
        tokens = torch.cat([torch.arange(*spans[row]) for row in group])
        columns = {name: value[tokens].clone() for name, value in rollout().items()}
        columns["log_probs"].requires_grad_()
        found.append(PolicyLossInputs(**columns, response_lengths=torch.tensor([LENGTHS[row] for row in group])))
    return found


def of_one_rank() -> Any:
    return SimpleNamespace(
        is_last_stage=True, dp_size=1, device=torch.device("cpu"), from_last_stage=lambda value: value
    )


def trained(groups: list[list[int]], settings: PolicyLossConfig) -> tuple[float, torch.Tensor, dict[str, float]]:
    """Loss, gradient by token in the order of the rollout, and metrics of one optimizer step."""
    inputs = parts(groups)
    sums = [policy_loss_sums(part, settings) for part in inputs]
    sum((entry.loss for entry in sums), torch.zeros(())).backward()
    pieces = {row: piece for group, part in zip(groups, inputs, strict=True) for row, piece in pieces_of(group, part)}
    gradient = torch.cat([pieces[row] for row in range(len(LENGTHS))])
    loss = sum(float(entry.loss.detach()) for entry in sums) / sum(int(entry.count) for entry in sums)
    return loss, gradient, reduce_step(sums, settings, of_one_rank())


def pieces_of(group: list[int], part: PolicyLossInputs) -> list[tuple[int, torch.Tensor]]:
    return list(zip(group, part.log_probs.grad.split([LENGTHS[row] for row in group]), strict=True))


DIVISORS: dict[str, dict[str, Any]] = {
    "per sample": {"per_token": False},
    "per token": {"per_token": True},
    "by a constant": {"tokens_per_sample": 9},
}


@pytest.mark.parametrize("divisor", DIVISORS.values(), ids=DIVISORS)
@pytest.mark.parametrize("changes", CORRECTIONS.values(), ids=CORRECTIONS)
def test_split_into_micro_batches_changes_neither_gradient_nor_metrics(
    changes: dict[str, Any], divisor: dict[str, Any]
):
    settings = dataclasses.replace(SETTINGS, **divisor, **changes)
    whole = trained([[0, 1, 2, 3, 4, 5]], settings)
    for groups in ([[0], [1], [2], [3], [4], [5]], [[4, 2], [5, 0, 1], [3]]):
        loss, gradient, metrics = trained(groups, settings)
        assert loss == pytest.approx(whole[0], rel=1e-12)
        torch.testing.assert_close(gradient, whole[1], rtol=1e-12, atol=1e-15)
        assert metrics == pytest.approx(whole[2], rel=1e-12)
    plain = trained([[0, 1, 2, 3, 4, 5]], dataclasses.replace(SETTINGS, **divisor))
    assert not torch.allclose(plain[1], whole[1], rtol=1e-3)  # the correction does something


@pytest.mark.parametrize("divisor", DIVISORS.values(), ids=DIVISORS)
def test_loss_is_the_sum_of_the_formulas(divisor: dict[str, Any]):
    """GRPO's clipped objective with weights of samples and rejected tokens, sample by sample in Python floats."""
    per_token, constant = divisor.get("per_token", False), divisor.get("tokens_per_sample")
    changes = {"weighting": ImportanceWeighting(0.5, 1.2, "sequence"), "rejection": Rejection("token", 0.7, 1.3)}
    settings = dataclasses.replace(SETTINGS, **divisor, **changes)
    columns = {name: value.tolist() for name, value in rollout().items()}
    total, trained_tokens = 0.0, 0
    for start, end in itertools.pairwise([0, *itertools.accumulate(LENGTHS)]):
        tokens = [{name: column[token] for name, column in columns.items()} for token in range(start, end)]
        tokens = [token for token in tokens if token["loss_mask"]]
        trained_tokens += len(tokens)
        gaps = [token["train_log_probs"] - token["rollout_log_probs"] for token in tokens]
        weight = min(max(math.exp(math.fsum(gaps)), 0.5), 1.2)
        terms = [loss_of(token, weight) for token, gap in zip(tokens, gaps, strict=True) if 0.7 <= math.exp(gap) <= 1.3]
        total += math.fsum(terms) / (1 if per_token else constant or max(len(terms), 1))
    loss, _, metrics = trained([[0, 1], [2, 3, 4, 5]], settings)
    assert loss == pytest.approx(total / (trained_tokens if per_token else len(LENGTHS)), rel=1e-9)
    assert metrics["loss"] == pytest.approx(loss, rel=1e-9)


def test_constant_divisor_changes_no_other_metric_than_the_loss_and_its_policy_term():
    own = trained([[0, 1, 2], [3, 4, 5]], SETTINGS)[2]
    constant = trained([[0, 1, 2], [3, 4, 5]], dataclasses.replace(SETTINGS, tokens_per_sample=9))[2]
    differ = {name for name in own if own[name] != pytest.approx(constant[name], rel=1e-12)}
    assert differ == {"loss", "pg_loss"}


def loss_of(token: dict[str, float], weight: float) -> float:
    ratio = math.exp(token["log_probs"] - token["old_log_probs"])
    policy = max(-ratio * token["advantages"], -min(max(ratio, 0.8), 1.3) * token["advantages"])
    gap = token["log_probs"] - token["ref_log_probs"]
    return weight * policy - 0.1 * token["entropy"] + 0.2 * (math.exp(-gap) - 1 + gap)


def test_gradient_is_zero_outside_icepop_bounds_and_weighted_within():
    settings = dataclasses.replace(SETTINGS, entropy_coef=0.0, kl_loss_coef=0.0)
    masked = dataclasses.replace(settings, **CORRECTIONS["IcePop"])
    everyone = [[0, 1, 2, 3, 4, 5]]
    columns = rollout()
    ratio = (columns["train_log_probs"] - columns["rollout_log_probs"]).exp()
    factor = torch.where((ratio >= 0.7) & (ratio <= 1.2), ratio, 0.0)
    expected = trained(everyone, settings)[1] * factor
    torch.testing.assert_close(trained(everyone, masked)[1], expected, rtol=1e-12, atol=0)
    assert int((factor == 0).sum()) > 2


def test_rejected_tokens_have_no_gradient_from_any_term():
    settings = dataclasses.replace(SETTINGS, **CORRECTIONS["rejected tokens"])
    columns = rollout()
    ratio = (columns["train_log_probs"] - columns["rollout_log_probs"]).exp()
    outside = (ratio < 0.7) | (ratio > 1.3)
    gradient = trained([[0, 1, 2, 3, 4, 5]], settings)[1]
    assert torch.equal(gradient[outside], torch.zeros_like(gradient[outside])) and outside.any()
    inside = ~outside & (columns["loss_mask"] != 0) & (columns["advantages"] != 0)
    assert (gradient[inside] != 0).all()  # the KL has a gradient even where the ratio is clipped


def test_metrics_of_the_step_are_shares_of_tokens_and_samples():
    settings = dataclasses.replace(SETTINGS, **CORRECTIONS["all"])
    metrics = trained([[0, 1, 2], [3, 4, 5]], settings)[2]
    columns = rollout()
    kept, gap = columns["loss_mask"] != 0, columns["train_log_probs"] - columns["rollout_log_probs"]
    weights = gap.exp().clamp(0.5, 1.2)[kept]
    assert metrics["tis_weight"] == pytest.approx(float(weights.mean()), rel=1e-12)
    kish = float(weights.sum() ** 2 / weights.square().sum()) / len(weights)
    assert metrics["tis_ess"] == pytest.approx(kish, rel=1e-12)
    samples = [(part, trained_part) for part, trained_part in zip(gap.split(LENGTHS), kept.split(LENGTHS), strict=True)]
    samples = [part[mask] for part, mask in samples if mask.any()]
    vetoed = [bool((part.exp() < 0.6).any()) for part in samples]
    outside = [not 0.9 <= float(part.mean().exp()) <= 1.2 for part in samples]
    rejected = [one or other for one, other in zip(vetoed, outside, strict=True)]
    assert metrics["rs_vetoed_samples"] == pytest.approx(sum(vetoed) / 5) and any(vetoed)
    assert metrics["rs_masked_samples"] == pytest.approx(sum(rejected) / 5) and not all(rejected)
    tokens = sum(part.numel() for part, out in zip(samples, rejected, strict=True) if out)
    assert metrics["rs_masked_tokens"] == pytest.approx(tokens / int(kept.sum()))
    clipped = [bool(((part.exp() < 0.5) | (part.exp() > 1.2)).any()) for part in samples]
    assert metrics["tis_clipped_samples"] == pytest.approx(sum(clipped) / 5)


LAYOUTS = {
    "PP2": Layout(2, PP2),
    "CP2, packed": Layout(2, CP2 | DYNAMIC),
    "DP2, packed": Layout(2, SPREAD | DYNAMIC),
}
WITH_WEIGHTS = {"one rank": Layout(1, {}), "TP2 SP": Layout(2, TP2_SP)} | LAYOUTS
FLAGS = {
    "use_tis": True,
    "tis_level": "sequence",
    "tis_mode": "mask",
    "tis_clip": 1.5,
    "use_rs": True,
    "rs_lower_bound": 0.6,
    "rs_upper_bound": 1.8,
    "rs_veto_threshold": 0.55,
}


def log_probs_of_the_policy(models: layouts.Models) -> list[torch.Tensor]:
    """Of each sample, by transformers in float64."""
    policy = reference.load_model(models.folder("dense", Layout(1, {}).layers, "policy"))
    with torch.no_grad():
        samples = reference._split(models.rollout)
        return [reference._log_probs(policy, sample, layouts.SETTINGS.temperature)[0] for sample in samples]


def near_the_policy(models: layouts.Models) -> RolloutBatch:
    """The rollout with log-probabilities that engines near the policy would report: transformers', and noise."""
    draw = torch.Generator().manual_seed(11)
    columns = [values + 0.25 * torch.randn(values.shape, generator=draw) for values in log_probs_of_the_policy(models)]
    return dataclasses.replace(models.rollout, rollout_log_probs=torch.cat(columns).float())


@pytest.mark.slow
def test_every_layout_corrects_alike(one_rank: Any, two_ranks: Any, tmp_path: Any):
    models = layouts.Models(tmp_path)
    rollout = near_the_policy(models)

    def result(pool: Any, layout: Layout) -> ranks.StepResult:
        return layouts.train(pool, dataclasses.replace(models.args(layout, "dense"), **FLAGS), rollout)

    single = result(one_rank, Layout(1, {}))
    shares = ("tis_ess", "rs_masked_tokens", "tis_clipped_samples", "rs_masked_samples")
    assert all(0 < sum(step[name] for step in single.metrics) < 2 for name in shares), [
        {n: s[n] for n in shares} for s in single.metrics
    ]
    for layout in LAYOUTS.values():
        found = result(two_ranks, layout)
        for step, expected in zip(found.metrics, single.metrics, strict=True):
            step = {key: value for key, value in step.items() if "memory_" not in key}
            accuracy.near("loss", step, {key: expected[key] for key in step}, rel=1e-4, abs=1e-6)
        accuracy.below("weights", layouts.relative_error(found.weights, single.weights), 1e-5)


LEVELS = {
    "token": {"tis_clip": 1.2, "tis_clip_low": 0.7},
    "sequence": {"tis_level": "sequence", "tis_clip": 1.5},
    "geometric": {"tis_level": "geometric", "tis_mode": "mask", "tis_clip": 1.05, "tis_clip_low": 0.9},
}


def normalized_weights(gaps: list[torch.Tensor], masks: list[torch.Tensor], flags: dict[str, Any]) -> list[list[float]]:
    """The weight of each trained token of a step, divided by the mean of the weights of its level."""
    low, high, level = flags.get("tis_clip_low", 0.0), flags["tis_clip"], flags.get("tis_level", "token")
    of_samples = []
    for gap, mask in zip(gaps, masks, strict=True):
        values = gap[mask != 0].tolist()
        if level != "token" and values:
            total = math.fsum(values) / (len(values) if level == "geometric" else 1)
            values = [total]
        ratios = [math.exp(value) for value in values]
        if flags.get("tis_mode") == "mask":
            of_samples.append([ratio if low <= ratio <= high else 0.0 for ratio in ratios])
        else:
            of_samples.append([min(max(ratio, low), high) for ratio in ratios])
    every = [weight for weights in of_samples for weight in weights]
    mean = math.fsum(every) / len(every)
    return [[weight / mean for weight in weights] for weights in of_samples]


def factors_of(gaps: list[torch.Tensor], masks: list[torch.Tensor], flags: dict[str, Any]) -> list[torch.Tensor]:
    """The factors of all tokens of a step, 1 where masked."""
    factors = []
    for weights, mask in zip(normalized_weights(gaps, masks, flags), masks, strict=True):
        factor = torch.ones_like(mask)
        if weights:
            factor[mask != 0] = torch.tensor(weights, dtype=mask.dtype)
        factors.append(factor)
    return factors


def of_steps(models: layouts.Models, rollout: RolloutBatch, flags: dict[str, Any]) -> list[torch.Tensor]:
    samples, train = reference._split(rollout), log_probs_of_the_policy(models)
    engine = rollout.rollout_log_probs.double().split(rollout.response_lengths.tolist())
    gaps = [own - other for own, other in zip(train, engine, strict=True)]
    masks = [sample["mask"] for sample in samples]
    half = len(samples) // layouts.SETTINGS.steps
    return [
        factor
        for first in range(0, len(samples), half)
        for factor in factors_of(gaps[first : first + half], masks[first : first + half], flags)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("level", LEVELS)
def test_weights_divided_by_their_mean_train_like_float64_in_every_layout(
    level: str, one_rank: Any, two_ranks: Any, tmp_path: Any
):
    """Each of the two steps has a mean of its own, over micro-batches that the layouts cut differently."""
    models, flags = layouts.Models(tmp_path), LEVELS[level]
    rollout = near_the_policy(models)
    folders = [models.folder("dense", Layout(1, {}).layers, role) for role in ("policy", "reference")]
    factors = of_steps(models, rollout, flags)
    truth = reference.train(*folders, rollout, layouts.SETTINGS, factors=factors)
    plain = reference.train(*folders, rollout, layouts.SETTINGS)
    assert layouts.furthest(plain.gradient_norms, truth.gradient_norms) > 1e-3  # the weights matter
    for name, layout in WITH_WEIGHTS.items():
        args = dataclasses.replace(models.args(layout, "dense"), use_tis=True, tis_batch_normalize=True, **flags)
        found = layouts.train(one_rank if layout.ranks == 1 else two_ranks, args, rollout)
        differences = layouts.differences(args, found, truth)
        assert max(differences.grad_norm, differences.weights) < 1e-5, (name, differences)
        assert differences.loss < 1e-4, (name, differences)  # a sum of terms that nearly cancel
