"""The run's folder is private to its user."""

import os
import stat

from slimrl.observability.run_log import make_private


def rights(path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def test_run_folder_is_private_and_its_parents_have_default_permissions(tmp_path):
    before = os.umask(0o022)
    try:
        assert make_private(tmp_path / "runs" / "a") is None
        assert rights(tmp_path / "runs" / "a") == 0o700
        assert rights(tmp_path / "runs") == 0o755
    finally:
        os.umask(before)


def test_existing_folder_is_made_private(tmp_path):
    (tmp_path / "a").mkdir(mode=0o755)
    assert make_private(tmp_path / "a") is None
    assert rights(tmp_path / "a") == 0o700


def test_file_system_without_permissions_is_reported(tmp_path, monkeypatch):
    def refuse(*_: object) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(os, "chmod", refuse)
    assert make_private(tmp_path / "a") == (
        f"others may be able to read the run's folder {tmp_path / 'a'}: Operation not permitted"
    )
