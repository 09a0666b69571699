"""Rule rewards other than math: multiple choice, word overlap, answer line; each against a manual count."""

import time

import pytest

from slimrl.data.sample import Sample
from slimrl.rollout.rm_hub import rule_reward
from slimrl.rollout.rm_hub.rule_reward import f1, request_of


def reward_of(rm_type, response, label, metadata=None):
    sample = Sample(prompt="q", response=response, label=label, metadata=metadata or {})
    return rule_reward.grade_request(request_of(rm_type, sample), lambda answer, label: False)


# dapo ----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("response", "right", "pred"),
    [
        ("thinking\nAnswer: 34", True, "34"),
        ("answer : $34$", True, "$34$"),
        ("Answer: 33\nAnswer: \\boxed{34}", True, "34"),
        ("Answer: 34\nAnswer: 35", False, "35"),
        ("Answer: 34" + " " * 301, False, "[INVALID]"),
        ("it is 34", False, "[INVALID]"),
        ("\\boxed{34}", False, "[INVALID]"),
    ],
)
def test_dapo_grades_the_last_answer_line_near_the_end(response, right, pred):
    assert reward_of("dapo", response, "34") == {"score": 1.0 if right else -1.0, "acc": right, "pred": pred}


@pytest.mark.parametrize("label", ["0.5", "\\frac{1}{2}", 0.5])
def test_dapo_labels_need_not_be_integers(label):
    assert reward_of("dapo", "Answer: 1/2", label)["score"] == 1.0
    assert reward_of("dapo", "Answer: 0", label)["score"] == -1.0


def test_dapo_with_the_boxed_prefix_grades_the_box():
    assert reward_of("boxed_dapo", "so \\boxed{34}.", "34")["score"] == 1.0
    assert reward_of("boxed_dapo", "Answer: 34", "34") == {"score": -1.0, "acc": False, "pred": "[INVALID]"}


# f1 ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("answer", "label", "score"),
    [
        ("The cat.", "cat", 1.0),
        ("a black cat", "the white cat", 0.5),  # 1 of 2 words on each side
        ("cat cat dog", "cat", 0.5),  # P = 1/3, R = 1
        ("dog", "cat", 0.0),
        ("yes", "yes", 1.0),
        ("yes it is", "yes", 0.0),
        ("", "cat", 0.0),
    ],
)
def test_f1_matches_the_manual_count(answer, label, score):
    assert f1(answer, label) == pytest.approx(score)


def test_f1_takes_the_best_of_several_labels():
    assert reward_of("f1", "a black cat", ["dog", "black cat"]) == 1.0
    assert reward_of("boxed_f1", "a long story \\boxed{black cat}", "black cat") == 1.0


@pytest.mark.parametrize("label", [None, 3, [], ["a", 3]])
def test_f1_label_that_is_not_text_is_an_error(label):
    with pytest.raises(ValueError, match="f1 rewards need text or a list of texts"):
        reward_of("f1", "x", label)


# gpqa ----------------------------------------------------------------------------------------------------------------

CHOICES = {"choices": ["1.5 eV", "2.5 eV", "the electron", "the electron and the hole"]}


@pytest.mark.parametrize(
    ("response", "letter"),
    [
        ("The answer is (B).", "B"),
        ("The answer is B", "B"),
        ("Answer: **B**", "B"),
        ("the correct option is $\\text{B}$", "B"),
        ("The final answer is $\\boxed{B}$", "B"),
        ("\\boxed{\\text{(B)}}", "B"),
        ("\\boxed{B. 2.5 eV}", "B"),
        ("A looks good, but the answer is C. No: the answer is B.", "B"),
        ("I think\n\nB", "B"),
        ("I think\n(B)", "B"),
        ("B. 2.5 eV", "B"),
        ("Among (A) and (B) it has to be (B)", "B"),
        ("A wave is an excitation", None),
        ("the answer is a wave", None),
        ("no idea", None),
    ],
)
def test_final_choice_letter_is_extracted(response, letter):
    assert rule_reward.chosen_letter(response, ["A", "B", "C", "D"]) == letter


def test_letter_search_is_not_quadratic_in_trailing_spaces():
    started = time.process_time()
    assert rule_reward.chosen_letter("B" + " " * 20_000 + "no", ["A", "B"]) is None
    assert time.process_time() - started < 1.0


@pytest.mark.parametrize("label", ["B", "(b)", 1, "1", "2.5 eV", "\\boxed{B}"])
def test_correct_choice_may_be_given_as_letter_number_or_text(label):
    assert reward_of("gpqa", "<think>(A)?</think> The answer is (B)", label, CHOICES) == 1.0
    assert reward_of("gpqa", "The answer is (A)", label, CHOICES) == 0.0


def test_response_without_a_letter_is_graded_by_the_choice_text():
    assert reward_of("gpqa", "It has to be 2.5 eV.", "B", CHOICES) == 1.0
    assert reward_of("gpqa", "It is the electron and the hole", "D", CHOICES) == 1.0
    assert reward_of("gpqa", "It is the electron and the hole", "C", CHOICES) == 0.0
    assert reward_of("gpqa", "It has to be 2.5 eV.", "B") == 0.0


def test_metadata_may_give_the_letter_and_the_valid_letters():
    metadata = {"correct_letter": "B", "valid_letters": ["A", "B"]}
    assert reward_of("gpqa", "The answer is B", None, metadata) == 1.0
    assert rule_reward.chosen_letter("the answer is D", ["A", "B"]) is None


def test_label_that_matches_no_choice_is_an_error():
    with pytest.raises(ValueError, match="gpqa rewards need one of the letters A, B, C, D, the number"):
        reward_of("gpqa", "B", "3.5 eV", CHOICES)
