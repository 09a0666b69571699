"""A folder with a predictable name is used only if it is private to this user."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from slimrl.processes.files import NotPrivateError, make_private


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_folder_is_created_for_this_user_only_and_reused(tmp_path):
    path = tmp_path / "kernels"
    old = os.umask(0)
    try:
        assert make_private(path) == path
    finally:
        os.umask(old)
    assert mode_of(path) == 0o700
    (path / "kernel").write_text("x")
    path.chmod(0o755)  # with torch's permissions
    make_private(path)
    assert mode_of(path) == 0o700 and (path / "kernel").exists()


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770])
def test_folder_writable_by_others_is_rejected_unchanged(mode, tmp_path):
    path = tmp_path / "kernels"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(NotPrivateError, match=rf"{path} can be written to by others \(mode {mode:o}\)"):
        make_private(path)
    assert path.stat().st_mode & 0o7777 == mode


@pytest.mark.parametrize("kind", ["link", "dangling link", "file"])
def test_non_folder_is_rejected(kind, tmp_path):
    path, target = tmp_path / "kernels", tmp_path / "target"
    if kind == "file":
        path.write_text("x")
    else:
        path.symlink_to(target)
    if kind == "link":
        target.mkdir(mode=0o700)
    with pytest.raises(NotPrivateError, match="is not a folder that this user can open"):
        make_private(path)
    assert kind == "link" or not target.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a folder to somebody else")
def test_folder_of_another_user_is_rejected(tmp_path):
    path = tmp_path / "kernels"
    path.mkdir(mode=0o700)
    os.chown(path, 54321, 54321)
    with pytest.raises(NotPrivateError, match="belongs to user 54321"):
        make_private(path)
