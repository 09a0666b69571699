"""A second set of labelled pairs, written later and without a look at the comparison or at the first set.

`math_pairs_fresh.jsonl` was written from public descriptions of such answers in three rounds, the last two of odd ones.
At first sight 98.5 of 100 pairs of the first round were judged right, 94.4 of the second and 94.4 of the third, and no
wrong answer passed; the comparison was mended after each. Pairs that the first set holds as well are left out. A fourth
round (100) was written to a list of hexadecimal numbers and chains of equalities that were judged wrongly: 36 of it
were, and 8 wrong answers passed.
"""

import json
from pathlib import Path

import pytest

from slimrl.rollout.rm_hub.math_equivalence import answers_equal

FOLDER = Path(__file__).parent
ROWS = [json.loads(line) for line in (FOLDER / "math_pairs_fresh.jsonl").read_text().splitlines()]


@pytest.fixture(scope="module")
def wrongly_judged():
    from slimrl.rollout.rm_hub.math_equivalence import sympy_equal

    sympy_equal.warm_up()
    return [row for row in ROWS if answers_equal(row["answer"], row["label"], sympy_equal.equal) is not row["equal"]]


def test_the_set_is_large_has_many_wrong_answers_and_nothing_of_the_first_set():
    first = [json.loads(line) for line in (FOLDER / "math_pairs.jsonl").read_text().splitlines()]
    pairs = {(row["answer"], row["label"]) for row in ROWS}
    assert len(ROWS) >= 500 and sum(not row["equal"] for row in ROWS) >= 150 and len({row["kind"] for row in ROWS}) > 25
    assert len(pairs) == len(ROWS) and not pairs & {(row["answer"], row["label"]) for row in first}


def test_at_least_99_of_100_pairs_are_judged_right(wrongly_judged):
    assert len(wrongly_judged) <= len(ROWS) / 100, wrongly_judged


def test_no_wrong_answer_passes(wrongly_judged):
    assert [row for row in wrongly_judged if not row["equal"]] == []
