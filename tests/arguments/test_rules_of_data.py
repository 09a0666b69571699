"""Rules about prompt data: the recipe and its variants pass, each violation is one error."""

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
from slimrl.data.preflight import preview_file

BLANK = "--disable-rollout-global-dataset"
OWN_FUNCTION = "--rollout-function-path slimrl.rollout.sft_rollout.generate_rollout"

TESTED_APART = (
    "templates_have_their_fields",
    "truncated_prompts_have_a_limit",
    "loss_mask_type_fits_the_chat_template",
)

# rule -> (flags that pass when appended to the recipe, flags that do not with their error)
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
        [
            (
                f"{BLANK} {OWN_FUNCTION} --max-bad-rows 1",  # the prompts are no conversations to train on
                f"{BLANK} leaves --prompt-data unread: leave one of the two out.",
            )
        ],
    ),
    "epochs_have_an_end": (
        ["--num-epoch 2", "--prompt-data {dir}/train.jsonl=0.5 {dir}/aime-2024.jsonl=0.5 --num-epoch 1"],
        [],
    ),
}


def sentences(line: list[str]) -> list[str]:
    return [str(problem) for problem in read_args(line)[1]]


@pytest.mark.parametrize(("rule", "more"), [(rule, more) for rule, (good, _) in CASES.items() for more in good])
def test_valid_flags_are_accepted(recipe, rule, more):
    assert sentences(recipe.line(more)) == []


@pytest.mark.parametrize(
    ("rule", "more", "sentence"), [(rule, *case) for rule, (_, bad) in CASES.items() for case in bad]
)
def test_each_violation_is_one_error(recipe, rule, more, sentence):
    assert sentences(recipe.line(more)) == [sentence.format(dir=recipe.dir)]


ALLOW = "fix it, or allow for bad rows with --max-bad-rows."


def write_rows(path: Path, rows: dict[int, bytes], count: int) -> None:
    """Writes `count` valid rows; rows given by number (from 1) are replaced."""
    good = json.dumps({"prompt": [{"role": "user", "content": "1+1"}], "label": "2"}).encode()
    path.write_bytes(b"".join(rows.get(number, good) + b"\n" for number in range(1, count + 1)))


def test_empty_data_file_is_rejected(recipe):
    path = recipe.dir / "train.jsonl"
    path.write_text("\n\n")
    assert sentences(recipe.line()) == [f"--prompt-data {path} has no rows: give at least one row."]


def test_slice_beyond_the_last_row_is_reported(recipe):
    path = recipe.dir / "train.jsonl"
    write_rows(path, {}, 5)
    for wanted in (f"{path}@[5:]", f"{path}@[7:9]", f"{path}@[3:2]"):
        (sentence,) = sentences(recipe.line(f"--prompt-data {wanted}"))
        assert sentence == f"--prompt-data {wanted} has no rows in this slice: give at least one row."
    assert sentences(recipe.line(f"--prompt-data {path}@[4:]")) == []


@pytest.fixture
def shards(recipe) -> Path:
    """A folder of data as distributed writers leave it: three files, one of them empty."""
    folder = recipe.dir / "shards"
    folder.mkdir()
    write_rows(folder / "part-0.jsonl", {}, 50)
    write_table(folder / "part-1.parquet", [])
    write_rows(folder / "part-2.jsonl", {}, 50)
    return folder


@pytest.mark.parametrize("slice_", ["", "@[:5]", "@[60:]", "@[-5:]"])
def test_folder_may_contain_an_empty_shard(recipe, shards, slice_):
    (shards / "part-3.jsonl").write_text("\n")
    assert sentences(recipe.line(f"--prompt-data {shards}{slice_}")) == []


def test_folder_of_only_empty_shards_is_rejected(recipe, shards):
    for name in ("part-0.jsonl", "part-2.jsonl"):
        (shards / name).write_text("")
    refused = [f"--prompt-data {shards} has no rows: give at least one row."]
    assert sentences(recipe.line(f"--prompt-data {shards}")) == refused


def test_every_file_of_a_folder_is_checked_like_a_single_file(recipe, shards):
    write_rows(shards / "part-2.jsonl", {40: b"{oops"}, 50)
    (sentence,) = sentences(recipe.line(f"--prompt-data {shards}"))
    assert sentence.startswith(
        f"--prompt-data {shards} has a bad row among the 100 looked at; {shards}/part-2.jsonl:40"
    )


def test_rows_that_may_be_outside_a_folder_slice_are_not_checked(recipe, shards):
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
    b'{"prompt": "a", "label": NaN}': "not valid JSON: NaN is not a JSON number",
    b'{"prompt": "a", "label": null}': (
        "the label is None, but math rewards need the answer as text or number: check --label-key"
    ),
    b'{"prompt": "a", "label": ["1"]}': (
        "the label is ['1'], but math rewards need the answer as text or number: check --label-key"
    ),
    b'{"prompt": "a"}': "no column 'label' (--label-key); it has ['prompt']",
    b'{"prompt": "", "label": "1"}': "an empty column 'prompt' (--input-key); it has ['label', 'prompt']",
    b'{"prompt": [1], "label": "1"}': '\'prompt\' must be text or a list of {"role", "content"} messages',
    b'{"prompt": "a", "label": "1", "metadata": [1]}': "'metadata' (--metadata-key) must be an object, not list",
}


@pytest.mark.parametrize(("row", "reason"), BAD_ROWS.items())
def test_invalid_row_after_valid_ones_is_reported_at_startup_unless_allowed(recipe, row, reason):
    path = recipe.dir / "train.jsonl"
    write_rows(path, {700: row}, 900)
    assert sentences(recipe.line()) == [
        f"--prompt-data {path} has a bad row among the 900 looked at; {path}:700: {reason}: {ALLOW}"
    ]
    assert sentences(recipe.line("--max-bad-rows 1")) == []


def test_all_first_rows_and_a_sample_of_the_rest_are_checked(recipe):
    path = recipe.dir / "train.jsonl"
    latin = b'{"prompt": "\xe9", "label": "1"}'
    write_rows(path, {999: b"{}"} | dict.fromkeys(range(20_000, 20_100), latin), 40_000)
    (sentence,) = sentences(recipe.line("--max-bad-rows 1"))
    found = re.match(
        rf"--prompt-data {path} has (\d+) bad rows among the ([\d,]+) looked at, and --max-bad-rows is 1;", sentence
    )
    # one row in 39 is checked after the first thousand
    assert 1 + 1 <= int(found[1]) <= 1 + 4
    assert found[2] == "2,000"
    assert f"the first {path}:999: no column 'label' (--label-key); it has []: fix them" in sentence
    write_rows(path, dict.fromkeys(range(20_000, 20_100), latin), 40_000)
    (sentence,) = sentences(recipe.line())
    line = int(re.search(rf"{path}:(\d+): not UTF-8 text", sentence)[1])
    assert 20_000 <= line < 20_100


@pytest.mark.parametrize("slice_", ["@[:50]", "@[60:]", "@[60:80]", "@[-10:]"])
def test_rows_outside_a_slice_are_not_checked(recipe, slice_):
    path = recipe.dir / "train.jsonl"
    write_rows(path, {55: b"{}"}, 100)
    assert len(sentences(recipe.line())) == 1
    assert sentences(recipe.line(f"--prompt-data {path}{slice_}")) == []


def test_allowed_invalid_first_row_is_not_checked(recipe):
    (recipe.dir / "train.jsonl").write_text('{oops\n{"prompt": "a", "answer": 1}\n')
    assert sentences(recipe.line("--max-bad-rows 1 --label-key answer --eval-label-key label")) == []
    assert "has no column 'label'" in sentences(recipe.line("--max-bad-rows 1 --label-key label"))[0]


@pytest.mark.parametrize(
    "more", ["--custom-rm-path slimrl.rollout.rm_hub.async_rm", "--rm-type random", "--rm-type gpqa"]
)
def test_label_is_not_required_by_rewards_that_do_not_use_it(recipe, more):
    write_rows(recipe.dir / "train.jsonl", {3: b'{"prompt": "a", "label": null}'}, 5)
    assert sentences(recipe.line(more)) == []


def test_row_is_checked_against_its_own_reward_type(recipe):
    path = recipe.dir / "train.jsonl"
    write_rows(path, {3: b'{"prompt": "a", "label": null, "metadata": {"rm_type": "random"}}'}, 5)
    assert sentences(recipe.line()) == []
    write_rows(path, {3: b'{"prompt": "a", "label": null, "metadata": {"rm_type": "boxed_f1"}}'}, 5)
    (sentence,) = sentences(recipe.line("--rm-type random"))
    assert "train.jsonl:3: the label is None, but f1 rewards need text or a list of texts" in sentence


def test_custom_class_provides_its_own_labels(recipe):
    own = "--eval-label-key label --data-source-path examples.data_source.Additions"
    assert sentences(recipe.line(own, without="--label-key")) == []


def test_reward_that_uses_labels_needs_the_label_column(recipe):
    line = recipe.line("--eval-label-key label", without="--label-key")
    assert sentences(line) == [
        "--rm-type deepscaler compares with the true answer, and no column of --prompt-data is set for it: give"
        " --label-key."
    ]
    assert sentences([*line, "--rm-type", "random"]) == []


def write_table(path: Path, labels: list[object], *, name: str = "label", group: int = 100) -> None:
    prompts = [[{"role": "user", "content": "1+1"}]] * len(labels)
    pyarrow.parquet.write_table(pyarrow.table({"prompt": prompts, name: labels}), path, row_group_size=group)


def test_parquet_rows_are_checked(recipe):
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
def test_eval_dataset_columns_use_their_own_names(recipe, config):
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


def test_checking_many_long_rows_takes_at_most_a_second(recipe):
    path = recipe.dir / "train.jsonl"
    row = {"prompt": [{"role": "user", "content": "x" * 400}], "label": "2"}
    path.write_bytes((json.dumps(row).encode() + b"\n") * 300_000)
    form = training_prompt_format(read_args(recipe.line())[0])
    started = time.process_time()
    look = preview_file(path, slice(None), form, seconds=0.8)
    assert time.process_time() - started < 1
    assert (len(look.bad), look.rows > 100) == (0, True)


def test_reaching_a_slice_is_time_limited_and_unreached_rows_are_not_reported(recipe, monkeypatch):
    path = recipe.dir / "train.jsonl"
    write_rows(path, {}, 100)
    form = training_prompt_format(read_args(recipe.line())[0])
    look = preview_file(path, slice(99, None), form, seconds=0)
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
    look = preview_file(path, rows, form, seconds=10)
    assert look.rows == min(rows.stop or 5000, 5000) - 4850
    assert [row.split(": ")[1] for row in look.bad] == ["row 4854"]


def test_parquet_files_are_not_checked_without_pyarrow(recipe, monkeypatch):
    path = recipe.dir / "train.parquet"
    write_table(path, [None])
    line = recipe.line(f"--prompt-data {path}")
    assert len(sentences(line)) == 1
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.setitem(sys.modules, "pyarrow.parquet", None)
    assert sentences(line) == []


def test_one_path_stays_a_string_and_several_become_a_list(recipe):
    assert read_args(recipe.line())[0].prompt_data == f"{recipe.dir}/train.jsonl"
    assert read_args(recipe.line("--prompt-data a b"))[0].prompt_data == ["a", "b"]


def test_run_without_prompt_data_needs_another_source_of_samples(recipe):
    assert sentences(recipe.line(f"{BLANK} {OWN_FUNCTION}", without="--prompt-data")) == []
    assert sentences(recipe.line(BLANK, without="--prompt-data")) == [
        f"{BLANK} supplies blank samples, and no function fills them: give --data-source-path,"
        f" --custom-generate-function-path or --rollout-function-path."
    ]


def test_epochs_of_a_dataset_mixture_give_no_run_length(recipe):
    line = recipe.line(f"{BLANK} {OWN_FUNCTION} --num-epoch 1", without="--num-rollout")
    at = line.index("--prompt-data")
    del line[at : at + 2]
    assert sentences(line) == [
        "--num-epoch 1 counts passes over --prompt-data, and --disable-rollout-global-dataset has none: give"
        " --num-rollout."
    ]
    mixed = "--prompt-data {dir}/train.jsonl=0.5 {dir}/aime-2024.jsonl=0.5 --num-epoch 1"
    assert sentences(recipe.line(mixed, without="--num-rollout")) == [
        "--num-epoch 1 is ambiguous for a mixture by probability, whose sets have different epochs: give --num-rollout."
    ]


# loss masks -----------------------------------------------------------------------------------------------------------

TEMPLATES = {
    "llama3": "{{ '<|start_header_id|>' + role + '<|end_header_id|>' + text + '<|eot_id|>' }}",
    "kimi": "<|im_assistant|>assistant<|im_middle|>{{ text }}<|im_end|>",
    "chat_template": "assistant: {%- generation -%}{{ text + eos_token }}{%- endgeneration -%}",
    None: "assistant: {{ text + eos_token }}",
}
PREFERENCE = "--rollout-function-path slimrl.rollout.preference_rollout.generate_rollout --loss-type preference_loss"
NEEDED = {
    "sft": "--loss-type sft_loss --rollout-function-path slimrl.rollout.sft_rollout.generate_rollout",
    "pairs": f"{PREFERENCE} --n-samples-per-prompt 2 --input-key prompt",
    "labelled answers": f"{PREFERENCE} --n-samples-per-prompt 1 --preference-loss kto --input-key prompt",
}


def of_loss_masks(recipe, training: str, more: str = "") -> list[str]:
    """The problems that concern the chat template; other rules have theirs with the recipe's other flags."""
    line = recipe.line(f"{NEEDED[training]} {more}")
    return [text for text in sentences(line) if "--loss-mask-type" in text or "chat template" in text]


def write_answers(recipe, prompt: object) -> None:
    answers = {"chosen": "2", "rejected": "3", "completion": "2", "label": True}
    (recipe.dir / "train.jsonl").write_text(json.dumps({"prompt": prompt, **answers}) + "\n")


@pytest.mark.parametrize("training", NEEDED)
def test_loss_mask_type_is_that_of_the_chat_template(recipe, training):
    write_answers(recipe, [{"role": "user", "content": "1+1"}])
    assert of_loss_masks(recipe, training) == []
    template = recipe.dir / "hf" / "chat_template.jinja"
    for fitting, text in TEMPLATES.items():
        template.write_text(text)
        fix = fitting or "chat_template, and mark them in it with {% generation %}"
        assert of_loss_masks(recipe, training) == [
            "--loss-mask-type qwen does not find the assistant's turns by the chat template of --hf-checkpoint"
            f" {recipe.dir}/hf: give {fix}."
        ]
        if fitting is not None:
            assert of_loss_masks(recipe, training, f"--loss-mask-type {fitting}") == []


def test_chat_template_of_the_tokenizer_config_is_read(recipe):
    (recipe.dir / "hf" / "chat_template.jinja").unlink()
    missing = (
        f"--hf-checkpoint {recipe.dir}/hf has no chat template for the messages of --prompt-data: copy the model's"
        " chat_template.jinja there."
    )
    assert of_loss_masks(recipe, "sft") == [missing]
    named = [{"name": "tool_use", "template": "-"}, {"name": "default", "template": TEMPLATES["kimi"]}]
    for found in (TEMPLATES["kimi"], named):
        (recipe.dir / "hf" / "tokenizer_config.json").write_text(json.dumps({"chat_template": found}))
        assert of_loss_masks(recipe, "sft", "--loss-mask-type kimi") == []
        assert "give kimi." in of_loss_masks(recipe, "sft")[0]


@pytest.mark.parametrize("training", ["pairs", "labelled answers"])
def test_answers_to_plain_text_need_no_chat_template(recipe, training):
    write_answers(recipe, "1+1=")
    (recipe.dir / "hf" / "chat_template.jinja").unlink()
    line = recipe.line(NEEDED[training])
    plain = [word for word in line if word != "--apply-chat-template"]
    assert not [text for text in sentences(plain) if "has no chat template" in text]
    assert len([text for text in sentences(line) if "has no chat template" in text]) == 1


# templates and truncation ---------------------------------------------------------------------------------------------


@pytest.fixture
def text_line(recipe):
    """The recipe over text prompts, without a chat template."""
    for name in ("train", "aime-2024"):
        (recipe.dir / f"{name}.jsonl").write_text(json.dumps({"prompt": "1+1", "label": "2"}) + "\n")
    return [word for word in recipe.line(without="--eval-interval") if word != "--apply-chat-template"]


def test_input_template_has_one_field_and_real_line_breaks(text_line):
    template = "Human: {}\nAssistant: "
    assert sentences([*text_line, "--input-template", template]) == []
    assert read_args([*text_line, "--input-template", template])[0].input_template == template
    for wrong, end in (
        ("Human: ", "has 0 times {}: write it once."),
        ("{} {}", "has 2 times {}: write it once."),
        (r"{}\n", "has a backslash and an n, not a line break: write $'...' around it in the shell."),
    ):
        assert sentences([*text_line, "--input-template", wrong]) == [f"--input-template {wrong!r} {end}"]


def test_input_template_excludes_a_chat_template_and_messages(recipe, text_line):
    assert sentences([*text_line, "--apply-chat-template", "--input-template", "{}:"]) == [
        "--input-template has no effect with --apply-chat-template, which forms the prompt itself: leave one out."
    ]
    (recipe.dir / "train.jsonl").write_text(json.dumps({"prompt": [{"role": "user", "content": "1"}], "label": "2"}))
    (sentence,) = sentences([*text_line, "--input-template", "{}:"])
    assert "'prompt' holds list: --input-template takes text" in sentence


def test_template_of_the_reward_model_has_both_fields_and_a_reward_model(text_line, tmp_path):
    template = ["--rm-input-template", "Human: {prompt}\nAssistant: {response}"]
    (tmp_path / "judge").mkdir()
    config = {"architectures": ["LlamaForSequenceClassification"], "id2label": {"0": "LABEL_0"}, "vocab_size": 10}
    (tmp_path / "judge/config.json").write_text(json.dumps(config))
    (tmp_path / "judge/tokenizer.json").touch()
    served = [*text_line, "--rm-type", "reward_model", "--rm-model", str(tmp_path / "judge")]
    assert sentences([*served, *template]) == []
    assert sentences([*served, "--rm-input-template", "{prompt}"]) == [
        "--rm-input-template '{prompt}' has 0 times {response}: write it once."
    ]
    assert sentences([*served, *template, "--rm-input", "text"]) == [
        "--rm-input-template is a form of input of its own, and --rm-input text another: leave one out."
    ]
    assert sentences([*text_line, *template]) == [
        "--rm-input-template belongs to a reward model, and there is none: give --rm-type reward_model and --rm-model,"
        " or leave it out."
    ]


def test_truncation_needs_a_limit_and_leaves_the_end_of_a_chat_template(recipe, text_line):
    right, limit = ["--rollout-truncate-prompt", "right"], ["--rollout-max-prompt-len", "1024"]
    assert sentences([*text_line, *right, *limit]) == []
    assert sentences([*recipe.line("--rollout-truncate-prompt left"), *limit]) == []
    assert sentences([*recipe.line(), *right, *limit]) == [
        "--rollout-truncate-prompt right would cut off the end of the chat template, where the response begins: give"
        " left or middle."
    ]
    assert sentences([*text_line, *right, *limit, "--refuse-long-prompts"]) == [
        "--rollout-truncate-prompt right has no effect with --refuse-long-prompts: leave one of the two out."
    ]
    assert sentences([*text_line, *right]) == []  # the engine's context is the limit
    custom = ["--rollout-function-path", "examples.rollouts.counted"]  # which has its own requests
    assert sentences([*text_line, *right, *custom]) == [
        "--rollout-truncate-prompt right has no length to cut prompts to: give --rollout-max-prompt-len."
    ]
