"""The additions and their split, against hand-made values and the plain rules of adding."""

import pytest

from slimrl.tiny.task import Addition, boxed, split_additions


def test_a_sum_with_a_carry_has_a_forgetful_answer_ten_too_small():
    problem = Addition(37, 45)
    assert (problem.question, problem.answer, problem.noisy_answer) == ("37+45=", 82, 72)


def test_a_sum_without_a_carry_cannot_be_forgotten():
    problem = Addition(31, 45)
    assert not problem.needs_carry
    assert problem.noisy_answer == problem.answer == 76


def test_nine_and_one_is_the_smallest_carry_of_the_ones():
    assert Addition(19, 11).needs_carry
    assert not Addition(18, 11).needs_carry


def test_a_row_holds_openai_messages_and_the_answer_as_text():
    assert Addition(20, 22).row() == {"prompt": [{"role": "user", "content": "20+22="}], "label": "42"}


def test_an_answer_is_boxed_as_math_graders_expect():
    assert boxed(82) == r"\boxed{82}"


def test_the_split_has_the_asked_sizes_and_the_same_share_of_carries():
    train, held_out = split_additions(seed=0, train_size=1000, eval_size=100)
    assert (len(train), len(held_out)) == (1000, 100)
    assert sum(problem.needs_carry for problem in train) == 600
    assert sum(problem.needs_carry for problem in held_out) == 60


def test_no_eval_problem_stands_in_train_in_either_order():
    train, held_out = split_additions(seed=1, train_size=1600, eval_size=128)
    seen = {frozenset((problem.left, problem.right)) for problem in train}
    assert not [problem for problem in held_out if frozenset((problem.left, problem.right)) in seen]


def test_every_problem_is_different_and_has_two_digits_everywhere():
    train, held_out = split_additions(seed=2, train_size=1600, eval_size=128)
    assert len(set(train)) == 1600 and len(set(held_out)) == 128
    assert all(10 <= number <= 99 for problem in train for number in (problem.left, problem.right, problem.answer))


def test_the_split_depends_on_the_seed_only():
    assert split_additions(seed=3, train_size=50, eval_size=10) == split_additions(seed=3, train_size=50, eval_size=10)
    assert split_additions(seed=3, train_size=50, eval_size=10) != split_additions(seed=4, train_size=50, eval_size=10)


def test_asking_for_more_problems_than_there_are_names_how_many_are_left():
    with pytest.raises(ValueError, match=r"train_size 5000 .* only \d+ are left"):
        split_additions(seed=0, train_size=5000, eval_size=10)
    with pytest.raises(ValueError, match="between 0 and 1"):
        split_additions(seed=0, train_size=5, eval_size=5, carry_share=1.5)
