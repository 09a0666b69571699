"""A folder of a foreseeable name is used only where it is this user's alone."""

from __future__ import annotations

import logging
import os
from pathlib import Path

import pytest

from slimrl.processes import folders
from slimrl.processes.folders import NotPrivateError, kernel_cache, make_private


def mode_of(path: Path) -> int:
    return path.stat().st_mode & 0o777


def test_it_is_made_for_this_user_alone_and_taken_again(tmp_path):
    path = tmp_path / "kernels"
    old = os.umask(0)
    try:
        assert make_private(path) == path
    finally:
        os.umask(old)
    assert mode_of(path) == 0o700
    (path / "kernel").write_text("x")
    path.chmod(0o755)  # as torch makes it
    make_private(path)
    assert mode_of(path) == 0o700 and (path / "kernel").exists()


@pytest.mark.parametrize("mode", [0o777, 0o1777, 0o770])
def test_one_that_others_can_write_to_is_refused_as_it_is(mode, tmp_path):
    path = tmp_path / "kernels"
    path.mkdir()
    path.chmod(mode)
    with pytest.raises(NotPrivateError, match=rf"{path} can be written to by others \(mode {mode:o}\)"):
        make_private(path)
    assert path.stat().st_mode & 0o7777 == mode


@pytest.mark.parametrize("kind", ["link", "dangling link", "file"])
def test_what_is_no_folder_is_refused(kind, tmp_path):
    path, target = tmp_path / "kernels", tmp_path / "target"
    if kind == "file":
        path.write_text("x")
    else:
        path.symlink_to(target)
    if kind == "link":
        target.mkdir(mode=0o700)
    with pytest.raises(NotPrivateError, match="is no folder that this user can open"):
        make_private(path)
    assert kind == "link" or not target.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a folder to somebody else")
def test_one_of_somebody_else_is_refused(tmp_path):
    path = tmp_path / "kernels"
    path.mkdir(mode=0o700)
    os.chown(path, 54321, 54321)
    with pytest.raises(NotPrivateError, match="belongs to user 54321"):
        make_private(path)


def test_kernels_are_kept_in_a_private_folder_or_not_kept(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(folders.tempfile, "tempdir", str(tmp_path))
    path = tmp_path / f"torchinductor_{os.getuid()}"
    assert kernel_cache({"TORCHINDUCTOR_CACHE_DIR": "/mine"}) == {} and not path.exists()
    assert kernel_cache({}) == {"TORCHINDUCTOR_CACHE_DIR": str(path)}
    path.chmod(0o777)
    with caplog.at_level(logging.WARNING):
        assert kernel_cache({}) == {}
    (message,) = caplog.messages
    assert message == (
        f"compiled kernels are not kept: {path} can be written to by others (mode 777); remove it or set"
        " TORCHINDUCTOR_CACHE_DIR"
    )
