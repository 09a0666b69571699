"""The math rewards, pair by pair; hostile answers cost bounded time and are told from wrong ones."""

import asyncio
import time

import pytest

from slimrl.data.sample import Sample
from slimrl.rollout.rm_hub import builtin
from slimrl.rollout.rm_hub.answers import compare
from slimrl.rollout.rm_hub.boxed import last_boxed
from slimrl.rollout.rm_hub.grader_pool import GraderFailure, GraderPool

# answer, label, whether they mean the same
PAIRS = [
    # whole numbers and spelling
    ("5", "5", True),
    ("5", 5, True),
    ("0", 0, True),
    ("5", "6", False),
    ("-7", "-7", True),
    ("7", "-7", False),
    ("+7", "7", True),
    ("007", "7", True),
    (" 42. ", "42", True),
    ("$42$", "42", True),
    ("\\(42\\)", "42", True),
    ("1,234,567", "1234567", True),
    ("1\\,234", "1234", True),
    ("\\$18", "18", True),
    ("90^\\circ", "90", True),
    ("12", "\\boxed{12}", True),
    ("123456789012345678901234567890", "123456789012345678901234567891", False),
    # decimals and fractions
    ("0.5", "\\frac{1}{2}", True),
    (".5", "1/2", True),
    ("\\dfrac{3}{6}", "\\frac12", True),
    ("-\\frac{1}{2}", "\\frac{-1}{2}", True),
    ("1.50", "1.5", True),
    ("2.0", 2, True),
    ("0.51", "\\frac{1}{2}", False),
    ("\\frac{12}{5}", "\\frac{1}{25}", False),
    ("1\\frac{1}{2}", "1.5", True),
    ("50\\%", "50%", True),
    ("1/0", "1", False),
    # algebra
    ("\\sqrt{8}", "2\\sqrt{2}", True),
    ("x^2-1", "(x-1)(x+1)", True),
    ("(x+1)^2", "x^2+2x+1", True),
    ("x^2+1", "x^2-1", False),
    ("x = 5", "5", True),
    ("2^{10}", "1024", True),
    ("\\frac{\\pi}{2}", "0.5\\pi", True),
    ("\\sin^2 x + \\cos^2 x", "1", True),
    ("\\infty", "-\\infty", False),
    # several values
    ("(1, 2)", "(1,2)", True),
    ("(1,2)", "(2,1)", False),
    ("\\{1,2\\}", "\\{2,1\\}", True),
    ("[0,1)", "[0,1]", False),
    ("1, 2", "2, 1", True),
    ("\\begin{pmatrix}1\\\\2\\end{pmatrix}", "\\begin{pmatrix} 1 \\\\ 2 \\end{pmatrix}", True),
    ("3, 4", "3", False),
    # words and choices
    ("\\text{Monday}", "monday", True),
    ("Tuesday", "Monday", False),
    ("silent", "listen", False),
    ("\\text{(B)}", "B", True),
    ("A", "B", False),
    ("yes", "no", False),
    # nothing there
    ("", "5", False),
    ("\\text{}", "5", False),
]

HOSTILE = [
    "9**9**9**9",
    "9^{9^{9^{9}}}",
    "99999999!",
    "(x+1)^{99999999}",
    "\\sum_{k=1}^{10^{12}} \\frac{1}{k^2+k\\sqrt{k}}",
    "\\int_0^1 x^{x^{x^{x}}} \\sin(\\tan(x^7)) dx",
]


@pytest.fixture(scope="module")
def graders():
    pool = GraderPool(time_limit_s=3.0, size=2)
    yield pool
    pool.close()


def grade(rm_type, response, label, graders):
    return asyncio.run(builtin.grade(rm_type, Sample(prompt="q", index=1, response=response, label=label), graders))


@pytest.mark.parametrize(("answer", "label", "equal"), PAIRS)
def test_pairs_are_judged_as_a_mathematician_would(answer, label, equal, graders):
    assert grade("math", f"so it is $\\boxed{{{answer}}}$", label, graders) == float(equal)


def test_the_table_is_long_enough_to_mean_something():
    assert len(PAIRS) >= 40 and sum(not equal for *_, equal in PAIRS) >= 10


@pytest.mark.parametrize("answer", HOSTILE)
def test_a_hostile_answer_is_judged_or_given_up_in_bounded_time(answer, graders):
    started = time.perf_counter()
    try:
        assert grade("math", f"\\boxed{{{answer}}}", "x+1", graders) == 0.0
    except GraderFailure as failure:
        assert "took more than 3 s" in str(failure) or "the grader failed" in str(failure)
    assert time.perf_counter() - started < 3.0 + 5.0


def test_a_very_long_answer_never_reaches_algebra():
    assert compare("1+" * 100_000 + "1", "100001") is False
    assert compare("9" * 100_000, "1") is False
    assert compare("9" * 100_000, "9" * 100_000) is True


@pytest.mark.parametrize(
    ("response", "reward"),
    [
        ("<think>2+2 is 5? no</think>It is \\boxed{4}", 1.0),
        ("###Response\nIt is \\boxed{4}", 1.0),
        ("<think>hm \\boxed{4}</think> forgot it", 0.0),
        ("<think>a</think> b <think>c</think> \\boxed{4}", 1.0),
        ("no marker, but \\boxed{4}", 0.0),
        ("<think>a</think> the answer is 4", 0.0),
        ("<think>a</think> \\boxed{5}", 0.0),
    ],
)
def test_deepscaler_counts_only_a_box_after_the_thinking(response, reward, graders):
    assert grade("deepscaler", response, "\\boxed{4}", graders) == reward


def test_the_prefix_boxed_takes_the_last_box_wherever_it_stands(graders):
    assert grade("boxed_deepscaler", "no marker, but \\boxed{3} or \\boxed{4}", "4", graders) == 1.0
    assert grade("boxed_math", "no box", "4", graders) == 0.0


def test_math_without_a_box_is_wrong(graders):
    assert grade("math", "the answer is 4", "4", graders) == 0.0


@pytest.mark.parametrize("label", [None, "", "  ", True, ["4"], {"a": 1}])
def test_a_label_that_is_no_answer_is_an_error(label, graders):
    with pytest.raises(ValueError, match="math rewards need the answer as text or number: check --label-key"):
        grade("math", "\\boxed{4}", label, graders)


def test_the_random_reward_is_the_same_in_every_run_and_fair(graders):
    rewards = [asyncio.run(builtin.grade("random", Sample(prompt="q", index=index), graders)) for index in range(400)]
    assert rewards[:12] == [
        asyncio.run(builtin.grade("random", Sample(prompt="q", index=index), graders)) for index in range(12)
    ]
    assert set(rewards) == {0.0, 1.0} and 150 < sum(rewards) < 250


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("\\boxed{4}", "4"),
        ("\\boxed{\\frac{1}{2}} and \\boxed{ x_{1} }.", "x_{1}"),
        ("\\fbox{7}", "7"),
        ("$\\boxed 5$", "5"),
        ("\\boxed{4", None),
        ("\\boxed", None),
        ("\\boxed ", None),
        ("no box", None),
        ("\\boxed{1} then \\boxed{2", None),
        ("\\boxed{}", ""),
    ],
)
def test_the_last_box_is_found(text, answer):
    assert last_boxed(text) == answer
