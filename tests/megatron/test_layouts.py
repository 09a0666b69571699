"""One rollout, trained on in two optimizer steps, gives the same result in every layout as plain autograd does.

The catalogue is in layouts.py. Only a part of it runs here, the layouts that differ in the code they exercise;
benchmarks/layouts.py measures every layout with every model type.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.megatron import layouts, ranks, reference, tiny
from tests.megatron.layouts import CP2, DYNAMIC, EP2, FULL, PP2, SETTINGS, SPREAD, TP2, TP2_SP, VIRTUAL, Layout

pytestmark = pytest.mark.slow

# settings other than parallel sizes: batches, padding, chunks, and everything combined
VARIANTS = {
    "micro-batches of four samples": Layout(1, {"micro_batch_size": 4}),
    "dynamic micro-batches": Layout(1, DYNAMIC),
    "padded to 64 tokens": Layout(1, {"data_pad_size_multiplier": 64}),
    "a vocabulary padded to 256": Layout(1, {"padded_vocab_size": 256}),
    "log-probabilities in chunks": Layout(1, {"log_probs_chunk_size": 7, "micro_batch_size": 2}),
    "TP2 with everything": Layout(2, TP2_SP | SPREAD | DYNAMIC | FULL),
    "DP2 dynamic and balanced": Layout(2, DYNAMIC | {"balance_data": True}),
    "PP2 with everything": Layout(2, PP2 | SPREAD | DYNAMIC | FULL),
    "PP2 virtual, dynamic": Layout(2, VIRTUAL | DYNAMIC, 4),
    "CP2 with everything": Layout(2, CP2 | SPREAD | DYNAMIC | FULL),
}
ALL, EXPERTS, DENSE, MOE, MLA = layouts.ALL, layouts.EXPERTS, ("dense",), ("MoE",), ("MLA",)
CHECKED = {
    "1 rank": ALL,
    "1 rank, recompute full uniform 2 of 4": MOE,
    "1 rank, recompute full block 1 of 4": DENSE,
    "1 rank, recompute core_attn, mlp, layernorm, shared_experts, mla_up_proj": MLA,
    "TP2": DENSE,
    "TP2, saved activations distributed": DENSE,
    "TP2 with sequence parallelism (SP)": ALL,
    "TP2 SP, recompute core_attn, mlp, layernorm": DENSE,
    "PP2": ("dense", "MLA"),
    "PP2, last stage 1 of 4 layers": MOE,
    "PP2, first stage 1 of 4 layers": MLA,
    "PP2, the loss counts as one of 4 layers": DENSE,
    "PP2, 2 virtual stages each": ALL,
    "CP2 (zig-zag)": ALL,
    "DP2": ALL,
    "DP2, distributed optimizer": DENSE,
    "DP2, distributed optimizer, overlapped": DENSE,
    "EP2": EXPERTS,
    "EP2, recompute moe": MLA,
    "EP2, distributed optimizer, overlapped": MOE,
    "EP2 TP2 SP, deterministic": EXPERTS,
    "ETP2 TP2 SP (experts cut)": EXPERTS,
    "EP2 CP2": MOE,
    "TP2 SP PP2": DENSE,
    "TP2 SP CP2": DENSE,
    "CP2 PP2": MLA,
    "PP2 DP2": DENSE,
    "PP2, 2 virtual stages each, DP2, overlapped": MOE,
    "EP2 PP2": MOE,
    "EP4": MLA,
    "ETP2 TP2 SP PP2": MOE,
    "TP2 SP PP2 DP2, all at once": DENSE,
    "TP2 SP CP2 PP2": MLA,
    "EP2 PP2 DP4": MOE,
}
# the other divisor of the loss, which depends on the split of samples over micro-batches, ranks and stages
PER_TOKEN = {
    "1 rank": ("dense", "MLA"),
    "dynamic micro-batches": DENSE,
    "TP2 with sequence parallelism (SP)": DENSE,
    "TP2 with everything": DENSE,
    "DP2 dynamic and balanced": DENSE,
    "PP2": MLA,
    "PP2 virtual, dynamic": DENSE,
    "CP2 with everything": DENSE,
    "EP2 CP2": MOE,
    "PP2, 2 virtual stages each, DP2, overlapped": DENSE,
}
EVERY = layouts.LAYOUTS | VARIANTS
CASES = [
    *((name, kind, False) for name, kinds in ({name: DENSE for name in VARIANTS} | CHECKED).items() for kind in kinds),
    *((name, kind, True) for name, kinds in PER_TOKEN.items() for kind in kinds),
]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> layouts.Models:
    return layouts.Models(tmp_path_factory.mktemp("layouts"))


@pytest.fixture(scope="module")
def pools(one_rank: Any, two_ranks: Any, four_ranks: Any, eight_ranks: Any) -> dict[int, Any]:
    return {1: one_rank, 2: two_ranks, 4: four_ranks, 8: eight_ranks}


def per_token(value: bool) -> reference.ReferenceSettings:
    return dataclasses.replace(SETTINGS, per_token=value)


@pytest.mark.parametrize(
    ("name", "kind", "tokens"), CASES, ids=[f"{n}, {k}{', per-token loss' if t else ''}" for n, k, t in CASES]
)
def test_every_layout_trains_like_plain_autograd(name: str, kind: str, tokens: bool, models: Any, pools: Any):
    layout, settings = EVERY[name], per_token(tokens)
    args, truth = models.args(layout, kind, settings), models.truth(kind, layout.layers, settings)
    result = layouts.train(pools[layout.ranks], args, models.rollout)
    found = layouts.differences(args, result, truth)
    assert max(found.loss, found.grad_norm, found.weights) < 1e-5
    assert found.gradients is None or found.gradients < 2e-5  # include the first step's rounding
    assert [step["pg_clipfrac"] for step in result.metrics] == pytest.approx(truth.clip_fractions, abs=1e-6)
    biases = [bias for bias in truth.weights if bias.endswith("e_score_correction_bias")]
    assert len(biases) == (layout.layers - 1 if kind == "MLA" else 0)
    for bias in biases:  # steps of a thousandth: too small to be seen among all weights
        torch.testing.assert_close(result.weights[bias].double(), truth.weights[bias], rtol=0, atol=1e-6)


@pytest.mark.parametrize("tokens", [False, True], ids=["per-sample loss", "per-token loss"])
def test_balance_loss_of_the_router_has_its_weight_in_every_layout(tokens: bool, models: Any, pools: Any):
    # full samples are micro-batches without padding in every split
    rollout = tiny.recorded_rollout(seed=6, multiple=4)
    settings = dataclasses.replace(SETTINGS, per_token=tokens, balance_coef=0.5)
    folders = [models.folder("MoE", 2, role) for role in ("policy", "reference")]
    truth = reference.train(*folders, rollout, settings)
    without = reference.train(*folders, rollout, dataclasses.replace(settings, balance_coef=0.0))
    assert truth.gradient_norms[0] != pytest.approx(without.gradient_norms[0], rel=0.01)
    for size, layout in ((1, {}), (2, PP2), (2, TP2_SP), (2, CP2), (2, EP2)):
        args = models.args(Layout(size, layout), "MoE", settings)
        args.moe_router_load_balancing_type, args.moe_aux_loss_coeff = ["aux_loss"], [0.5]
        result = layouts.train(pools[size], args, rollout)
        found = layouts.differences(args, result, truth)
        assert max(found.loss, found.grad_norm, found.weights) < 1e-5


@pytest.mark.parametrize(("kind", "layers"), [("dense", 2), ("dense", 4), ("MoE", 2), ("MLA", 2)])
def test_rollout_exercises_clip_kl_and_entropy(kind: str, layers: int, models: Any):
    truth = models.truth(kind, layers, SETTINGS)
    assert truth.clip_fractions[0] == 0.0
    assert 0.1 < truth.clip_fractions[1] < 0.9
    assert min(truth.gradient_norms) > SETTINGS.clip_grad  # gradient clipping is active as well


def test_expert_biases_also_move_in_the_reference(models: Any):
    moved = models.truth("MLA", 2, SETTINGS).weights["model.layers.1.mlp.gate.e_score_correction_bias"]
    frozen = models.truth("MLA", 2, dataclasses.replace(SETTINGS, bias_rate=0.0))
    steps = (moved - frozen.weights["model.layers.1.mlp.gate.e_score_correction_bias"]) / SETTINGS.bias_rate
    assert steps.abs().max() == pytest.approx(2.0, abs=1e-3)  # one step up or down after each optimizer step
    assert (steps > 0.5).any() and (steps < -0.5).any()


def test_ratio_is_one_and_self_kl_zero_before_the_first_update(models: Any, pools: Any):
    args = models.args(Layout(2, TP2 | {"compute_old_log_probs": "always"}), "dense")
    args.ref_load = args.load
    first, second = layouts.train(pools[2], args, models.rollout).metrics
    assert first["ratio_max_abs_diff"] < 1e-6
    assert abs(first["kl_loss"]) < 1e-12
    assert second["ratio_max_abs_diff"] > 0.05
    assert second["kl_loss"] > 1e-4


def test_progress_counts_the_micro_batches_of_all_three_passes(models: Any, pools: Any):
    # reference, log-probabilities of the second optimizer step's samples before the first, training; two samples each
    total = (2 * len(models.rollout) + len(models.rollout) // 2) // 2
    for layout in (Layout(1, {"micro_batch_size": 2}, 4), Layout(2, VIRTUAL | {"micro_batch_size": 2}, 4)):
        result = layouts.train(pools[layout.ranks], models.args(layout, "dense"), models.rollout)
        assert result.progress == [(number, total) for number in range(1, total + 1)]


def test_logged_mismatch_with_the_engine_is_over_trained_tokens(models: Any, pools: Any):
    rollout = models.rollout
    result = layouts.train(pools[1], models.args(Layout(1, {}), "dense"), rollout)
    policy = reference.load_model(models.folder("dense", 2, "policy"))
    gaps, start = [], 0
    with torch.no_grad():
        for sample in reference._split(rollout)[:4]:
            length = sample["mask"].numel()
            log_probs, *_ = reference._log_probs(policy, sample, SETTINGS.temperature)
            gap = (log_probs - rollout.rollout_log_probs[start : start + length]).abs()
            gaps.append(gap[sample["mask"] > 0])
            start += length
    gaps = torch.cat(gaps)
    first = result.metrics[0]
    assert first["tokens"] == gaps.numel()
    assert first["train_rollout_logprob_abs_diff_mean"] == pytest.approx(float(gaps.mean()), rel=1e-5)
    assert first["train_rollout_logprob_abs_diff_max"] == pytest.approx(float(gaps.max()), rel=1e-5)


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("1 rank", "MLA"),
        ("DP2, distributed optimizer", "dense"),
        ("PP2", "dense"),
        ("CP2 (zig-zag)", "dense"),
        ("TP2 with sequence parallelism (SP)", "MLA"),
        ("EP2", "MoE"),
    ],
)
def test_bfloat16_is_within_its_bound_of_float64(name: str, kind: str, models: Any, pools: Any):
    layout = layouts.LAYOUTS[name]
    args = models.args(layout, kind, layouts.BF16)
    result = layouts.train(pools[layout.ranks], args, models.rollout)
    assert result.weights["model.norm.weight"].dtype == torch.bfloat16
    found = layouts.differences(args, result, models.truth(kind, layout.layers, layouts.BF16))
    assert layouts.within_bf16(found, kind), found


@pytest.mark.parametrize("kind", layouts.ALL)
def test_transformers_bfloat16_needs_the_same_bound(kind: str, models: Any):
    peer = models.peer(kind, 2)
    assert layouts.within_bf16(peer, kind)
    assert peer.gradients > layouts.BF16_GRADIENT[kind] / 8


MODULES = ("core_attn", "mlp", "layernorm", "moe", "shared_experts", "mla_up_proj")


def test_recomputation_runs_exactly_the_selected_modules_once_more(models: Any, pools: Any):
    always = {"compute_old_log_probs": "always"}
    calls = {
        chosen: pools[1].run(ranks.count_calls, models.args(Layout(1, flags | always), "MLA"), models.rollout)[0]
        for chosen, flags in [("", {}), *((module, layouts.selective(module)) for module in MODULES)]
    }
    passes = len(models.rollout)  # of one sample each: reference, log-probabilities before the update, training
    layers = {"core_attn": 2, "layernorm": 2, "mla_up_proj": 2}
    once = {module: layers.get(module, 1) * passes for module in MODULES}
    assert calls.pop("") == {module: 3 * number for module, number in once.items()}
    for chosen, found in calls.items():
        again = {"moe", "shared_experts"} if chosen == "moe" else {chosen}
        assert found == {module: (3 + (module in again)) * number for module, number in once.items()}
