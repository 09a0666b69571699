"""The table of built-in rewards and everything that reads it: flag, rules, prompt data, graders, docs."""

import asyncio
import re
import subprocess
import sys
from pathlib import Path

import pytest

from slimrl.arguments.flag import flag_specs
from slimrl.arguments.flags.rollout import RewardArguments
from slimrl.data import reward_registry
from slimrl.data.prompt_format import label_fault, needs_label
from slimrl.data.reward_registry import REWARDS, GradedBy
from slimrl.data.sample import Sample
from slimrl.rollout.rm_hub import registry
from slimrl.rollout.rm_hub.grader_pool import GraderPool

ROOT = Path(__file__).resolve().parents[2]
RULES = [row for row in REWARDS if row.by is GradedBy.RULE]
NO_COMMA = {"instruction_id_list": ["punctuation:no_comma"]}

# name -> label, metadata, a correct and a wrong response
EXAMPLES = {
    "math": ("1/2", {}, "so \\boxed{0.5}", "so \\boxed{0.25}"),
    "deepscaler": ("1/2", {}, "so</think>\\boxed{0.5}", "so \\boxed{0.5}"),
    "dapo": ("34", {}, "so\nAnswer: 34", "so\nAnswer: 35"),
    "gpqa": ("B", {}, "The answer is B.", "The answer is C."),
    "f1": (["a cat", "a dog"], {}, "the dog", "a bird"),
    "ifeval": (None, NO_COMMA, "plain words", "words, words"),
    "ifbench": (None, NO_COMMA, "plain words", "words, words"),
}


def sample_of(response, label="1", metadata=None):
    return Sample(prompt="q", index=None, response=response, label=label, metadata=dict(metadata or {}))


@pytest.fixture(scope="module")
def graders():
    pool = GraderPool(time_limit_s=60.0, size=1)
    yield pool
    pool.close()


def test_rows_match_the_choices_of_the_flag():
    (choices,) = (spec.choices for spec in flag_specs(RewardArguments) if spec.dest == "rm_type")
    assert sorted(choices) == sorted(name for row in REWARDS for name in row.names)
    assert len({row.name for row in REWARDS}) == len(REWARDS)
    assert all(registry.is_builtin(name) for name in choices)
    assert set(registry.builtin_types()) == {row.name for row in REWARDS}


def test_docs_have_the_table():
    table = reward_registry.markdown()
    assert table in (ROOT / "docs" / "rewards.md").read_text(), "python -m slimrl.data.reward_registry prints it"
    assert re.findall(r"(?m)^\| `(\w+)`", table) == [row.name for row in REWARDS]


def test_every_rule_has_an_example_and_a_grader():
    assert set(EXAMPLES) == {row.name for row in RULES if row.grader}
    for row in REWARDS:
        paths = [path for path in (row.grader, row.fast_path, *row.needs.values()) if path]
        assert all(callable(reward_registry.load(path)) for path in paths if ":" in path)
        assert bool(row.grader or row.fast_path) == (row.by is GradedBy.RULE)


@pytest.mark.parametrize("name", EXAMPLES)
def test_grader_separates_correct_from_wrong_and_the_fast_path_agrees(name, graders):
    label, metadata, right, wrong = EXAMPLES[name]
    row = reward_registry.reward_of(name)

    async def graded(response):
        sample = sample_of(response, label, metadata)
        request = registry.request_of(name, sample)
        first = registry.fast_path_reward(name, sample, request)
        reward = (await graders.grade(request))["value"]
        assert first in (None, reward)
        assert set(reward) == set(row.entries) if row.entries else isinstance(reward, float)
        return reward[row.entries[0]] if row.entries else reward

    worst = registry.wrong_answer_reward(name)
    assert asyncio.run(graded(right)) == 1.0
    assert asyncio.run(graded(wrong)) == (worst[row.entries[0]] if row.entries else worst)


@pytest.mark.parametrize("row", RULES, ids=lambda row: row.name)
def test_boxed_prefix_grades_the_box_and_no_box_is_wrong(row, graders):
    if not row.grader:
        return
    label, metadata, *_ = EXAMPLES[row.name]
    reward = asyncio.run(registry.grade(f"boxed_{row.name}", sample_of("no box", label, metadata), graders))
    assert reward == registry.wrong_answer_reward(row.name) == registry.wrong_answer_reward(f"boxed_{row.name}")


@pytest.mark.parametrize("row", REWARDS, ids=lambda row: row.name)
def test_prompt_data_is_checked_by_the_row_label(row):
    for name in row.names:
        assert needs_label(name) is row.label.compared
        assert (label_fault(name, None) is not None) is row.label.compared
        if row.name in EXAMPLES:
            assert label_fault(name, EXAMPLES[row.name][0]) is None
    if row.by is GradedBy.RULE and row.label.compared:
        with pytest.raises(ValueError, match="check --label-key"):
            registry.request_of(row.name, sample_of("", None))


def test_random_reward_needs_no_grader_and_gives_both_values():
    rewards = [asyncio.run(registry.grade("random", sample_of(str(n)), None)) for n in range(50)]
    assert set(rewards) == {0.0, 1.0}


def test_dict_of_a_wrong_answer_is_not_shared():
    registry.wrong_answer_reward("dapo")["score"] = 5
    assert registry.wrong_answer_reward("dapo")["score"] == -1.0


def test_new_rule_needs_a_grader_and_a_row(monkeypatch):
    row = reward_registry.BuiltInReward(
        "length", "short", "1 or 0", reward_registry.ANY, grader=f"{__name__}:is_short", needs={"prompt": "prompt"}
    )
    monkeypatch.setitem(reward_registry._BY_NAME, "length", row)
    request = registry.request_of("length", sample_of("abc"))
    assert request == {"rule": "length", "boxed": False, "response": "abc", "prompt": "q"}
    assert registry.fast_path_reward("length", sample_of("abc"), request) is None
    assert registry.grade_request(request, lambda answer, label: False) == 1.0


def is_short(response, request, algebra):
    return float(len(response) < 5 * len(request["prompt"]))


def test_reading_the_table_imports_no_grader():
    program = "import sys, slimrl.data.reward_registry; print(*(name for name in sys.modules if 'rm_hub' in name))"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == [] and done.returncode == 0
