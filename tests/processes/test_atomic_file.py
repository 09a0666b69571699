"""A file written in one block is either complete or unchanged."""

from __future__ import annotations

import pytest

from slimrl.processes.files import atomic_file


def test_file_and_folder_exist_only_after_the_block(tmp_path):
    path = tmp_path / "run" / "summary.json"
    with atomic_file(path) as unfinished:
        unfinished.write_text("new")
        assert unfinished.parent == path.parent and not path.exists()
    assert [file.name for file in path.parent.iterdir()] == ["summary.json"] and path.read_text() == "new"


@pytest.mark.parametrize("error", [OSError("no space left"), KeyboardInterrupt()])
@pytest.mark.parametrize("begun", [True, False], ids=["begun", "not begun"])
def test_error_leaves_only_the_old_file(tmp_path, error, begun):
    path = tmp_path / "summary.json"
    path.write_text("old")
    with pytest.raises(type(error)), atomic_file(path) as unfinished:
        if begun:
            unfinished.write_text("half")
        raise error
    assert [file.name for file in tmp_path.iterdir()] == ["summary.json"] and path.read_text() == "old"
