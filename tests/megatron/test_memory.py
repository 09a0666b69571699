"""The memory report of a rank: bytes known in advance, and the trainer's numbers next to the plan's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slimrl.arguments import Arguments
from slimrl.data.train_batch import RolloutBatch
from slimrl.megatron.offload import CHUNK_BYTES
from tests.megatron import ranks, tiny
from tests.megatron.layouts import SPREAD, TP2_SP, Layout, fsdp


def test_shared_storage_of_saved_tensors_counts_once():
    from slimrl.megatron.training.profiling import KeptForBackward

    weight = torch.ones(8, 8, requires_grad=True)
    with KeptForBackward({weight.untyped_storage().data_ptr()}) as kept:
        hidden = torch.ones(5, 8) @ weight  # keeps its input
        result = hidden.relu()  # keeps its result
        (result * result).sum()  # keeps the result, twice
    assert kept.peak == 2 * 5 * 8 * 4


def test_memory_freed_by_backward_is_not_counted():
    from slimrl.megatron.training.profiling import KeptForBackward

    weight = torch.ones(8, 8, requires_grad=True)
    with KeptForBackward({weight.untyped_storage().data_ptr()}) as kept:
        for rows in (5, 3, 4):
            (torch.ones(rows, 8) @ weight).sum().backward()
    assert kept.peak == 5 * 8 * 4
    assert weight.grad.tolist() == [[12.0] * 8] * 8


def test_message_shows_measured_and_planned_memory():
    from slimrl.megatron.training.profiling import sentence

    measured = {"parameters": 2**30, "gradients": 2**31, "optimizer": 3 * 2**29, "activations": 5 * 2**20}
    assert sentence(measured, measured | {"activations": 2**21}, 4096) == (
        "parameters 1.00 GiB (planned 1.00 GiB), gradients 2.00 GiB (planned 2.00 GiB), optimizer 1.50 GiB (planned"
        " 1.50 GiB), activations 5.0 MiB (planned 2.0 MiB) with micro-batches of up to 4,096 tokens"
    )


def train(
    rank: int, world_size: int, init_method: str, args: Arguments, rollout: RolloutBatch
) -> tuple[dict[str, float], dict[str, float], list[int]]:
    """The reports of two rollouts, and the elements of this rank's weights."""
    trainer = ranks.start(rank, world_size, init_method, args)
    noted = []
    for number in range(2):
        trainer.train(number, ranks.share_of(trainer, rollout))
        noted.append(trainer.memory_report.take())
    own = [parameter.numel() for stage in trainer.stages for parameter in stage.parameters()]
    trainer.close()
    return *noted, own


@pytest.mark.slow
def test_every_rank_reports_the_bytes_of_the_fullest_rank_and_the_plan_once(models: Any, two_ranks: Any):
    layout = {"pipeline_model_parallel_size": 2, "bf16": True, "actor_num_gpus_per_node": 2}
    args = tiny.tiny_args(load=str(models.policy), **models.flags, **layout)
    results = two_ranks.run(train, args, tiny.recorded_rollout(seed=5))
    fullest = max(sum(own) for *_, own in results)
    report, then, _ = results[0]
    assert (report["memory_parameters"], report["memory_gradients"]) == (2 * fullest, 4 * fullest)
    # a copy and two moments in float32; a counter of the steps for each weight
    assert 12 * fullest <= report["memory_optimizer"] <= 12 * fullest + 1024
    assert report["planned_memory_parameters"] == report["memory_parameters"]
    assert report["planned_memory_gradients"] == report["memory_gradients"]
    assert report["planned_memory_optimizer"] == 12 * fullest
    assert 0 < report["planned_memory_activations"] < report["memory_activations"]
    assert then == {}
    assert results[1][:2] == (report, then)


@pytest.mark.slow
def test_kept_logits_are_counted_as_saved_and_others_are_not(models: Any, one_rank: Any):
    rollout = tiny.recorded_rollout(seed=5)
    sizes = {}
    for keep in (True, False):
        args = tiny.tiny_args(load=str(models.policy), keep_logits=keep, micro_batch_size=4, **models.flags)
        ((report, *_),) = one_rank.run(train, args, rollout)
        sizes[keep] = report["memory_activations"]
    # the first step's only micro-batch: the layer keeps its full input and the response tokens' logits, or only the
    # hidden states of these; log-probabilities and entropies need the same few numbers per token in both
    positions, tokens = int(rollout.total_lengths[:4].sum()), int(rollout.response_lengths[:4].sum())
    assert sizes[True] - sizes[False] == 4 * (positions * 64 + tokens * 128 - tokens * 64)


OF_ALL_MODELS = {
    "1 rank": Layout(1, {}),
    "TP2 SP, bf16": Layout(2, TP2_SP | {"bf16": True}),
    "DP2, distributed optimizer": Layout(2, SPREAD),
    "DP2, Megatron-FSDP": Layout(2, fsdp("optim_grads_params")),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", OF_ALL_MODELS)
def test_critic_and_reference_are_reported_beside_the_plan(name: str, models: Any, one_rank: Any, two_ranks: Any):
    layout = OF_ALL_MODELS[name]
    args = tiny.tiny_args(
        load=str(models.policy),
        ref_load=str(models.reference),
        use_kl_loss=True,
        kl_loss_coef=0.05,
        advantage_estimator="ppo",
        critic_lr=1e-3,
        actor_num_gpus_per_node=layout.ranks,
        **models.flags,
        **layout.flags,
    )
    pool = one_rank if layout.ranks == 1 else two_ranks
    results = pool.run(train, args, tiny.recorded_rollout(seed=5))
    report = results[0][0]
    for kind in ("parameters", "gradients", "critic_gradients"):
        assert report[f"memory_{kind}"] == report[f"planned_memory_{kind}"] > 0, kind
    for kind in ("optimizer", "critic"):  # except for padding, and a counter of the steps for each weight
        assert report[f"memory_{kind}"] == pytest.approx(report[f"planned_memory_{kind}"], abs=1024), kind
    planned = report["planned_memory_host_models"]
    assert 0 <= report["memory_host_models"] - planned <= CHUNK_BYTES
    assert planned == pytest.approx(2 * report["memory_parameters"], rel=0.01)  # reference and policy, without padding
