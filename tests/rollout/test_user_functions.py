"""Custom functions around a rollout: their input, when they are called, and the effect of their result."""

from __future__ import annotations

import asyncio
import sys
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from slimrl.data.sample import Sample, SampleStatus
from slimrl.data.train_batch import batch_from_samples
from slimrl.hooks import HookError, HookFailedError
from slimrl.observability.run_log import RunLog, StepRecord
from slimrl.observability.summary import load_summary
from slimrl.rollout.convert_samples import RewardProcessing, batch_from_columns, compute_rewards, training_batch
from slimrl.rollout.dataset.data_source import GroupBuffer, RolloutDataSource
from slimrl.rollout.filter_hub.dynamic_sampling_filters import DynamicFilterOutput, check_any_completed
from slimrl.rollout.generation.sample_generator import SampleError
from slimrl.rollout.metrics import EvalResult
from slimrl.rollout.rollout_function import reported_metrics, reported_scalars
from slimrl.rollout.rollout_generator import RolloutGenerator
from tests.observability.test_run_log import scalars as tensorboard_scalars
from tests.observability.wandb_file import rows

HUB = "slime.rollout.filter_hub.dynamic_sampling_filters"
FUNCTIONS = """
import copy
import torch
from types import SimpleNamespace

def noted(args, name, what):
    args.custom.setdefault(name, []).append(what)

def see(args, sample, rollout_id, evaluation):
    noted(args, "seen", (sample.index, rollout_id, evaluation, sample.reward))
    sample.label = str(int(sample.label) + 1)

async def replace(args, sample, **told):
    noted(args, "told", told)
    changed = copy.deepcopy(sample)
    changed.metadata["by"] = "replace"
    return changed

def confuse(args, sample):
    return "sample"

def fail(args, sample):
    raise KeyError("tool")

def every_second(args, groups):
    for sample in groups[0]:
        sample.remove_sample = True
    noted(args, "filtered", [group[0].group_index for group in groups])

def failing_filter(args, groups):
    raise ZeroDivisionError("no groups")

def all_groups(args, groups, data_source):
    noted(args, "all", [group[0].group_index for group in groups])
    noted(args, "length", len(data_source))

def odd_bool(args, samples):
    return samples[0].group_index % 2 == 1

def odd_tensor(args, samples, **kwargs):
    return torch.tensor(samples[0].group_index % 2 == 1)

def odd_reasoned(args, samples):
    odd = samples[0].group_index % 2 == 1
    return SimpleNamespace(keep=odd, reason=None if odd else "even")

def forgetful(args, samples):
    pass

def own_evaluation(args, rollout_id, data_source, *, evaluation, generator=None):
    assert evaluation and data_source is None
    results = generator.evaluation(rollout_id)
    return {"mine": {"rewards": [2.0] * len(results["sums"].samples), "samples": results["sums"].samples}}

def log(rollout_id, args, samples, extra_metrics, rollout_time):
    noted(args, "logged", (rollout_id, len(samples), extra_metrics, rollout_time))
    return args.custom["replace"]

def log_evaluation(rollout_id, args, data, extra_metrics):
    noted(args, "logged", (rollout_id, {name: sorted(part) for name, part in data.items()}, data["a"]["truncated"]))
    return args.custom["replace"]

def convert(args, samples):
    kept = [sample for sample in samples if not sample.remove_sample]
    return {
        "tokens": [sample.tokens for sample in kept],
        "response_lengths": [sample.response_length for sample in kept],
        "rewards": [2 * sample.reward for sample in kept],
        "raw_reward": [sample.reward for sample in kept],
        "truncated": [int(sample.status == sample.Status.TRUNCATED) for sample in kept],
        "loss_masks": [sample.loss_mask for sample in kept],
        "rollout_log_probs": [sample.rollout_log_probs for sample in kept],
        "sample_indices": [sample.index for sample in kept],
        "rollout_ids": [sample.group_index for sample in kept],
    }

def convert_badly(args, samples):
    return {"tokens": [[1]], "multimodal_train_inputs": [None]}
"""


@pytest.fixture
def own(tmp_path, monkeypatch):
    (tmp_path / "functions_under_test.py").write_text(FUNCTIONS)
    monkeypatch.syspath_prepend(tmp_path)
    yield "functions_under_test"
    sys.modules.pop("functions_under_test", None)


@pytest.fixture
def roll(make_args, tokenizer, fake_engine):
    def run(work=None, engine=None, **changes):
        args = make_args(**changes)
        source = RolloutDataSource(args, tokenizer)

        async def main():
            generator = RolloutGenerator.from_args(args, tokenizer, engine or fake_engine())
            try:
                return await (work(generator) if work else generator.generate_rollout(7, source))
            finally:
                generator.close()

        return asyncio.run(main()), args

    return run


# -- one sample ------------------------------------------------------------------------------------------------------


def test_sample_hooks_run_in_order_once_per_sample_before_the_reward(roll, own):
    output, args = roll(rollout_sample_hook_path=[f"{own}.see", f"{own}.replace"])
    samples = [sample for group in output.groups for sample in group]
    assert sorted(args.custom["seen"]) == [(index, 7, False, None) for index in range(8)]
    assert args.custom["told"] == [{"rollout_id": 7, "evaluation": False}] * 8
    assert all(sample.metadata["by"] == "replace" for sample in samples)
    assert all(sample.reward == 0.0 for sample in samples)  # the first hook changed the label


def test_sample_hooks_run_on_evaluation_samples(roll, own, make_eval_dataset):
    _, args = roll(
        lambda generator: generator.evaluate(3),
        rollout_sample_hook_path=[f"{own}.see"],
        eval_datasets=[make_eval_dataset()],
    )
    assert sorted(args.custom["seen"]) == [(index, 3, True, None) for index in range(12)]


@pytest.mark.parametrize(
    ("name", "message"),
    [
        (
            "confuse",
            r"confuse of sample \d \(group \d\) failed: TypeError: the hook must return a Sample or None, not 'samp",
        ),
        ("fail", r"--rollout-sample-hook-path functions_under_test.fail of sample \d .* failed: KeyError: 'tool'; its"),
    ],
)
def test_failing_sample_hook_is_named_with_the_sample(roll, own, name, message):
    with pytest.raises(SampleError, match=message):
        roll(rollout_sample_hook_path=[f"{own}.{name}"])


# -- all groups ------------------------------------------------------------------------------------------------------


def test_sample_filter_removes_samples_and_receives_dropped_groups(roll, own):
    output, args = roll(
        dynamic_sampling_filter_path=f"{own}.odd_reasoned",
        rollout_sample_filter_path=f"{own}.every_second",
        rollout_all_samples_process_path=f"{own}.all_groups",
    )
    assert args.custom["filtered"] == [[1, 3, 5, 7]]
    (seen,) = args.custom["all"]
    assert seen == sorted(seen) and {1, 3, 5, 7} < set(seen) and any(number % 2 == 0 for number in seen)
    assert args.custom["length"] == [12]
    assert [[sample.remove_sample for sample in group] for group in output.groups] == [[True] * 2] + [[False] * 2] * 3


def test_failing_filter_is_named_with_its_flag(roll, own):
    with pytest.raises(HookFailedError, match="--rollout-sample-filter-path .*failing_filter raised ZeroDivisionError"):
        roll(rollout_sample_filter_path=f"{own}.failing_filter")


@pytest.mark.parametrize(("name", "reason"), [("bool", "unnamed"), ("tensor", "unnamed"), ("reasoned", "even")])
def test_filter_may_return_a_bool_a_tensor_or_a_reason(roll, own, name, reason):
    output, _ = roll(dynamic_sampling_filter_path=f"{own}.odd_{name}")
    assert [group[0].group_index for group in output.groups] == [1, 3, 5, 7]
    assert output.metrics[f"rollout/dynamic_filter/drop_{reason}"] >= 4


@pytest.mark.parametrize("kind", [bool, np.bool_, np.array, torch.tensor, lambda keep: torch.tensor([float(keep)])])
def test_filter_may_return_any_truth_value(kind):
    for keep in (True, False):
        assert DynamicFilterOutput.of(kind(keep)) == DynamicFilterOutput(keep)
        reasoned = SimpleNamespace(keep=kind(keep), reason="because")  # a foreign class, like slime's
        assert DynamicFilterOutput.of(reasoned) == DynamicFilterOutput(keep, "because")


def test_filter_that_returns_none_is_an_error(roll, own):
    with pytest.raises(
        HookFailedError, match="forgetful raised TypeError: the filter returned None: return a bool, a scalar"
    ):
        roll(dynamic_sampling_filter_path=f"{own}.forgetful")


def test_reserve_groups_fill_a_rollout_with_too_few_prompts(roll, fake_engine):
    # of each wave of 6 prompts, only group 1 has rewards that differ
    def reply(prompt, call):
        return f"\\boxed{{{2 if prompt == '1+1=' and call % 2 else -1}}}"

    engine = fake_engine(reply)
    output, _ = roll(
        engine=engine,
        dynamic_sampling_filter_path=f"{HUB}.check_reward_nonzero_std_with_fallback",
        over_sampling_batch_size=6,
    )
    assert len(engine.requests) == 12  # one wave
    assert [group[0].group_index for group in output.groups].count(1) == 1 and len(output.groups) == 4
    assert output.metrics["rollout/dynamic_filter/drop_zero_std_0.0"] == 2.0


def test_group_of_only_truncated_responses_is_dropped(make_args):
    cut = Sample(prompt="q", status=SampleStatus.TRUNCATED)
    whole = Sample(prompt="q", status=SampleStatus.COMPLETED)
    assert check_any_completed(make_args(), [cut, whole]) == DynamicFilterOutput(True)
    assert check_any_completed(make_args(), [cut, cut]) == DynamicFilterOutput(False, "all_truncated")


# -- evaluation ------------------------------------------------------------------------------------------------------


def test_custom_evaluation_function_does_not_affect_rollouts(roll, own, make_eval_dataset):
    settings = {"eval_function_path": f"{own}.own_evaluation", "eval_datasets": [make_eval_dataset()]}
    results, _ = roll(lambda generator: generator.evaluate(3), **settings)
    assert list(results) == ["mine"] and results["mine"].mean_reward == 2.0
    output, _ = roll(**settings)
    assert len(output.groups) == 4


def test_path_of_an_uncallable_function_is_rejected(roll, own):
    with pytest.raises(HookError, match=r"expected async or ordinary f\(args, sample\)"):
        roll(rollout_sample_hook_path=[f"{own}.all_groups"])
    with pytest.raises(HookError, match=r"expected f\(args, all_groups, data_source\)"):
        roll(rollout_all_samples_process_path=f"{own}.confuse")


# -- logs ------------------------------------------------------------------------------------------------------------


def finished(index, reward, length=2, **changes):
    return Sample(
        prompt="q", group_index=index // 2, index=index, tokens=[5] * (3 + length), response_length=length,
        loss_mask=[1] * length, rollout_log_probs=[-0.5] * length, reward=reward, status=SampleStatus.COMPLETED,
        **changes,
    )  # fmt: skip


@pytest.mark.parametrize("replace", [True, None])
def test_log_function_may_replace_all_metrics_but_the_reward(make_args, own, replace):
    args = make_args(custom_rollout_log_function_path=f"{own}.log", custom={"replace": replace})
    metrics = {"rollout/raw_reward": 0.5, "rollout/truncated_ratio": 0.1, "rollout/x": 1.0}
    reported = reported_metrics(args, 4, [finished(0, 1.0)], metrics, {"rollout/x": 1.0}, 2.5, hook_args=args)
    assert args.custom["logged"] == [(4, 1, {"rollout/x": 1.0}, 2.5)]
    assert reported == ({"rollout/raw_reward": 0.5} if replace else metrics)
    assert reported_metrics(make_args(), 4, [], metrics, {}, 2.5, hook_args=make_args()) == metrics


@pytest.mark.parametrize("replace", [True, None])
def test_evaluation_log_function_may_replace_all_but_the_mean_rewards(make_args, own, replace):
    args = make_args(custom_eval_rollout_log_function_path=f"{own}.log_evaluation", custom={"replace": replace})
    samples = [finished(0, 1.0), finished(1, 0.0)]
    samples[1].status = SampleStatus.TRUNCATED
    results = {"a": EvalResult("a", [1.0, 0.0], samples, 1)}
    reported = reported_scalars(args, 4, results, hook_args=args)
    assert args.custom["logged"] == [(4, {"a": ["rewards", "samples", "truncated"]}, [False, True])]
    assert reported == ({"a": {"eval/a": 0.5}} if replace else {"a": results["a"].metrics()})


LOGS = """
import numpy as np

def log(rollout_id, args, samples, extra_metrics, rollout_time):
    extra_metrics.update(args.custom["adds"])
    return args.custom["replace"]

def log_evaluation(rollout_id, args, data, extra_metrics):
    extra_metrics.update(args.custom["adds"])
    return args.custom["replace"]
"""


@pytest.fixture
def logs(tmp_path, monkeypatch):
    (tmp_path / "own_log_functions.py").write_text(LOGS)
    monkeypatch.syspath_prepend(tmp_path)
    yield "own_log_functions"
    sys.modules.pop("own_log_functions", None)


def test_custom_metrics_reach_the_summary_tensorboard_and_wandb(make_args, logs, tmp_path):
    import wandb

    adds = {"rollout/words": np.float32(7.5), "mine/turns": torch.tensor(3), "score": 0.25, "rollout/x": 2}
    args = make_args(
        custom_rollout_log_function_path=f"{logs}.log",
        custom_eval_rollout_log_function_path=f"{logs}.log_evaluation",
        custom={"adds": adds, "replace": False},
        run_dir=str(tmp_path / "run"),
        use_tensorboard=True,
        tensorboard_dir=str(tmp_path / "tensorboard"),
        use_wandb=True,
        wandb_mode="offline",
    )
    metrics = {"rollout/raw_reward": 0.5, "rollout/x": 1.0}
    reported = reported_metrics(args, 0, [finished(0, 1.0)], metrics, {"rollout/x": 1.0}, 2.5, hook_args=args)
    scalars = reported_scalars(
        args, 1, {"a": EvalResult("a", [1.0, 0.0], [finished(0, 1.0), finished(1, 0.0)], 1)}, hook_args=args
    )
    evaluated = SimpleNamespace(mean_reward=0.5, metrics=lambda: scalars["a"])
    with RunLog.open(args, {}) as log:
        log.step(StepRecord(0, "0", reported, [{"loss": 1.0}], {"train": 1.0, "total": 2.0}))
        log.evaluation("after", 1, {"a": evaluated})
    wandb.teardown()
    expected = {"rollout/words": 7.5, "mine/turns": 3.0, "score": 0.25, "rollout/x": 2.0}
    summary = load_summary(args.run_dir)
    assert {name: summary["steps"][0][name] for name in expected} == expected
    assert {name: summary["eval"]["history"][0]["metrics"][name] for name in expected} == expected
    assert summary["steps"][0]["reward"] == 0.5 and summary["eval"]["after"] == 0.5
    found = tensorboard_scalars(args.tensorboard_dir)
    assert {name: found[name] for name in expected} == {
        name: [(0, value), (1, value)] for name, value in expected.items()
    }
    (file,) = (tmp_path / "run").glob("wandb/offline-run-*/*.wandb")
    logged = [row for row in rows(file) if "score" in row]
    assert [{name: row[name] for name in expected} for row in logged] == [expected, expected]


@pytest.mark.parametrize(
    ("adds", "message"),
    [
        ({"mine/x": "many"}, "added the metric 'mine/x' with the value 'many': use a number"),
        ({"rollout/raw_reward": 1.0}, "added the metric 'rollout/raw_reward', a name that slimrl uses itself"),
        ({"train/grad_norm": 1.0}, "added the metric 'train/grad_norm', a name that slimrl uses itself"),
        ({"grad_norm": 1.0}, "added the metric 'grad_norm', a name that slimrl uses itself"),
        ({"seconds": 1.0}, "added the metric 'seconds', a name that slimrl uses itself"),
        ({"perf/step_time": 1.0}, "added the metric 'perf/step_time', a name that slimrl uses itself"),
    ],
)
def test_unreportable_metric_of_a_log_function_is_rejected_by_name(make_args, logs, adds, message):
    args = make_args(custom_rollout_log_function_path=f"{logs}.log", custom={"adds": adds, "replace": True})
    with pytest.raises(HookFailedError, match=f"--custom-rollout-log-function-path {logs}.log {message}"):
        reported_metrics(
            args, 0, [finished(0, 1.0)], {"rollout/raw_reward": 0.5, "rollout/y": 0.1}, {}, 2.5, hook_args=args
        )


def test_log_function_that_replaces_slimrl_metrics_may_use_their_names(make_args, logs):
    args = make_args(
        custom_rollout_log_function_path=f"{logs}.log",
        custom={"adds": {"rollout/truncated_ratio": 0.75}, "replace": True},
    )
    metrics = {"rollout/raw_reward": 0.5, "rollout/truncated_ratio": 0.1}
    reported = reported_metrics(args, 0, [finished(0, 1.0)], metrics, {}, 2.5, hook_args=args)
    assert reported == {"rollout/raw_reward": 0.5, "rollout/truncated_ratio": 0.75}


# -- training data ---------------------------------------------------------------------------------------------------


def test_custom_training_data_matches_the_built_in_batch_in_shared_fields(make_args, own):
    samples = [finished(0, 1.0, 3), finished(1, 0.0, remove_sample=True), finished(2, 0.5, 4), finished(3, 0.25)]
    samples[2].status, samples[3].loss_mask = SampleStatus.TRUNCATED, [0, 1]
    args = make_args(custom_convert_samples_to_train_data_path=f"{own}.convert")
    rewards = compute_rewards(RewardProcessing.from_args(args), samples)
    batch = training_batch(args, samples, rewards, hook_args=args)
    raw = torch.tensor([1.0, 0.5, 0.25])
    expected = batch_from_samples([samples[0], *samples[2:]], raw, 2 * raw)
    assert batch.teacher_log_probs is expected.teacher_log_probs is None
    for name, column in vars(expected).items():
        assert column is None or torch.equal(torch.as_tensor(getattr(batch, name)), torch.as_tensor(column)), name
    built_in = training_batch(make_args(), samples, rewards, hook_args=make_args())
    assert len(built_in) == 4 and torch.equal(built_in.rewards, rewards.normalized)


def test_invalid_training_data_is_rejected(make_args, own):
    args = make_args(custom_convert_samples_to_train_data_path=f"{own}.convert_badly")
    samples = [finished(0, 1.0), finished(1, 0.0)]
    with pytest.raises(HookFailedError, match=r"columns \['response_lengths', .* are missing and \['multimodal_train"):
        training_batch(args, samples, compute_rewards(RewardProcessing.from_args(args), samples), hook_args=args)
    good = {
        "tokens": [[1, 2, 3]], "response_lengths": [2], "rewards": [1.0], "loss_masks": [[1, 1]],
        "rollout_log_probs": [[-1.0, -1.0]],
    }  # fmt: skip
    assert len(batch_from_columns(good)) == 1
    for change, message in (
        ({"rewards": [1.0, 2.0]}, "column rewards has 2 entries but tokens has 1: give one for each row"),
        ({"total_lengths": [4]}, "sample 0 has 3 tokens but total_lengths 4"),
        ({"loss_masks": [[1]]}, "has 1 loss_mask for 2 response tokens"),
    ):
        with pytest.raises(ValueError, match=message):
            batch_from_columns({**good, **change})
    with pytest.raises(ValueError, match="the function returned list: return a dict of columns"):
        batch_from_columns([good])


def test_failing_reward_post_process_and_buffer_filter_are_named_with_their_lines(make_args, tmp_path, monkeypatch):
    (tmp_path / "slimrl_fails.py").write_text(
        "def two(args, samples): return {}['a']\n\ndef four(a, b, c, d): return 1 / 0\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(HookFailedError) as caught:
        compute_rewards(RewardProcessing.from_args(make_args(custom_reward_post_process_path="slimrl_fails.two")), [])
    flag = "--custom-reward-post-process-path slimrl_fails.two"
    line = f"{tmp_path}/slimrl_fails.py:1 in two: def two(args, samples): return {{}}['a']"
    assert str(caught.value) == f"{flag} raised KeyError: 'a'\n  {line}"
    buffer = GroupBuffer("slimrl_fails.four", make_args())
    buffer.put([[Sample("q")]])
    with pytest.raises(HookFailedError, match="--buffer-filter-path slimrl_fails.four raised ZeroDivisionError"):
        buffer.take(1, 0)
