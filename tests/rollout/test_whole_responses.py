"""Whole responses as models write them, with label and score, through the rule that `--rm-type` names.

`whole_responses.jsonl` was written in two rounds without a look at what the graders said. Of the first round (507, of
which four that may be read both ways were left out) 85.8 of 100 were judged right at first sight, and 18 wrong answers
passed; the graders were fixed. Of the second (112) 98.2 of 100 were, and one wrong answer passed. The third (120) was
written to a list of what had then gone wrong: 87 of it were judged wrongly, and 25 wrong answers passed.
"""

import json
from collections import Counter
from pathlib import Path

import pytest

from slimrl.data.sample import Sample
from slimrl.rollout.rm_hub import registry, rule_graders
from slimrl.rollout.rm_hub.math_equivalence import sympy_equal

ROWS = [json.loads(line) for line in (Path(__file__).parent / "whole_responses.jsonl").read_text().splitlines()]
REWARDS = {True: (1.0,), False: (0.0, -1.0)}


@pytest.fixture(scope="module")
def algebraic():
    sympy_equal.warm_up()
    return sympy_equal.equal


def judged_right(row, algebraic):
    """Whether the score is the row's, by the way of `registry.grade` without the processes between."""
    sample = Sample(prompt="q", response=row["response"], label=row["label"], metadata=row.get("metadata", {}))
    request = registry.request_of(row["rule"], sample)
    reward = registry.at_first_sight(row["rule"], sample, request)
    if reward is None:
        reward = rule_graders.judge(request, algebraic)
    return (reward["score"] if isinstance(reward, dict) else reward) in REWARDS[row["correct"]]


def test_the_set_is_large_and_holds_wrong_answers_to_every_rule():
    assert len(ROWS) >= 700 and sum(not row["correct"] for row in ROWS) >= 200
    wrong = Counter(row["rule"] for row in ROWS if not row["correct"])
    assert all(wrong[rule] >= number for rule, number in {"math": 80, "dapo": 20, "gpqa": 50, "deepscaler": 5}.items())
    keys = {json.dumps({key: row[key] for key in row if key not in ("correct", "kind", "round")}) for row in ROWS}
    assert len(keys) == len(ROWS)


def test_every_response_is_judged_as_a_careful_reader_would(algebraic):
    assert [row for row in ROWS if not judged_right(row, algebraic)] == []
