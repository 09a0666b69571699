"""slime's helpers for losses, masks, grades and metrics, against hand-computed numbers."""

from __future__ import annotations

import asyncio
import math

import pytest
import torch

from slimrl.arguments import Arguments
from slimrl.compatibility import loss_helpers, rollout_helpers
from slimrl.compatibility.loss_helpers import MultiTurnLossMaskGenerator, get_response_lengths
from slimrl.compatibility.rollout_helpers import (
    RolloutFnEvalOutput,
    RolloutFnTrainOutput,
    SingletonMeta,
    load_function,
    run,
)
from slimrl.data.sample import Sample
from slimrl.megatron.training.loss.policy_loss import PolicyLossHooks
from slimrl.rollout.rollout_function import rollout_output


def test_slime_loss_correction_works_unchanged():
    own = {"bound_low": 0.5, "bound_high": 2.0}
    args = Arguments(use_tis=True, custom_tis_function_path="mismatch.bounded_weights", custom=own)
    train, rollout = torch.tensor([-1.0, -1.0, -2.0]), torch.tensor([-1.0, -3.0, -2.0 - math.log(1.5)])
    masks = torch.tensor([1.0, 1.0, 1.0])
    functions = PolicyLossHooks.from_args(args, args)
    loss, kept, noted = functions.corrected(torch.ones(3), train, rollout, masks, [4, 3], [2, 1])
    assert loss.tolist() == pytest.approx([1.0, math.exp(2.0), 1.5])
    assert kept.tolist() == [1.0, 0.0, 1.0] and noted["mis_ratio"].tolist() == loss.tolist()
    with pytest.raises(ValueError, match="2 values for a response of 3 tokens"):
        loss_helpers.all_gather_with_cp(torch.zeros(2), 5, 3)


def test_losses_match_their_formulas():
    new, base = torch.tensor([-1.0, -0.5]), torch.tensor([-1.5, -0.25])
    assert loss_helpers.compute_approx_kl(new, base, "k1", torch.tensor([2.0, 1.0])).tolist() == [1.0, -0.25]
    expected = [math.exp(-0.5) - 1 + 0.5, math.exp(0.25) - 1 - 0.25]
    assert loss_helpers.compute_approx_kl(new, base, "low_var_kl").tolist() == pytest.approx(expected)
    # ratios 2 and 1/2 with advantages 1 and -1: both are clipped
    kl = torch.tensor([-math.log(2), math.log(2)])
    loss, clipped = loss_helpers.compute_policy_loss(kl, torch.tensor([1.0, -1.0]), 0.2, 0.3)
    assert loss.tolist() == pytest.approx([-1.3, 0.8]) and clipped.tolist() == [1.0, 1.0]
    parts = [torch.tensor([-1.0, -2.0]), torch.tensor([-1.0])], [torch.tensor([-2.0, -2.5]), torch.tensor([0.0])]
    masks = [torch.tensor([1.0, 1.0]), torch.tensor([1.0])]
    assert loss_helpers.compute_gspo_kl(*parts, parts[0], masks).tolist() == pytest.approx([-0.75, -0.75, 1.0])
    kl = [torch.zeros(2), torch.zeros(1)]
    assert [part.tolist() for part in loss_helpers.get_grpo_returns(torch.tensor([2.0, 3.0]), kl)] == [
        [2.0, 2.0],
        [3.0],
    ]
    returns = loss_helpers.get_reinforce_plus_plus_returns(
        torch.tensor([1.0, 4.0]), [torch.tensor([0.5, 1.0]), torch.tensor([0.0])], masks, [2, 1], [3, 2], 0.1, 0.5
    )
    assert [part.tolist() for part in returns] == [pytest.approx([-0.05 + 0.5 * 0.9, 0.9]), [4.0]]
    spread = loss_helpers.get_reinforce_plus_plus_baseline_advantages(
        torch.tensor([1.0]), [torch.tensor([1.0])], masks, 0.25
    )
    assert spread[0].tolist() == [0.75]
    values, masks = torch.tensor([1.0, 3.0, 8.0]), [torch.tensor([1.0, 1.0]), torch.tensor([1.0])]
    assert loss_helpers.get_sum_of_sample_mean([3, 2], [2, 1], masks)(values) == 10.0
    assert loss_helpers.get_sum_of_sample_mean([3, 2], [2, 1], masks, True)(values) == 12.0


def test_graders_compare_by_meaning():
    assert rollout_helpers.compute_score("so\nAnswer: 1,000", "1000") == {"score": 1.0, "acc": True, "pred": "1,000"}
    assert rollout_helpers.compute_score("Answer: 7", "7", strict_box_verify=True)["score"] == -1.0
    assert rollout_helpers.compute_score("Answer: \\boxed{7}", "7", strict_box_verify=True)["acc"] is True
    assert rollout_helpers.grade_answer_verl("it is \\boxed{\\frac{1}{2}}", "0.5") is True
    assert rollout_helpers.grade_answer_verl("it is \\boxed{3}", None) is False
    assert (
        rollout_helpers.answers_are_equal("0.5", "1/2") is True and rollout_helpers.answers_are_equal("2", "3") is False
    )
    assert rollout_helpers.get_deepscaler_rule_based_reward("</think>\\boxed{4}", "4") == 1
    assert rollout_helpers.compute_gpqa_reward("The answer is B", "B") == 1.0
    assert rollout_helpers.f1_score("the red fox", "red dog") == (0.5, 0.5, 0.5)
    assert rollout_helpers.f1_score(None, "red dog") == (0.0, 0.0, 0.0)
    assert load_function("slime.rollout.rm_hub.boxed.last_boxed")("\\boxed{7}") == "7"


def test_loss_masks_match_supervised_training(tokenizer):
    messages = [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]
    generator = MultiTurnLossMaskGenerator(tokenizer, "qwen")
    ids, mask = generator.get_loss_mask([*messages, {**messages[1], "step_loss_mask": 0}])
    assert len(ids) == len(mask) and mask.count(1) == 3  # two letters and the end of the turn
    assert generator.get_text_from_loss_mask(ids, mask) == ["yo<|im_end|>"]
    assert (
        generator.get_response_lengths([mask, [0]])
        == get_response_lengths([mask, [0]])
        == [len(mask) - mask.index(1), 0]
    )
    with pytest.raises(ValueError, match="tokenizer_type 'llama' is unknown: use qwen"):
        MultiTurnLossMaskGenerator(tokenizer, "llama")


def test_metrics_match_the_run():
    assert rollout_helpers.dict_add_prefix({"a": 1}, "x/") == {"x/a": 1}
    # groups 1 1 0 0 and 0 0 0 0: one sample passes with 1/2, two with 1 - 1/6
    rates = rollout_helpers.compute_pass_rate([1, 1, 0, 0, 0, 0, 0, 0], 4)
    assert rates == {"pass@1": 0.25, "pass@2": pytest.approx(5 / 12), "pass@4": 0.5}
    assert rollout_helpers.compute_pass_rate([1.0], 1) == {}
    with pytest.raises(ValueError, match="5 rewards are not 1 groups of 4"):
        rollout_helpers.compute_pass_rate([1] * 5, 4)


def test_small_helpers():
    async def nested():
        return await asyncio.to_thread(run, asyncio.sleep(0, 5))

    class Only(metaclass=SingletonMeta):
        def __init__(self, value):
            self.value = value

    assert asyncio.run(nested()) == 5 and load_function(None) is None
    assert Only(1) is Only(2) and Only(3).value == 1
    group = [Sample(index=0, group_index=0)]
    assert rollout_output(RolloutFnTrainOutput([group], {"a": 1}), "x").metrics == {"a": 1}
    assert RolloutFnEvalOutput({"set": {}}).data == {"set": {}}
    with pytest.raises(ValueError, match="metrics \\['a'\\] of an evaluation belong to no evaluation set"):
        RolloutFnEvalOutput({}, {"a": 1})


def test_rewards_of_distillation_are_zero_and_need_a_teacher():
    samples = [Sample(index=index) for index in range(3)]
    for kind in ("sglang", "megatron"):
        args = Arguments(use_opd=True, opd_type=kind)
        assert run(rollout_helpers.reward_func(args, samples[0])) == 0.0
        assert rollout_helpers.post_process_rewards(args, samples) == ([0.0] * 3, [0.0] * 3)
    with pytest.raises(ValueError, match="needs a teacher: add --use-opd --opd-type sglang"):
        run(rollout_helpers.reward_func(Arguments(use_opd=False), samples[0]))
