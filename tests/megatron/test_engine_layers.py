"""Checkpoints, epsilons and gradients are the same with layers put together as for Transformer Engine and without.

The engine's modules are stand-ins that run on a CPU (`engine_layers`); the layers are those that a GPU gets.
"""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from slimrl.arguments import Arguments
from tests.families.layouts import LAYOUTS, flags
from tests.families.toys import TOYS
from tests.megatron import ranks, tiny
from tests.megatron.launch import RankPool

pytestmark = pytest.mark.slow

ENGINE = ["tests.megatron.engine_layers", "layers"]
FUSING = ["tests.megatron.engine_layers", "fusing_layers"]


def stored(rank: int, world_size: int, init_method: str, models: list[Arguments]) -> list[set[Any]]:
    """Everything that a checkpoint stores of each model's weights."""
    from slimrl.megatron.checkpoint.state import model_blueprint

    return [{piece for weight in model_blueprint(args).weights for piece in weight.pieces} for args in models]


def test_every_family_is_stored_identically_by_both_layer_implementations(one_rank: RankPool):
    models = [flags(toy, LAYOUTS[0]) for toy in TOYS.values()]
    found = one_rank.run(stored, models + [dataclasses.replace(args, spec=ENGINE) for args in models])[0]
    for name, ours, theirs in zip(TOYS, found[: len(models)], found[len(models) :], strict=True):
        assert ours == theirs, name


class Allocations(TorchDispatchMode):
    """Counts the bytes of new storages that are backed by memory."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[int] = set()
        self.nbytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor) and not tensor.is_meta:
                self.nbytes += tensor.untyped_storage().nbytes()
        return result


def described_on_a_gpu(rank: int, world_size: int, init_method: str, args: Arguments) -> tuple[int, int]:
    """Bytes of the weights, and bytes allocated while a machine with Transformer Engine describes the model."""
    from slimrl.megatron import config
    from slimrl.megatron.checkpoint import state

    config.transformer_engine_installed = lambda: True
    config.is_cpu = lambda: False
    with Allocations() as allocations:
        found = state.model_blueprint(args)
    return sum(piece.nbytes for weight in found.weights for piece in weight.pieces), allocations.nbytes


@pytest.mark.parametrize("impl", [None, "transformer_engine"])
@pytest.mark.parametrize("spec", [None, ENGINE])
def test_model_description_takes_no_memory_with_transformer_engine(
    one_rank: RankPool, impl: str | None, spec: list[str] | None
):
    args = tiny.tiny_args(transformer_impl=impl, spec=spec, hidden_size=1024, ffn_hidden_size=8192, bf16=True)
    weights, allocated = one_rank.run(described_on_a_gpu, args)[0]
    assert weights > 100e6
    assert allocated < 1e6


def saved_and_loaded(
    rank: int, world_size: int, init_method: str, writer: Arguments, reader: Arguments, root: Path
) -> list[dict[str, Tensor]]:
    """Weights of a model with `writer`'s layers, and of one with `reader`'s layers loaded from its checkpoint."""
    from slimrl.megatron import parallel
    from slimrl.megatron.checkpoint import start
    from slimrl.megatron.checkpoint import state as checkpoint
    from slimrl.megatron.model import model_builder

    found = []
    for number, args in enumerate((writer, reader)):
        state = parallel.initialize(
            args, rank=rank, world_size=world_size, local_rank=rank, init_method=f"{init_method}{number}"
        )
        built = model_builder.build_model(args, state, model_builder.CustomModel.from_args(args))
        if number == 0:
            with torch.no_grad():
                for parameter in built.parameters():
                    parameter.normal_()
            checkpoint.save_model_only(built, root)
        else:
            start.load_model_only(built, root)
        found.append({name: value.clone() for name, value in built.named_parameters()})
        parallel.shutdown()
    return found


KINDS = {"dense": {}, "MoE": tiny.MOE_FLAGS, "latent": tiny.LATENT_FLAGS}
WAYS = {"without, then with": (None, ENGINE), "with, then without": (ENGINE, None)}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("kind", KINDS)
def test_model_is_loaded_by_the_other_layer_implementation(one_rank: RankPool, tmp_path: Path, kind: str, way: str):
    writer, reader = (tiny.tiny_args(**KINDS[kind], spec=spec) for spec in WAYS[way])
    first, second = one_rank.run(saved_and_loaded, writer, reader, tmp_path)[0]
    first, second = ({_local_name(name): value for name, value in found.items()} for found in (first, second))
    assert first.keys() == second.keys()
    for name, value in first.items():
        assert torch.equal(value, second[name]), name


def _local_name(name: str) -> str:
    """The name of a norm's weight if the norm is a separate module."""
    for fused, norm in {
        "self_attention.linear_qkv.layer_norm_": "input_layernorm.",
        "self_attention.linear_q_up_proj.layer_norm_": "self_attention.q_layernorm.",
        "self_attention.linear_kv_up_proj.layer_norm_": "self_attention.kv_layernorm.",
        "mlp.linear_fc1.layer_norm_": "pre_mlp_layernorm.",
    }.items():
        name = name.replace(fused, norm)
    return name


@pytest.mark.parametrize("spec", [None, ENGINE])
def test_weight_missing_from_the_checkpoint_is_named(one_rank: RankPool, tmp_path: Path, spec: list[str] | None):
    writer, reader = tiny.tiny_args(qk_layernorm=False), tiny.tiny_args(spec=spec)
    with pytest.raises(RuntimeError, match=r"lacks decoder.layers.self_attention.k_layernorm.weight, .*q_layernorm"):
        one_rank.run(saved_and_loaded, writer, reader, tmp_path)


@pytest.mark.parametrize("spec", [None, ENGINE])
def test_weight_missing_from_the_model_is_named(one_rank: RankPool, tmp_path: Path, spec: list[str] | None):
    writer, reader = tiny.tiny_args(spec=spec), tiny.tiny_args(qk_layernorm=False, spec=ENGINE)
    with pytest.raises(RuntimeError, match=r"has decoder.layers.self_attention.k_layernorm.weight, .*which this"):
        one_rank.run(saved_and_loaded, writer, reader, tmp_path)


def test_incompletely_filled_stage_is_rejected():
    from slimrl.megatron.checkpoint.start import _fill

    with pytest.raises(ValueError, match="/saved has no values for bias"):
        _fill(torch.nn.Linear(2, 2), {"weight": torch.zeros(2, 2)}, Path("/saved"))
    with pytest.raises(ValueError, match="/saved has values that the model does not have, for extra"):
        state = {"weight": torch.zeros(2, 2), "bias": torch.zeros(2), "extra": torch.zeros(1), "_extra_state": None}
        _fill(torch.nn.Linear(2, 2), state, Path("/saved"))


def trained(rank: int, world_size: int, init_method: str, args: Arguments) -> tuple[dict[str, Tensor], int]:
    """Weights after one rollout starting from --load; saved."""
    trainer = ranks.start(rank, world_size, init_method, args)
    start = trainer.start_rollout_id
    trainer.train(start, ranks.share_of(trainer, tiny.recorded_rollout(start)))
    trainer.save(start, {})
    weights = ranks.export(trainer)
    trainer.close()
    return weights, start


@pytest.mark.parametrize(("kind", "distributed"), [("dense", False), ("dense", True), ("MoE", True)])
def test_training_is_resumed_by_the_other_layer_implementation(
    two_ranks: RankPool, models: Any, expert_models: Any, tmp_path: Path, kind: str, distributed: bool
):
    made = {"dense": models, "MoE": expert_models}[kind]
    ends = {}
    for way in ([None, None], [None, ENGINE], [ENGINE, None]):
        folder = str(tmp_path / str(len(ends)))
        for rollout_id, spec in enumerate(way):
            args = tiny.tiny_args(
                **KINDS[kind], spec=spec, use_distributed_optimizer=distributed, bf16=distributed,
                ref_load=str(made.policy), load=folder, save=folder,
            )  # fmt: skip
            weights, started = two_ranks.run(trained, args)[0]
            assert started == rollout_id
        ends[str(way)] = weights
    expected = ends.pop(str([None, None]))
    for way, weights in ends.items():
        for name, value in weights.items():
            # In bf16 the implementations round differently, and Adam takes full steps for gradients of pure rounding.
            apart = ~torch.isclose(value, expected[name], rtol=1.6e-2 if distributed else 1.3e-6, atol=1e-5)
            assert apart.float().mean() <= (0.005 if distributed else 0.0), f"{way} {name}"
            assert not apart.any() or (value - expected[name])[apart].abs().max() < 2e-3, f"{way} {name}"


def epsilons(rank: int, world_size: int, init_method: str, args: Arguments) -> dict[str, float]:
    """The epsilon of each norm of a model, by module name."""
    from slimrl.megatron import parallel
    from slimrl.megatron.model import model_builder

    state = parallel.initialize(args, rank=rank, world_size=world_size, local_rank=rank, init_method=init_method)
    built = model_builder.build_model(args, state, model_builder.CustomModel.from_args(args))
    found = {
        _local_name(name): module.eps
        for module_name, module in built.named_modules()
        if hasattr(module, "eps")
        for name in (f"{module_name}.{weight}" for weight, _ in module.named_parameters() if "weight" in weight)
    }
    parallel.shutdown()
    return {name: epsilon for name, epsilon in found.items() if "norm" in name}


def test_latent_norms_have_their_own_epsilon_in_both_implementations(one_rank: RankPool):
    by_kind = [
        one_rank.run(epsilons, tiny.tiny_args(**tiny.LATENT_FLAGS, norm_epsilon=1e-5, spec=spec))[0]
        for spec in (None, ENGINE)
    ]
    assert by_kind[0] == by_kind[1]
    for name, value in by_kind[1].items():
        assert value == (1e-6 if name.endswith((".q_layernorm.weight", ".kv_layernorm.weight")) else 1e-5), name
    assert sum(value == 1e-6 for value in by_kind[1].values()) == 4


@pytest.mark.parametrize("kind", ["dense", "MoE"])
def test_fused_gradient_accumulation_gives_the_same_gradients(
    one_rank: RankPool, models: Any, expert_models: Any, kind: str
):
    made = {"dense": models, "MoE": expert_models}[kind]
    rollout = tiny.recorded_rollout(3)
    plain, fused = (
        one_rank.run(ranks.train_once, tiny.tiny_args(**KINDS[kind], ref_load=str(made.policy), spec=spec), rollout)[0]
        for spec in (None, FUSING)
    )
    assert plain.gradients.keys() == fused.gradients.keys()
    for name, gradient in plain.gradients.items():
        torch.testing.assert_close(fused.gradients[name], gradient, msg=lambda text, at=name: f"{at}: {text}")
    for name, weight in plain.weights.items():
        torch.testing.assert_close(fused.weights[name], weight, msg=lambda text, at=name: f"{at}: {text}")
