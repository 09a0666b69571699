"""Frozen weights stay unchanged, and the others train like plain autograd, in every layout."""

from __future__ import annotations

import dataclasses
import re
from typing import Any

import pytest
import torch
from torch import Tensor

from slimrl.arguments import Arguments
from slimrl.data.train_batch import RolloutBatch
from tests.megatron import layouts, ranks, reference, tiny
from tests.megatron.layouts import EP2, PP2, SPREAD
from tests.megatron.layouts import TP2_SP as TP2

pytestmark = pytest.mark.slow

SETTINGS = reference.ReferenceSettings(
    steps=2,
    per_token=False,
    eps_clip=0.02,
    eps_clip_high=0.03,
    kl_coef=0.1,
    entropy_coef=0.0,
    temperature=1.0,
    lr=2e-3,
    weight_decay=0.1,
    betas=(0.9, 0.95),
    eps=1e-6,
    clip_grad=0.5,
)
RECOMPUTE = {"recompute_granularity": "full", "recompute_method": "uniform", "recompute_num_layers": 1}

# name: ranks, model, flags, and the frozen weights by name in transformers' model
CASES: dict[str, tuple[int, str, dict[str, Any], str]] = {
    "a frozen embedding before recomputed layers": (
        1,
        "dense",
        RECOMPUTE | {"freeze_params_name_list": ["embedding"]},
        "embed_tokens",
    ),
    "norms and one matrix, TP2, spread": (
        2,
        "dense",
        TP2 | SPREAD | {"freeze_params_name_list": ["layernorm", r"layers\.1\.mlp\.linear_fc1"]},
        r"norm|layers\.1\.mlp\.(gate|up)_proj",
    ),
    "nothing to train on the first stage": (
        2,
        "dense",
        PP2 | SPREAD | {"only_train_params_name_list": [r"layers\.1\."]},
        r"^(?!model\.layers\.1\.)",
    ),
    "nothing to train on the last stage": (
        2,
        "dense",
        PP2 | {"only_train_params_name_list": [r"layers\.0\."]},
        r"^(?!model\.layers\.0\.)",
    ),
    "experts, EP2, spread": (
        2,
        "experts",
        EP2 | SPREAD | {"freeze_params_name_list": [r"\.experts\."]},
        r"\.experts\.",
    ),
    "all but experts and routers, EP2": (
        2,
        "experts",
        EP2 | {"only_train_params_name_list": [r"\.experts\.", "router"]},
        r"^(?!.*(experts|mlp\.gate\.))",
    ),
}


def flags(models: Any, **changes: Any) -> Arguments:
    return tiny.tiny_args(
        load=str(models.policy),
        ref_load=str(models.reference),
        use_kl_loss=True,
        kl_loss_coef=SETTINGS.kl_coef,
        kl_loss_type="k3",
        eps_clip=SETTINGS.eps_clip,
        eps_clip_high=SETTINGS.eps_clip_high,
        **models.flags,
        **changes,
    )


@dataclasses.dataclass
class Outcome:
    """The report of a rank about a run with frozen weights."""

    metrics: list[dict[str, float]]
    weights: dict[str, Tensor]  # unsharded, by Hugging Face name: what the engines receive
    parameters: int  # elements on this rank
    gradients: int  # elements of its gradient buffers
    moments: int  # elements of its first moments


def train(rank: int, size: int, init_method: str, args: Arguments, rollout: RolloutBatch) -> Outcome:
    """Trains one rollout."""
    trainer = ranks.start(rank, size, init_method, args)
    metrics = trainer.train(0, ranks.share_of(trainer, rollout))
    outcome = Outcome(
        metrics,
        ranks.export(trainer),
        parameters=sum(p.numel() for stage in trainer.stages for p in stage.parameters()),
        gradients=sum(b.numel for w in trainer._policy.wrapped for b in w.buffers + w.expert_parallel_buffers),
        moments=sum(
            state["exp_avg"].numel()
            for part in trainer.optimizer.chained_optimizers
            for state in part.optimizer.state.values()
        ),
    )
    trainer.close()
    return outcome


@pytest.mark.parametrize("case", CASES)
def test_remaining_weights_train_like_autograd(
    case: str, models: Any, expert_models: Any, one_rank: Any, two_ranks: Any
):
    size, kind, changes, frozen = CASES[case]
    model = {"dense": models, "experts": expert_models}[kind]
    rollout = tiny.recorded_rollout(seed=5)
    before = reference._as_published(dict(reference.load_model(model.policy_hf).named_parameters()))
    truth = reference.train(model.policy_hf, model.reference_hf, rollout, dataclasses.replace(SETTINGS, frozen=frozen))
    result, *_ = {1: one_rank, 2: two_ranks}[size].run(train, flags(model, **changes), rollout)
    assert [step["loss"] for step in result.metrics] == pytest.approx(truth.losses, rel=1e-5)
    assert [step["grad_norm"] for step in result.metrics] == pytest.approx(truth.gradient_norms, rel=1e-5)
    assert result.weights.keys() == truth.weights.keys()  # all weights are updated
    for name, value in truth.weights.items():
        if name in truth.gradients:
            moved = (value - before[name]).norm()
            assert moved > 0
            assert (result.weights[name].double() - value).norm() < 2e-4 * moved, name
        else:
            assert re.search(frozen, name)
            assert torch.equal(result.weights[name], before[name].float()), name


@pytest.mark.parametrize("kind", ["dense", "experts"])
@pytest.mark.parametrize("strategy", ["optim_grads", "optim_grads_params"])
def test_megatron_fsdp_shards_frozen_weights_too(
    strategy: str, kind: str, models: Any, expert_models: Any, two_ranks: Any
):
    model = {"dense": models, "experts": expert_models}[kind]
    rollout = tiny.recorded_rollout(seed=5)
    lists = {"freeze_params_name_list": ["embedding", "layernorm", r"layers\.1\.self_attention\.linear_proj"]}
    frozen = r"embed_tokens|norm|layers\.1\.self_attn\.o_proj"
    truth = reference.train(model.policy_hf, model.reference_hf, rollout, dataclasses.replace(SETTINGS, frozen=frozen))
    args = flags(model, **lists, **layouts.fsdp(strategy))
    found = layouts.differences(args, layouts.train(two_ranks, args, rollout), truth)
    assert max(found.loss, found.grad_norm, found.weights) < 1e-5


def test_frozen_weights_have_no_gradient_buffer_and_no_optimizer_state(models: Any, two_ranks: Any):
    rollout = tiny.recorded_rollout(seed=5)
    only = {"only_train_params_name_list": ["mlp.linear_fc1"]}
    held = two_ranks.run(train, flags(models, **only), rollout)
    spread = two_ranks.run(train, flags(models, **only, **SPREAD), rollout)
    trained = 2 * (2 * 128 * 64)  # two layers of gate and up
    whole = trained + 128 * 64 + 2 * (64 * 64 * 2 + 64 * 32 * 2 + 128 * 64 + 2 * 64 + 2 * 16) + 64
    for outcome in held + spread:
        assert outcome.parameters == whole
        assert outcome.gradients == trained
    assert [outcome.moments for outcome in held] == [trained, trained]
    assert [outcome.moments for outcome in spread] == [trained // 2, trained // 2]


def train_on(
    rank: int, size: int, init_method: str, args: Arguments, rollouts: list[RolloutBatch], stop: int
) -> dict[str, Tensor]:
    """Trains from the checkpoint up to rollout `stop`, saving at the end; returns the weights."""
    trainer = ranks.start(rank, size, init_method, args)
    for rollout_id in range(trainer.start_rollout_id, stop):
        trainer.train(rollout_id, ranks.share_of(trainer, rollouts[rollout_id]))
    trainer.save(stop - 1, {})
    weights = ranks.export(trainer)
    trainer.close()
    return weights


@pytest.mark.parametrize("layout", [PP2 | SPREAD, layouts.fsdp("optim_grads_params")], ids=["PP2", "Megatron-FSDP"])
def test_frozen_run_resumes_bit_for_bit_and_rejects_other_patterns(
    layout: dict[str, Any], models: Any, two_ranks: Any, tmp_path: Any
):
    rollouts = [tiny.recorded_rollout(seed=seed) for seed in (5, 6)]
    args = flags(models, freeze_params_name_list=["embedding", "layernorm"], **layout)
    args.save = str(tmp_path / "whole")
    whole = two_ranks.run(train_on, args, rollouts, 2)[0]
    args.save = str(tmp_path / "cut")
    two_ranks.run(train_on, args, rollouts, 1)
    args.load = args.save
    resumed = two_ranks.run(train_on, args, rollouts, 2)[0]
    assert whole.keys() == resumed.keys()
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    args.freeze_params_name_list = None
    with pytest.raises(RuntimeError, match=r"was saved with --freeze-params-name-list embedding layernorm"):
        two_ranks.run(train_on, args, rollouts, 3)


def test_pattern_without_matches_is_rejected_by_name_on_every_rank(models: Any, two_ranks: Any):
    rollout = tiny.recorded_rollout(seed=5)
    for lists, words in (
        ({"freeze_params_name_list": ["layernorm", "visual"]}, r"'visual' matches no weight's name.*decoder\."),
        ({"only_train_params_name_list": ["output_layer"]}, r"'output_layer' matches no weight's name"),
        ({"freeze_params_name_list": ["weight"]}, r"--freeze-params-name-list weight leaves no weight to train"),
    ):
        with pytest.raises(RuntimeError, match=words):
            two_ranks.run(train, flags(models, **lists, **PP2), rollout)
