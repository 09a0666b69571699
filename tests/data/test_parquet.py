"""Parquet by row group: what is decoded, cached, hashed and reported."""

import hashlib

import pyarrow
import pyarrow.parquet
import pytest

from slimrl.data import parquet
from slimrl.data.readers import ChangedDataError

ROWS = [{"label": i} for i in range(8)]


@pytest.fixture
def path(tmp_path):
    """Eight rows of one integer in four row groups of equal size."""
    written = tmp_path / "train.parquet"
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(ROWS), written, row_group_size=2, compression="none")
    return written


@pytest.fixture
def group_bytes(path):
    return pyarrow.parquet.ParquetFile(path).read_row_group(0).nbytes


def decoded(opened, monkeypatch):
    """The row groups that are decoded from now on, in order."""
    groups = []
    read = opened._file.read_row_group

    class Recorder:
        def read_row_group(self, group, **options):
            groups.append(group)
            return read(group, **options)

    monkeypatch.setattr(opened, "_file", Recorder())
    return groups


def test_row_groups_are_cached_within_the_budget_and_evicted_by_lru(path, group_bytes, monkeypatch):
    monkeypatch.setattr(parquet, "_BUDGET", 2 * group_bytes)
    opened = parquet.ParquetFile(path, None)
    groups = decoded(opened, monkeypatch)
    for row in (0, 2, 1, 4, 0, 2):
        assert opened.read([row]) == [ROWS[row]]
    assert groups == [0, 1, 2, 1]  # row 4 evicted group 1, because group 0 was read after it


def test_one_row_group_is_cached_even_above_the_budget(path, group_bytes, monkeypatch):
    monkeypatch.setattr(parquet, "_BUDGET", group_bytes - 1)
    opened = parquet.ParquetFile(path, None)
    groups = decoded(opened, monkeypatch)
    for row in (0, 1, 2, 3, 0):
        opened.read([row])
    assert groups == [0, 1, 0]


@pytest.mark.parametrize(
    ("sizes", "spare", "warned"),
    [((2, 2), 0, False), ((2, 2), -1, True), ((2, 6), -1, True), ((6, 2), -1, True), ((8,), -1, False)],
    ids=["as large as the budget", "larger", "the second is larger", "the first is larger", "a single one"],
)
def test_row_groups_above_the_budget_are_reported_when_there_are_several(
    tmp_path, monkeypatch, caplog, sizes, spare, warned
):
    path = tmp_path / "train.parquet"
    table = pyarrow.Table.from_pylist(ROWS)
    with pyarrow.parquet.ParquetWriter(path, table.schema, compression="none", use_dictionary=False) as writer:
        first = 0
        for size in sizes:
            writer.write_table(table.slice(first, size))
            first += size
    footer = pyarrow.parquet.ParquetFile(path).metadata
    largest = max(footer.row_group(group).total_byte_size for group in range(footer.num_row_groups))
    monkeypatch.setattr(parquet, "_BUDGET", largest + spare)
    parquet.ParquetFile(path, None)
    assert ("rewrite it with" in caplog.text) == warned


def test_file_without_row_groups_has_no_rows(tmp_path):
    with pyarrow.parquet.ParquetWriter(tmp_path / "empty.parquet", pyarrow.schema([("label", pyarrow.int64())])):
        pass
    opened = parquet.ParquetFile(tmp_path / "empty.parquet", None)
    assert len(opened) == 0
    assert list(opened.blocks(0, 0, hashlib.blake2b())) == []


def test_digest_covers_the_file_bytes_and_the_bounds(path):
    digest = hashlib.blake2b()
    list(parquet.ParquetFile(path, None).blocks(1, 5, digest))
    assert digest.digest() == hashlib.blake2b(path.read_bytes() + b"1:5").digest()


def test_undecodable_row_group_is_a_file_error_when_the_file_is_unchanged(path):
    damage(path)
    with pytest.raises((OSError, pyarrow.ArrowInvalid)) as raised:
        parquet.ParquetFile(path, None).read([0])
    assert not isinstance(raised.value, ChangedDataError)


def test_undecodable_row_group_is_reported_as_changed_when_the_file_was_overwritten(path):
    opened = parquet.ParquetFile(path, None)
    list(opened.blocks(0, len(opened), hashlib.blake2b()))
    damage(path)
    with pytest.raises(ChangedDataError, match="row 3 to 4"):
        opened.read([2])


def damage(path):
    """Zeros every page of the file in place; the footer stays."""
    content = path.read_bytes()
    footer = pyarrow.parquet.ParquetFile(path).metadata.serialized_size + 8
    with path.open("r+b") as file:
        file.seek(4)
        file.write(bytes(len(content) - footer - 4))
