"""A file that is written in one block is there whole, or as it was before."""

from __future__ import annotations

import pytest

from slimrl.processes.atomic_file import atomic_file


def test_the_file_and_its_folder_are_there_after_the_block_and_not_before(tmp_path):
    path = tmp_path / "run" / "summary.json"
    with atomic_file(path) as unfinished:
        unfinished.write_text("new")
        assert unfinished.parent == path.parent and not path.exists()
    assert [file.name for file in path.parent.iterdir()] == ["summary.json"] and path.read_text() == "new"


@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt()])
@pytest.mark.parametrize("begun", [True, False], ids=["begun", "not begun"])
def test_an_error_leaves_the_old_file_and_nothing_else(tmp_path, error, begun):
    path = tmp_path / "summary.json"
    path.write_text("old")
    with pytest.raises(type(error)), atomic_file(path) as unfinished:
        if begun:
            unfinished.write_text("half")
        raise error
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"] and path.read_text() == "old"
