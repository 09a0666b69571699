"""A second set of labelled pairs, written later and without a look at the comparison or at the first set.

`math_pairs_fresh.jsonl` was written from public descriptions of such answers in three rounds, the last two of unusual
ones. Before any fix, 98.5, 94.4 and 94.4 of 100 pairs of the three rounds were graded correctly, and no wrong answer
passed; the comparison was fixed after each. Pairs that are also in the first set are omitted. A fourth round (100) was
written for a list of hexadecimal numbers and chains of equalities that were graded wrongly: 36 of it were, and 8 wrong
answers passed.
"""

import json
from pathlib import Path

import pytest

from slimrl.rollout.rm_hub.math_equivalence import answers_equal

FOLDER = Path(__file__).parent
ROWS = [json.loads(line) for line in (FOLDER / "math_pairs_fresh.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def graded_wrongly():
    from slimrl.rollout.rm_hub.math_equivalence import sympy_equal

    sympy_equal.warm_up()
    return [row for row in ROWS if answers_equal(row["answer"], row["label"], sympy_equal.equal) is not row["equal"]]


def test_set_is_large_with_many_wrong_answers_and_disjoint_from_the_first():
    first = [json.loads(line) for line in (FOLDER / "math_pairs.jsonl").read_text().splitlines()]
    pairs = {(row["answer"], row["label"]) for row in ROWS}
    assert len(ROWS) >= 500 and sum(not row["equal"] for row in ROWS) >= 150 and len({row["kind"] for row in ROWS}) > 25
    assert len(pairs) == len(ROWS) and not pairs & {(row["answer"], row["label"]) for row in first}


@pytest.mark.slow
def test_at_least_99_of_100_pairs_are_graded_correctly(graded_wrongly):
    assert len(graded_wrongly) <= len(ROWS) / 100, graded_wrongly


@pytest.mark.slow
def test_no_wrong_answer_passes(graded_wrongly):
    assert [row for row in graded_wrongly if not row["equal"]] == []
