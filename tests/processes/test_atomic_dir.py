"""A folder that appears complete or not at all."""

from __future__ import annotations

import shutil
from collections import namedtuple
from pathlib import Path

import pytest

from slimrl.processes import files
from slimrl.processes.files import AtomicDir, check_apart

Usage = namedtuple("Usage", "total used free")


def test_final_path_is_absent_until_the_end(tmp_path):
    with AtomicDir(tmp_path / "out") as folder:
        (folder.partial / "a").write_text("1")
        assert not (tmp_path / "out").exists()
    assert (tmp_path / "out" / "a").read_text() == "1"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_error_or_ctrl_c_leaves_nothing(tmp_path, error):
    with pytest.raises(error), AtomicDir(tmp_path / "out") as folder:
        (folder.partial / "a").write_text("1")
        raise error
    assert list(tmp_path.iterdir()) == []


def test_empty_folder_is_filled_and_a_full_one_rejected(tmp_path):
    (tmp_path / "out").mkdir()
    with AtomicDir(tmp_path / "out") as folder:
        (folder.partial / "a").write_text("1")
    with pytest.raises(FileExistsError, match="out exists already and is not empty"):
        AtomicDir(tmp_path / "out")
    with AtomicDir(tmp_path / "out", replace=["a"]) as folder:
        (folder.partial / "b").write_text("2")
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["b"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_folder_with_other_contents_is_never_replaced(tmp_path):
    (tmp_path / "out").mkdir()
    for name in ("part-1", "part-2", "thesis.txt"):
        (tmp_path / "out" / name).write_text("precious")
    with pytest.raises(ValueError, match=r"also has thesis\.txt, which would be lost"):
        AtomicDir(tmp_path / "out", replace=["part-?"])
    assert (tmp_path / "out" / "thesis.txt").read_text() == "precious"


def test_file_added_to_an_old_output_meanwhile_is_kept(tmp_path):
    (tmp_path / "out").mkdir()
    with pytest.raises(ValueError, match=r"thesis\.txt"), AtomicDir(tmp_path / "out", replace=["part"]):
        (tmp_path / "out" / "thesis.txt").write_text("precious")
    assert (tmp_path / "out" / "thesis.txt").read_text() == "precious"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize("old", [True, False], ids=["old_output", "empty"])
def test_symlink_to_a_folder_stays_and_its_folder_is_filled(tmp_path, old):
    (tmp_path / "disk").mkdir()
    if old:
        (tmp_path / "disk" / "a").write_text("1")
    (tmp_path / "out").symlink_to(tmp_path / "disk", target_is_directory=True)
    with AtomicDir(tmp_path / "out", replace=["a"]) as folder:
        (folder.partial / "b").write_text("2")
    assert (tmp_path / "out").is_symlink()
    assert [path.name for path in (tmp_path / "disk").iterdir()] == ["b"]


def test_file_at_the_path_is_rejected_even_with_replace(tmp_path):
    (tmp_path / "out").write_text("precious")
    with pytest.raises(NotADirectoryError, match="is a file"):
        AtomicDir(tmp_path / "out", replace=["*"])


def test_folder_contents_added_meanwhile_are_not_overwritten(tmp_path):
    with pytest.raises(FileExistsError, match="not empty"), AtomicDir(tmp_path / "out"):
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "mine").write_text("kept")
    assert (tmp_path / "out" / "mine").read_text() == "kept"
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_leftovers_of_a_killed_run_are_removed(tmp_path):
    left = files.partial_path(tmp_path / "out")
    left.mkdir()
    (left / "half").write_text("1")
    with AtomicDir(tmp_path / "out") as folder:
        assert list(folder.partial.iterdir()) == []


def test_second_run_on_the_same_folder_is_rejected_while_the_first_runs(tmp_path):
    with AtomicDir(tmp_path / "out") as first:
        (first.partial / "a").write_text("1")
        with pytest.raises(FileExistsError, match="being written by another process"):
            AtomicDir(tmp_path / "out").open()
    assert (tmp_path / "out" / "a").read_text() == "1"


def test_insufficient_disk_space_is_rejected_with_both_numbers(tmp_path, monkeypatch):
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(0, 0, 3 * 1024**3 // 2))
    with pytest.raises(ValueError, match=r"needs 2\.00 GiB and its disk has 1\.50 GiB free"):
        AtomicDir(tmp_path / "deep" / "out", needed_bytes=2 * 1024**3)
    AtomicDir(tmp_path / "deep" / "out", needed_bytes=1024**3)


def test_output_that_contains_the_input_is_rejected(tmp_path):
    (tmp_path / "run" / "in").mkdir(parents=True)
    for output in (tmp_path / "run", tmp_path / "run" / "in", tmp_path / "run" / "x" / ".." / "in"):
        with pytest.raises(ValueError, match="which would be lost"):
            check_apart(output, "--save", tmp_path / "run" / "in", "--hf-checkpoint")
    check_apart(tmp_path / "run" / "in" / "out", "--save", tmp_path / "run" / "in", "--hf-checkpoint")


def test_mount_point_is_rejected_before_writing():
    with pytest.raises(ValueError, match=r"/dev/shm is a mount point.*choose a folder in it"):
        AtomicDir(Path("/dev/shm"), replace=["*"])
