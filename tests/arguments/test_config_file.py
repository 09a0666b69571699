"""--custom-config-path: a file of flags, checked like the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from slimrl.arguments import PassthroughFlag, read_args
from tests.arguments.conftest import Recipe

TABLES = {"sglang": lambda: {"mem-fraction-static": PassthroughFlag("mem_fraction_static", type=float)}}


def read(recipe: Recipe, text: str, more: str = "", name: str = "custom.yaml") -> tuple[object, list[str]]:
    path = Path(recipe.dir) / name
    path.write_text(text)
    args, problems = read_args(recipe.line(f"--custom-config-path {path} {more}"), passthrough=TABLES)
    return args, [str(problem).replace(str(path), "FILE") for problem in problems]


def test_the_file_wins_over_the_command_line_and_says_so(recipe: Recipe):
    args, problems = read(recipe, "lr: 2e-6\neps-clip: 0.1\nrewards_normalization: true\n", "--lr 1e-5")
    assert problems == []
    assert (args.lr, args.eps_clip, args.rewards_normalization) == (2e-6, 0.1, True)
    assert sum("lr is 2e-06 by --custom-config-path" in note for note in args.notes) == 1


def test_every_kind_of_value_is_read(recipe: Recipe):
    text = (
        "rollout_stop: [a, b]\napply_chat_template_kwargs: {enable_thinking: false}\nbalance_data: true\n"
        "rollout_max_context_len: null\nsglang_mem_fraction_static: 0.7\ncustom: {my_weight: 3}\n"
    )
    args, problems = read(recipe, text)
    assert problems == []
    assert args.rollout_stop == ["a", "b"]
    assert args.apply_chat_template_kwargs == {"enable_thinking": False}
    assert args.rollout_max_context_len is None
    assert args.sglang_options == {"mem_fraction_static": 0.7}
    assert args.custom == {"my_weight": 3}


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("lrr: 1", "lrr is no flag: put settings of your own hooks under custom; did you mean lr?"),
        ("lr: fast", 'lr: "fast" is not a number.'),
        ("lr: [1, 2]", "lr: [1, 2] is a list, and one value is wanted."),
        ("balance_data: 1", "balance_data: 1 is neither true nor false."),
        ("num_layers: true", "num_layers: true is not what --num-layers takes."),
        ("- 1", "the file must hold a mapping of flags to values."),
        ("a: [", "the file is not YAML"),
        ("sglang_mem_fraction: 1", "unknown flag --sglang-mem-fraction: did you mean --sglang-mem-fraction-static?"),
    ],
)
def test_what_the_command_line_would_refuse_is_refused(recipe: Recipe, text: str, sentence: str):
    _, problems = read(recipe, text)
    assert any(problem.startswith(f"--custom-config-path FILE: {sentence}") for problem in problems), problems


def test_rules_hold_for_the_file_too(recipe: Recipe):
    _, problems = read(recipe, "eps_clip_c: 1.1\noffload_train: true\n")
    assert any(problem.startswith("--eps-clip-c 1.1 is not above") for problem in problems)
    assert any(problem.startswith("--offload-train is not served") for problem in problems)


def test_a_missing_file_is_one_sentence(recipe: Recipe):
    _, problems = read_args(recipe.line("--custom-config-path /nowhere.yaml"))
    assert [str(problem) for problem in problems] == [
        "--custom-config-path /nowhere.yaml: the file does not exist: check the path."
    ]
