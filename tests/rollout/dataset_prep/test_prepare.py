"""Each published layout, in hand-made samples, becomes the rows that the recipes read; no row is lost."""

import gzip
import json
import re

import pyarrow.parquet
import pytest

from slimrl.data.readers import open_rows
from slimrl.rollout.dataset_prep.layouts import INSTRUCTION
from slimrl.rollout.dataset_prep.prepare import PUBLIC_SETS, prepare

USER = {"role": "user", "content": "What is 3+4?"}
ANSWER = {"role": "assistant", "content": "Seven."}
WRONG = {"role": "assistant", "content": "Eight."}


def write(path, rows):
    """Writes rows in the format of the file name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    lines = "".join(json.dumps(row) + "\n" for row in rows)
    if path.name.endswith(".parquet"):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    elif path.name.endswith(".gz"):
        path.write_bytes(gzip.compress(lines.encode()))
    else:
        path.write_text(json.dumps(rows) if path.suffix == ".json" else lines)


@pytest.fixture
def prepared(tmp_path):
    """Prepares `tmp_path/in`; returns the rows by file and the output per file."""

    def run(name, **overrides):
        options = {"folders": [], "instruction": None, "max_bad": 0, "keys": {}}
        out = tmp_path / "out"
        accounts = prepare(PUBLIC_SETS[name], str(tmp_path / "in"), out, **{**options, **overrides})
        rows = {}
        for path in sorted(out.iterdir()):
            opened = open_rows(str(path))
            rows[path.name] = opened.read(range(len(opened)))
        return rows, [str(account).removeprefix(f"{out}/") for account in accounts]

    return run


def bare(text):
    return [{"role": "user", "content": f"{text}\n{INSTRUCTION}"}]


GEOMETRY = {
    "images": [{"bytes": b"first", "path": None}, {"bytes": b"second", "path": None}],
    "problem": "<image><image>Find $x$.",
    "answer": "3",
}


def test_images_of_geometry_problems_are_kept_as_text(prepared, tmp_path):
    (tmp_path / "in/data").mkdir(parents=True)
    splits = {"train": [GEOMETRY], "test": [GEOMETRY | {"problem": "<image>Find $x$."}, GEOMETRY]}
    for split, problems in splits.items():
        path = tmp_path / f"in/data/{split}-00000-of-00001.parquet"
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(problems), path)
    rows, reports = prepared("geo3k", max_bad=1)
    stored = [{"bytes": "Zmlyc3Q="}, {"bytes": "c2Vjb25k"}]
    expected = {"prompt": bare("<image><image>Find $x$."), "label": "3", "images": stored}
    assert rows == {"test.jsonl": [expected], "train.jsonl": [expected]}
    assert "test.jsonl: 1 of 2 rows (bad: 1)" in reports


MATH = {
    "problem": "Halve $9$.",
    "level": "Level 1",
    "type": "Prealgebra",
    "solution": "Two of \\boxed{1}? No: $\\boxed{\\frac{9}{2}}$.",
}
MATH_ROW = {
    "prompt": bare("Halve $9$."),
    "label": "\\frac{9}{2}",
    "metadata": {"subject": "Prealgebra", "level": "Level 1"},
}


def test_math_lighteval_from_the_hub_layout(prepared, tmp_path):
    for split, count in (("train", 1), ("test", 2)):
        rows = [{**MATH, "level": f"Level {number}"} for number in range(1, count + 1)]
        write(tmp_path / f"in/data/{split}-00000-of-00001.parquet", rows)
    write(tmp_path / "in/algebra/train-00000-of-00001.parquet", [MATH])  # the same rows by subject
    rows, printed = prepared("MATH-lighteval")
    assert rows["train.jsonl"] == [MATH_ROW]
    assert [row["metadata"]["level"] for row in rows["test.jsonl"]] == ["Level 1", "Level 2"]
    assert printed == ["test.jsonl: 2 of 2 rows", "train.jsonl: 1 of 1 rows"]


def test_math_from_its_original_layout_of_one_file_per_problem(prepared, tmp_path):
    for split in ("train", "test"):
        folder = tmp_path / f"in/MATH/{split}/prealgebra"
        folder.mkdir(parents=True)
        (folder / "17.json").write_text(json.dumps(MATH))
    rows, _ = prepared("MATH-lighteval")
    assert rows == {"train.jsonl": [MATH_ROW], "test.jsonl": [MATH_ROW]}


@pytest.mark.parametrize("file", ["main/train-00000-of-00001.parquet", "train.jsonl"])
def test_gsm8k_keeps_only_the_final_answer(prepared, tmp_path, file):
    write(tmp_path / "in" / file, [{"question": "How many?", "answer": "1000+234=<<1000+234=1234>>\n#### 1,234"}])
    rows, _ = prepared("gsm8k", keys={"prompt": "messages"})
    assert rows == {"train.jsonl": [{"messages": bare("How many?"), "label": "1234"}]}


def test_gsm8k_published_for_slime_is_unchanged(prepared, tmp_path):
    write(tmp_path / "in/test.parquet", [{"messages": [USER], "label": "7"}])
    assert prepared("gsm8k")[0] == {"test.jsonl": [{"prompt": [USER], "label": "7"}]}


def test_repeated_dapo_problems_are_dropped_and_counted(prepared, tmp_path):
    row = {
        "data_source": "math_dapo",
        "prompt": [USER],
        "ability": "MATH",
        "reward_model": {"ground_truth": "7"},
        "extra_info": {"index": "a"},
    }
    other = {
        **row,
        "prompt": [{**USER, "content": "What is 4+4?"}],
        "reward_model": {"ground_truth": "8", "style": "rule"},
    }
    write(tmp_path / "in/data/dapo-math-17k.parquet", [row, other, {**row, "extra_info": {"index": "b"}}, row])
    rows, printed = prepared("dapo-math-17k")
    assert [(row["prompt"][0]["content"], row["label"]) for row in rows["dapo-math-17k.jsonl"]] == [
        ("What is 3+4?", "7"),
        ("What is 4+4?", "8"),
    ]
    assert printed == ["dapo-math-17k.jsonl: 2 of 4 rows (repetitions: 2)"]


@pytest.mark.parametrize(
    ("file", "row", "prompt"),
    [
        ("aime-2024.jsonl", {"prompt": [USER], "label": "33"}, [USER]),
        ("data/train-00000-of-00001.parquet", {"id": 1, "problem": "P", "solution": "S", "answer": "33"}, bare("P")),
        ("aime_2024_problems.parquet", {"ID": "2024-I-1", "Problem": "P", "Solution": "S", "Answer": 33}, bare("P")),
    ],
)
def test_aime_in_its_three_published_layouts(prepared, tmp_path, file, row, prompt):
    write(tmp_path / "in" / file, [row])
    assert prepared("aime-2024")[0] == {"aime-2024.jsonl": [{"prompt": prompt, "label": "33"}]}


def test_custom_instruction_is_used(prepared, tmp_path):
    write(tmp_path / "in/train.jsonl", [{"question": "Q", "answer": "#### 2"}])
    assert prepared("gsm8k", instruction="")[0]["train.jsonl"][0]["prompt"][0]["content"] == "Q"
    (tmp_path / "out/train.jsonl").unlink()
    assert prepared("gsm8k", instruction="Be brief.")[0]["train.jsonl"][0]["prompt"][0]["content"] == "Q\nBe brief."


PAIR = {"prompt": [USER], "chosen": "Seven.", "rejected": "Eight."}
HUMAN = "\n\nHuman: Hi\n\nAssistant: Hello.\n\nHuman: What is 3+4?\n\nAssistant:"
HH_PAIR = {
    **PAIR,
    "prompt": [{"role": "user", "content": "Hi"}, {"role": "assistant", "content": "Hello."}, USER],
}


def gpt(text):
    return {"from": "gpt", "value": text}


SPOKEN = [{"from": "human", "value": "Hi"}, gpt("Hello."), {"from": "human", "value": "What is 3+4?"}]
QUESTION = {"dataset": "eli5", "id": "1", "full_text": "What is 3+4?"}
ARENA = {"model_a": "x", "model_b": "y", "conversation_a": [USER, WRONG], "conversation_b": [USER, ANSWER], "turn": 1}


@pytest.mark.parametrize(
    ("file", "row", "pair"),
    [
        ("base/train.jsonl.gz", {"chosen": HUMAN + " Seven.", "rejected": HUMAN + " Eight."}, HH_PAIR),
        ("data/train_prefs.parquet", {"prompt": "x", "chosen": [USER, ANSWER], "rejected": [USER, WRONG]}, PAIR),
        ("train.jsonl", {"prompt": [USER], "chosen": [ANSWER], "rejected": [WRONG]}, PAIR),
        ("train.jsonl", {"prompt": "What is 3+4?", "chosen": "Seven.", "rejected": "Eight."}, PAIR),
        ("alpaca.json", {"instruction": "What is 3+4?", "input": "", "chosen": "Seven.", "rejected": "Eight."}, PAIR),
        ("sharegpt.json", {"conversations": SPOKEN, "chosen": gpt("Seven."), "rejected": gpt("Eight.")}, HH_PAIR),
        (
            "comparisons.jsonl",
            {"question": QUESTION, "answer_0": "Eight.", "score_0": -0.5, "answer_1": "Seven.", "score_1": 0.5},
            {**PAIR, "margin": 1.0},
        ),
        (
            "data/train_prefs.parquet",
            {
                "prompt": "x",
                "chosen": [USER, ANSWER],
                "rejected": [USER, WRONG],
                "score_chosen": 8.5,
                "score_rejected": 6,
            },
            {**PAIR, "margin": 2.5},
        ),
        (
            "train.jsonl",
            {"prompt": [USER], "chosen": [ANSWER], "rejected": [WRONG], "chosen-rating": 3, "rejected-rating": 4},
            {**PAIR, "margin": -1.0},
        ),
        (
            "train.jsonl",
            {"prompt": [USER], "chosen": [ANSWER], "rejected": [WRONG], "chosen-rating": None, "rejected-rating": 4},
            PAIR,
        ),
        ("data/train-0.parquet", {**ARENA, "winner": "model_b"}, PAIR),
    ],
)
def test_preferences_in_their_published_layouts(prepared, tmp_path, file, row, pair):
    write(tmp_path / "in" / file, [row])
    assert prepared("preference")[0] == {"train.jsonl": [pair]}


def test_pairs_of_any_layout_become_a_desirable_and_an_undesirable_answer(prepared, tmp_path):
    row = {"prompt": "What is 3+4?", "chosen": [USER, ANSWER], "rejected": [USER, WRONG]}
    write(tmp_path / "in/train.jsonl", [row, row])
    rows, reports = prepared("labelled-answers")
    answers = [
        {"prompt": [USER], "completion": "Seven.", "label": True},
        {"prompt": [USER], "completion": "Eight.", "label": False},
    ]
    assert rows == {"train.jsonl": answers}
    assert reports == ["train.jsonl: 2 of 2 rows (repetitions: 2)"]


@pytest.mark.parametrize("prompt", ["What is 3+4?", [USER]], ids=["text", "messages"])
@pytest.mark.parametrize("answer", ["Eight. ", [WRONG]], ids=["text", "message"])
def test_answers_published_for_kto_keep_their_labels(prepared, tmp_path, prompt, answer):
    write(tmp_path / "in/data/test-0.parquet", [{"prompt": prompt, "completion": answer, "label": False}])
    rows, _ = prepared("labelled-answers", keys={"label": "good"})
    assert rows == {"test.jsonl": [{"prompt": [USER], "completion": "Eight.", "good": False}]}


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"label": 1}, "its label is 1, not true or false"),
        ({"completion": " "}, "its completion is empty"),
        ({"completion": [USER]}, "its completion is not one message of the assistant"),
        ({"completion": [ANSWER, USER]}, "its completion is not one message of the assistant"),
        ({"prompt": ""}, "its prompt is empty"),
        ({"prompt": [USER, ANSWER]}, "its prompt ends with the assistant"),
        ({"prompt": [{"text": "?"}]}, "it has no prompt"),
    ],
)
def test_bad_labelled_answer_is_named(prepared, tmp_path, change, reason):
    row = {"prompt": "What is 3+4?", "completion": "Seven.", "label": True}
    write(tmp_path / "in/train.jsonl", [row, {**row, **change}])
    with pytest.raises(ValueError, match=f"train.jsonl:2: {re.escape(reason)}"):
        prepared("labelled-answers")


def test_conversation_tree_pairs_the_best_answer_with_each_lower_one(prepared, tmp_path):
    def message(name, parent, role, text, rank=None):
        return {"message_id": name, "parent_id": parent, "role": role, "text": text, "rank": rank}

    rows = [
        message("a", None, "prompter", "What is 3+4?"),
        message("b", "a", "assistant", "Eight.", 1),
        message("c", "a", "assistant", "Seven.", 0),
        message("d", "a", "assistant", "Nine.", 2),
        message("e", "c", "prompter", "Sure?"),
        message("f", "e", "assistant", "Yes.", 0),
        message("g", "e", "assistant", "No.", 1),
        message("h", "a", "assistant", "Unranked."),
    ]
    write(tmp_path / "in/data/train-0.parquet", rows)
    pairs = prepared("preference")[0]["train.jsonl"]
    assert [(pair["chosen"], pair["rejected"]) for pair in pairs] == [
        ("Seven.", "Eight."),
        ("Seven.", "Nine."),
        ("Yes.", "No."),
    ]
    assert pairs[2]["prompt"] == [USER, ANSWER, {"role": "user", "content": "Sure?"}]


def test_rows_without_a_preference_are_counted(prepared, tmp_path):
    longer = [USER, ANSWER, USER, ANSWER]
    rows = [
        {**ARENA, "winner": "model_b"},
        {**ARENA, "winner": "tie (bothbad)"},
        {**ARENA, "winner": "tie"},
        {**ARENA, "conversation_a": longer, "conversation_b": longer, "winner": "model_a"},
    ]
    write(tmp_path / "in/train.jsonl", rows)
    rows, printed = prepared("preference")
    assert rows == {"train.jsonl": [PAIR]}
    several = "a conversation of several turns without a preference per turn"
    assert printed == [f"train.jsonl: 1 of 4 rows (a tie: 2, {several}: 1)"]


def test_only_the_named_folders_of_a_dataset_are_read(prepared, tmp_path):
    for folder, question in (("good", "Q"), ("other", "R"), ("third", "S")):
        write(tmp_path / f"in/{folder}/train.jsonl", [{"question": question, "answer": "#### 2"}])
    rows, _ = prepared("gsm8k", folders=["good", "third"], instruction="")
    assert [row["prompt"][0]["content"] for row in rows["train.jsonl"]] == ["Q", "S"]
    with pytest.raises(FileNotFoundError, match="--folders goood: there is no such folder"):
        prepared("gsm8k", folders=["goood"])


BAD_ROWS = [
    {"problem": "P", "solution": "no box"},
    {"problem": "", "solution": "\\boxed{1}"},
    {"question": "Q", "answer": "no mark"},
    {"prompt": [USER], "reward_model": {}},
    {"prompt": [3], "label": "1"},
    {"problem": "P", "solution": None},
    {"text": "x"},
]


def test_invalid_rows_are_named_and_no_file_is_written_unless_allowed(prepared, tmp_path):
    path = tmp_path / "in/train.jsonl"
    write(path, [*BAD_ROWS, {"question": "Q", "answer": "#### 2"}])
    with pytest.raises(ValueError) as caught:
        prepared("gsm8k", max_bad=6)
    lines = str(caught.value).splitlines()
    assert lines[0].startswith(f"7 bad rows in {path} (6 allowed): ")
    assert [line.strip().split(": ")[0] for line in lines[1:]] == [f"{path}:{number}" for number in range(1, 8)]
    assert list((tmp_path / "out").iterdir()) == []
    rows, printed = prepared("gsm8k", max_bad=7)
    assert len(rows["train.jsonl"]) == 1
    assert printed == ["train.jsonl: 1 of 8 rows (bad: 7)"]


def test_invalid_pairs_are_named_with_their_error(prepared, tmp_path):
    rows = [
        {"chosen": HUMAN + " Seven.", "rejected": "\n\nHuman: Other\n\nAssistant: Eight."},
        {"prompt": "Q", "chosen": "Seven.", "rejected": " "},
        {"question": {}, "answer_0": "a", "score_0": 1, "answer_1": "b", "score_1": 0},
        {"chosen": 3, "rejected": 4},
        {"prompt": [ANSWER], "chosen": "a", "rejected": "b"},
    ]
    write(tmp_path / "in/train.jsonl", rows)
    with pytest.raises(ValueError) as caught:
        prepared("preference")
    reasons = [line.split(": ", 1)[1] for line in str(caught.value).splitlines()[1:]]
    assert reasons == [
        "its two conversations differ before their last answer",
        "one of its two answers is empty",
        "a column does not have the structure of this layout (KeyError('full_text'))",
        "its chosen and rejected are neither texts nor messages",
        "its prompt ends with the assistant",
    ]


def test_existing_output_is_kept_and_missing_input_is_named(prepared, tmp_path):
    with pytest.raises(FileNotFoundError, match="--input .*/in does not exist: give a file, a folder, or the id"):
        prepared("gsm8k")
    (tmp_path / "in").mkdir()
    with pytest.raises(FileNotFoundError, match="has no .parquet, .jsonl, .jsonl.gz, .json file"):
        prepared("gsm8k")
    write(tmp_path / "in/train.jsonl", [{"question": "Q", "answer": "#### 2"}])
    prepared("gsm8k")
    with pytest.raises(FileExistsError, match="out/train.jsonl already exists: remove it, or give another"):
        prepared("gsm8k")
