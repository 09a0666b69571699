"""Which reward scores a sample, and how failures are handled."""

import asyncio
import sys

import pytest

from slimrl.data.sample import Sample
from slimrl.hooks import HookError
from slimrl.rollout.rm_hub import RewardConfig, RewardScorer, async_rm
from slimrl.rollout.rm_hub.grader_pool import GraderPool

NOTHING = RewardConfig(None, None)

HOOKS = """
import asyncio
import numpy
from slimrl.rollout.rm_hub import async_rm, batched_async_rm

async def seven(args, sample, **kwargs):
    return 7

async def scalar(args, sample):
    return numpy.float32(0.25)

async def as_dict(args, sample):
    return {"score": 1.0, "acc": 0}

async def broken(args, sample):
    return [sample["no such key"]]

async def nonsense(args, sample):
    return "good"

async def slow(args, sample):
    await asyncio.sleep(60)

async def half_of_builtin(args, sample):
    return 0.5 * await async_rm(args, sample)

def not_async(args, sample):
    return 1.0

calls = []

async def by_length(args, samples, **kwargs):
    calls.append([sample.index for sample in samples])
    longest = max(len(sample.response) for sample in samples)
    return [len(sample.response) / longest for sample in samples]

async def as_array(args, samples):
    return numpy.ones(len(samples))

async def too_few(args, samples):
    return [1.0]

async def none_at_all(args, samples):
    return None

async def builtin_of_all(args, samples):
    return [2 * reward for reward in await batched_async_rm(args, samples)]
"""


@pytest.fixture
def hooks(tmp_path, monkeypatch):
    (tmp_path / "reward_hooks.py").write_text(HOOKS)
    monkeypatch.syspath_prepend(tmp_path)
    yield "reward_hooks"
    sys.modules.pop("reward_hooks", None)


@pytest.fixture
def scorer(make_args):
    made = RewardScorer.from_args(make_args())
    yield made
    made.close()


def right_sample(**changes):
    return Sample(**{"prompt": "1+1=", "index": 3, "response": "\\boxed{2}", "label": "2", **changes})


def test_most_specific_reward_choice_wins(scorer, hooks):
    sample = right_sample(response="no box", index=0)
    everything = RewardConfig(f"{hooks}.seven", "math")
    score = lambda sample, rule: asyncio.run(scorer.score(sample, rule))  # noqa: E731
    assert score(sample, RewardConfig(None, "math")) == 0.0
    sample.metadata["rm_type"] = "random"
    by_coin = score(sample, RewardConfig(None, "math"))
    assert by_coin == score(sample, RewardConfig(None, "random"))
    assert score(sample, everything) == 7.0
    sample.custom_rm_path = f"{hooks}.as_dict"
    assert score(sample, everything) == {"score": 1.0, "acc": 0}


def test_missing_or_unknown_reward_is_one_error(scorer):
    with pytest.raises(ValueError, match="give --rm-type, --custom-rm-path or metadata.rm_type"):
        asyncio.run(scorer.score(right_sample(), NOTHING))
    with pytest.raises(ValueError, match="'maths' is unknown: use dapo, deepscaler, f1, gpqa, ifbench, ifeval, math"):
        asyncio.run(scorer.score(right_sample(metadata={"rm_type": "maths"}), NOTHING))
    with pytest.raises(ValueError, match="--rm-type: the reward type 'maths' is unknown"):
        RewardConfig(None, "maths").check("--rm-type")


def test_scalars_of_other_libraries_become_floats(scorer, hooks):
    assert asyncio.run(scorer.score(right_sample(), RewardConfig(f"{hooks}.scalar", None))) == 0.25


@pytest.mark.parametrize(
    ("name", "error", "message"),
    [
        ("broken", TypeError, "not subscriptable"),
        ("nonsense", ValueError, "reward_hooks.nonsense returned 'good': it must return a number or a dict"),
        ("not_async", HookError, "expected async f"),
        ("missing", HookError, "has no missing"),
    ],
)
def test_failing_custom_function_is_an_error_never_a_zero(scorer, hooks, name, error, message):
    with pytest.raises(error, match=message):
        asyncio.run(scorer.score(right_sample(), RewardConfig(f"{hooks}.{name}", None)))


def test_custom_function_that_times_out_is_an_error(make_args, hooks):
    scorer = RewardScorer.from_args(make_args(), custom_time_limit_s=0.1)
    with pytest.raises(TimeoutError, match="reward_hooks.slow took more than 0.1 s: set a shorter timeout within it"):
        asyncio.run(scorer.score(right_sample(), RewardConfig(f"{hooks}.slow", None)))
    scorer.close()


def test_custom_function_may_call_the_built_in_reward(scorer, hooks):
    rule = RewardConfig(f"{hooks}.half_of_builtin", None)
    assert asyncio.run(scorer.score(right_sample(), rule)) == 0.5
    assert asyncio.run(scorer.score(right_sample(response="\\boxed{1+1}"), rule)) == 0.5


def test_async_rm_works_outside_a_rollout_and_leaves_no_process(make_args):
    import psutil

    before = len(psutil.Process().children())
    assert asyncio.run(async_rm(make_args(), right_sample(response="\\boxed{x+x}", label="2x"))) == 1.0
    assert len(psutil.Process().children()) == before


def test_grader_without_a_score_is_counted(make_args, caplog):
    scorer = RewardScorer.from_args(make_args(), graders=GraderPool(time_limit_s=0.5, size=1))
    sample = right_sample(response="\\boxed{\\int_0^1 x^{x^{x}} \\sin(\\tan(x^7)) dx}", label="x+1")
    try:
        assert asyncio.run(scorer.score(sample, RewardConfig(None, "math"))) == 0.0
    finally:
        scorer.close()
    assert sample.metadata["reward_failure"] == "the grader took more than 0.5 s grading and was killed"
    assert "sample 3: grading failed, scored as wrong" in caplog.text


# --group-rm ----------------------------------------------------------------------------------------------------------


def group(*responses):
    return [right_sample(index=index, response=response) for index, response in enumerate(responses)]


def test_group_is_scored_in_one_call_in_order(scorer, hooks):
    rule = RewardConfig(f"{hooks}.by_length", None)
    assert asyncio.run(scorer.score_group(group("abcd", "ab", "abc"), rule)) == [1.0, 0.5, 0.75]
    assert sys.modules[hooks].calls == [[0, 1, 2]]
    assert asyncio.run(scorer.score_group(group("a", "b"), RewardConfig(f"{hooks}.as_array", None))) == [1.0, 1.0]


def test_function_of_a_sample_overrides_the_group_reward(scorer, hooks):
    samples = group("abcd", "ab", "abc", "a")
    samples[1].custom_rm_path = f"{hooks}.as_array"
    rewards = asyncio.run(scorer.score_group(samples, RewardConfig(f"{hooks}.by_length", None)))
    assert rewards == [1.0, 1.0, 0.75, 0.25] and sys.modules[hooks].calls == [[0, 2, 3]]


def test_group_without_a_function_is_graded_by_rule(scorer):
    samples = group("\\boxed{2}", "\\boxed{3}", "no box")
    assert asyncio.run(scorer.score_group(samples, RewardConfig(None, "math"))) == [1.0, 0.0, 0.0]


def test_group_function_may_call_the_built_in_rewards(scorer, hooks):
    samples = group("\\boxed{2}", "\\boxed{1+1}", "\\boxed{3}")
    assert asyncio.run(scorer.score_group(samples, RewardConfig(f"{hooks}.builtin_of_all", None))) == [2.0, 2.0, 0.0]


@pytest.mark.parametrize(("name", "shown"), [("too_few", "1 rewards"), ("none_at_all", "None")])
def test_function_that_returns_too_few_scores_is_an_error(scorer, hooks, name, shown):
    message = f"reward_hooks.{name} returned {shown} for a group of 2 samples: with --group-rm it must return a list"
    with pytest.raises(ValueError, match=message):
        asyncio.run(scorer.score_group(group("a", "b"), RewardConfig(f"{hooks}.{name}", None)))


def test_failure_of_a_dict_rule_keeps_the_dict_form(make_args):
    scorer = RewardScorer.from_args(make_args(), graders=GraderPool(time_limit_s=0.5, size=1))
    sample = right_sample(response="Answer: 99999999!", label="x+1")
    try:
        reward = asyncio.run(scorer.score(sample, RewardConfig(None, "dapo")))
    finally:
        scorer.close()
    assert reward == {"score": -1.0, "acc": False, "pred": "[INVALID]"}
    assert "TooLarge: the answer has a factorial above 3000!" in sample.metadata["reward_failure"]
