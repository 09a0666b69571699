"""--custom-config-path: a file of flags, checked like the command line."""

from __future__ import annotations

from pathlib import Path

import pytest

from slimrl.arguments import PassthroughFlag, read_args
from tests.arguments.conftest import Recipe

SERVER = {
    "mem-fraction-static": PassthroughFlag("mem_fraction_static", type=float),
    "enable-metrics": PassthroughFlag("enable_metrics", action="store_true"),
}
TABLES = {"sglang": lambda: SERVER}


def read(recipe: Recipe, text: str, more: str = "", name: str = "custom.yaml") -> tuple[object, list[str]]:
    path = Path(recipe.dir) / name
    path.write_text(text)
    args, problems = read_args(recipe.line(f"--custom-config-path {path} {more}"), passthrough=TABLES)
    return args, [str(problem).replace(str(path), "FILE") for problem in problems]


def test_file_overrides_the_command_line_and_logs_it(recipe: Recipe):
    args, problems = read(recipe, "lr: 2e-6\neps-clip: 0.1\nrewards_normalization: true\n", "--lr 1e-5")
    assert problems == []
    assert (args.lr, args.eps_clip, args.rewards_normalization) == (2e-6, 0.1, True)
    assert sum("lr is 2e-06 from --custom-config-path" in note for note in args.notes) == 1


def test_every_value_type_is_read(recipe: Recipe):
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


def test_switch_may_be_named_by_its_spelling_or_its_destination(recipe: Recipe):
    args, problems = read(recipe, "disable_grpo_std_normalization: true\n--no-offload-train: true\nuse-tis: false\n")
    assert problems == []
    assert (args.grpo_std_normalization, args.offload_train, args.use_tis) == (False, False, False)


def test_file_can_turn_off_an_engine_switch(recipe: Recipe):
    args, problems = read(recipe, "sglang_enable_metrics: false\n", "--sglang-enable-metrics")
    assert problems == []
    assert args.sglang_options == {"enable_metrics": False}


def test_json_file_may_not_name_a_flag_twice(recipe: Recipe):
    _, problems = read(recipe, '{"lr": 1e-6, "lr": 2e-6}', name="custom.json")
    assert problems == ["--custom-config-path FILE: lr is given twice: keep one of them."]


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("lrr: 1", "lrr is not a flag: put settings of custom hooks under custom; did you mean lr?"),
        ("lr: fast", 'lr: "fast" is not a number.'),
        ("lr: [1, 2]", "lr: [1, 2] is a list, and one value is wanted."),
        ("balance_data: 1", "balance_data: 1 is neither true nor false."),
        ("num_layers: true", "num_layers: true is not what --num-layers takes."),
        ("- 1", "the file must contain a mapping of flags to values."),
        ("a: [", "the file is not YAML"),
        ("rollout_stop: [[a]]", 'rollout_stop: [["a"]] is not what --rollout-stop takes.'),
        ("eval_prompt_data: {a: b}", 'eval_prompt_data: {"a": "b"} is not what --eval-prompt-data takes.'),
        ("eval_prompt_data: []", "eval_prompt_data: [] is empty, and a value is wanted."),
        ("lr: 1e-6\nlr: 2e-6", "lr is given twice: keep one of them."),
        ("custom: {a: 1, a: 2}", "a is given twice: keep one of them."),
        ("lr: 1e-6\n--lr: 2e-6", "--lr is given twice, in two spellings: keep one of them."),
        ("custom: 3", "custom must be a mapping of your own settings, each with a name."),
        (
            "custom: {tis_level: sequence}",
            "tis_level under custom is a flag, and args.tis_level would have the flag's value: move it out of custom,"
            " or rename it.",
        ),
        (
            "tis_upper_bound: 2.0",
            "tis_upper_bound is slime's name: use --tis-clip (settings of custom hooks: under custom).",
        ),
        ("custom_config_path: b.yaml", "custom_config_path cannot name another file from within one"),
        ("sglang_mem_fraction_static: null", "sglang_mem_fraction_static: null is no value: give one"),
        ("sglang_mem_fraction_static: false", "--sglang-mem-fraction-static needs a value and none is given"),
        ("sglang_mem_fraction: 1", "unknown flag --sglang-mem-fraction: did you mean --sglang-mem-fraction-static?"),
    ],
)
def test_values_invalid_on_the_command_line_are_rejected_in_the_file(recipe: Recipe, text: str, sentence: str):
    _, problems = read(recipe, text)
    assert any(problem.startswith(f"--custom-config-path FILE: {sentence}") for problem in problems), problems


def test_validation_rules_apply_to_the_file(recipe: Recipe):
    _, problems = read(recipe, "eps_clip_c: 1.1\nrelease_train: true\n")
    assert any(problem.startswith("--eps-clip-c 1.1 is not above") for problem in problems)
    assert any(problem.startswith("--release-train is unsupported") for problem in problems)


def test_missing_file_is_one_error(recipe: Recipe):
    _, problems = read_args(recipe.line("--custom-config-path /nowhere.yaml"))
    assert [str(problem) for problem in problems] == [
        "--custom-config-path /nowhere.yaml: the file does not exist: check the path."
    ]
