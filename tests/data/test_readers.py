"""Data files come in whole, in order, and never lose a row in silence."""

import json

import pyarrow
import pyarrow.parquet
import pytest

from slimrl.data.readers import DataPath, read_rows

ROWS = [{"prompt": [{"role": "user", "content": f"{i}+{i}"}], "label": str(2 * i)} for i in range(10)]


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
def test_both_kinds_give_the_same_rows(kind, request):
    assert read_rows(str(request.getfixturevalue(kind))) == ROWS


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("bounds", [(2, 5), (None, 3), (7, None), (-2, None), (None, -8), (3, 100), (None, None)])
def test_a_slice_counts_as_python_does(kind, bounds, request):
    start, end = ("" if bound is None else str(bound) for bound in bounds)
    path = f"{request.getfixturevalue(kind)}@[{start}:{end}]"
    assert read_rows(path) == ROWS[slice(*bounds)]


@pytest.mark.parametrize("kind", ["jsonl", "parquet"])
@pytest.mark.parametrize("text", ["5:2", "10:", "4:4"])
def test_a_slice_without_rows_is_refused(kind, text, request):
    with pytest.raises(ValueError, match="holds no rows"):
        read_rows(f"{request.getfixturevalue(kind)}@[{text}]")


def test_every_bad_row_is_named_with_its_line(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text('{"prompt": "a"}\n{"prompt": \n\n[1, 2]\n{"prompt": NaN}\n')
    with pytest.raises(ValueError) as caught:
        read_rows(str(path))
    message = str(caught.value)
    assert message.startswith("3 bad rows in ")
    assert f"{path}:2: not valid JSON" in message
    assert f"{path}:4: a row must be a JSON object, this one is list" in message
    assert f"{path}:5: not valid JSON" in message
    assert f"{path}:1:" not in message


def test_a_hundred_bad_rows_make_a_short_message(tmp_path):
    path = tmp_path / "bad.jsonl"
    path.write_text("x\n" * 100)
    with pytest.raises(ValueError) as caught:
        read_rows(str(path))
    assert len(str(caught.value).splitlines()) == 22
    assert "and 80 more" in str(caught.value)


def test_a_missing_last_newline_and_windows_line_ends_change_nothing(tmp_path):
    path = tmp_path / "dos.jsonl"
    path.write_bytes("\r\n".join(json.dumps(row) for row in ROWS).encode())
    assert read_rows(str(path)) == ROWS


def test_integers_beyond_64_bits_stay_exact(tmp_path):
    path = tmp_path / "long.jsonl"
    path.write_text('{"label": 123456789012345678901234567890}\n{"label": 18446744073709551616}\n')
    assert [row["label"] for row in read_rows(str(path))] == [123456789012345678901234567890, 2**64]


def test_a_missing_file_and_an_unknown_kind_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere.jsonl does not exist"):
        read_rows(str(tmp_path / "nowhere.jsonl"))
    (tmp_path / "data.csv").write_text("a,b\n")
    with pytest.raises(ValueError, match="the kind '.csv' is not known"):
        read_rows(str(tmp_path / "data.csv"))


def test_a_file_that_is_not_parquet_is_named(tmp_path):
    (tmp_path / "data.parquet").write_text("hello")
    with pytest.raises(ValueError, match="data.parquet is not a Parquet file"):
        read_rows(str(tmp_path / "data.parquet"))


def test_a_malformed_slice_is_refused_and_a_plain_at_sign_is_not():
    with pytest.raises(ValueError, match=r"path@\[start:end\]"):
        DataPath.parse("train.jsonl@[1:2:3]")
    assert str(DataPath.parse("me@home.jsonl").path) == "me@home.jsonl"
