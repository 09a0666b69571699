"""Training in bfloat16: the optimizer's float32 weights follow AdamW, and the model's weights are their rounding."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slimrl.arguments import Arguments
from slimrl.data.train_batch import RolloutBatch
from tests.megatron import ranks
from tests.megatron.test_freeze import SETTINGS, flags
from tests.megatron.test_sharding import ROLLOUTS, SPREAD, losses_and_norms, relative_error, train

pytestmark = pytest.mark.slow

ON_HOST = SPREAD | {"optimizer_cpu_offload": True, "use_precision_aware_optimizer": True}
HALF = {"optimizer_offload_fraction": 0.5, "overlap_cpu_optimizer_d2h_h2d": True}


@dataclasses.dataclass
class Weight:
    """One weight, or this rank's part of it, flat."""

    decays: bool
    start: Tensor  # float32, before training
    gradients: list[Tensor]  # of each step, as passed to the optimizer: reduced and clipped
    master: Tensor  # float32, afterwards
    weight: Tensor  # bfloat16, afterwards


def follow_weights(
    rank: int, size: int, init_method: str, args: Arguments, rollouts: list[RolloutBatch]
) -> tuple[list[Weight], list[float], dict[str, Tensor]]:
    """Trains one step on each rollout; returns the history of every weight, the gradient norms and the full weights."""
    trainer = ranks.start(rank, size, init_method, args)
    triples = list(master_weights(trainer.optimizer))
    followed = [
        Weight(model.dim() > 1, master.detach().flatten().clone(), [], master, weight)
        for model, weight, master in triples
    ]
    norms = []
    for number, rollout in enumerate(rollouts):
        norms += [step["grad_norm"] for step in trainer.train(number, ranks.share_of(trainer, rollout))]
        for one in followed:
            one.gradients.append(one.master.grad.detach().float().flatten().clone())
    for one in followed:
        one.master, one.weight = one.master.detach().flatten().clone(), one.weight.detach().flatten().clone()
    whole = ranks.export(trainer)
    trainer.close()
    return followed, norms, whole


def master_weights(optimizer: Any) -> Any:
    """(model parameter, the slice that this rank's optimizer updates, its float32 copy)."""
    for part in optimizer.chained_optimizers:
        spread = hasattr(part, "shard_float16_groups")
        models = part.model_float16_groups if spread else part.float16_groups
        weights = part.shard_float16_groups if spread else part.float16_groups
        copies = part.shard_fp32_from_float16_groups if spread else part.fp32_from_float16_groups
        for model_group, weight_group, copy_group in zip(models, weights, copies, strict=True):
            for model, weight, copy in zip(model_group, weight_group, copy_group, strict=True):
                yield model, weight, part.optimizer.param_to_fp32_param[weight] if copy is None else copy


def adamw(weight: Weight, args: Arguments) -> Tensor:
    """The weight after its gradients, float64: Loshchilov and Hutter, arXiv:1711.05101, algorithm 2."""
    value = weight.start.double()
    first, second = torch.zeros_like(value), torch.zeros_like(value)
    for step, gradient in enumerate(weight.gradients, start=1):
        first = args.adam_beta1 * first + (1 - args.adam_beta1) * gradient.double()
        second = args.adam_beta2 * second + (1 - args.adam_beta2) * gradient.double() ** 2
        value = value * (1 - args.lr * args.weight_decay * weight.decays)
        corrected = (second / (1 - args.adam_beta2**step)).sqrt() + args.adam_eps
        value = value - args.lr * first / (1 - args.adam_beta1**step) / corrected
    return value


CASES: dict[str, tuple[int, dict[str, Any]]] = {
    "one rank": (1, {}),
    "one rank, distributed optimizer": (1, SPREAD),
    "DP2": (2, {}),
    "DP2, distributed optimizer": (2, SPREAD),
    "DP2, gradients in bf16": (2, SPREAD | {"grad_reduce_in_bf16": True}),
    "DP2, state in host memory": (2, ON_HOST),
}


@pytest.mark.parametrize("case", CASES)
def test_float32_master_weights_follow_adamw_and_the_model_has_their_rounding(
    case: str, models: Any, one_rank: Any, two_ranks: Any
):
    size, changes = CASES[case]
    args = flags(models, bf16=True, num_steps_per_rollout=1, **changes)
    results = {1: one_rank, 2: two_ranks}[size].run(follow_weights, args, ROLLOUTS)
    shares = size if args.use_distributed_optimizer else 1  # of the optimizer's state
    elements = 0
    squares = [0.0, 0.0]
    for followed, _, _ in results[:shares]:
        for one in followed:
            expected = adamw(one, args)
            assert (one.master.double() - expected).abs().max() < 1e-6
            assert (expected - one.start).abs().max() > 1e-3  # a step larger than rounding
            assert torch.equal(one.weight, one.master.bfloat16())
            elements += one.start.numel()
            squares = [
                total + float(gradient.double().square().sum())
                for total, gradient in zip(squares, one.gradients, strict=True)
            ]
    assert elements == 82304
    assert min(results[0][1]) > SETTINGS.clip_grad
    assert [math.sqrt(square) for square in squares] == pytest.approx([SETTINGS.clip_grad] * 2, rel=1e-5)
    for _, norms, whole in results[1:]:  # the other ranks have what one rank updated
        assert norms == results[0][1]
        assert all(torch.equal(whole[name], value) for name, value in results[0][2].items())


@pytest.mark.parametrize(
    ("kind", "saving"), [("dense", SPREAD), ("experts", ON_HOST | HALF)], ids=["state from the device", "from the host"]
)
def test_offloaded_state_changes_nothing_and_resumes_bit_for_bit(
    kind: str, saving: dict[str, Any], models: Any, expert_models: Any, two_ranks: Any, tmp_path: Path
):
    model = {"dense": models, "experts": expert_models}[kind]
    plain = two_ranks.run(train, flags(model, bf16=True, **SPREAD), ROLLOUTS, 2)[0]
    args = flags(model, bf16=True, **saving)
    args.save = str(tmp_path / kind)
    two_ranks.run(train, args, ROLLOUTS, 1)
    args = flags(model, bf16=True, **ON_HOST, **HALF)
    args.load = str(tmp_path / kind)
    resumed = two_ranks.run(train, args, ROLLOUTS, 2)[0]
    assert losses_and_norms(resumed) == losses_and_norms(plain)[4:]
    assert relative_error(resumed.weights, plain.weights) == 0
