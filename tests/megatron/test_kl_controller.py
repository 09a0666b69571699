"""--kl-target and --entropy-target: the coefficient follows what is measured, in every layout and after a resume."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.megatron import layouts, ranks, reference, tiny
from tests.megatron.layouts import DYNAMIC, PP2, SPREAD, Layout

COEF, TARGET, HORIZON = 0.05, 3.0, 40.0
FLAGS = {"kl_coef": COEF, "kl_loss_coef": 0.0, "use_kl_loss": False, "kl_target": TARGET, "kl_horizon": HORIZON}
Reports = list[dict[str, float]]


def reports_of(
    rank: int, world_size: int, init_method: str, args: Any, rollout: Any, rollouts: range, save: Path | None = None
) -> tuple[Reports, dict[str, torch.Tensor]]:
    """The rollouts' reports without speeds, and the weights after them; saves after the last one."""
    trainer = ranks.start(rank, world_size, init_method, args)
    assert trainer.start_rollout_id == rollouts.start
    reports = []
    for rollout_id in rollouts:
        steps = trainer.train(rollout_id, ranks.share_of(trainer, rollout))
        report = trainer.rollout_metrics | {f"loss of step {number}": step["loss"] for number, step in enumerate(steps)}
        reports.append({name: value for name, value in report.items() if not name.startswith("perf/")})
    if save is not None:
        trainer.save(rollouts[-1], None, save)
    weights = ranks.export(trainer)
    trainer.close()
    return reports, weights


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> layouts.Models:
    return layouts.Models(tmp_path_factory.mktemp("kl"))


def arguments(models: layouts.Models, layout: Layout, **more: Any) -> Any:
    settings = dataclasses.replace(layouts.SETTINGS, steps=1)
    return dataclasses.replace(models.args(layout, "dense", settings), **(FLAGS | more))


def kl_by_hand(models: layouts.Models) -> float:
    """The mean over samples of the k3 estimates, summed over trained tokens, by transformers in float64."""
    policy, anchor = (
        reference.load_model(models.folder("dense", Layout(1, {}).layers, role)) for role in ("policy", "reference")
    )
    sums = []
    with torch.no_grad():
        for sample in reference._split(models.rollout):
            log_probs, ref = (
                reference._log_probs(model, sample, layouts.SETTINGS.temperature)[0] for model in (policy, anchor)
            )
            gap = (log_probs - ref)[sample["mask"] > 0]
            sums.append(math.fsum((torch.exp(-gap) - 1 + gap).tolist()))
    return math.fsum(sums) / sum(total > 0 for total in sums)


@pytest.mark.slow
def test_coefficient_follows_the_formula_in_every_layout(models: Any, one_rank: Any, two_ranks: Any):
    samples = len(models.rollout)
    (found, _), *_ = one_rank.run(reports_of, arguments(models, Layout(1, {})), models.rollout, range(3))
    assert found[0]["rollout/sample_kl"] == pytest.approx(kl_by_hand(models), rel=1e-4)
    coef = COEF
    for report in found:
        assert report["rollout/kl_coef"] == pytest.approx(coef, rel=1e-12)
        error = min(max(report["rollout/sample_kl"] / TARGET - 1, -0.2), 0.2)
        coef *= 1 + error * samples / HORIZON
    assert found[2]["rollout/kl_coef"] != COEF
    for layout in (Layout(2, PP2), Layout(2, SPREAD | DYNAMIC)):
        for reports, _ in two_ranks.run(reports_of, arguments(models, layout), models.rollout, range(3)):
            for report, expected in zip(reports, found, strict=True):
                assert report == pytest.approx(expected, rel=1e-4, abs=1e-6)


@pytest.mark.slow
def test_resumed_run_continues_with_its_coefficient(models: Any, one_rank: Any, tmp_path: Path):
    args = arguments(models, Layout(1, {}))
    ((whole, weights),) = one_rank.run(reports_of, args, models.rollout, range(4))
    one_rank.run(reports_of, args, models.rollout, range(2), tmp_path)
    resumed = dataclasses.replace(args, load=str(tmp_path))
    ((rest, last),) = one_rank.run(reports_of, resumed, models.rollout, range(2, 4))
    assert rest == whole[2:] and rest[0]["rollout/kl_coef"] != COEF
    assert all(torch.equal(value, last[name]) for name, value in weights.items())
    # a run without a target has the coefficient of its flag
    constant = dataclasses.replace(resumed, kl_target=None)
    ((plain, _),) = one_rank.run(reports_of, constant, models.rollout, range(2, 3))
    assert "rollout/kl_coef" not in plain[0]


@pytest.mark.slow
def test_checkpoint_without_a_coefficient_starts_with_that_of_the_flag(models: Any, one_rank: Any, tmp_path: Path):
    args = arguments(models, Layout(1, {}), kl_target=None)
    one_rank.run(reports_of, args, models.rollout, range(1), tmp_path)
    resumed = arguments(models, Layout(1, {}), load=str(tmp_path))
    ((found, _),) = one_rank.run(reports_of, resumed, models.rollout, range(1, 2))
    assert found[0]["rollout/kl_coef"] == COEF


def test_value_that_is_not_finite_leaves_the_coefficient(one_rank: Any):
    found = one_rank.run(coefficients_after, [math.nan, math.inf, 12.0])[0]
    # at twice the target the error is clipped to 0.2
    assert found == [0.1, 0.1, pytest.approx(0.1 * (1 + 0.2 * 100 / 1000))]


def coefficients_after(rank: int, world_size: int, init_method: str, values: list[float]) -> list[float]:
    """The coefficient after each rollout with these KL values."""
    import torch.distributed as dist

    from slimrl.megatron.training.policy_rollout import KLController

    dist.init_process_group("gloo", init_method=init_method, rank=rank, world_size=world_size)
    controller = KLController(tiny.tiny_args(kl_coef=0.1, kl_target=6.0, kl_horizon=1000), torch.device("cpu"))
    found = []
    for value in values:
        controller.after_rollout({"rollout/sample_kl": value}, samples=100)
        found.append(next(iter(controller.numbers.values())))
    dist.destroy_process_group()
    return found


ENTROPY = {"kl_target": None, "kl_coef": 0.0, "entropy_coef": 0.0, "entropy_target": 100.0, "entropy_coef_delta": 0.25}


@pytest.mark.slow
def test_entropy_coefficient_rises_below_the_target_and_is_the_loss_of_the_next_rollout(
    models: Any, one_rank: Any, tmp_path: Path
):
    args = arguments(models, Layout(1, {}), **ENTROPY)
    ((found, weights),) = one_rank.run(reports_of, args, models.rollout, range(2))
    assert [report["rollout/entropy_coef"] for report in found] == [0.0, 0.25]
    # the same with constant coefficients: a rollout with 0, then one with 0.25
    constant = dataclasses.replace(args, entropy_target=None)
    one_rank.run(reports_of, constant, models.rollout, range(1), tmp_path)
    constant = dataclasses.replace(constant, entropy_coef=0.25, load=str(tmp_path))
    ((second, last),) = one_rank.run(reports_of, constant, models.rollout, range(1, 2))
    assert second[0]["loss of step 0"] == found[1]["loss of step 0"]
    assert all(torch.equal(value, last[name]) for name, value in weights.items())


@pytest.mark.slow
def test_entropy_bonus_is_off_above_the_target_and_continues_after_a_resume(
    models: Any, one_rank: Any, two_ranks: Any, tmp_path: Path
):
    args = arguments(models, Layout(1, {}), **ENTROPY | {"entropy_coef": 0.3, "entropy_target": 0.01})
    ((whole, weights),) = one_rank.run(reports_of, args, models.rollout, range(4))
    # the first rollout has the flag's; after it the entropy is above the target, and the coefficient falls to 0
    assert [report["rollout/entropy_coef"] for report in whole] == [0.3, 0.0, 0.0, 0.0]
    for layout in (Layout(2, PP2), Layout(2, SPREAD | DYNAMIC)):
        wide = arguments(models, layout, **ENTROPY | {"entropy_coef": 0.3, "entropy_target": 0.01})
        for reports, _ in two_ranks.run(reports_of, wide, models.rollout, range(2)):
            for report, expected in zip(reports, whole, strict=False):
                assert report == pytest.approx(expected, rel=1e-4, abs=1e-6)
    one_rank.run(reports_of, args, models.rollout, range(2), tmp_path)
    resumed = dataclasses.replace(args, load=str(tmp_path))
    ((rest, last),) = one_rank.run(reports_of, resumed, models.rollout, range(2, 4))
    assert rest == whole[2:]
    assert all(torch.equal(value, last[name]) for name, value in weights.items())
