"""Custom training functions: a reimplemented loss, advantages and model train like slimrl's own."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from tests.megatron import custom_functions, layouts, ranks, reference, tiny
from tests.megatron.layouts import CP2, DYNAMIC, FULL, PP2, SETTINGS, SPREAD, TP2_SP, VIRTUAL, Layout

pytestmark = pytest.mark.slow

LOSS = {
    "loss_type": "custom_loss",
    "custom_loss_function_path": "tests.megatron.custom_functions.loss",
    "keep_logits": True,
}
PLAIN = dataclasses.replace(SETTINGS, kl_coef=0.0, entropy_coef=0.0)  # the settings of the examples


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> layouts.Models:
    return layouts.Models(tmp_path_factory.mktemp("own"))


def assert_true(args: Any, result: Any, truth: reference.ReferenceResult) -> None:
    found = layouts.differences(args, result, truth)
    assert max(found.loss, found.grad_norm, found.weights) < 1e-5
    assert found.gradients is None or found.gradients < 2e-5


def trained_alike(models: Any, pool: Any, layout: Layout, settings: Any, folder: Any, **changes: Any) -> Any:
    """Trains with these flags and compares with plain autograd; returns the result."""
    args = models.args(layout, "dense", settings)
    for name, value in ({"custom": {"notes": str(folder)}} | changes).items():
        setattr(args, name, value)
    result = layouts.train(pool, args, models.rollout)
    assert_true(args, result, models.truth("dense", layout.layers, settings))
    return result


def test_custom_loss_gives_autograd_gradients_and_every_function_is_called(models: Any, one_rank: Any, tmp_path: Any):
    functions = {
        "custom_megatron_init_path": "tests.megatron.custom_functions.init",
        "custom_megatron_before_log_prob_hook_path": "tests.megatron.custom_functions.before_log_prob",
        "custom_megatron_before_train_step_hook_path": "tests.megatron.custom_functions.before_step",
        "rollout_data_postprocess_path": "tests.megatron.custom_functions.postprocess",
    }
    result = trained_alike(models, one_rank, Layout(1, {}), SETTINGS, tmp_path, **LOSS, **functions)
    notes = custom_functions.noted(tmp_path, 0)
    rollout = models.rollout
    init, of_reference, of_policy, data, first = notes[:5]
    assert init == ["init", 1]
    assert [of_reference[1], of_policy[1]] == ["ref_", ""]
    for role, found in (("reference", of_reference), ("policy", of_policy)):
        norm = reference.load_model(models.folder("dense", 2, role)).model.layers[0].input_layernorm.weight.detach()
        assert found[2] == pytest.approx(float(norm.double().sum()), rel=1e-6)
    assert data[:2] == ["data", 0] and data[3] == list(range(8))
    keys = "advantages kl log_probs loss_masks raw_reward ref_log_probs response_lengths returns rewards"
    keys += " rollout_ids rollout_log_probs sample_indices tokens total_lengths truncated"
    assert data[2] == keys.split()
    assert first == ["step", 0, 0, 2e-3]
    batches = [entry for entry in notes if entry[0] == "batch"]
    assert len(batches) == len(rollout) and sum(entry[0] == "step" for entry in notes) == 2
    assert batches[0][1] == sorted([*keys.split(), "mine", "unconcat_tokens", "full_loss_masks", "packed_seq_params"])
    lengths = list(zip(rollout.total_lengths.tolist(), rollout.response_lengths.tolist(), strict=True))
    assert [entry[2:4] for entry in batches] == [[[1, n, 128], [r, 128]] for n, r in lengths]
    assert [entry[4] for entry in batches] == [float(m.sum()) for m in rollout.loss_mask.split([r for _, r in lengths])]
    trained = [bool(mask.any()) for mask in rollout.loss_mask.split([r for _, r in lengths])]
    for step, metrics in enumerate(result.metrics):  # means over samples; a fully masked one has 0
        places = [row * trained[row] for row in range(4 * step, 4 * step + 4)]
        assert metrics["place"] == pytest.approx(sum(places) / 4)
        assert "ratio_max_abs_diff" not in metrics and "pg_loss" not in metrics
    assert result.metrics[0]["train_rollout_logprob_abs_diff_max"] > 0


@pytest.mark.parametrize(
    ("layout", "tokens"),
    [(TP2_SP | DYNAMIC, True), (CP2 | DYNAMIC, True), (PP2, False), (SPREAD | DYNAMIC, True)],
    ids=["TP2 SP, per-token loss", "CP2, per-token loss", "PP2", "DP2, distributed optimizer, per-token loss"],
)
def test_custom_loss_is_correct_on_every_axis_of_a_layout(
    layout: dict[str, Any], tokens: bool, models: Any, two_ranks: Any, tmp_path: Any
):
    settings = dataclasses.replace(SETTINGS, per_token=tokens)
    result = trained_alike(models, two_ranks, Layout(2, layout), settings, tmp_path, **LOSS)
    policy = reference.load_model(models.folder("dense", 2, "policy"))
    entropies = []
    with torch.no_grad():
        for sample in reference._split(models.rollout)[:4]:
            entropy = reference._log_probs(policy, sample, settings.temperature)[1][sample["mask"] > 0]
            entropies.append(entropy if tokens else entropy.mean().nan_to_num()[None])
    assert result.metrics[0]["entropy"] == pytest.approx(float(torch.cat(entropies).mean()), rel=1e-5)


def test_custom_correction_and_mean_are_correct_with_data_parallelism(models: Any, two_ranks: Any, tmp_path: Any):
    args = models.args(Layout(2, {"micro_batch_size": 2}), "dense")
    args.use_tis, args.custom_tis_function_path = True, "tests.megatron.custom_functions.without_first_tokens"
    args.custom_pg_loss_reducer_function_path = "tests.megatron.custom_functions.mean_per_sample"
    result = layouts.train(two_ranks, args, models.rollout)
    rollout = without_first_tokens(models.rollout)
    policy, anchor = (models.folder("dense", 2, role) for role in ("policy", "reference"))
    assert_true(args, result, reference.train(policy, anchor, rollout, SETTINGS))
    samples = zip(
        rollout.total_lengths.tolist(), rollout.loss_mask.split(rollout.response_lengths.tolist()), strict=True
    )
    totals = [n if bool(mask.any()) else 0 for n, mask in samples]  # a mean over samples; a fully masked one has 0
    assert [step["total_length"] for step in result.metrics] == pytest.approx(
        [sum(totals[:4]) / 4, sum(totals[4:]) / 4]
    )
    assert "tis" not in result.metrics[0]


def without_first_tokens(rollout: Any) -> Any:
    """The rollout with the masks that `custom_functions` produces."""
    masks = rollout.loss_mask.clone()
    for mask in masks.split(rollout.response_lengths.tolist()):
        mask[:2] = 0
    return dataclasses.replace(rollout, loss_mask=masks)


def test_equivalent_examples_match_the_built_in_training(models: Any, one_rank: Any, tmp_path: Any):
    custom_loss_sums = LOSS | {"custom_loss_function_path": "examples.losses.high_entropy"}
    result = trained_alike(
        models,
        one_rank,
        Layout(1, {}),
        PLAIN,
        tmp_path,
        **custom_loss_sums,
        custom={"entropy_share": 1, "discount": 1.0, "sure": 1.1},
        custom_advantage_function_path="examples.advantages.discounted",
        rollout_data_postprocess_path="examples.training.leave_out_sure_tokens",
        custom_megatron_before_log_prob_hook_path="examples.training.check_weights",
        custom_megatron_before_train_step_hook_path="examples.training.rest",
    )
    assert result.metrics[0]["chosen_entropy"] == pytest.approx(result.metrics[0]["entropy"])


def test_custom_layers_are_equal_on_every_virtual_stage(models: Any, two_ranks: Any, tmp_path: Any):
    spec = ["examples.model", "watched_layers"]
    trained_alike(models, two_ranks, Layout(2, VIRTUAL, 4), SETTINGS, tmp_path, spec=spec)


def test_custom_model_is_equal_and_its_embedding_is_kept(models: Any, two_ranks: Any):
    frozen = dataclasses.replace(SETTINGS, frozen="embed_tokens")
    args = models.args(Layout(2, PP2 | FULL), "dense", frozen)
    args.custom_model_provider_path = "examples.model.frozen_embedding"
    metrics, weights = two_ranks.run(custom_functions.train_frozen, args, models.rollout)[0]
    truth = models.truth("dense", 2, frozen)
    assert layouts.furthest([step["loss"] for step in metrics], truth.losses) < 1e-5
    assert layouts.furthest([step["grad_norm"] for step in metrics], truth.gradient_norms) < 1e-5
    assert layouts.relative_error(weights, truth.weights) < 1e-5
    before = reference.load_model(models.folder("dense", 2, "policy")).model.embed_tokens.weight.float()
    assert torch.equal(weights["model.embed_tokens.weight"], before)


def refusal(models: Any, pool: Any, folder: Any, layout: Layout = Layout(1, {}), **changes: Any) -> str:  # noqa: B008
    args = models.args(layout, "dense")
    for name, value in ({"custom": {"notes": str(folder)}} | changes).items():
        setattr(args, name, value)
    with pytest.raises(RuntimeError) as caught:
        pool.run(ranks.train_once, args, models.rollout)
    return str(caught.value)


def test_mismatch_is_reported_with_flag_and_sample(models: Any, one_rank: Any, tmp_path: Any):
    length = int(models.rollout.response_lengths[1])
    for changes, sentence in (
        (
            {"rollout_data_postprocess_path": "tests.megatron.custom_functions.drop_a_token"},
            f'rollout_data["advantages"] has [{length - 1}] at sample 1, whose response has {length}: give a tensor',
        ),
        (
            LOSS | {"custom_loss_function_path": "tests.megatron.custom_functions.fails"},
            "--custom-loss-function-path tests.megatron.custom_functions.fails raised KeyError: 'no such key'\n  ",
        ),
        (
            {"use_tis": True, "custom_tis_function_path": "tests.megatron.custom_functions.hides_the_loss"},
            "--custom-tis-function-path tests.megatron.custom_functions.hides_the_loss returned a metric pg_loss, "
            "which slimrl logs",
        ),
    ):
        assert sentence in refusal(models, one_rank, tmp_path, **changes)


def test_frozen_embedding_with_a_trained_tied_head_is_rejected(models: Any, two_ranks: Any, tmp_path: Any):
    path = "tests.megatron.custom_functions.half_frozen"
    sentence = refusal(models, two_ranks, tmp_path, Layout(2, PP2), custom_model_provider_path=path)
    assert f"--custom-model-provider-path {path} freezes only one of embedding and head" in sentence


def test_modified_masks_are_used_for_loss_and_weights(models: Any, one_rank: Any):
    # the routers' balance loss is weighted against the trained tokens; whole samples are micro-batches without padding
    settings = dataclasses.replace(SETTINGS, per_token=True, balance_coef=0.5)
    rollout = tiny.recorded_rollout(seed=6, multiple=4)
    args = models.args(Layout(1, {}), "MoE", settings)
    args.moe_router_load_balancing_type, args.moe_aux_loss_coeff = ["aux_loss"], [0.5]
    args.rollout_data_postprocess_path = "tests.megatron.custom_functions.mask_first_tokens"
    actual = layouts.train(one_rank, args, rollout)
    policy, anchor = (models.folder("MoE", 2, role) for role in ("policy", "reference"))
    assert_true(args, actual, reference.train(policy, anchor, without_first_tokens(rollout), settings))
