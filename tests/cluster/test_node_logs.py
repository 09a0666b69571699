"""Logs of other nodes in the driver's run folder; tests/end_to_end/test_machines.py copies those of a real node."""

from __future__ import annotations

from pathlib import Path

from slimrl.cluster.nodes import logs
from slimrl.cluster.nodes.logs import LogFolder


def test_folder_returns_what_was_appended_since_the_offsets(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(logs, "BYTES_PER_READ", 4)
    (tmp_path / "train-rank1.log").write_text("abcdef")
    (tmp_path / "empty.log").touch()
    (tmp_path / "other.txt").write_text("no log")
    folder = LogFolder(tmp_path)
    assert folder.sizes() == {"train-rank1.log": 6, "empty.log": 0}
    assert folder.read({}) == {"train-rank1.log": b"abcd", "empty.log": b""}
    assert folder.read({"train-rank1.log": 4, "empty.log": 0}) == {"train-rank1.log": b"ef"}
    assert folder.read(folder.sizes()) == {}
    assert LogFolder(tmp_path / "none").read({}) == {}


def test_appended_bytes_are_those_of_the_other_node_and_stay_in_the_folder(tmp_path: Path):
    folder = LogFolder(tmp_path / "run/logs")
    folder.append({"train-rank1.log": "ä".encode()[:1]})  # a read may end within a character
    folder.append({"train-rank1.log": "ä".encode()[1:], "../../outside.log": b"x"})
    assert (tmp_path / "run/logs/train-rank1.log").read_text() == "ä"
    assert (tmp_path / "run/logs/outside.log").read_text() == "x" and not (tmp_path / "outside.log").exists()
