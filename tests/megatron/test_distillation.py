"""On-policy distillation in the training ranks: the teacher's log-probabilities and their term of the advantages."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from slimrl.algorithms.losses import TeacherTerm
from slimrl.megatron.training.advantages import TrainingHooks, build_train_inputs
from slimrl.megatron.training.forward_step import TrainTensors
from slimrl.megatron.training.pass_plan import PassPlan
from slimrl.observability.metrics.registry import METRICS
from tests.megatron import layouts, ranks, reference, tiny
from tests.megatron.layouts import CP2, DYNAMIC, EP2, ETP2, PP2, SPREAD, TP2_SP, VIRTUAL, Layout, fsdp

COEF = 0.7
SETTINGS = dataclasses.replace(layouts.SETTINGS, teacher_coef=COEF)
LAYOUTS = {
    "1 rank": (Layout(1, {}), "dense"),
    "DP2, packed": (Layout(2, SPREAD | DYNAMIC), "dense"),
    "TP2 SP": (Layout(2, TP2_SP), "dense"),
    "PP2, packed": (Layout(2, PP2 | DYNAMIC), "dense"),
    "PP2 virtual, packed": (Layout(2, VIRTUAL | DYNAMIC, 4), "dense"),
    "CP2": (Layout(2, CP2), "dense"),
    "ETP2 TP2 SP": (Layout(2, ETP2), "MLA"),
    "EP2": (Layout(2, EP2), "MLA"),
    "DP2, Megatron-FSDP of all": (Layout(2, fsdp("optim_grads_params")), "dense"),
    "DP2, Megatron-FSDP of all, packed": (Layout(2, fsdp("optim_grads_params") | DYNAMIC), "dense"),
    "DP2, Megatron-FSDP of the optimizer's state": (Layout(2, fsdp("optim")), "MoE"),
}


@dataclasses.dataclass
class Distilled:
    """Rank 0 after one rollout."""

    result: ranks.StepResult
    report: dict[str, float]
    host_bytes: int


def train(rank: int, world_size: int, init_method: str, args: Any, rollout: Any) -> Distilled:
    trainer = ranks.start(rank, world_size, init_method, args)
    metrics = trainer.train(0, ranks.share_of(trainer, rollout))
    own = [trainer._policy.reference, trainer._parts.passes.teacher.weights]
    taken = sum(one.host_bytes for one in own if hasattr(one, "host_bytes"))
    result = ranks.StepResult(metrics, ranks.export(trainer), ranks.gradients(trainer), [], None)
    found = Distilled(result, trainer.rollout_metrics, taken)
    trainer.close()
    return found


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> layouts.Models:
    return layouts.Models(tmp_path_factory.mktemp("distillation"))


@pytest.fixture(scope="module")
def pools(one_rank: Any, two_ranks: Any) -> dict[int, Any]:
    return {1: one_rank, 2: two_ranks}


def teacher_of(models: layouts.Models, kind: str, layers: int = 2) -> Path:
    """A third set of weights, neither the policy's nor the reference's."""
    folder = models._folder / f"{kind}-{layers}-teacher"
    return folder if folder.exists() else layouts.save(kind, folder, seed=3, layers=layers)


def distilled(models: layouts.Models, layout: Layout, kind: str, **changes: Any) -> Any:
    """The flags of a run with a reference and a teacher."""
    folder = teacher_of(models, kind, layout.layers)
    teacher = {"use_opd": True, "opd_type": "megatron", "opd_kl_coef": COEF, "opd_teacher_load": str(folder)}
    args = dataclasses.replace(models.args(layout, kind), **teacher)
    return dataclasses.replace(args, **changes)


@pytest.mark.slow
@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_distils_like_plain_autograd(name: str, models: Any, pools: Any):
    layout, kind = LAYOUTS[name]
    folders = [models.folder(kind, layout.layers, role) for role in ("policy", "reference")]
    truth = reference.train(*folders, models.rollout, SETTINGS, teacher_of(models, kind, layout.layers))
    assert layouts.relative_error(truth.weights, models.truth(kind, layout.layers, layouts.SETTINGS).weights) > 1e-3
    args = distilled(models, layout, kind)
    found, *others = pools[layout.ranks].run(train, args, models.rollout)
    assert all(other.result.metrics == found.result.metrics for other in others)
    away = layouts.differences(args if found.result.gradients else spread(args), found.result, truth)
    assert max(away.grad_norm, away.weights, away.gradients or 0.0) < 1e-5
    assert away.loss < 2e-5  # a sum of terms that nearly cancel


def spread(args: Any) -> Any:
    """The same flags, without whole gradients to compare."""
    return dataclasses.replace(args, use_distributed_optimizer=True)


@pytest.mark.slow
def test_logged_reverse_kl_is_the_mean_over_trained_tokens_of_every_sample(models: Any, pools: Any):
    args = distilled(models, Layout(2, CP2 | DYNAMIC), "dense")
    found = pools[2].run(train, args, models.rollout)[0].report
    student, teacher = (
        reference.load_model(folder) for folder in (models.folder("dense", 2, "policy"), teacher_of(models, "dense"))
    )
    gaps, values = [], []
    with torch.no_grad():
        for sample in reference._split(models.rollout):
            if not sample["mask"].any():
                continue
            own, other = (reference._log_probs(model, sample, 0.8)[0] for model in (student, teacher))
            gaps.append(((own - other) * sample["mask"]).sum() / sample["mask"].sum())
            values.append((other * sample["mask"]).sum() / sample["mask"].sum())
    assert found["rollout/opd_reverse_kl"] == pytest.approx(float(torch.stack(gaps).mean()), rel=1e-5)
    assert found["rollout/teacher_log_probs"] == pytest.approx(float(torch.stack(values).mean()), rel=1e-5)
    assert found["perf/teacher_log_probs_tflops"] > 0
    assert {"rollout/opd_reverse_kl", "rollout/teacher_log_probs"} <= {metric.name for metric in METRICS}


@pytest.mark.slow
def test_teacher_of_the_students_weights_changes_nothing(models: Any, pools: Any):
    layout = Layout(1, {"compute_old_log_probs": "always"})
    with_teacher = distilled(models, layout, "dense", opd_teacher_load=str(models.folder("dense", 2, "policy")))
    found, plain = (
        pools[1].run(train, args, models.rollout)[0] for args in (with_teacher, models.args(layout, "dense"))
    )
    assert found.report["rollout/opd_reverse_kl"] == 0.0
    assert layouts.relative_error(found.result.weights, {n: w.double() for n, w in plain.result.weights.items()}) == 0.0
    assert found.host_bytes == 2 * plain.host_bytes  # what the memory plan counts: as much again as the reference


@pytest.mark.slow
def test_whitening_and_the_engines_log_probs_apply_to_the_penalty(models: Any, pools: Any):
    layout = Layout(1, {"normalize_advantages": True, "use_rollout_logprobs": True})
    args = distilled(models, layout, "dense", use_kl_loss=False, kl_loss_coef=0.0)
    found = pools[1].run(train, args, models.rollout)[0].report
    rollout, teacher = models.rollout, reference.load_model(teacher_of(models, "dense"))
    lengths = rollout.response_lengths.tolist()
    with torch.no_grad():
        parts = reference._split(rollout)
        scored = torch.cat([reference._log_probs(teacher, sample, 0.8)[0] for sample in parts])
    gap = rollout.rollout_log_probs.double() - scored
    advantages = torch.repeat_interleave(rollout.rewards.double(), rollout.response_lengths) - COEF * gap
    trained = rollout.loss_mask != 0
    advantages = (advantages - advantages[trained].mean()) / advantages[trained].std()
    means = [
        float(part[mask != 0].mean())
        for part, mask in zip(advantages.split(lengths), rollout.loss_mask.split(lengths), strict=True)
        if mask.any()
    ]
    assert found["rollout/advantages"] == pytest.approx(sum(means) / len(means), abs=1e-5)


def train_rollouts(rank: int, world_size: int, init_method: str, args: Any, rollouts: list[Any], stop: int) -> Any:
    """Trains up to rollout `stop`, offloaded before each rollout if the flags say so, and saves."""
    trainer = ranks.start(rank, world_size, init_method, args)
    first, metrics = trainer.start_rollout_id, []
    for rollout_id in range(first, stop):
        if args.offload_train:
            trainer.memory.sleep()
            trainer.memory.wake()
        metrics.append(trainer.train(rollout_id, ranks.share_of(trainer, rollouts[rollout_id])))
    if args.save is not None:
        trainer.save(stop - 1, {})
    result = first, metrics, ranks.export(trainer)
    trainer.close()
    return result


@pytest.mark.slow
def test_resumed_and_offloaded_run_distils_bit_for_bit_like_an_uninterrupted_one(
    models: Any, pools: Any, tmp_path: Path
):
    rollouts = [tiny.recorded_rollout(seed) for seed in range(4)]
    policy = str(models.folder("dense", 2, "policy"))
    args = distilled(models, Layout(2, SPREAD), "dense", num_rollout=4, ref_load=policy, load=None)
    _, expected, weights = pools[2].run(train_rollouts, args, rollouts, 4)[0]
    args = dataclasses.replace(args, offload_train=True, save=str(tmp_path), load=str(tmp_path))
    first, before, _ = pools[2].run(train_rollouts, args, rollouts, 2)[0]
    second, after, found = pools[2].run(train_rollouts, args, rollouts, 4)[0]
    assert (first, second) == (0, 2) and before + after == expected
    assert all(torch.equal(value, found[name]) for name, value in weights.items())


@pytest.mark.slow
def test_teacher_of_another_shape_is_rejected_by_name(models: Any, pools: Any, tmp_path: Path):
    folder = layouts.save("dense", tmp_path / "deeper", seed=3, layers=4)
    args = distilled(models, Layout(1, {}), "dense", opd_teacher_load=str(folder))
    with pytest.raises(Exception, match=rf"--opd-teacher-load {folder} is not a teacher for --opd-type megatron"):
        pools[1].run(train, args, models.rollout)


def train_inputs(teacher: TeacherTerm | None, **flags: Any) -> TrainTensors:
    rollout, args = tiny.recorded_rollout(seed=5), tiny.tiny_args(use_opd=teacher is not None, **flags)
    hooks = TrainingHooks(args, [], None, None, args)
    log_probs, values = torch.full_like(rollout.loss_mask, -1.5), torch.linspace(-1, 1, rollout.loss_mask.numel())
    values = values if args.use_critic else None
    device = torch.device("cpu")
    columns, _ = build_train_inputs(args, hooks, 0, rollout, log_probs, None, values, None, device, teacher)
    return columns


@pytest.mark.parametrize("estimator", ["grpo", "reinforce_plus_plus", "ppo"])
def test_every_estimator_keeps_its_returns_and_takes_the_term_off_each_advantage(estimator: str):
    scores = torch.linspace(-3, -0.1, tiny.recorded_rollout(seed=5).loss_mask.numel())
    flags = {"advantage_estimator": estimator, "gamma": 0.9 if estimator != "grpo" else 1.0}
    plain, distilled = (train_inputs(teacher, **flags) for teacher in (None, TeacherTerm(scores, COEF)))
    expected = (COEF * (-1.5 - scores)).masked_fill(plain.loss_mask == 0, 0.0)
    torch.testing.assert_close(plain.advantages - distilled.advantages, expected)
    assert torch.equal(plain.returns, distilled.returns)  # a critic learns the returns of the reward alone


def test_value_of_the_teacher_that_is_not_finite_names_the_sample():
    rollout = tiny.recorded_rollout(seed=5)
    scores = torch.full_like(rollout.loss_mask, -1.0)
    trained = int(rollout.loss_mask.nonzero()[-1])
    scores[trained] = torch.nan
    columns = train_inputs(TeacherTerm(scores, COEF))
    found = columns.broken_samples(rollout)
    assert any("7" in sentence and "teacher_log_probs" in sentence for sentence in found), found


def test_plan_names_the_pass_of_the_teacher():
    flags = {"use_opd": True, "opd_type": "megatron", "num_steps_per_rollout": 1}
    assert PassPlan.from_args(tiny.tiny_args(**flags)).sentence() == (
        "a pass computes the old log-probabilities of all samples (--use-opd); no reference model; a pass of the"
        " teacher for every rollout"
    )
    plan = PassPlan.from_args(tiny.tiny_args(**flags, use_rollout_logprobs=True))
    assert plan.reuses_first_step and plan.has_teacher  # the penalty compares the engines' values with the teacher's
    served = PassPlan.from_args(tiny.tiny_args(**{**flags, "opd_type": "sglang"}))
    assert not served.has_teacher and served.reasons == ("--use-opd",)
