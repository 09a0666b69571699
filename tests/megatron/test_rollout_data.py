"""Hooks may change the rollout data: the batch stays unchanged, and invalid changes are rejected."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from slimrl.hooks import HookFailedError
from slimrl.megatron.training.advantages import TrainingHooks, build_train_inputs
from slimrl.megatron.training.forward_step import TrainTensors
from slimrl.megatron.training.train_metrics import _samples
from tests.megatron import tiny


def postprocessed(function: str, rollout: Any) -> tuple[TrainTensors, Any]:
    args = tiny.tiny_args(rollout_data_postprocess_path=f"tests.megatron.custom_functions.{function}")
    hooks = TrainingHooks(args, [], None, None, args)
    log_probs = torch.zeros_like(rollout.loss_mask)
    return build_train_inputs(args, hooks, 0, rollout, log_probs, None, None, None, torch.device("cpu"))


@pytest.mark.parametrize("function", ["swap_tokens", "swap_tokens_in_place", "shorten"])
def test_changes_to_tokens_or_lengths_by_a_hook_are_rejected(function: str):
    rollout = tiny.recorded_rollout(seed=5)
    before = rollout.tokens.clone()
    with pytest.raises(
        HookFailedError, match=f"custom_functions.{function} changed tokens or lengths, which are already packed"
    ):
        postprocessed(function, rollout)
    assert torch.equal(rollout.tokens, before)


def test_in_place_changes_by_a_hook_reach_the_loss_but_not_the_batch():
    rollout = tiny.recorded_rollout(seed=5)
    mask, engines = rollout.loss_mask.clone(), rollout.rollout_log_probs.clone()
    columns, _ = postprocessed("mask_first_tokens", rollout)
    assert torch.equal(rollout.loss_mask, mask) and torch.equal(rollout.rollout_log_probs, engines)
    starts = rollout.response_lengths.cumsum(0) - rollout.response_lengths
    assert not columns.loss_mask[starts].any() and columns.loss_mask.sum() < mask.sum()
    assert not columns.rollout_log_probs[starts].any() and not torch.equal(columns.rollout_log_probs, engines)


def test_supervised_train_dump_has_no_policy_log_probs():
    rollout = tiny.recorded_rollout(seed=5)
    rollout.micro_batches = [[[row] for row in range(8)]]
    columns = TrainTensors.without_policy(rollout.loss_mask)
    columns = dataclasses.replace(columns, teacher_log_probs=rollout.rollout_log_probs)
    for with_policy in (False, True):
        sample = _samples(rollout, columns, 0, with_policy=with_policy)[1]
        assert torch.equal(sample["loss_mask"], rollout.loss_mask.split(rollout.response_lengths.tolist())[1])
        names = ("train_log_probs", "rollout_log_probs", "teacher_log_probs", "advantages")
        assert [sample[name] is not None for name in names] == [with_policy] * 4
