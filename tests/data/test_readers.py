"""Data files are read completely and in order; no row is dropped silently."""

import hashlib
import json
import os
import random

import pyarrow
import pyarrow.parquet
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from slimrl.data import parquet as parquet_reader
from slimrl.data import readers as jsonl_reader
from slimrl.data.prompt_format import DataMix, DataPath, InvalidRow, bad_rows_error
from slimrl.data.readers import ChangedDataError, RowSet, open_rows

ROWS = [{"prompt": [{"role": "user", "content": f"{i}+{i}"}], "label": str(2 * i)} for i in range(10)]


def read_rows(paths):
    """All rows, read by number and as blocks, which must agree."""
    rows = open_rows(paths)
    read = rows.read(range(len(rows)))
    assert [row for block in rows.blocks(hashlib.blake2b()) for row in block] == read
    return read


@pytest.fixture
def jsonl(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in ROWS))
    return path


@pytest.fixture
def parquet(tmp_path):
    path = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), path)
    return path


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_both_formats_give_the_same_rows(kind, request):
    assert read_rows(str(request.getfixturevalue(kind))) == ROWS


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("bounds", [(2, 5), (None, 3), (7, None), (-2, None), (None, -8), (3, 100), (None, None)])
def test_slice_follows_python_semantics(kind, bounds, request):
    start, end = ("" if bound is None else str(bound) for bound in bounds)
    path = f"{request.getfixturevalue(kind)}@[{start}:{end}]"
    assert read_rows(path) == ROWS[slice(*bounds)]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("text", ["5:2", "10:", "4:4"])
def test_empty_slice_is_rejected(kind, text, request):
    with pytest.raises(ValueError, match="has no rows"):
        read_rows(f"{request.getfixturevalue(kind)}@[{text}]")


def test_invalid_row_keeps_its_position_and_line_number(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('\n{"prompt": "a"}\n{"prompt": \n\n  \t\n[1, 2]\n{"prompt": NaN}\n\n')
    rows = open_rows(str(path))
    assert [rows.where(row) for row in range(4)] == [f"{path}:{line}" for line in (2, 3, 6, 7)]
    read = read_rows(str(path))
    assert read[0] == {"prompt": "a"}
    assert [row.reason.split(":")[0] for row in read[1:]] == [
        "not valid JSON",
        "a row must be a JSON object, this one is list",
        "not valid JSON",
    ]


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    lines=st.lists(
        st.sampled_from(['{"a": 1}', "{}", "", " ", '  {"b": "' + "x" * 90 + '"}', "oops", "\t"]), max_size=40
    ),
    ending=st.sampled_from(["", "\n"]),
    chunk=st.integers(1, 200),
)
def test_line_index_matches_split_text(tmp_path, monkeypatch, lines, ending, chunk):
    monkeypatch.setattr(jsonl_reader, "_CHUNK", chunk)
    monkeypatch.setattr(jsonl_reader, "_BLOCK", chunk)
    path = tmp_path / "any.jsonl"
    path.write_text("\n".join(lines) + ending)
    expected = [(number, line) for number, line in enumerate(path.read_text().split("\n"), 1) if line.strip()]
    file = jsonl_reader.JsonlFile(path)
    assert [file.where(row) for row in range(len(file))] == [f"{path}:{number}" for number, _ in expected]
    values = [None if line == "oops" else json.loads(line) for _, line in expected]
    order = random.sample(range(len(file)), len(file))
    read = [None if isinstance(row, InvalidRow) else row for row in file.read(order)]
    assert read == [values[row] for row in order]
    blocks = [row for block in file.blocks(0, len(file), hashlib.blake2b()) for row in block]
    assert [None if isinstance(row, InvalidRow) else row for row in blocks] == values


def test_file_modified_during_the_run_is_detected(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    rows = open_rows(str(path))
    path.write_text('{"a": 1234567}\n')
    os.utime(path, ns=(1, 1))
    with pytest.raises(OSError, match="train.jsonl was changed while this run was using it"):
        rows.read([1])
    with pytest.raises(OSError, match="train.jsonl was changed while this run was using it"):
        list(rows.blocks(hashlib.blake2b()))


def test_missing_last_newline_and_crlf_change_nothing(tmp_path):
    path = tmp_path / "dos.jsonl"
    path.write_bytes("\r\n".join(json.dumps(row) for row in ROWS).encode())
    assert read_rows(str(path)) == ROWS


def test_integers_beyond_64_bits_stay_exact(tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_text('{"label": 123456789012345678901234567890}\n{"label": 18446744073709551616}\n')
    assert [row["label"] for row in open_rows(str(path)).read([0, 1])] == [123456789012345678901234567890, 2**64]


def test_missing_file_and_unknown_format_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere.jsonl does not exist"):
        read_rows(str(tmp_path / "nowhere.jsonl"))
    (tmp_path / "data.csv").write_text("a,b\n")
    with pytest.raises(ValueError, match="unknown file type '.csv'"):
        read_rows(str(tmp_path / "data.csv"))


def test_non_parquet_file_is_named(tmp_path):
    (tmp_path / "data.parquet").write_text("hello")
    with pytest.raises(ValueError, match="data.parquet is not a Parquet file"):
        read_rows(str(tmp_path / "data.parquet"))


def test_malformed_slice_is_rejected_and_a_plain_at_sign_is_not():
    with pytest.raises(ValueError, match=r"path@\[start:end\]"):
        DataPath.parse("train.jsonl@[1:2:3]")
    assert str(DataPath.parse("me@home.jsonl").path) == "me@home.jsonl"


def test_folder_is_the_concatenation_of_its_data_files(jsonl, tmp_path):
    folder = tmp_path / "many"
    folder.mkdir()
    (folder / "b.jsonl").write_text(jsonl.read_text())
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS[:3]), folder / "a.parquet")
    (folder / "README.md").write_text("not data")
    assert read_rows(str(folder)) == ROWS[:3] + ROWS
    assert read_rows(f"{folder}@[2:5]") == [ROWS[2], ROWS[0], ROWS[1]]
    rows = open_rows(f"{folder}@[2:5]")
    assert [rows.where(row) for row in range(3)] == [
        f"{folder}/a.parquet: row 3",
        f"{folder}/b.jsonl:1",
        f"{folder}/b.jsonl:2",
    ]
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match="empty has no .jsonl or .parquet file"):
        open_rows(str(tmp_path / "empty"))


def test_several_paths_are_concatenated_each_with_its_slice(jsonl, parquet):
    assert read_rows([f"{jsonl}@[:2]", f"{parquet}@[-2:]"]) == ROWS[:2] + ROWS[-2:]
    with pytest.raises(IndexError, match="row 4 of .* which has 4"):
        open_rows([f"{jsonl}@[:2]", f"{parquet}@[-2:]"]).read([4])


def test_parquet_random_access_keeps_little_in_memory(tmp_path, monkeypatch):
    path = tmp_path / "groups.parquet"
    rows = [{"prompt": f"{i}" * 20, "label": i, "unused": "x"} for i in range(100)]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=7)
    monkeypatch.setattr(parquet_reader, "_BUDGET", 1000)
    opened = open_rows(str(path), ["prompt", "label", "metadata"])
    order = random.Random(0).sample(range(100), 100)
    wanted = [{"prompt": row["prompt"], "label": row["label"]} for row in rows]
    assert opened.read(order) == [wanted[row] for row in order]
    (window,) = opened._windows
    assert len(window.file._decoded) < 5
    assert [row for block in opened.blocks(hashlib.blake2b()) for row in block] == wanted
    assert opened.columns == {"prompt", "label", "unused"}


@pytest.mark.parametrize("bounds", [(0, 30), (3, 9), (10, 20), (11, 30), (29, 30)])
def test_parquet_slice_is_read_sequentially_in_batches(tmp_path, monkeypatch, bounds):
    path = tmp_path / "batches.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist([{"label": i} for i in range(30)]), path, row_group_size=10)
    monkeypatch.setattr(parquet_reader, "_BLOCK_ROWS", 4)
    opened = open_rows(f"{path}@[{bounds[0]}:{bounds[1]}]")
    blocks = list(opened.blocks(hashlib.blake2b()))
    assert [row["label"] for block in blocks for row in block] == list(range(*bounds))
    assert all(1 <= len(block) <= 4 for block in blocks)


@pytest.mark.parametrize(
    ("words", "paths", "probabilities"),
    [
        ("a=0.5", ("a=0.5",), None),
        (["odd=0.5.jsonl"], ("odd=0.5.jsonl",), None),
        (["a.jsonl", "b.jsonl@[1:2]"], ("a.jsonl", "b.jsonl@[1:2]"), None),
        (["a.jsonl=0.25", "b.jsonl@[1:2]=.75"], ("a.jsonl", "b.jsonl@[1:2]"), (0.25, 0.75)),
        (["x=1/a=2.5e-1", "b=0.5", "c=0.25"], ("x=1/a", "b", "c"), (0.25, 0.5, 0.25)),
    ],
)
def test_mixture_paths_are_followed_by_their_probabilities(words, paths, probabilities):
    assert DataMix.parse(words) == DataMix(paths, probabilities)


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["a=0.5", "b=0.4"], "a=0.5 b=0.4 has probabilities that sum to 0.9: make their sum 1"),
        (
            ["a=0.5", "b"],
            "a=0.5 b gives some sets a probability but not b: write path=probability for all sets or for none",
        ),
        (["a=0", "b=1"], "a=0 has the probability 0: give a number between 0 and 1"),
        (["a=1.5", "b=0.5"], "a=1.5 has the probability 1.5: give a number between 0 and 1"),
    ],
)
def test_mixture_probabilities_must_sum_to_one(words, sentence):
    with pytest.raises(ValueError) as caught:
        DataMix.parse(words)
    assert str(caught.value) == sentence


@pytest.mark.parametrize(
    ("bad", "allowed", "first", "lines", "last"),
    [
        (1, 0, "1 bad row in data.jsonl: fix it", 2, "row 0"),
        (20, 5, "20 bad rows in data.jsonl (5 allowed): fix it", 21, "row 19"),
        (21, 5, "21 bad rows in data.jsonl (5 allowed): fix it", 22, "and 1 more"),
    ],
)
def test_first_twenty_invalid_rows_are_listed_and_the_rest_counted(bad, allowed, first, lines, last):
    shown = str(bad_rows_error("data.jsonl", [f"row {number}" for number in range(bad)], allowed, "fix it"))
    assert [line.strip() for line in shown.splitlines()][:: lines - 1] == [first, last]
    assert len(shown.splitlines()) == lines


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_file_overwritten_in_place_is_detected_at_the_first_changed_row(tmp_path, kind):
    path, old, new = (tmp_path / f"{name}.{kind}" for name in ("train", "old", "new"))
    wide = "x" * 2000
    for target, mark in ((old, "a"), (new, "b")):
        write_kind(target, [{"text": f"{'a' if row < 1000 else mark}{row:06d}{wide}"} for row in range(2000)])
    path.write_bytes(old.read_bytes())
    rows = open_rows(str(path))
    list(rows.blocks(hashlib.blake2b()))  # like the check before training
    assert rows.read([1999])[0]["text"].startswith("a001999")
    then = path.stat()
    with path.open("r+b") as file:  # in place, of the same length, with its mtime restored
        file.write(new.read_bytes())
    os.utime(path, ns=(then.st_atime_ns, then.st_mtime_ns))
    if kind == "jsonl":
        assert rows.read([3])[0]["text"].startswith("a000003")  # that part is unchanged
    complaint = rf"train\.{kind} was changed while this run was using it, found at .*1[0-9]{{3}}.* bytes, last changed"
    with pytest.raises(ChangedDataError, match=rf"{complaint}.*Restore the file and resume") as changed:
        rows.read([1500])
    if kind == "parquet":  # by groups of 100 rows
        assert "found at row 1501 to 1600" in str(changed.value)
    path.write_bytes(old.read_bytes())  # what the error message asks for
    assert rows.read([1500])[0]["text"].startswith("a001500")


def test_parquet_file_with_only_the_first_byte_changed_is_detected(tmp_path):
    path = tmp_path / "train.parquet"
    write_kind(path, [{"a": row} for row in range(3)])
    rows = open_rows(str(path))
    with path.open("r+b") as file:
        file.write(b"Q")
    with pytest.raises(ChangedDataError, match=r"found at row 1 to 3"):
        rows.read([0])


def test_dataset_without_files_has_no_rows():
    assert len(RowSet("nothing", [])) == 0


def test_row_may_start_with_any_byte(tmp_path):
    path = tmp_path / "bytes.jsonl"
    path.write_bytes(b"".join(bytes([value]) + b'{"a": 1}\n' for value in range(256)))
    rows = open_rows(str(path))
    good = [value for value, row in enumerate(rows.read(range(len(rows)))) if not isinstance(row, InvalidRow)]
    assert len(rows) == 256 and bytes(good) == b"\t\n\r "  # JSON's white space


def test_touched_or_identically_rewritten_file_stays_the_same(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    rows = open_rows(str(path))
    content = path.read_bytes()
    path.write_bytes(content)
    os.utime(path, ns=(1, 1))
    assert rows.read([1, 0]) == [{"a": 2}, {"a": 1}]
    assert [row for block in rows.blocks(hashlib.blake2b()) for row in block] == [{"a": 1}, {"a": 2}]


def test_file_truncated_in_place_is_detected(tmp_path):
    path = tmp_path / "train.jsonl"
    path.write_text('{"a": 1}\n{"a": 2}\n')
    rows = open_rows(str(path))
    os.truncate(path, 9)
    with pytest.raises(ChangedDataError, match=r"train\.jsonl:2: it had 18 bytes.* and now has 9 bytes"):
        rows.read([1])


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
def test_replaced_file_is_still_read_and_logged_once(tmp_path, kind, caplog):
    path = tmp_path / f"train.{kind}"
    write_kind(path, [{"a": row} for row in range(3)])
    rows = open_rows(str(path))
    write_kind(tmp_path / "new", [{"a": -1}])
    (tmp_path / "new").replace(path)
    assert rows.read([0]) == [{"a": 0}] and rows.read([2]) == [{"a": 2}]
    assert [row for block in rows.blocks(hashlib.blake2b()) for row in block] == [{"a": row} for row in range(3)]
    assert caplog.text.count("was removed or replaced") == 1


def write_kind(path, rows):
    if "parquet" in path.name or (path.name == "new" and (path.parent / "train.parquet").exists()):
        pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path, row_group_size=100, compression="none")
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
