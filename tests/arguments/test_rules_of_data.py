"""Rules about prompt data: each lets the recipe and its neighbours pass, and says what is wrong in one sentence."""

from __future__ import annotations

import pytest

from slimrl.arguments import read_args
from slimrl.arguments.rules import MODEL_RULES, TRAINING_RULES

BLANK = "--disable-rollout-global-dataset"
OWN_FUNCTION = "--rollout-function-path slimrl.rollout.sft_rollout.generate_rollout"

# rule -> (what passes when appended to the recipe, what does not and the sentence for it)
CASES: dict[str, tuple[list[str], list[tuple[str, str]]]] = {
    "data_files_exist": (
        [
            "--prompt-data {dir}/train.jsonl@[0:1]",
            "--label-key label",
            "--eval-prompt-data {dir}/aime-2024.jsonl",
            "--prompt-data {dir}",
            "--prompt-data {dir}@[1:]",
            "--prompt-data {dir}/train.jsonl {dir}/aime-2024.jsonl",
            "--prompt-data {dir}/train.jsonl@[:1]=0.75 {dir}/aime-2024.jsonl=0.25",
        ],
        [
            (
                "--prompt-data {dir}/train.jsonl@[0-1]",
                "--prompt-data {dir}/train.jsonl@[0-1] has a slice that cannot be read: write path@[start:end].",
            ),
            (
                "--prompt-data {dir}/hf",
                "--prompt-data {dir}/hf is a folder without .jsonl nor .parquet files: check the path.",
            ),
            (
                "--prompt-data {dir}/hf/config.json",
                "--prompt-data {dir}/hf/config.json is neither .jsonl nor .parquet: convert it to one of them.",
            ),
            (
                "--prompt-data {dir}/train.jsonl {dir}/more.jsonl",
                "--prompt-data {dir}/more.jsonl does not exist (only {dir} of it does): check the path.",
            ),
            (
                "--prompt-data {dir}/train.jsonl=0.5 {dir}/aime-2024.jsonl=0.25",
                "--prompt-data {dir}/train.jsonl=0.5 {dir}/aime-2024.jsonl=0.25 has probabilities that sum to 0.75:"
                " make their sum 1.",
            ),
            (
                "--eval-prompt-data aime {dir}/aime.jsonl",
                "--eval-prompt-data {dir}/aime.jsonl (set aime) does not exist (only {dir} of it does): check the"
                " path.",
            ),
            (
                "--eval-input-key question",
                "--eval-prompt-data {dir}/aime-2024.jsonl (set aime) has no column 'question' (input key) but"
                " 'prompt', 'label': set input key to one of them.",
            ),
            (
                "--label-key answer --eval-label-key label",
                "--prompt-data {dir}/train.jsonl has no column 'answer' (--label-key) but 'prompt', 'label': set"
                " --label-key to one of them.",
            ),
        ],
    ),
    "prompts_have_one_source": (
        ["--data-source-path slime.rollout.data_source.RolloutDataSourceWithBuffer"],
        [(f"{BLANK} {OWN_FUNCTION}", f"{BLANK} leaves --prompt-data unread: leave one of the two out.")],
    ),
    "epochs_have_an_end": (
        ["--num-epoch 2", "--prompt-data {dir}/train.jsonl=0.5 {dir}/aime-2024.jsonl=0.5 --num-epoch 1"],
        [],
    ),
}


def sentences(line: list[str]) -> list[str]:
    return [str(problem) for problem in read_args(line)[1]]


@pytest.mark.parametrize(("rule", "more"), [(rule, more) for rule, (good, _) in CASES.items() for more in good])
def test_what_keeps_a_rule_passes(recipe, rule, more):
    assert sentences(recipe.line(more)) == []


@pytest.mark.parametrize(
    ("rule", "more", "sentence"), [(rule, *case) for rule, (_, bad) in CASES.items() for case in bad]
)
def test_what_breaks_a_rule_is_one_sentence(recipe, rule, more, sentence):
    assert sentences(recipe.line(more)) == [sentence.format(dir=recipe.dir)]


def test_every_rule_about_data_is_tested():
    rules = {rule.__name__ for rule in MODEL_RULES + TRAINING_RULES if rule.__module__.endswith(".data")}
    assert rules == set(CASES)


def test_an_empty_data_file_and_a_broken_first_row_are_refused(recipe):
    path = recipe.dir / "train.jsonl"
    path.write_text("\n\n")
    assert sentences(recipe.line()) == [f"--prompt-data {path} is empty: give a file with at least one row."]
    path.write_text("[1]\n")
    assert sentences(recipe.line()) == [
        f"--prompt-data {path} has a first row that is not a JSON object: write one object per line."
    ]
    path.write_text("{oops\n")
    (sentence,) = sentences(recipe.line())
    assert "has a first row that is not JSON" in sentence


def test_a_broken_first_row_that_is_allowed_is_not_looked_at(recipe):
    (recipe.dir / "train.jsonl").write_text('{oops\n{"prompt": "a", "answer": 1}\n')
    assert sentences(recipe.line("--max-bad-rows 1 --label-key answer --eval-label-key label")) == []
    assert "has no column 'label'" in sentences(recipe.line("--max-bad-rows 1 --label-key label"))[0]


def test_data_that_is_not_utf_8_is_refused(recipe):
    path = recipe.dir / "latin.jsonl"
    path.write_bytes('{"prompt": "é", "label": 1}\n'.encode("latin-1"))
    (sentence,) = sentences(recipe.line(f"--prompt-data {path}"))
    assert sentence.startswith(f"--prompt-data {path} cannot be read as UTF-8 text (")


def test_one_path_stays_text_and_several_are_a_list(recipe):
    assert read_args(recipe.line())[0].prompt_data == f"{recipe.dir}/train.jsonl"
    assert read_args(recipe.line("--prompt-data a b"))[0].prompt_data == ["a", "b"]


def test_without_prompt_data_something_has_to_make_samples(recipe):
    assert sentences(recipe.line(f"{BLANK} {OWN_FUNCTION}", without="--prompt-data")) == []
    assert sentences(recipe.line(BLANK, without="--prompt-data")) == [
        f"{BLANK} hands out blank samples, and nothing fills them: give --data-source-path,"
        " --custom-generate-function-path or --rollout-function-path."
    ]


def test_epochs_that_never_end_together_give_no_length(recipe):
    line = recipe.line(f"{BLANK} {OWN_FUNCTION} --num-epoch 1", without="--num-rollout")
    at = line.index("--prompt-data")
    del line[at : at + 2]
    assert sentences(line) == [
        "--num-epoch 1 counts passes over --prompt-data, and --disable-rollout-global-dataset does without: give"
        " --num-rollout."
    ]
    mixed = "--prompt-data {dir}/train.jsonl=0.5 {dir}/aime-2024.jsonl=0.5 --num-epoch 1"
    assert sentences(recipe.line(mixed, without="--num-rollout")) == [
        "--num-epoch 1 has no one meaning for sets that are mixed by probability, each of which ends at a time of its"
        " own: give --num-rollout."
    ]
