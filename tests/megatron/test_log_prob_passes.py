"""A rollout trained with and without the passes that it does not need: the same weights, losses and metrics."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from slimrl.megatron.training.pass_plan import PassPlan
from slimrl.models.model_size import forward_flops
from slimrl.models.model_spec import ModelSpec
from tests.megatron import layouts, ranks, tiny
from tests.megatron.layouts import (
    CP2,
    DYNAMIC,
    EP2,
    ETP2,
    FULL,
    OVERLAP,
    PP2,
    SETTINGS,
    SPREAD,
    TP2_SP,
    VIRTUAL,
    Layout,
    fsdp,
)

LAYOUTS = {
    "1 rank": (Layout(1, {}), "dense"),
    "1 rank, packed": (Layout(1, DYNAMIC), "MLA"),
    "1 rank, recomputed": (Layout(1, FULL), "MoE"),
    "1 rank, logits kept": (Layout(1, {"keep_logits": True, "micro_batch_size": 2}), "dense"),
    "TP2 SP": (Layout(2, TP2_SP), "dense"),
    "TP2 SP, packed": (Layout(2, TP2_SP | DYNAMIC), "MoE"),
    "PP2, packed": (Layout(2, PP2 | DYNAMIC), "dense"),
    "PP2 virtual, packed": (Layout(2, VIRTUAL | DYNAMIC, 4), "dense"),
    "CP2": (Layout(2, CP2), "dense"),
    "CP2, packed": (Layout(2, CP2 | DYNAMIC), "dense"),
    "DP2, overlapped, packed": (Layout(2, SPREAD | OVERLAP | DYNAMIC), "dense"),
    "EP2, packed": (Layout(2, EP2 | SPREAD | DYNAMIC), "MoE"),
    "ETP2 TP2 SP, packed": (Layout(2, ETP2 | DYNAMIC), "MLA"),
    "DP2, Megatron-FSDP": (Layout(2, fsdp("optim_grads_params")), "dense"),
}
# what reads the old log-probabilities, or those of training, within the loss or after it
READERS: dict[str, dict[str, Any]] = {
    "TIS": {"use_tis": True, "tis_clip": 1.5, "get_mismatch_metrics": True, "use_rollout_entropy": True},
    "MIS, rejection": {
        "use_tis": True,
        "tis_level": "geometric",
        "tis_mode": "mask",
        "use_rs": True,
        "rs_upper_bound": 3.0,
    },
    "custom TIS": {"use_tis": True, "custom_tis_function_path": "tests.megatron.custom_functions.without_first_tokens"},
    "GSPO, OPSM": {"advantage_estimator": "gspo", "use_opsm": True},
    "CISPO, unbiased KL": {"advantage_estimator": "cispo", "use_unbiased_kl": True, "calculate_per_token_loss": True},
    "REINFORCE++": {"advantage_estimator": "reinforce_plus_plus", "normalize_advantages": True, "gamma": 0.9},
    "the engines' as old ones": {"use_rollout_logprobs": True, "get_mismatch_metrics": True},
    "no reference": {"use_kl_loss": False},
}


@dataclasses.dataclass
class Trained:
    """What some rollouts left on rank 0."""

    metrics: list[list[dict[str, float]]]
    reports: list[dict[str, float]]
    speeds: list[dict[str, float]]
    weights: dict[str, torch.Tensor]
    totals: list[int]  # micro-batches of all passes over each rollout


def train(rank: int, world_size: int, init_method: str, args: Any, rollout: Any, rollouts: int) -> Trained:
    """Trains on the same samples so often."""
    progress: list[tuple[int, int]] = []
    trainer = ranks.start(rank, world_size, init_method, args, on_progress=lambda *now: progress.append(now))
    metrics, reports, speeds = [], [], []
    for rollout_id in range(rollouts):
        metrics.append(trainer.train(rollout_id, ranks.share_of(trainer, rollout)))
        report = trainer.rollout_metrics
        reports.append({name: value for name, value in report.items() if not name.startswith("perf/")})
        speeds.append({name: value for name, value in report.items() if name.startswith("perf/")})
    totals = [total for done, total in progress if done == total]
    result = Trained(metrics, reports, speeds, ranks.export(trainer), totals)
    trainer.close()
    return result


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> layouts.Models:
    return layouts.Models(tmp_path_factory.mktemp("passes"))


@pytest.fixture(scope="module")
def pools(one_rank: Any, two_ranks: Any) -> dict[int, Any]:
    return {1: one_rank, 2: two_ranks}


def assert_equal(one: Trained, other: Trained) -> None:
    """Bit for bit: the arithmetic is the same."""
    assert one.metrics == other.metrics
    assert one.reports == other.reports
    assert one.weights.keys() == other.weights.keys()
    assert all(torch.equal(value, other.weights[name]) for name, value in one.weights.items())


def both(pool: Any, args: Any, rollout: Any, rollouts: int = 2) -> tuple[Trained, Trained]:
    """Rank 0 with the pass over all samples and with the passes that are needed."""
    found = []
    for mode in ("always", "auto"):
        first, *others = pool.run(train, dataclasses.replace(args, compute_old_log_probs=mode), rollout, rollouts)
        assert all(repr((other.metrics, other.reports)) == repr((first.metrics, first.reports)) for other in others)
        found.append(first)
    return found[0], found[1]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "steps"),
    [
        *((name, 1) for name in LAYOUTS),
        ("1 rank, packed", 4),
        *((name, 2) for name in ("TP2 SP, packed", "PP2 virtual, packed", "CP2, packed")),
    ],
)
def test_training_without_the_pass_is_bit_identical(name: str, steps: int, models: Any, pools: Any):
    layout, kind = LAYOUTS[name]
    args = models.args(layout, kind, dataclasses.replace(SETTINGS, steps=steps))
    args.use_rollout_entropy = True
    with_pass, without = both(pools[layout.ranks], args, models.rollout)
    assert_equal(with_pass, without)
    assert len(without.metrics[1]) == steps and without.metrics[1][-1]["kl_loss"] > 0
    # reference, policy and training have equal micro-batches; the pass leaves out those of the first optimizer step
    micro_batches = with_pass.totals[0] // 3
    assert without.totals == [with_pass.totals[0] - micro_batches // steps] * 2


@pytest.mark.slow
@pytest.mark.parametrize(("reader", "steps"), [*((reader, 1) for reader in READERS), ("TIS", 2), ("GSPO, OPSM", 2)])
def test_every_reader_gets_the_same_values_without_the_pass(reader: str, steps: int, models: Any, pools: Any):
    args = models.args(Layout(2, CP2 | DYNAMIC), "dense", dataclasses.replace(SETTINGS, steps=steps))
    args = dataclasses.replace(args, **READERS[reader])
    with_pass, without = both(pools[2], args, models.rollout)
    assert_equal(with_pass, without)
    assert without.totals[0] < with_pass.totals[0]


@pytest.mark.slow
def test_bfloat16_weights_give_the_same_results(models: Any, pools: Any):
    args = models.args(Layout(2, TP2_SP | DYNAMIC), "dense", layouts.BF16)
    assert_equal(*both(pools[2], args, models.rollout))


@pytest.mark.slow
def test_skipped_first_step_gives_the_same_results(models: Any, pools: Any):
    args = models.args(Layout(2, TP2_SP | DYNAMIC), "dense", dataclasses.replace(SETTINGS, steps=2))
    args = dataclasses.replace(args, check_for_nan_in_loss_and_grad=False)
    rollout = dataclasses.replace(models.rollout, rewards=models.rollout.rewards.clone())
    rollout.rewards[1] = torch.nan  # a sample of the first step
    with_pass, without = both(pools[2], args, rollout)
    assert [step["skipped"] for step in without.metrics[0]] == [1.0, 0.0]
    assert repr(with_pass.metrics) == repr(without.metrics)  # NaN is not equal to itself
    assert repr(with_pass.reports) == repr(without.reports)
    assert all(torch.equal(value, without.weights[name]) for name, value in with_pass.weights.items())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("changes", "passes"),
    [
        ({"hidden_dropout": 0.1, "attention_dropout": 0.1}, 3),
        ({"use_kl_loss": False, "kl_loss_coef": 0.0, "kl_coef": 0.1}, 3),
        ({"custom_advantage_function_path": "examples.advantages.discounted"}, 3),
        ({"save_debug_train_data": "{rollout_id}.pt"}, 3),
        ({}, 2),
        ({"use_kl_loss": False, "kl_loss_coef": 0.0}, 1),
        ({"loss_type": "sft_loss", "compute_advantages_and_returns": False, "use_kl_loss": False}, 1),
    ],
    ids=lambda value: " ".join(value) or "plain" if isinstance(value, dict) else "",
)
def test_passes_that_run(changes: dict[str, Any], passes: int, models: Any, pools: Any, tmp_path: Any):
    args = models.args(Layout(1, {"micro_batch_size": 2}), "dense", dataclasses.replace(SETTINGS, steps=1))
    if "save_debug_train_data" in changes:
        changes = {"save_debug_train_data": f"{tmp_path}/{{rollout_id}}.pt"}
    args = dataclasses.replace(args, **changes)
    (found,) = pools[1].run(train, args, models.rollout, 1)
    assert found.totals == [passes * len(models.rollout) // 2]
    assert ("perf/log_probs_time" in found.speeds[0]) == (passes == 3)
    if "save_debug_train_data" in changes:
        samples = torch.load(tmp_path / "0.pt", weights_only=True)["samples"]
        assert all((sample["train_log_probs"] < 0).all() for sample in samples)


@pytest.mark.slow
def test_throughput_of_the_pass_counts_only_its_samples(models: Any, pools: Any):
    args = models.args(Layout(1, {}), "dense")
    (found,) = pools[1].run(train, args, models.rollout, 1)
    work = {
        phase: found.speeds[0][f"perf/{phase}_tflops"] * found.speeds[0][f"perf/{phase}_time"] * 1e12
        for phase in ("log_probs", "ref_log_probs")
    }
    totals, responses = models.rollout.total_lengths.tolist(), models.rollout.response_lengths.tolist()
    spec = ModelSpec.from_args(args)
    assert work["ref_log_probs"] == pytest.approx(forward_flops(spec, totals, sum(responses)))
    assert work["log_probs"] == pytest.approx(forward_flops(spec, totals[4:], sum(responses[4:])))


@pytest.mark.slow
def test_reference_that_is_only_logged_runs_at_its_metric_interval(models: Any, pools: Any):
    args = models.args(Layout(2, PP2 | DYNAMIC), "dense", dataclasses.replace(SETTINGS, steps=2, kl_coef=0.0))
    every, third = (
        pools[2].run(train, dataclasses.replace(args, ref_kl_metric_interval=interval), models.rollout, 4)[0]
        for interval in (1, 3)
    )
    assert all(torch.equal(value, third.weights[name]) for name, value in every.weights.items())
    kl = {"kl_loss", "rollout/kl", "rollout/ref_log_probs"}
    for rollout_id in range(4):
        asked = rollout_id % 3 == 0
        pairs = [(every.reports[rollout_id], third.reports[rollout_id])]
        pairs += zip(every.metrics[rollout_id], third.metrics[rollout_id], strict=True)
        for expected, found in pairs:
            assert found == {name: value for name, value in expected.items() if asked or name not in kl}
        assert every.metrics[rollout_id][1]["kl_loss"] > 0
        assert ("perf/ref_log_probs_time" in third.speeds[rollout_id]) == asked
    micro_batches = every.totals[0] * 2 // 5  # reference, half of the policy's, training
    assert third.totals == [every.totals[0], *[every.totals[0] - micro_batches] * 2, every.totals[0]]


@pytest.mark.slow
@pytest.mark.parametrize(
    "name", ["1 rank", "TP2 SP, packed", "PP2 virtual, packed", "DP2, overlapped, packed", "DP2, Megatron-FSDP"]
)
def test_reference_that_takes_the_trained_weights_has_no_kl_to_them(name: str, models: Any, pools: Any):
    """At the first step after an update both are the same model; at all others the KL is above 0."""
    layout, kind = LAYOUTS[name]
    args = models.args(layout, kind, dataclasses.replace(SETTINGS, steps=2))
    args = dataclasses.replace(args, ref_update_interval=2)
    found = pools[layout.ranks].run(train, args, models.rollout, 5)[0]
    first, second = ([metrics[step]["kl_loss"] for metrics in found.metrics] for step in range(2))
    assert [first[rollout_id] for rollout_id in (2, 4)] == pytest.approx([0, 0], abs=1e-9)
    assert min(first[1], first[3], *second) > 1e-7


REASONS = {
    "--compute-old-log-probs always": {"compute_old_log_probs": "always"},
    "--ci-test": {"ci_test": True},
    "--kl-coef": {"kl_coef": 0.1},
    "--loss-type custom_loss": {"loss_type": "custom_loss"},
    "--custom-advantage-function-path": {"custom_advantage_function_path": "a.b"},
    "--rollout-data-postprocess-path": {"rollout_data_postprocess_path": "a.b"},
    "--custom-megatron-before-log-prob-hook-path": {"custom_megatron_before_log_prob_hook_path": "a.b"},
    "--save-debug-train-data": {"save_debug_train_data": "{rollout_id}.pt"},
    "--attention-dropout": {"attention_dropout": 0.1},
    "--hidden-dropout": {"hidden_dropout": 0.1},
    "--moe-input-jitter-eps": {"moe_input_jitter_eps": 0.01},
    "--moe-router-load-balancing-type sinkhorn": {"moe_router_load_balancing_type": ["sinkhorn"]},
    "--custom-megatron-before-train-step-hook-path": {"custom_megatron_before_train_step_hook_path": "a.b"},
    "--fp8-recipe delayed": {"fp8_format": "hybrid", "fp8_recipe": "delayed"},
    "--custom-megatron-init-path": {"custom_megatron_init_path": "a.b"},
    "--custom-model-provider-path": {"custom_model_provider_path": "a.b"},
    "--spec": {"spec": ["a", "b"]},
}


@pytest.mark.parametrize("flag", REASONS)
def test_each_flag_that_needs_the_pass_is_named_and_runs_it_every_step(flag: str):
    plan = PassPlan.from_args(tiny.tiny_args(**REASONS[flag]))
    assert plan.sentence().startswith(f"a pass computes the old log-probabilities of all samples ({flag}); ")
    assert list(plan.steps_with_pass(3)) == [0, 1, 2] and not plan.reuses_first_step


@pytest.mark.parametrize(
    ("flags", "sentence", "scored"),
    [
        (
            {"num_steps_per_rollout": 1},
            "no pass computes old log-probabilities: the one optimizer step of a rollout computes them itself; no"
            " reference model",
            [],
        ),
        (
            {"num_steps_per_rollout": 2, "use_kl_loss": True, "kl_loss_coef": 0.1, "ref_kl_metric_interval": 5},
            "a pass computes the old log-probabilities of the samples of optimizer step 2 of a rollout: step 1 computes"
            " its own; a pass of the reference model for every rollout",
            [1],
        ),
        (
            {"num_steps_per_rollout": 4, "use_kl_loss": True, "ref_kl_metric_interval": 5},
            "a pass computes the old log-probabilities of the samples of optimizer steps 2 to 4 of a rollout: step 1"
            " computes its own; a pass of the reference model for every rollout whose number is a multiple of 5"
            " (--ref-kl-metric-interval)",
            [1, 2, 3],
        ),
        (
            {"num_steps_per_rollout": 1, "use_kl_loss": True, "kl_loss_coef": 0.1, "ref_update_interval": 8},
            "no pass computes old log-probabilities: the one optimizer step of a rollout computes them itself; a pass"
            " of the reference model, which takes the trained weights after every 8 rollouts (--ref-update-interval),"
            " for every rollout",
            [],
        ),
        (
            {"compute_advantages_and_returns": False, "use_kl_loss": True},
            "no log-probability pass runs before the optimizer steps: no advantages are computed",
            [],
        ),
    ],
)
def test_plan_shows_which_passes_run(flags: dict[str, Any], sentence: str, scored: list[int]):
    plan = PassPlan.from_args(tiny.tiny_args(**flags))
    assert plan.sentence() == sentence
    assert list(plan.steps_with_pass(plan.steps)) == scored


def test_reference_is_skipped_only_when_its_kl_is_only_logged():
    def asked(**flags: Any) -> list[int]:
        plan = PassPlan.from_args(tiny.tiny_args(**flags, ref_kl_metric_interval=3))
        return [rollout_id for rollout_id in range(7) if plan.runs_reference_pass(rollout_id)]

    assert asked(use_kl_loss=True) == [0, 3, 6]
    assert asked(use_kl_loss=True, kl_loss_coef=0.01) == asked(kl_coef=0.01) == list(range(7))
    assert asked() == asked(use_kl_loss=True, compute_advantages_and_returns=False) == []
