"""What a rank says about its memory: bytes known beforehand, and the trainer's numbers beside the plan's."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slimrl.arguments import Arguments
from slimrl.data.train_batch import RolloutBatch
from tests.megatron import ranks, tiny


def test_what_operations_keep_counts_once_for_each_piece_of_memory():
    from slimrl.megatron.training.memory_report import KeptForBackward

    weight = torch.ones(8, 8, requires_grad=True)
    with KeptForBackward({weight.untyped_storage().data_ptr()}) as kept:
        hidden = torch.ones(5, 8) @ weight  # keeps its input
        result = hidden.relu()  # keeps its result
        (result * result).sum()  # keeps the result, twice
    assert kept.peak == 2 * 5 * 8 * 4


def test_what_a_backward_pass_has_let_go_of_counts_no_longer():
    from slimrl.megatron.training.memory_report import KeptForBackward

    weight = torch.ones(8, 8, requires_grad=True)
    with KeptForBackward({weight.untyped_storage().data_ptr()}) as kept:
        for rows in (5, 3, 4):
            (torch.ones(rows, 8) @ weight).sum().backward()
    assert kept.peak == 5 * 8 * 4
    assert weight.grad.tolist() == [[12.0] * 8] * 8


def test_the_sentence_has_measured_and_planned_side_by_side():
    from slimrl.megatron.training.memory_report import sentence

    measured = {"parameters": 2**30, "gradients": 2**31, "optimizer": 3 * 2**29, "activations": 5 * 2**20}
    assert sentence(measured, measured | {"activations": 2**21}, 4096) == (
        "parameters 1.00 GiB (planned 1.00 GiB), gradients 2.00 GiB (planned 2.00 GiB), optimizer 1.50 GiB (planned"
        " 1.50 GiB), activations 5.0 MiB (planned 2.0 MiB) with micro-batches of up to 4,096 tokens"
    )


def train(
    rank: int, world_size: int, init_method: str, args: Arguments, rollout: RolloutBatch
) -> tuple[dict[str, float], dict[str, float], list[int]]:
    """What was noted of each of two rollouts, and the elements of this rank's weights."""
    trainer = ranks.start(rank, world_size, init_method, args)
    noted = []
    for number in range(2):
        trainer.train(number, ranks.share_of(trainer, rollout))
        noted.append(trainer.memory_report.take())
    own = [parameter.numel() for stage in trainer.stages for parameter in stage.parameters()]
    trainer.close()
    return *noted, own


@pytest.mark.slow
def test_every_rank_tells_the_bytes_of_the_fullest_and_the_plan_once(models: Any, two_ranks: Any):
    layout = {"pipeline_model_parallel_size": 2, "bf16": True, "actor_num_gpus_per_node": 2}
    args = tiny.tiny_args(load=str(models.policy), **models.flags, **layout)
    results = two_ranks.run(train, args, tiny.recorded_rollout(seed=5))
    fullest = max(sum(own) for *_, own in results)
    told, then, _ = results[0]
    assert (told["memory_parameters"], told["memory_gradients"]) == (2 * fullest, 4 * fullest)
    # a copy and two moments in float32; a counter of the steps for each weight
    assert 12 * fullest <= told["memory_optimizer"] <= 12 * fullest + 1024
    assert told["planned_memory_parameters"] == told["memory_parameters"]
    assert told["planned_memory_gradients"] == told["memory_gradients"]
    assert told["planned_memory_optimizer"] == 12 * fullest
    assert 0 < told["planned_memory_activations"] < told["memory_activations"]
    assert then == {}
    assert results[1][:2] == (told, then)


@pytest.mark.slow
def test_kept_logits_are_among_what_is_kept_and_others_are_not(models: Any, one_rank: Any):
    rollout = tiny.recorded_rollout(seed=5)
    sizes = {}
    for keep in (True, False):
        args = tiny.tiny_args(load=str(models.policy), keep_logits=keep, micro_batch_size=4, **models.flags)
        ((told, *_),) = one_rank.run(train, args, rollout)
        sizes[keep] = told["memory_activations"]
    # the first step's only micro-batch: the layer keeps its whole input and the response tokens' logits, or nothing but
    # the hidden states of these; log-probabilities and entropies need the same few numbers per token in both
    positions, tokens = int(rollout.total_lengths[:4].sum()), int(rollout.response_lengths[:4].sum())
    assert sizes[True] - sizes[False] == 4 * (positions * 64 + tokens * 128 - tokens * 64)
