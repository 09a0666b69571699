"""Evaluation datasets: the dataset's own value, then the file's defaults, then --eval-*, then --rollout-*."""

from __future__ import annotations

import json

import pytest

from slimrl.arguments import read_args
from slimrl.arguments.flag import ended
from slimrl.arguments.flags.rollout import RM_TYPES
from slimrl.rollout.rm_hub.rule_reward import builtin_types, is_builtin

CONFIG = """
eval:
  defaults:
    n_samples_per_eval_prompt: 4
    temperature: 0.5
    rm_type: math
  datasets:
    - name: easy
      path: {dir}/aime-2024.jsonl
      temperature: 0
      stop: ["\\n\\n"]
    - name: hard
      path: {dir}/train.jsonl@[0:1]
      n_samples_per_eval_prompt: 32
      rm_type: deepscaler
      metadata_overrides: {{level: 5}}
"""


def sentences(line: list[str]) -> list[str]:
    return [str(problem) for problem in read_args(line)[1]]


@pytest.fixture
def config(recipe):
    """Writes an --eval-config file and returns the recipe's command line with it."""

    def write(text: str, more: str = "", suffix: str = "yaml") -> list[str]:
        path = recipe.dir / f"eval.{suffix}"
        path.write_text(text.format(dir=recipe.dir))
        return recipe.line(f"--eval-config {path} {more}", without="--eval-prompt-data")

    return write


def test_values_are_resolved_from_the_most_specific_level(config):
    args, problems = read_args(config(CONFIG, "--eval-temperature 0.9 --rollout-top-k 20"))
    assert problems == []
    easy, hard = args.eval_datasets
    assert (easy.temperature, hard.temperature) == (0, 0.5)  # the set, the defaults
    assert (easy.n_samples_per_eval_prompt, hard.n_samples_per_eval_prompt) == (4, 32)
    assert (easy.top_p, hard.top_p) == (0.7, 0.7)  # --eval-top-p
    assert (easy.top_k, hard.top_k) == (20, 20)  # --rollout-top-k
    assert (easy.rm_type, hard.rm_type) == ("math", "deepscaler")
    assert (easy.stop, hard.stop) == (["\n\n"], None)
    assert (easy.max_prompt_len, easy.metadata_overrides, hard.metadata_overrides) == (None, {}, {"level": 5})


def test_dataset_reward_overrides_the_custom_reward_of_the_run(config, recipe, monkeypatch):
    (recipe.dir / "slimrl_test_eval_hooks.py").write_text("async def judge(args, sample): return 1.0\n")
    monkeypatch.syspath_prepend(recipe.dir)
    custom = "--custom-rm-path slimrl_test_eval_hooks.judge"
    args, problems = read_args(config(CONFIG, custom))
    assert problems == []
    assert [dataset.custom_rm_path for dataset in args.eval_datasets] == [None, None]
    args, _ = read_args(recipe.line(custom))
    assert args.eval_datasets[0].custom_rm_path == "slimrl_test_eval_hooks.judge"


def test_datasets_may_be_a_mapping_without_the_eval_key_or_json(config):
    text = json.dumps({"datasets": {"a": {"path": "PATH"}}}).replace("{", "{{").replace("}", "}}")
    args, problems = read_args(config(text.replace("PATH", "{dir}/train.jsonl"), suffix="json"))
    assert problems == []
    assert [(dataset.name, dataset.temperature) for dataset in args.eval_datasets] == [("a", 0.8)]


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("datasets: []", "datasets must list at least one set with name and path"),
        ("[1]", "the file must hold a mapping with datasets (and defaults)"),
        ("datasets: [{{name: a}}]", "set 1 must be a mapping with at least name and path"),
        (
            "datasets: [{{name: a, path: p, temprature: 1}}]",
            "set 1 (a) has an unknown key 'temprature', did you mean temperature?",
        ),
        (
            "datasets: [{{name: a, path: p, top_p: 2}}]",
            "set 1 (a) has top_p 2, which is too large: it must be at most 1",
        ),
        (
            "datasets: [{{name: a, path: p, top_k: 0}}]",
            "set 1 (a) has top_k 0, which is not allowed: give another number, or leave it out",
        ),
        ("datasets: {{a: train.jsonl}}", "set 1 must be a mapping with at least name and path"),
        ("datasets: [{{name: a, path: p, top_k: x}}]", "set 1 (a) has top_k 'x', which is not of type int"),
        (
            "datasets: [{{name: a, path: p, stop: x}}]",
            "set 1 (a) has stop 'x', which is not of type list[str] | None",
        ),
        (
            "datasets: [{{name: a, path: p, multimodal_keys: images}}]",
            "set 1 (a) has multimodal_keys 'images', which is not of type dict[str, typing.Any] | None",
        ),
    ],
)
def test_invalid_file_is_one_error(config, recipe, text, complaint):
    assert sentences(config(text)) == [ended(f"--eval-config {recipe.dir}/eval.yaml: {complaint}")]


def test_errors_are_found_next_to_valid_datasets(config, recipe):
    path = f"{recipe.dir}/eval.yaml"
    assert sentences(config("defaults: {{top_q: 1}}\ndatasets: [{{name: a, path: {dir}/train.jsonl}}]\nextra: 1")) == [
        f"--eval-config {path}: 'extra' is not a known key (known: datasets, defaults): remove it, or move it under"
        " defaults.",
        f"--eval-config {path}: defaults has an unknown key 'top_q', did you mean top_p?",
    ]
    assert sentences(config("datasets: [{{name: a, path: {dir}/train.jsonl, rm_type: maths}}]")) == [
        f"--eval-config: set a has rm_type 'maths': give one of {', '.join(RM_TYPES)}."
    ]
    assert sentences(config("datasets: [{{name: a, path: {dir}/train.jsonl, custom_rm_path: no.where}}]")) == [
        "--eval-config: set a, custom_rm_path no.where: there is no module no: check the spelling, or start from the"
        " folder that contains it."
    ]


def test_missing_or_non_yaml_file_is_rejected(config, recipe):
    assert sentences(recipe.line("--eval-config {dir}/nope.yaml", without="--eval-prompt-data")) == [
        f"--eval-config {recipe.dir}/nope.yaml: the file does not exist: check the path."
    ]
    assert "the file is not YAML" in sentences(config("a: [b"))[0]


def test_datasets_from_two_sources_are_rejected(recipe, config):
    line = [*config(CONFIG), "--eval-prompt-data", f"{recipe.dir}/train.jsonl"]
    assert sentences(line) == ["--eval-config and --eval-prompt-data both name evaluation sets: give one of them."]


def test_dataset_without_a_reward_is_rejected(recipe, config, monkeypatch):
    (recipe.dir / "slimrl_test_own.py").write_text("async def generate(args, sample, sampling_params): return sample\n")
    monkeypatch.syspath_prepend(recipe.dir)
    text = "datasets: [{{name: a, path: {dir}/train.jsonl}}]"
    line = config(text)
    at = line.index("--rm-type")
    del line[at : at + 2]
    assert "--eval-config: no reward for set a: give it rm_type or custom_rm_path." in sentences(line)
    assert sentences([*line, "--custom-generate-function-path", "slimrl_test_own.generate"]) == []


def test_single_path_is_named_after_its_file(recipe):
    args, problems = read_args(recipe.line("--eval-prompt-data {dir}/aime-2024.jsonl@[0:1]"))
    assert problems == []
    assert [dataset.name for dataset in args.eval_datasets] == ["aime-2024"]


def test_unpaired_words_and_repeated_names_are_rejected(recipe):
    assert sentences(recipe.line("--eval-prompt-data a b c")) == [
        "--eval-prompt-data got 3 words, a b c, which do not pair up: write name path [name path ...]."
    ]
    assert sentences(recipe.line("--eval-prompt-data a {dir}/train.jsonl a {dir}/train.jsonl")) == [
        "--eval-prompt-data names 'a' twice: give each evaluation set its own name."
    ]


def test_reward_types_match_the_registry():
    assert all(is_builtin(name) for name in RM_TYPES)
    assert set(builtin_types()) == {name for name in RM_TYPES if not name.startswith("boxed_")}
