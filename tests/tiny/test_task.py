"""The additions and their split, against hand-made values and the rules of addition."""

import math

import pytest
import torch

from slimrl.tiny.tasks import Addition, boxed, mixture_loss, split_additions


def test_noisy_answer_of_a_sum_with_a_carry_is_ten_too_small():
    problem = Addition(37, 45)
    assert (problem.question, problem.answer, problem.noisy_answer) == ("37+45=", 82, 72)


def test_sum_without_a_carry_has_no_noisy_answer():
    problem = Addition(31, 45)
    assert not problem.needs_carry
    assert problem.noisy_answer == problem.answer == 76


def test_nine_plus_one_is_the_smallest_carry_of_the_ones():
    assert Addition(19, 11).needs_carry
    assert not Addition(18, 11).needs_carry


def test_row_has_openai_messages_and_the_answer_as_text():
    assert Addition(20, 22).row() == {"prompt": [{"role": "user", "content": "20+22="}], "label": "42"}


def test_answer_is_boxed_as_math_graders_expect():
    assert boxed(82) == r"\boxed{82}"


def test_split_has_the_requested_sizes_and_equal_fractions_of_carries():
    train, held_out = split_additions(seed=0, train_size=1000, eval_size=100)
    assert (len(train), len(held_out)) == (1000, 100)
    assert sum(problem.needs_carry for problem in train) == 600
    assert sum(problem.needs_carry for problem in held_out) == 60


def test_no_eval_problem_is_in_train_in_either_order():
    train, held_out = split_additions(seed=1, train_size=1600, eval_size=128)
    seen = {frozenset((problem.left, problem.right)) for problem in train}
    assert not [problem for problem in held_out if frozenset((problem.left, problem.right)) in seen]


def test_every_problem_is_unique_with_two_digit_numbers():
    train, held_out = split_additions(seed=2, train_size=1600, eval_size=128)
    assert len(set(train)) == 1600 and len(set(held_out)) == 128
    assert all(10 <= number <= 99 for problem in train for number in (problem.left, problem.right, problem.answer))


def test_split_depends_only_on_the_seed():
    assert split_additions(seed=3, train_size=50, eval_size=10) == split_additions(seed=3, train_size=50, eval_size=10)
    assert split_additions(seed=3, train_size=50, eval_size=10) != split_additions(seed=4, train_size=50, eval_size=10)


def test_too_many_requested_problems_report_the_number_left():
    with pytest.raises(ValueError, match=r"train_size 5000 .* only \d+ remain"):
        split_additions(seed=0, train_size=5000, eval_size=10)
    with pytest.raises(ValueError, match="between 0 and 1"):
        split_additions(seed=0, train_size=5, eval_size=5, carry_share=1.5)


def test_loss_of_the_warm_start_is_lowest_where_30_percent_carry():
    noisy, right = torch.tensor([[2, 4]]), torch.tensor([[3, 4]])  # the answers differ in their first token
    wanted = torch.tensor([[[0.0, 0.0, 0.7, 0.3, 0.0], [0.0, 0.0, 0.0, 0.0, 1.0]]])
    entropy = -(0.7 * math.log(0.7) + 0.3 * math.log(0.3)) / 2  # of the first token; the second has none
    assert mixture_loss(wanted.clamp(min=1e-30).log(), noisy, right).item() == pytest.approx(entropy, abs=1e-6)
    always_right = torch.tensor([[[0.0, 0.0, 0.1, 0.9, 0.0], [0.0, 0.0, 0.0, 0.0, 1.0]]]).clamp(min=1e-30).log()
    assert mixture_loss(always_right, noisy, right).item() > entropy
