"""The examples for generation and losses: their numbers, computed by hand."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import json
import math
import re
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from examples import advantages, flow, logs, losses, policy_loss, reward, rollouts, samples, supervised, training
from slimrl.cluster.run import Run
from slimrl.data.sample import Sample, SampleStatus
from slimrl.hooks import HookFailedError
from slimrl.megatron.training.loss.policy_loss import (
    PolicyLossConfig,
    PolicyLossHooks,
    PolicyLossInputs,
    policy_loss_sums,
)
from slimrl.rollout.convert_samples import RewardProcessing, compute_rewards, training_batch
from slimrl.rollout.metrics import EvalResult
from slimrl.rollout.rollout_function import RolloutOutput


def scored(reward_, number, group=0, length=3, **changes):
    values = dict(
        prompt=f"q{group}",
        index=number,
        group_index=group,
        tokens=list(range(length + 1)),
        response_length=length,
        rollout_log_probs=[-1.0] * length,
        reward=reward_,
        status=SampleStatus.COMPLETED,
    )
    return Sample(**(values | changes))


# -- around generation ------------------------------------------------------------------------------------------------


def test_shortest_correct_response_wins_its_group(make_args):
    group = [
        scored(None, number, length=length, response=f"\\boxed{{{answer}}}", label="2")
        for number, (length, answer) in enumerate([(9, 2), (5, 2), (5, 2), (3, 7)])
    ]
    assert asyncio.run(reward.shortest_wins(make_args(), group)) == [0.5, 1.0, 1.0, 0.0]


def test_leave_one_out_baseline_uses_only_the_same_group(make_args):
    rollout = [scored(r, n, group) for n, (r, group) in enumerate([(1.0, 0), (0.0, 1), (0.0, 0), (0.5, 0), (4.0, 2)])]
    found = compute_rewards(
        RewardProcessing.from_args(make_args(custom_reward_post_process_path="examples.reward.leave_one_out")), rollout
    )
    assert found.raw.tolist() == [1.0, 0.0, 0.0, 0.5, 4.0]
    assert found.normalized.tolist() == [0.75, 0.0, -0.75, 0.0, 0.0]


def test_final_answer_is_recorded_only_in_training(make_args):
    sample = scored(1.0, 0, response="so\nit is\n 7 \n")
    samples.note_final_answer(make_args(), sample, evaluation=True)
    assert sample.metadata == {}
    samples.note_final_answer(make_args(), sample, evaluation=False)
    assert sample.metadata == {"final_answer": "7"}


def test_unsolved_prompts_are_written(make_args, tmp_path):
    args = make_args(custom={"unsolved": str(tmp_path / "unsolved.jsonl")})
    groups = [[scored(0.0, 0, 0), scored(1.0, 1, 0)], [scored(0.0, 2, 1, label="3"), scored(0.0, 3, 1)]]
    for _ in range(2):
        samples.write_unsolved(args, groups, None)
    lines = [json.loads(line) for line in (tmp_path / "unsolved.jsonl").read_text().splitlines()]
    assert lines == [{"prompt": "q1", "label": "3"}] * 2


def test_truncated_samples_are_masked_but_count_in_the_baseline(make_args):
    args = make_args(custom_convert_samples_to_train_data_path="examples.samples.without_truncated")
    rollout = [
        scored(1.0, 0, loss_mask=[1, 0, 1]),
        scored(0.0, 1, length=2, status=SampleStatus.TRUNCATED),
        scored(3.0, 2, group=5),
    ]
    batch = training_batch(args, rollout, None, hook_args=args)
    assert batch.rewards.tolist() == [0.5, -0.5, 0.0] and batch.raw_rewards.tolist() == [1.0, 0.0, 3.0]
    assert batch.loss_mask.tolist() == [1, 0, 1, 0, 0, 1, 1, 1]
    assert batch.truncated.tolist() == [False, True, False] and batch.group_ids.tolist() == [0, 0, 5]


def test_reports_are_csv_lines(make_args, tmp_path):
    args = make_args(custom={"csv": str(tmp_path / "rewards.csv")})
    assert logs.rollout(3, args, [scored(1.0, 0), scored(0.0, 1)], None, 1.0) is False
    assert logs.evaluation(4, args, {"sums": {"rewards": [1.0, 1.0]}, "others": {"rewards": [0.25]}}, None) is False
    assert (tmp_path / "rewards.csv").read_text().split() == ["3,train,0.5", "4,sums,1.0", "4,others,0.25"]


class Builtin:
    def rollout(self, rollout_id, data_source):
        groups = [[scored(0.0, 0)], [scored(1.0, 1, 1)], [scored(0.0, 2, 2), scored(-1.0, 3, 2)]]
        return RolloutOutput(groups, {"rollout/raw_reward": 0.0})

    def evaluation(self, rollout_id):
        return {"a": EvalResult("a", [1.0], [scored(1.0, 0)], 1), "b": EvalResult("b", [0.0] * 3, [scored(0.0, 1)], 1)}


def test_rollout_function_adds_a_metric_and_eval_function_a_dataset(make_args):
    made = rollouts.counted(make_args(), 0, None, evaluation=False, generator=Builtin())
    assert made.metrics == {"rollout/raw_reward": 0.0, "rollout/unsolved": pytest.approx(2 / 3)}
    assert len(made.groups) == 3
    results = rollouts.with_total(make_args(), 0, None, evaluation=True, generator=Builtin())
    assert {name: result.mean_reward for name, result in results.items()} == {"a": 1.0, "b": 0.0, "total": 0.25}


def test_label_becomes_the_target_response(make_args, tokenizer):
    prompt = tokenizer("1+1=", add_special_tokens=False)["input_ids"]

    class Source:
        def get_samples(self, num_groups):
            return [[Sample("1+1=", 0, 0, label="2", tokens=list(prompt))] for _ in range(num_groups)]

    args = make_args(rollout_batch_size=3)
    groups = supervised.generate_rollout(args, 0, Source(), evaluation=False, tokenizer=tokenizer)
    (sample,) = groups[0]
    assert len(groups) == 3 and tokenizer.decode(sample.tokens) == "1+1=2<|im_end|>"
    assert sample.response_length == 2 and sample.loss_mask == [1, 1] and sample.prompt_length == len(prompt)


# -- parts of training ------------------------------------------------------------------------------------------------

SETTINGS = PolicyLossConfig(
    eps_clip=0.2,
    eps_clip_high=0.2,
    eps_clip_c=None,
    entropy_coef=0.0,
    kl_loss_coef=0.5,
    kl_loss_type="k2",
    per_token=False,
)
GAP = math.log(3.0)  # of the first sample's second token, which only that engine found likely


def two_samples() -> PolicyLossInputs:
    """Three tokens, of which the last is masked, and one: ratio 1, advantages 2 and -1, a distance to the reference."""
    old = torch.tensor([-1.0, -2.0, -3.0, -1.5])
    return PolicyLossInputs(
        log_probs=old.clone().requires_grad_(),
        entropy=torch.zeros(4),
        old_log_probs=old,
        train_log_probs=old,
        rollout_log_probs=old + torch.tensor([math.log(1.25), GAP, 0.0, 0.0]),
        ref_log_probs=old - 2.0,
        advantages=torch.tensor([2.0, 2.0, 2.0, -1.0]),
        loss_mask=torch.tensor([1.0, 1.0, 0.0, 1.0]),
        response_lengths=torch.tensor([3, 1]),
        lengths=((5, 3), (4, 1)),
    )


def correction(make_args, **changes):
    args = make_args(tis_clip=2.0, tis_clip_low=0.5, **changes)
    return PolicyLossHooks(correction=partial(policy_loss.reject, args), correction_name="--custom-tis-function-path x")


@pytest.mark.parametrize("per_token", [False, True])
def test_rejected_tokens_are_excluded_from_every_mean(make_args, per_token):
    settings = dataclasses.replace(SETTINGS, loss_hooks=correction(make_args), per_token=per_token)
    sums = policy_loss_sums(two_samples(), settings)
    # the first token's ratio is 1 / 1.25, the second's a third; the KL of each is 2^2 / 2, by its coefficient 1
    assert float(sums.loss) == pytest.approx((-2 * 0.8 + 1) + (1 + 1), rel=1e-6)
    assert int(sums.count) == (3 if per_token else 2)
    assert float(sums.custom["kept_ratio"]) == pytest.approx(0.8 + 1, rel=1e-6)
    assert sums.trained_tokens == 3


def test_constant_length_mean_leaves_the_kl_mean_unchanged(make_args):
    parts = PolicyLossHooks(reducer=policy_loss.by_constant)
    inputs = two_samples()
    sums = policy_loss_sums(inputs, dataclasses.replace(SETTINGS, loss_hooks=parts))
    assert float(sums.loss) == pytest.approx((-2 - 2 + 1) / 1024 + (1 + 1), rel=1e-6)
    logged = [float(sums.weighted[name]) for name in ("loss", "pg_loss")]
    assert logged == pytest.approx([float(sums.loss), -3 / 1024], rel=1e-6)
    sums.loss.backward()
    kl = torch.tensor([2.0, 2.0, 0.0, 2.0]) * 0.5 * torch.tensor([0.5, 0.5, 0.0, 1.0])
    expected = torch.tensor([-2.0, -2.0, 0.0, 1.0]) / 1024 + kl
    torch.testing.assert_close(inputs.log_probs.grad, expected)


@pytest.mark.parametrize(
    ("answer", "sentence"),
    [
        (lambda pg_loss, **_: pg_loss, "x returned a tensor [4]: return (pg_loss, masks, metrics)"),
        (lambda pg_loss, **k: (pg_loss.sum(), k["loss_masks"], {}), "its pg_loss is a tensor []: return a tensor [4]"),
        (lambda pg_loss, **k: (pg_loss, k["loss_masks"][:1], {}), "its masks do not fit the samples"),
        (
            lambda pg_loss, **k: (pg_loss, [torch.ones_like(mask) for mask in k["loss_masks"]], {}),
            "its masks train on tokens that were masked before",
        ),
        (lambda pg_loss, **k: (pg_loss, k["loss_masks"], {"odd": 1.0}), "its metric odd is a value of type float"),
    ],
)
def test_correction_with_an_invalid_result_is_rejected(answer, sentence):
    parts = PolicyLossHooks(correction=answer, correction_name="--custom-tis-function-path x")
    with pytest.raises(HookFailedError) as caught:
        policy_loss_sums(two_samples(), dataclasses.replace(SETTINGS, loss_hooks=parts))
    assert sentence in str(caught.value) and str(caught.value).startswith("--custom-tis-function-path x")


def test_earlier_tokens_get_less_of_the_reward(make_args):
    data = {"rewards": [2.0, -1.0], "kl": [torch.tensor([0.1, 0.2, 0.4]), torch.tensor([0.0])]}
    advantages.discounted(make_args(custom={"discount": 0.5}, kl_coef=10.0), data)
    assert [values.tolist() for values in data["advantages"]] == [pytest.approx([-0.5, -1.0, -2.0]), [-1.0]]
    assert data["returns"] is data["advantages"]


def test_confident_tokens_are_masked(make_args):
    data = {"loss_masks": [torch.tensor([1.0, 1.0, 0.0])], "log_probs": [torch.tensor([0.95, 0.8, 0.5]).log()]}
    training.leave_out_sure_tokens(make_args(custom={"sure": 0.9}), 0, data)
    assert data["loss_masks"][0].tolist() == [0.0, 1.0, 0.0]


@pytest.mark.parametrize(
    ("share", "expected"), [(0.25, [0, 0, 4, 0, 0]), (0.5, [2, 0, 2, 0, 0]), (1.0, [1, 1, 1, 0, 1])]
)
def test_highest_entropy_tokens_get_the_total_weight(share, expected):
    entropy, mask = torch.tensor([0.5, 0.1, 0.9, 7.0, 0.2]), torch.tensor([1.0, 1.0, 1.0, 0.0, 1.0])
    assert losses.chosen_weights(entropy, mask, share).tolist() == expected
    assert losses.chosen_weights(entropy, torch.zeros(5), share).tolist() == [0.0] * 5


def test_non_finite_weight_is_named(make_args):
    model = torch.nn.Linear(2, 2)
    training.check_weights(make_args(), [model], "")
    with torch.no_grad():
        model.bias[1] = math.nan
    with pytest.raises(ValueError, match="^ref_weight bias is not finite"):
        training.check_weights(make_args(), [model], "ref_")


def test_first_steps_have_zero_learning_rate(make_args):
    optimizer = torch.optim.SGD([torch.zeros(1)], lr=0.5)
    args = make_args(custom={"steps_at_rest": 3}, num_steps_per_rollout=2)
    rates = []
    for rollout_id, step_id in ((0, 0), (0, 1), (1, 0), (1, 1)):
        optimizer.param_groups[0]["lr"] = 0.5
        training.rest(args, rollout_id, step_id, [], optimizer, None)
        rates.append(optimizer.param_groups[0]["lr"])
    assert rates == [0.0, 0.0, 0.0, 0.5]


def test_repeated_version_is_copied_again(make_args, tmp_path, monkeypatch):
    monkeypatch.setattr(training.dist, "get_rank", lambda: 0)
    args, version = make_args(custom={"mirror": str(tmp_path / "mirror")}), tmp_path / "weight_v000003"
    version.mkdir()
    for number, name in enumerate(("old.safetensors", "model.safetensors")):  # a resumed run may cut differently
        for file in version.iterdir():
            file.unlink()
        (version / name).write_text(str(number))
        training.keep_a_copy(args, version, [])
    assert [(file.name, file.read_text()) for file in (tmp_path / "mirror/weight_v000003").iterdir()] == [
        ("model.safetensors", "1")
    ]


# -- a flow -----------------------------------------------------------------------------------------------------------


class RecordedRun:
    """The verbs of a run; each rollout has the next of the rewards."""

    weight_version = 0
    args = SimpleNamespace(eval_datasets=["sums"])

    def __init__(self, rewards):
        self.rollout_ids = range(len(rewards))
        self._rewards = rewards
        self.calls = []

    def step(self, rollout_id):
        return contextlib.nullcontext()

    def generate(self, rollout_id):
        self.calls.append(f"generate {rollout_id}")
        return SimpleNamespace(rollout_id=rollout_id, metrics={"rollout/raw_reward": self._rewards[rollout_id]})

    def train(self, rollout):
        self.calls.append(f"train {rollout.rollout_id}")
        return [{}]

    def save_if_due(self, rollout, metrics):
        self.calls.append(f"save {rollout.rollout_id}")

    def update_weights(self, version):
        self.calls.append(f"weights {version}")

    def record(self, rollout, metrics):
        assert metrics == [{}]

    def evaluate(self, rollout_id):
        self.calls.append(f"evaluate {rollout_id}")


def test_flow_evaluates_on_a_rise_and_ends_when_the_reward_is_high_enough():
    run = RecordedRun([0.03, 0.06, 0.1, 0.11, 0.96, 0.99])
    flow.learn(run)
    expected = ["weights 0"]
    for number, evaluated in enumerate([False, True, False, True, True]):
        expected += [f"generate {number}", f"train {number}", f"save {number}", f"weights {number + 1}"]
        expected += [f"evaluate {number}"] * evaluated
    assert run.calls == expected


def test_flow_has_at_most_60_lines_and_calls_only_verbs_of_a_run():
    source = Path(flow.__file__).read_text()
    assert len(source.splitlines()) <= 60
    named = set(re.findall(r"\brun\.(\w+)", source))
    assert "generate" in named and named <= {*dir(Run), "rollout_ids", "weight_version", "args"}
    assert [name for name in named if name.startswith("_")] == []
