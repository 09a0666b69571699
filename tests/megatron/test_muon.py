"""Muon and SGD: the step of each layout equals one in float64, and checkpoints resume bit for bit in other layouts.

Also with frozen weights, of a critic and of a reward model, and with an offload between the steps.
"""

from __future__ import annotations

import dataclasses
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from slimrl.arguments import Arguments
from tests import accuracy
from tests.megatron import layouts, ranks, reference, test_critic, test_offload, test_reward_model, tiny
from tests.megatron.launch import RankPool
from tests.megatron.layouts import Layout, Models, relative_error
from tests.megatron.test_resharding import distance, flags_of, save_and_step

TP2 = {"tensor_model_parallel_size": 2, "sequence_parallel": True}
PP2 = {"pipeline_model_parallel_size": 2}
EP2 = {"expert_model_parallel_size": 2}
NO_TP = {"tensor_model_parallel_size": 1, "sequence_parallel": False}
SGD = {"optimizer": "sgd"}
MUON = {"optimizer": "muon", "muon_fp32_matmul_prec": "highest"}
# https://leloykun.github.io/ponder/muon-opt-coeffs
QUINTIC = [
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
]


def orthogonal(matrix: Tensor) -> Tensor:
    """Newton-Schulz as polynomials of the singular values, in float64."""
    left, values, right = torch.linalg.svd(matrix.double(), full_matrices=False)
    values = values / values.square().sum().sqrt().clamp(min=1e-7)  # an expert without tokens has no gradient
    for a, b, c in QUINTIC:
        values = a * values + b * values**3 + c * values**5
    return left @ torch.diag(values) @ right


class ReferenceMuon(torch.optim.Optimizer):
    """Muon over Hugging Face weights: one matrix per list of names, whose rows are joined, and of each part of it."""

    def __init__(
        self,
        masters: dict[str, nn.Parameter],
        settings: Any,
        *,
        split_qkv: bool,
        nesterov: bool,
        mode: str,
        shards: int,
    ):
        super().__init__(list(masters.values()), {})
        self._masters, self._lr, self._decay = masters, settings.lr, settings.weight_decay
        self._split_qkv, self._nesterov, self._mode, self._shards = split_qkv, nesterov, mode, shards
        ends = ("embed_tokens", "lm_head")
        self._rest = {
            n: p for n, p in masters.items() if p.dim() == 1 or n == "head" or any(end in n for end in ends)
        }  # a value head is a row of weights
        self._adam = reference._adam(self._rest, settings)
        self._momenta = {n: torch.zeros_like(p) for n, p in masters.items() if n not in self._rest}

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        self._adam.step()
        updates = {}
        for name, momentum in self._momenta.items():
            gradient = self._masters[name].grad
            if gradient is None:
                continue  # frozen
            momentum.mul_(0.95).add_(gradient, alpha=0.05)
            updates[name] = 0.95 * momentum + 0.05 * gradient if self._nesterov else momentum
        for names in self._matrices():
            if names[0] not in updates:
                continue
            for part in self._parts(names[0]):
                joined = torch.cat([part(updates[name]) for name in names])
                rows, columns = joined.shape
                scale = {"spectral": max(rows, columns), "unit_rms_norm": rows / columns}[self._mode] ** 0.5
                sizes = [len(part(updates[name])) for name in names]
                for name, update in zip(names, orthogonal(joined).split(sizes), strict=True):
                    weight = part(self._masters[name].data)
                    weight.mul_(1 - self._lr * self._decay).sub_(self._lr * scale * update)

    def _matrices(self) -> list[list[str]]:
        """Queries, keys and values, and gate and up, share a fused weight."""
        found: dict[str, list[str]] = {}
        for name in self._momenta:
            fused = name.replace("up_proj", "gate_proj") if "gate_up_proj" not in name else name
            if not self._split_qkv:
                fused = fused.replace("k_proj", "q_proj").replace("v_proj", "q_proj")
            found.setdefault(fused, []).append(name)
        return list(found.values())

    def _parts(self, name: str) -> list[Any]:
        """Experts are stacked in memory, each with matrices of its own; other matrices may be cut into shards."""
        if self._momenta[name].dim() == 2:
            axis = 1 if "o_proj" in name or "down_proj" in name else 0  # row-parallel layers: their input is cut
            return [
                lambda tensor, shard=shard: tensor.chunk(self._shards, axis)[shard] for shard in range(self._shards)
            ]
        return [lambda tensor, number=number: tensor[number] for number in range(len(self._momenta[name]))]


@pytest.fixture(scope="module")
def toys(tmp_path_factory: pytest.TempPathFactory) -> Models:
    return Models(tmp_path_factory.mktemp("muon"))


WHOLE = {"muon_tp_mode": "duplicated"}
WHERE_IT_LIES = {"muon_tp_mode": "distributed"}
VARIANT = {"muon_split_qkv": False, "muon_use_nesterov": True, "muon_scale_mode": "unit_rms_norm"}
# name: model, ranks, flags
STEPS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "one rank": ("dense", 1, {}),
    "one rank, the other settings": ("dense", 1, VARIANT),
    "DP2 with experts": ("MoE", 2, {}),
    "TP2, each shard a matrix": ("dense", 2, TP2),
    "TP2, whole matrices": ("dense", 2, TP2 | WHOLE),
    "TP2, matrices where they lie": ("dense", 2, TP2 | WHERE_IT_LIES | VARIANT),
    "TP2 and EP2": ("MoE", 2, TP2 | EP2 | WHOLE),
    "latent attention, TP2 with experts over TP2": ("MLA", 2, TP2 | WHOLE | {"expert_tensor_parallel_size": 2}),
    "latent attention, PP2": ("MLA", 2, PP2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", STEPS)
def test_step_of_muon_equals_float64(name: str, toys: Models, one_rank: RankPool, two_ranks: RankPool):
    kind, size, flags = STEPS[name]
    settings = layouts.SETTINGS
    args = toys.args(Layout(size, flags | MUON), kind, settings)
    found = layouts.train(one_rank if size == 1 else two_ranks, args, toys.rollout)
    make = muon_of(args, shards=2 if name == "TP2, each shard a matrix" else 1)
    folders = [toys.folder(kind, args.num_layers, role) for role in ("policy", "reference")]
    truth = reference.train(*folders, toys.rollout, settings, make_optimizer=make)
    far = layouts.differences(args, found, truth)
    # Newton-Schulz multiplies the rounding of the smallest singular values by up to 500
    assert (far.loss, far.grad_norm, far.weights) == pytest.approx((0, 0, 0), abs=2e-4)
    assert relative_error(found.gradients, truth.gradients) < 1e-3


# flags that freeze, and the names of the same weights in transformers' model
FROZEN: dict[str, tuple[int, dict[str, Any], dict[str, Any], str]] = {
    "PP2, without embedding and attention": (
        2,
        PP2,
        {"freeze_params_name_list": ["embedding", "linear_qkv", "linear_proj"]},
        "embed_tokens|[qkvo]_proj",
    ),
    "TP2, gate and up alone": (
        2,
        TP2 | WHOLE,
        {"only_train_params_name_list": ["linear_fc1.weight"]},
        "embed_tokens|[qkvo]_proj|norm|down_proj|lm_head",
    ),
}


def trained_weights(rank: int, world_size: int, init_method: str, args: Arguments, rollout: Any) -> Any:
    """Metrics and weights after one rollout."""
    trainer = ranks.start(rank, world_size, init_method, args)
    metrics = trainer.train(0, ranks.share_of(trainer, rollout))
    weights = ranks.export(trainer)
    trainer.close()
    return metrics, weights


@pytest.mark.slow
@pytest.mark.parametrize("name", FROZEN)
def test_step_of_muon_leaves_frozen_weights_and_equals_float64(name: str, toys: Models, two_ranks: RankPool):
    _, flags, lists, frozen = FROZEN[name]
    settings = dataclasses.replace(layouts.SETTINGS, frozen=frozen)
    args = toys.args(Layout(2, flags | MUON | lists), "dense", settings)
    (metrics, weights), *_ = two_ranks.run(trained_weights, args, toys.rollout)
    folders = [toys.folder("dense", args.num_layers, role) for role in ("policy", "reference")]
    truth = reference.train(*folders, toys.rollout, settings, make_optimizer=muon_of(args))
    accuracy.near("loss", [step["loss"] for step in metrics], truth.losses, rel=2e-4)
    accuracy.near("loss", [step["grad_norm"] for step in metrics], truth.gradient_norms, rel=2e-4)
    before = reference._as_published(dict(reference.load_model(folders[0]).named_parameters()))
    for weight, value in truth.weights.items():
        moved = float((value - before[weight]).norm())
        if moved == 0:
            assert torch.equal(weights[weight], before[weight].float()), weight
        else:
            assert float((weights[weight].double() - value).norm()) < 2e-3 * moved, weight
    assert 0 < len(truth.gradients) < len(truth.weights)


def muon_of(args: Arguments, shards: int = 1) -> Any:
    """The reference optimizer of these flags."""
    return functools.partial(
        ReferenceMuon,
        split_qkv=args.muon_split_qkv,
        nesterov=args.muon_use_nesterov,
        mode=args.muon_scale_mode,
        shards=shards,
    )


HEAD = 0.3 * torch.randn(1, 64, generator=torch.Generator().manual_seed(11))
VALUE_MODELS: dict[str, tuple[str, int, dict[str, Any]]] = {
    "one rank": ("dense", 1, {}),
    "TP2, whole matrices": ("dense", 2, TP2 | WHOLE),
    "PP2": ("dense", 2, PP2),
    "EP2": ("MoE", 2, EP2),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", VALUE_MODELS)
def test_critic_trained_with_muon_equals_float64(name: str, toys: Models, one_rank: RankPool, two_ranks: RankPool):
    """Losses, gradient norms and the values after two steps; Adam has the value head."""
    kind, size, flags = VALUE_MODELS[name]
    args = test_critic.critic_alone(toys.args(Layout(size, flags | MUON), kind, test_critic.SETTINGS))
    found = (one_rank if size == 1 else two_ranks).run(test_critic.train, args, toys.rollout, HEAD)
    folder = toys.folder(kind, args.num_layers, "reference" if args.load is None else "policy")
    true = test_critic.truth(folder, HEAD, toys.rollout, make_optimizer=muon_of(args))
    ids = toys.rollout.sample_ids.tolist()
    for rank in found:
        accuracy.near("loss", [step["critic-value_loss"] for step in rank.metrics], true.losses, rel=5e-4)
        accuracy.near("loss", [step["critic-grad_norm"] for step in rank.metrics], true.norms, rel=5e-4)
        for sample, values in zip(rank.samples, rank.values[1], strict=True):
            accuracy.near_values(values, true.values[1][ids.index(sample)], rtol=1e-3, atol=1e-3)
    moved = torch.cat(true.values[1]) - torch.cat(true.values[0])
    assert float(moved.abs().max()) > 0.05


@pytest.mark.slow
@pytest.mark.parametrize("name", VALUE_MODELS)
def test_reward_model_trained_with_muon_equals_float64(
    name: str, toys: Models, one_rank: RankPool, two_ranks: RankPool
):
    kind, size, flags = VALUE_MODELS[name]
    rollout = test_reward_model.rollout_of(2)
    layout = Layout(size, flags | MUON | test_reward_model.WHOLE)
    args = test_reward_model.flags(toys, layout, kind, "bradley_terry", 2)
    found = (one_rank if size == 1 else two_ranks).run(test_reward_model.train, args, rollout, HEAD)
    folder = toys.folder(kind, args.num_layers, "reference" if args.load is None else "policy")
    steps, losses = test_reward_model.truth(folder, HEAD, rollout, 2, muon_of(args))
    for rank in found:
        for step, true in zip(rank.metrics, steps, strict=True):
            accuracy.near("loss", [step["loss"], step["grad_norm"]], [true["loss"], true["grad_norm"]], rel=5e-4)
        accuracy.near("weights", [held_out["loss"] for held_out in rank.held_out], losses, rel=1e-3)
    assert abs(losses[1] - losses[0]) > 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("flags", [{}, TP2 | WHOLE, TP2 | {"bf16": True}], ids=["one rank", "TP2", "TP2 in bfloat16"])
def test_offloading_between_steps_of_muon_changes_nothing(
    flags: dict[str, Any], models: Any, one_rank: RankPool, two_ranks: RankPool
):
    """As --colocate does while engines generate: metrics and weights are equal bit for bit."""
    rollouts = [tiny.recorded_rollout(seed) for seed in range(3)]
    paths = {"load": str(models.policy), "ref_load": str(models.reference)}
    args = tiny.tiny_args(**paths, use_kl_loss=True, kl_loss_coef=0.05, **models.flags, **flags, **MUON)
    pool = two_ranks if flags else one_rank
    slept, awake = (pool.run(test_offload.train, args, rollouts, sleeps) for sleeps in (True, False))
    for one, other in zip(slept, awake, strict=True):
        assert one.metrics == other.metrics
        assert [name for name, value in other.weights.items() if not torch.equal(value, one.weights[name])] == []
        assert one.offloaded["optimizer"] > one.offloaded["weights"] / 2  # the momenta are offloaded too
        assert one.left_offloaded is not None and one.left_offloaded < 60_000


def sgd(masters: dict[str, nn.Parameter], settings: Any, momentum: float) -> torch.optim.Optimizer:
    groups = [
        {"params": [p for p in masters.values() if p.dim() > 1], "weight_decay": settings.weight_decay},
        {"params": [p for p in masters.values() if p.dim() == 1], "weight_decay": 0.0},
    ]
    return torch.optim.SGD(groups, lr=settings.lr, momentum=momentum)


@pytest.mark.slow
@pytest.mark.parametrize("momentum", [0.9, 0.0])
def test_step_of_sgd_equals_float64(momentum: float, toys: Models, two_ranks: RankPool):
    settings = dataclasses.replace(layouts.SETTINGS, lr=0.1)
    flags = {"optimizer": "sgd", "sgd_momentum": momentum, "lr": 0.1}
    args = toys.args(Layout(2, TP2 | flags), "dense", settings)
    found = layouts.train(two_ranks, args, toys.rollout)
    folders = [toys.folder("dense", args.num_layers, role) for role in ("policy", "reference")]
    make = functools.partial(sgd, momentum=momentum)
    truth = reference.train(*folders, toys.rollout, settings, make_optimizer=make)
    far = layouts.differences(args, found, truth)
    assert (far.loss, far.grad_norm, far.weights) == pytest.approx((0, 0, 0), abs=1e-5)


# name: model, flags of the saving ranks, flags of the resuming ranks; ranks of both
CHANGES: dict[str, tuple[str, dict[str, Any], dict[str, Any], int, int]] = {
    "the same": ("models", TP2 | MUON | WHOLE, {}, 2, 2),
    "experts, the same in bfloat16": ("expert_models", EP2 | MUON | {"bf16": True}, {}, 2, 2),
    "TP2 to PP2": ("models", TP2 | MUON | WHOLE, NO_TP | PP2, 2, 2),
    "experts, EP2 to one rank": ("expert_models", EP2 | MUON, {"expert_model_parallel_size": 1}, 2, 1),
    "SGD, the same": ("models", PP2 | SGD, {}, 2, 2),
    "SGD, DP2 to TP2": ("models", SGD, TP2, 2, 2),
}


@pytest.mark.slow
@pytest.mark.parametrize("change", CHANGES)
def test_checkpoint_resumes_in_the_same_and_in_other_layouts(
    change: str, request: pytest.FixtureRequest, one_rank: RankPool, two_ranks: RankPool, tmp_path: Path
):
    kind, before, after, *sizes = CHANGES[change]
    one, other = (one_rank if size == 1 else two_ranks for size in sizes)
    args = flags_of(kind, request)
    args = dataclasses.replace(
        args, use_distributed_optimizer=False, save=str(tmp_path / "save"), load=str(tmp_path / "save"), **before
    )
    (tmp_path / "save").mkdir()
    rollouts = [tiny.recorded_rollout(seed) for seed in range(3)]
    expected = one.run(save_and_step, args, rollouts, 3)[0]
    actual = other.run(save_and_step, dataclasses.replace(args, **after), rollouts, 1)
    for step in actual:
        assert step.first_rollout == 2
        if after:
            assert step.metrics["grad_norm"] == pytest.approx(expected.metrics["grad_norm"], rel=2e-6)
            assert distance(step.weights, expected.weights) < 1e-5
        else:
            assert step.metrics == expected.metrics
            assert [
                name for name, value in expected.weights.items() if not torch.equal(value, step.weights[name])
            ] == []


def planned_and_counted(rank: int, world_size: int, init_method: str, args: Arguments) -> tuple[int, int]:
    """Bytes of the optimizer's state of this rank: by the plan and by its tensors, without Adam's step counters."""
    from slimrl.arguments.memory import training_memory
    from slimrl.megatron.offload import persistent_tensors

    trainer = ranks.start(rank, world_size, init_method, args)
    plan = training_memory(args, tokens=64)[trainer.parallel.pp_rank].optimizer
    shared = {weight.data_ptr() for stage in trainer.stages for weight in stage.parameters()}
    tensors = persistent_tensors(trainer._policy.wrapped, [trainer.optimizer])["optimizer"]
    counted = sum(one.nbytes for one in tensors if one.dim() and one.data_ptr() not in shared)
    trainer.close()
    return plan, counted


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["dense", "MoE", "MLA"])
def test_plan_of_the_state_is_exact(kind: str, toys: Models, two_ranks: RankPool):
    for layout in (TP2 | {"bf16": True}, PP2):
        flags = {name: value for name, value in layout.items() if name != "bf16"}
        args = toys.args(Layout(2, MUON | flags | {"actor_num_gpus_per_node": 2}), kind)
        args.bf16 = "bf16" in layout
        for plan, counted in two_ranks.run(planned_and_counted, args):
            assert plan == counted


def resumed_with(rank: int, world_size: int, init_method: str, args: Arguments) -> str:
    """The error of a start."""
    try:
        ranks.start(rank, world_size, init_method, args)
    except ValueError as error:
        return str(error)
    return "none"


@pytest.mark.slow
def test_checkpoint_of_another_optimizer_is_refused(request: pytest.FixtureRequest, one_rank: RankPool, tmp_path: Path):
    args = flags_of("models", request)
    args = dataclasses.replace(args, use_distributed_optimizer=False, save=str(tmp_path), load=str(tmp_path), **MUON)
    one_rank.run(save_and_step, args, [tiny.recorded_rollout(seed) for seed in range(2)], 2)
    (error,) = one_rank.run(resumed_with, dataclasses.replace(args, optimizer="adam"))
    assert "was saved with --optimizer muon, and this run has --optimizer adam: use the same, or add" in error
