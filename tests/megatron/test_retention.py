"""Which checkpoints are deleted when a new one is complete."""

from __future__ import annotations

from pathlib import Path

import pytest

from slimrl.megatron.checkpoint import folder
from slimrl.megatron.checkpoint.folder import Retention

EVERY_SECOND = [1, 3, 5, 7, 9]  # saved after 2, 4, 6, 8 and 10 rollouts


@pytest.mark.parametrize(
    ("newest", "interval", "gone"),
    [
        (None, None, []),
        (1, None, [1, 3, 5, 7]),
        (2, None, [1, 3, 5]),
        (9, None, []),
        (None, 4, [1, 5]),  # after 4 and after 8 rollouts, and the newest
        (2, 6, [1, 3]),  # after 6, and the two newest
    ],
)
def test_newest_checkpoints_and_multiples_of_the_interval_are_kept(newest, interval, gone):
    assert Retention(newest, interval).surplus(EVERY_SECOND, 9) == gone


def test_checkpoints_after_the_resumed_one_are_neither_counted_nor_removed():
    assert Retention(2).surplus([1, 3, 5, 7, 9], 5) == [1]


def make(root: Path, iteration: int) -> None:
    partial = folder.begin(root, iteration)
    (partial / "metadata.json").write_text("{}")
    folder.write_manifest(partial, iteration)
    folder.commit(root, iteration)


def test_files_not_written_by_training_are_kept(tmp_path: Path):
    for iteration in EVERY_SECOND:
        make(tmp_path, iteration)
    for other in ("release", "iter_0000000", "notes"):
        (tmp_path / other).mkdir()
    Retention(1).apply(tmp_path, 9)
    kept = ["iter_0000000", "iter_0000009", "latest_checkpointed_iteration.txt", "notes", "release"]
    assert sorted(path.name for path in tmp_path.iterdir()) == kept


def test_undeletable_checkpoint_is_named_and_training_continues(tmp_path: Path, monkeypatch, caplog):
    make(tmp_path, 1)
    make(tmp_path, 2)

    def refuse(root: Path, iteration: int) -> None:
        raise PermissionError(f"{root / 'iter_0000001'} is read-only")

    monkeypatch.setattr(folder, "remove", refuse)
    Retention(1).apply(tmp_path, 2)
    assert "an old checkpoint could not be deleted" in caplog.text and "iter_0000001 is read-only" in caplog.text
