"""Logs of other nodes in the driver's run folder; tests/end_to_end/test_machines.py copies those of a real node."""

from __future__ import annotations

import dataclasses
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import ray

from slimrl.cluster.nodes import logs
from slimrl.cluster.nodes.logs import LogFolder, NodeLogs, _Source


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


@dataclasses.dataclass(eq=False)
class FakeReference:
    """Of a call that has answered, or never will: None."""

    news: dict[str, bytes] | None


class FakeReader:
    """A reader on another node; a silent one, without a folder, never answers."""

    def __init__(self, folder: Path | None) -> None:
        self.folder, self.asked, self.killed = folder, 0, False
        self.read = SimpleNamespace(remote=self._read)

    def _read(self, offsets: dict[str, int]) -> FakeReference:
        self.asked += 1
        return FakeReference(None if self.folder is None else LogFolder(self.folder).read(offsets))


class FakeRay:
    """The calls of `NodeLogs` to Ray about these readers."""

    ObjectRef, exceptions = FakeReference, ray.exceptions

    @staticmethod
    def wait(refs: list[FakeReference], num_returns: int, timeout: float) -> tuple[list, list]:
        ready = [ref for ref in refs if ref.news is not None]
        if len(ready) < num_returns:
            time.sleep(timeout)
        return ready, [ref for ref in refs if ref.news is None]

    @staticmethod
    def get(ref: FakeReference, timeout: float) -> dict[str, bytes]:
        return ref.news

    @staticmethod
    def kill(reader: FakeReader) -> None:
        reader.killed = True


def test_end_waits_for_no_node_that_did_not_answer_before(tmp_path: Path, monkeypatch):
    monkeypatch.setattr(logs, "ray", FakeRay)
    monkeypatch.setattr(logs, "PERIOD_S", 0.05)
    monkeypatch.setattr(logs, "TIMEOUT_S", 30.0)
    (tmp_path / "there").mkdir()
    (tmp_path / "there/train-rank1.log").write_text("first\n")
    good, silent = FakeReader(tmp_path / "there"), FakeReader(None)
    copied = NodeLogs(tmp_path / "logs")
    for source in (_Source(good, "10.0.0.2", {}), _Source(silent, "10.0.0.3", {}, failures=1)):
        copied._new.put(source)
    copied._thread = threading.Thread(target=copied._copy_until_end, daemon=True)
    copied._thread.start()
    while not silent.asked:
        time.sleep(0.01)
    with open(tmp_path / "there/train-rank1.log", "a") as log:  # while the silent one is waited for
        log.write("last\n")
    began = time.monotonic()
    copied.close()
    assert time.monotonic() - began < 10 and not copied._thread.is_alive()
    assert (tmp_path / "logs/train-rank1.log").read_text() == "first\nlast\n"
    assert silent.asked == 1 and good.killed and silent.killed
