"""Rewards that could not be judged or trained on are refused before anything starts."""

import pytest

from slimrl.arguments import read_args


def sentences(line: list[str]) -> list[str]:
    return [str(problem) for problem in read_args(line)[1]]


@pytest.mark.parametrize("rm_type", ["remote_rm", "boxed_remote_rm"])
def test_a_reward_service_needs_an_address(recipe, rm_type):
    line = recipe.line(f"--rm-type {rm_type}")
    assert sentences(line) == [
        f"--rm-type {rm_type} asks a reward service: give its address, --rm-url http://host:port/..."
    ]
    assert sentences([*line, "--rm-url", "http://127.0.0.1:5000/judge"]) == []
    assert sentences([*line, "--rm-url", "127.0.0.1:5000"]) == [
        "--rm-url 127.0.0.1:5000 is no address: begin it with http:// or https://."
    ]


def test_a_reward_that_is_a_dict_needs_a_key_in_training_and_in_evaluation(recipe):
    line = recipe.line("--rm-type dapo")
    assert sentences(line) == [
        "--rm-type dapo gives a dict with score, acc and pred: give --reward-key score.",
        "evaluation set aime with rm_type dapo gives a dict with score, acc and pred: give --eval-reward-key score.",
    ]
    assert sentences([*line, "--reward-key", "score"]) == []


@pytest.mark.parametrize(
    "flags", ["--rm-type ifeval", "--group-rm", "--rm-time-limit 0.5 --rm-num-graders 3", "--rm-type boxed_gpqa"]
)
def test_reward_flags_are_served(recipe, flags):
    assert sentences(recipe.line(flags)) == []


def test_a_time_limit_of_nothing_is_refused(recipe):
    assert "--rm-time-limit 0 is too small" in sentences(recipe.line("--rm-time-limit 0"))[0]
