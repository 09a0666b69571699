"""Rules about prompt data: each lets the recipe and its neighbours pass, and says what is wrong in one sentence."""

from __future__ import annotations

import json
import re
import sys
import time
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from slimrl.arguments import read_args
from slimrl.arguments.eval_datasets import training_prompt_format
from slimrl.data.preflight import look_at

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
                "--eval-prompt-data {dir}/aime-2024.jsonl (set aime) has no column 'question' (--eval-input-key) but"
                " 'prompt', 'label': set --eval-input-key to one of them.",
            ),
            (
                "--label-key answer --eval-label-key label",
                "--prompt-data {dir}/train.jsonl has no column 'answer' (--label-key) but 'prompt', 'label': set"
                " --label-key to one of them.",
            ),
        ],
    ),
    "labels_have_a_column": (["--label-key label"], []),
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


ALLOW = "fix it, or allow for bad rows with --max-bad-rows."


def write_rows(path: Path, rows: dict[int, bytes], count: int) -> None:
    """`count` good rows but for those given by number, from 1."""
    good = json.dumps({"prompt": [{"role": "user", "content": "1+1"}], "label": "2"}).encode()
    path.write_bytes(b"".join(rows.get(number, good) + b"\n" for number in range(1, count + 1)))


def test_an_empty_data_file_is_refused(recipe):
    path = recipe.dir / "train.jsonl"
    path.write_text("\n\n")
    assert sentences(recipe.line()) == [f"--prompt-data {path} holds no rows: give at least one row."]


def test_a_slice_behind_the_last_row_is_told_as_that(recipe):
    path = recipe.dir / "train.jsonl"
    write_rows(path, {}, 5)
    for wanted in (f"{path}@[5:]", f"{path}@[7:9]", f"{path}@[3:2]"):
        (sentence,) = sentences(recipe.line(f"--prompt-data {wanted}"))
        assert sentence == f"--prompt-data {wanted} holds no rows in this slice: give at least one row."
    assert sentences(recipe.line(f"--prompt-data {path}@[4:]")) == []


@pytest.fixture
def shards(recipe) -> Path:
    """A folder of data as distributed writers leave it: three files, one of them without a row."""
    folder = recipe.dir / "shards"
    folder.mkdir()
    write_rows(folder / "part-0.jsonl", {}, 50)
    write_table(folder / "part-1.parquet", [])
    write_rows(folder / "part-2.jsonl", {}, 50)
    return folder


@pytest.mark.parametrize("slice_", ["", "@[:5]", "@[60:]", "@[-5:]"])
def test_a_folder_may_have_a_shard_without_rows(recipe, shards, slice_):
    (shards / "part-3.jsonl").write_text("\n")
    assert sentences(recipe.line(f"--prompt-data {shards}{slice_}")) == []


def test_a_folder_of_nothing_but_such_shards_is_refused(recipe, shards):
    for name in ("part-0.jsonl", "part-2.jsonl"):
        (shards / name).write_text("")
    refused = [f"--prompt-data {shards} holds no rows: give at least one row."]
    assert sentences(recipe.line(f"--prompt-data {shards}")) == refused


def test_every_file_of_a_folder_is_looked_into_as_one_alone_would_be(recipe, shards):
    write_rows(shards / "part-2.jsonl", {40: b"{oops"}, 50)
    (sentence,) = sentences(recipe.line(f"--prompt-data {shards}"))
    assert sentence.startswith(
        f"--prompt-data {shards} has a bad row among the 100 looked at; {shards}/part-2.jsonl:40"
    )


def test_of_a_slice_of_a_folder_no_row_is_judged_that_may_lie_outside(recipe, shards):
    write_rows(shards / "part-2.jsonl", {1: b"{oops"}, 50)
    write_table(shards / "part-3.parquet", ["2"], name="answer")
    assert sentences(recipe.line(f"--prompt-data {shards}@[:50]")) == []
    (shards / "part-3.parquet").write_text("{}")
    (sentence,) = sentences(recipe.line(f"--prompt-data {shards}@[:50]"))  # the run opens every file
    assert "part-3.parquet cannot be read: is not a Parquet file" in sentence


BAD_ROWS = {
    b"{oops": "not valid JSON: Expecting property name enclosed in double quotes: line 1 column 2 (char 1)",
    b"[1]": "a row must be a JSON object, this one is list",
    b'{"prompt": "\xe9", "label": "1"}': "not UTF-8 text: invalid continuation byte at byte 12 of the line",
    b'{"prompt": "a", "label": NaN}': "not valid JSON: NaN is no number of JSON",
    b'{"prompt": "a", "label": null}': (
        "the label is None, and math rewards need the answer as text or number: check --label-key"
    ),
    b'{"prompt": "a", "label": ["1"]}': (
        "the label is ['1'], and math rewards need the answer as text or number: check --label-key"
    ),
    b'{"prompt": "a"}': "no column 'label' (--label-key); it has ['prompt']",
    b'{"prompt": "", "label": "1"}': "an empty column 'prompt' (--input-key); it has ['label', 'prompt']",
    b'{"prompt": [1], "label": "1"}': '\'prompt\' must be text or a list of {"role", "content"} messages',
    b'{"prompt": "a", "label": "1", "metadata": [1]}': "'metadata' (--metadata-key) must be an object, not list",
}


@pytest.mark.parametrize(("row", "reason"), BAD_ROWS.items())
def test_a_bad_row_behind_others_is_named_before_anything_starts_unless_it_is_allowed(recipe, row, reason):
    path = recipe.dir / "train.jsonl"
    write_rows(path, {700: row}, 900)
    assert sentences(recipe.line()) == [
        f"--prompt-data {path} has a bad row among the 900 looked at; {path}:700: {reason}: {ALLOW}"
    ]
    assert sentences(recipe.line("--max-bad-rows 1")) == []


def test_all_of_the_first_rows_are_looked_at_and_a_sample_of_the_rest(recipe):
    path = recipe.dir / "train.jsonl"
    latin = b'{"prompt": "\xe9", "label": "1"}'
    write_rows(path, {999: b"{}"} | dict.fromkeys(range(20_000, 20_100), latin), 40_000)
    (sentence,) = sentences(recipe.line("--max-bad-rows 1"))
    found = re.match(
        rf"--prompt-data {path} has (\d+) bad rows among the ([\d,]+) looked at, and --max-bad-rows is 1;", sentence
    )
    # one row in 39 is sampled behind the first thousand
    assert 1 + 1 <= int(found[1]) <= 1 + 4
    assert found[2] == "2,000"
    assert f"the first {path}:999: no column 'label' (--label-key); it has []: fix them" in sentence
    write_rows(path, dict.fromkeys(range(20_000, 20_100), latin), 40_000)
    (sentence,) = sentences(recipe.line())
    line = int(re.search(rf"{path}:(\d+): not UTF-8 text", sentence)[1])
    assert 20_000 <= line < 20_100


@pytest.mark.parametrize("slice_", ["@[:50]", "@[60:]", "@[60:80]", "@[-10:]"])
def test_rows_outside_of_a_slice_are_not_looked_at(recipe, slice_):
    path = recipe.dir / "train.jsonl"
    write_rows(path, {55: b"{}"}, 100)
    assert len(sentences(recipe.line())) == 1
    assert sentences(recipe.line(f"--prompt-data {path}{slice_}")) == []


def test_a_broken_first_row_that_is_allowed_is_not_looked_at(recipe):
    (recipe.dir / "train.jsonl").write_text('{oops\n{"prompt": "a", "answer": 1}\n')
    assert sentences(recipe.line("--max-bad-rows 1 --label-key answer --eval-label-key label")) == []
    assert "has no column 'label'" in sentences(recipe.line("--max-bad-rows 1 --label-key label"))[0]


@pytest.mark.parametrize(
    "more", ["--custom-rm-path slimrl.rollout.rm_hub.async_rm", "--rm-type random", "--rm-type gpqa"]
)
def test_a_label_is_not_wanted_by_rewards_that_compare_with_none(recipe, more):
    write_rows(recipe.dir / "train.jsonl", {3: b'{"prompt": "a", "label": null}'}, 5)
    assert sentences(recipe.line(more)) == []


def test_a_row_that_names_its_own_reward_is_held_to_that(recipe):
    path = recipe.dir / "train.jsonl"
    write_rows(path, {3: b'{"prompt": "a", "label": null, "metadata": {"rm_type": "random"}}'}, 5)
    assert sentences(recipe.line()) == []
    write_rows(path, {3: b'{"prompt": "a", "label": null, "metadata": {"rm_type": "boxed_f1"}}'}, 5)
    (sentence,) = sentences(recipe.line("--rm-type random"))
    assert "train.jsonl:3: the label is None, and f1 rewards need a text or a list of them" in sentence


def test_a_class_of_the_users_labels_its_samples_itself(recipe):
    own = "--eval-label-key label --data-source-path examples.data_source.Additions"
    assert sentences(recipe.line(own, without="--label-key")) == []


def test_a_reward_that_compares_with_labels_needs_their_column(recipe):
    line = recipe.line("--eval-label-key label", without="--label-key")
    assert sentences(line) == [
        "--rm-type deepscaler compares with the true answer, and no column of --prompt-data is named for it: give"
        " --label-key."
    ]
    assert sentences([*line, "--rm-type", "random"]) == []


def write_table(path: Path, labels: list[object], *, name: str = "label", group: int = 100) -> None:
    prompts = [[{"role": "user", "content": "1+1"}]] * len(labels)
    pyarrow.parquet.write_table(pyarrow.table({"prompt": prompts, name: labels}), path, row_group_size=group)


def test_parquet_is_looked_at_likewise(recipe):
    path = recipe.dir / "train.parquet"
    more = f"--prompt-data {path}"
    write_table(path, ["2"] * 5000)
    assert sentences(recipe.line(more)) == []
    write_table(path, ["2"] * 5000, name="answer")
    assert sentences(recipe.line(more)) == [
        f"--prompt-data {path} has no column 'label' (--label-key) but 'prompt', 'answer': set --label-key to one of"
        " them."
    ]
    for at in (70, 4903):  # among the first rows, and at the head of a later row group
        labels: list[object] = ["2"] * 5000
        labels[at] = None
        write_table(path, labels)
        (sentence,) = sentences(recipe.line(more))
        assert f"{path}: row {at + 1}: the label is None" in sentence
    path.write_text("{}")
    assert f"--prompt-data {path} cannot be read: is not a Parquet file" in sentences(recipe.line(more))[0]


@pytest.mark.parametrize("config", [False, True])
def test_the_columns_of_an_evaluation_set_are_told_by_its_own_names(recipe, config):
    (recipe.dir / "own.jsonl").write_text('{"question": "a", "label": "1"}\n{"question": "", "label": "1"}\n')
    more, flag, name = "--eval-prompt-data own {dir}/own.jsonl", "--eval-prompt-data", "--eval-input-key"
    if config:
        (recipe.dir / "sets.json").write_text(
            json.dumps({"datasets": [{"name": "own", "path": f"{recipe.dir}/own.jsonl", "rm_type": "math"}]})
        )
        more, flag, name = "--eval-config {dir}/sets.json", "--eval-config", "input_key of the set"
    line = recipe.line(more)
    if config:
        at = line.index("--eval-prompt-data")
        del line[at : at + 3]
    assert sentences(line) == [
        f"{flag} {recipe.dir}/own.jsonl (set own) has no column 'prompt' ({name}) but 'question', 'label': set {name}"
        " to one of them."
    ]
    (sentence,) = sentences([*line, "--eval-input-key", "question"])
    assert f"own.jsonl:2: an empty column 'question' ({name}); it has ['label', 'question']: fix it." in sentence


def test_many_long_rows_take_no_more_than_a_second(recipe):
    path = recipe.dir / "train.jsonl"
    row = {"prompt": [{"role": "user", "content": "x" * 400}], "label": "2"}
    path.write_bytes((json.dumps(row).encode() + b"\n") * 300_000)
    form = training_prompt_format(read_args(recipe.line())[0])
    started = time.process_time()
    look = look_at(path, slice(None), form, seconds=0.8)
    assert time.process_time() - started < 1
    assert (len(look.bad), look.rows > 100) == (0, True)


def test_the_way_to_a_slice_takes_no_longer_either_and_nothing_is_said_of_what_was_not_reached(recipe, monkeypatch):
    path = recipe.dir / "train.jsonl"
    write_rows(path, {}, 100)
    form = training_prompt_format(read_args(recipe.line())[0])
    look = look_at(path, slice(99, None), form, seconds=0)
    assert (look.rows, look.ended_early) == (0, True)
    monkeypatch.setattr("slimrl.arguments.validation.data._SECONDS", 0)
    assert sentences(recipe.line(f"--prompt-data {path}@[99:]")) == []


@pytest.mark.parametrize("rows", [slice(4850, None), slice(4850, 4860)])
def test_row_groups_before_a_slice_are_not_decoded(recipe, rows):
    path = recipe.dir / "train.parquet"
    write_table(path, [*["2"] * 4853, None, *["2"] * 146])
    groups = pyarrow.parquet.ParquetFile(path).metadata
    starts = [groups.row_group(48).column(at).dictionary_page_offset for at in range(groups.num_columns)]
    content = path.read_bytes()
    path.write_bytes(content[:4] + b"\xff" * (min(starts) - 4) + content[min(starts) :])
    form = training_prompt_format(read_args(recipe.line())[0])
    look = look_at(path, rows, form, seconds=10)
    assert look.rows == min(rows.stop or 5000, 5000) - 4850
    assert [row.split(": ")[1] for row in look.bad] == ["row 4854"]


def test_a_python_without_pyarrow_says_nothing_of_parquet_files(recipe, monkeypatch):
    path = recipe.dir / "train.parquet"
    write_table(path, [None])
    line = recipe.line(f"--prompt-data {path}")
    assert len(sentences(line)) == 1
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert sentences(line) == []


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
