"""The math rewards, pair by pair; hostile answers cost bounded time and are distinguished from wrong ones."""

import asyncio
import time
from fractions import Fraction

import psutil
import pytest

from slimrl.data.sample import Sample
from slimrl.rollout.rm_hub import registry
from slimrl.rollout.rm_hub.grader_pool import MEMORY_LIMIT_BYTES, GraderFailure, GraderPool
from slimrl.rollout.rm_hub.math_equivalence import answers_equal, equality_chains
from slimrl.rollout.rm_hub.rule_reward import last_boxed

# answer, label, whether they are equal
PAIRS = [
    # integers and spelling
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
    # empty
    ("", "5", False),
    ("\\text{}", "5", False),
]

# scored or given up quickly, whatever they contain
HOSTILE = [
    "9**9**9**9",
    "9^{9^{9^{9}}}",
    "99999999!",
    "3!!!!!!",
    "(x+1)^{99999999}",
    "((x+1)^2+1)^{2^{20}}",
    "10^{999999999}",
    "1e999999999",
    "\\binom{10^9}{5\\cdot 10^8}",
    "\\prod_{k=1}^{10^9} k",
    "9" * 900 + "^{" + "9" * 900 + "}",
    "(" * 900 + "1" + ")" * 900,
    "\\frac{" * 300 + "1" + "}{2}" * 300,
    "\\sqrt{" * 300 + "2" + "}" * 300,
    "[[[[" * 200 + "1" + "]]]]" * 200,
    "\\begin{pmatrix}" * 100,
    "\\begin{pmatrix}" + "1&" * 900 + "\\end{pmatrix}",
    "\\boxed{" * 200,
    ",".join(map(str, range(400))),
    "\\pm 1" * 300,
    "x_" * 900,
    "$" * 1900,
    "-" * 1900,
    "\x00\x01\x02\x1b[31m9",
    "\u202e9\u200b",
    "\U0001f600" * 300,
    "x" * 1_000_000,
]
# only the time limit ends these
UNBOUNDED = ["\\sum_{k=1}^{10^{12}} \\frac{1}{k^2+k\\sqrt{k}}"]


@pytest.fixture(scope="module")
def graders():
    pool = GraderPool(time_limit_s=3.0, size=2)
    yield pool
    pool.close()


def grade(rm_type, response, label, graders):
    return asyncio.run(registry.grade(rm_type, Sample(prompt="q", index=1, response=response, label=label), graders))


@pytest.mark.parametrize(("answer", "label", "equal"), PAIRS)
def test_pairs_are_graded_mathematically(answer, label, equal, graders):
    assert grade("math", f"so it is $\\boxed{{{answer}}}$", label, graders) == float(equal)


def test_table_is_large_enough():
    assert len(PAIRS) >= 40 and sum(not equal for *_, equal in PAIRS) >= 10


@pytest.mark.parametrize("answer", HOSTILE, ids=lambda answer: ascii(answer[:20]))
def test_hostile_answer_is_scored_or_given_up_without_a_kill(answer, graders):
    try:
        assert grade("math", f"\\boxed{{{answer}}}", "x+1", graders) == 0.0
    except GraderFailure as failure:
        assert "the grader failed" in str(failure)


@pytest.mark.parametrize("answer", UNBOUNDED)
def test_unbounded_computation_costs_only_its_time_limit(answer, graders):
    started = time.perf_counter()
    with pytest.raises(GraderFailure, match="took more than 3 s grading and was killed"):
        grade("math", f"\\boxed{{{answer}}}", "x+1", graders)
    assert time.perf_counter() - started < 3.0 + 30.0  # a loaded machine has to start a process first
    assert grade("math", "\\boxed{1+x}", "x+1", graders) == 1.0


def test_grader_has_bounded_memory(graders):
    assert grade("math", "\\boxed{1+x}", "x+1", graders) == 1.0
    workers = [child for child in psutil.Process().children() if "grader_pool.py" in " ".join(child.cmdline())]
    assert workers
    assert all(worker.rlimit(psutil.RLIMIT_AS) == (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES) for worker in workers)


def no_algebra(answer, label):
    raise AssertionError("algebra was asked")


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("2(3) + 4", 10),
        ("-2^2", -4),
        ("\\frac{(4)(6)}{2}", 12),
        ("\\sqrt[3]{27}\\sqrt{\\frac{1}{4}}", Fraction(3, 2)),
        ("\\binom{5}{2}", 10),
        ("--3!", 6),
        ("\\sqrt{2}", pytest.approx(1.41421356)),
        ("2x", None),
        ("4\\frac{1}{2}", None),
        ("6/2(3)", None),
        ("2^3^2", None),
        ("3!!", None),
        ("1/0", None),
        ("\\sqrt{-1}", None),
        ("9^{99999}", None),
        ("9^{6000}" * 3, None),
        ("(9999!)", None),
        ("(" * 900 + "1" + ")" * 900, None),
        ("-" * 1501 + "6", -6),
    ],
)
def test_plain_arithmetic_is_evaluated_when_unambiguous_and_small(text, value):
    assert equality_chains.value(text) == value


def test_very_long_answer_never_reaches_sympy():
    assert not answers_equal("1+" * 100_000 + "1", "100001", no_algebra)
    assert not answers_equal("9" * 100_000, "1", no_algebra)
    assert answers_equal("9" * 100_000, "9" * 100_000, no_algebra)


@pytest.mark.parametrize(
    ("response", "label", "score"),
    [
        ("so \\boxed{42}", "42", True),
        ("so \\boxed{042}", "42", True),
        ("so \\boxed{42}", "43", False),
        ("so \\fbox{ yes }", "yes", True),
        ("so \\boxed{42} or \\boxed{43}", "43", True),
        ("so \\boxed{42.0}", "42", None),
        ("so \\boxed{\\frac12}", "\\frac12", None),
        ("so \\boxed{42", "42", None),
        ("no box", "42", None),
    ],
)
def test_fast_path_decides_only_equal_texts_and_integers(response, label, score):
    assert registry.fast_match(response, label, thinks=False) is score


def test_fast_path_ignores_a_box_inside_the_thinking():
    assert registry.fast_match("<think></think> \\boxed{4}", "4", thinks=True) is True
    assert registry.fast_match("<think> \\boxed{4} </think>", "4", thinks=True) is None
    assert registry.fast_match("\\boxed{4}", "4", thinks=True) is None


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


def test_boxed_prefix_takes_the_last_box_anywhere(graders):
    assert grade("boxed_deepscaler", "no marker, but \\boxed{3} or \\boxed{4}", "4", graders) == 1.0
    assert grade("boxed_math", "no box", "4", graders) == 0.0


def test_math_answer_without_a_box_is_wrong(graders):
    assert grade("math", "the answer is 4", "4", graders) == 0.0


@pytest.mark.parametrize("label", [None, "", "  ", True, ["4"], {"a": 1}])
def test_invalid_label_is_an_error(label, graders):
    with pytest.raises(ValueError, match="math rewards need the answer as text or number: check --label-key"):
        grade("math", "\\boxed{4}", label, graders)


def test_random_reward_is_reproducible_and_fair(graders):
    rewards = [asyncio.run(registry.grade("random", Sample(prompt="q", index=index), graders)) for index in range(400)]
    assert rewards[:12] == [
        asyncio.run(registry.grade("random", Sample(prompt="q", index=index), graders)) for index in range(12)
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
def test_last_box_is_found(text, answer):
    assert last_boxed(text) == answer
