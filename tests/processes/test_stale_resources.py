"""Leftovers of a killed process are removed at the next start; resources of other processes are kept."""

from __future__ import annotations

import mmap
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import slimrl
from slimrl.processes import stale_resources

HOLDER = """
import sys
from slimrl.processes import stale_resources
with stale_resources.owned_folder("slimrl-ray-") as folder:
    (folder / "r").mkdir()
    (folder / "r" / "log").write_text("x")
    print(folder, flush=True)
    sys.stdin.read()
"""


@pytest.fixture
def holder(tmp_path: Path) -> Iterator[tuple[subprocess.Popen, Path]]:
    """A process that holds a folder in `tmp_path` until its input ends, and that folder."""
    environment = {**os.environ, "TMPDIR": str(tmp_path), "PYTHONPATH": str(Path(slimrl.__file__).parent.parent)}
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", HOLDER], env=environment, **pipes) as process:
        yield process, Path(process.stdout.readline().strip())
        process.kill()


def swept(folder: Path) -> list[str]:
    """What the next start removes; excludes this machine's own shared memory."""
    return stale_resources.remove_stale(folder, str(folder / "shm"))


def owned(folder: Path, *shared: Path) -> stale_resources.Owner:
    folder.mkdir()
    owner = stale_resources.own(folder)
    for path in shared:
        owner.add_shared_memory(str(path))
    return owner


def test_folder_of_a_killed_process_is_removed_and_one_of_a_live_process_kept(holder, tmp_path):
    process, folder = holder
    assert folder.parent == tmp_path and folder.stat().st_mode & 0o777 == 0o700
    assert swept(tmp_path) == []
    assert (folder / "r" / "log").exists()
    process.kill()
    process.wait(10)
    assert folder.exists()
    assert swept(tmp_path) == [str(folder)]
    assert list(tmp_path.iterdir()) == []


def test_process_removes_its_folder_on_clean_exit(holder, tmp_path):
    process, _ = holder
    process.communicate("", timeout=10)
    assert list(tmp_path.iterdir()) == []


def test_child_that_outlives_its_parent_does_not_hold_the_folder(tmp_path):
    folder = tmp_path / "slimrl-1"
    owner = owned(folder)
    with subprocess.Popen(["sleep", "60"], close_fds=False) as child:
        owner.release()
        assert swept(tmp_path) == [str(folder)]
        child.kill()


def test_child_that_inherits_the_lock_holds_the_folder_while_it_lives(tmp_path):
    folder = tmp_path / "slimrl-1"
    owner = owned(folder)
    with subprocess.Popen(["sleep", "60"], pass_fds=(owner.fileno(),)) as child:
        owner.release()
        assert swept(tmp_path) == []
        child.kill()
    assert swept(tmp_path) == [str(folder)]


@pytest.mark.parametrize("kind", ["unmarked", "another name", "another's mark", "link", "a mark that is a link"])
def test_foreign_files_are_kept(kind, tmp_path):
    elsewhere = tmp_path / "elsewhere" / "slimrl-1"
    elsewhere.parent.mkdir()
    owned(elsewhere).release()
    folder = tmp_path / ("other-1" if kind == "another name" else "slimrl-2")
    if kind == "link":
        folder.symlink_to(elsewhere)
    else:
        folder.mkdir()
        (folder / "data").write_text("precious")
    if kind == "another's mark":
        (folder / stale_resources.OWNER).write_text("another program's")
    elif kind == "a mark that is a link":
        (folder / stale_resources.OWNER).symlink_to(elsewhere / stale_resources.OWNER)
    elif kind == "another name":
        stale_resources.own(folder).release()
    assert swept(tmp_path) == []
    assert folder.exists() and elsewhere.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a folder to somebody else")
@pytest.mark.parametrize("whose", ["the folder", "the mark"])
def test_files_of_another_user_are_kept(whose, tmp_path):
    folder = tmp_path / "slimrl-1"
    owned(folder).release()
    os.chown(folder if whose == "the folder" else folder / stale_resources.OWNER, 54321, 54321)
    assert swept(tmp_path) == []
    assert (folder / stale_resources.OWNER).exists()


def test_listed_shared_memory_is_removed_unless_mapped_or_replaced(tmp_path):
    shared = tmp_path / "shm"
    shared.mkdir()
    files = {name: shared / f"sglang_loads_{name}" for name in ("dead", "mapped", "replaced", "unlisted")}
    for path in files.values():
        path.write_bytes(bytes(4096))
    listed = [path for name, path in files.items() if name != "unlisted"]
    owner = owned(tmp_path / "slimrl-1", *listed)
    new = shared / "new"
    new.write_bytes(b"of the next owner of this name")
    new.rename(files["replaced"])
    with open(files["mapped"], "r+b") as file, mmap.mmap(file.fileno(), 4096):
        assert stale_resources.remove_stale(tmp_path, str(shared)) == []  # its owner is alive
        owner.release()
        removed = stale_resources.remove_stale(tmp_path, str(shared))
    assert removed == [str(files["dead"]), str(tmp_path / "slimrl-1")]
    assert sorted(path.name for path in shared.iterdir()) == [
        f"sglang_loads_{name}" for name in ("mapped", "replaced", "unlisted")
    ]


def test_listed_name_cannot_escape_its_folder(tmp_path):
    shared, precious = tmp_path / "shm", tmp_path / "precious"
    shared.mkdir()
    precious.write_text("x")
    owner = owned(tmp_path / "slimrl-1")
    status = precious.stat()
    os.write(owner._descriptor, f"{status.st_dev} {status.st_ino} ../precious\n".encode())
    owner.release()
    assert stale_resources.remove_stale(tmp_path, str(shared)) == [str(tmp_path / "slimrl-1")]
    assert precious.exists()


def test_folder_is_kept_while_a_nested_owner_lives(tmp_path):
    outer, shared = tmp_path / "slimrl-ray-1", tmp_path / "shm"
    shared.mkdir()
    segment = shared / "sglang_loads_1"
    segment.write_bytes(b"x")
    owned(outer).release()
    inner = owned(outer / "slimrl-2", segment)
    assert stale_resources.remove_stale(tmp_path, str(shared)) == [] and segment.exists()
    inner.release()
    assert stale_resources.remove_stale(tmp_path, str(shared)) == [str(segment), str(outer / "slimrl-2"), str(outer)]
    assert not outer.exists() and not segment.exists()


def test_folder_of_another_machine_or_boot_is_kept(tmp_path, monkeypatch):
    owned(tmp_path / "slimrl-1").release()
    monkeypatch.setattr(stale_resources, "_of_this_boot", lambda: b"boot 0\n")
    assert swept(tmp_path) == [] and (tmp_path / "slimrl-1").exists()


def test_list_truncated_by_a_full_disk_does_not_block_the_next_start(tmp_path):
    owner = owned(tmp_path / "slimrl-1")
    os.write(owner.fileno(), b"64")
    owner.release()
    assert swept(tmp_path) == [str(tmp_path / "slimrl-1")]
