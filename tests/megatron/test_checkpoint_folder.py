"""Checkpoint folders: the tracker file decides, half-written folders do not count."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

from slimrl.megatron.checkpoint import folder
from slimrl.megatron.checkpoint.folder import CheckpointFolder, find_checkpoint


def make(root: Path, iteration: int | None) -> Path:
    """Makes a checkpoint as far as this module reads it; with a manifest if it is a training checkpoint."""
    partial = folder.begin(root, iteration)
    for name in ("metadata.json", ".metadata", "__0_0.distcp"):
        (partial / name).write_text("{}")
    if iteration is not None:
        folder.write_manifest(partial, iteration, weight_version=str(iteration + 1))
    return folder.commit(root, iteration)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir())


def test_absent_or_empty_folder_has_no_checkpoint(tmp_path: Path):
    assert find_checkpoint(None) is None
    assert find_checkpoint(tmp_path / "absent") is None
    assert find_checkpoint(tmp_path) is None


def test_newest_committed_checkpoint_is_found_and_older_ones_by_step(tmp_path: Path):
    make(tmp_path, 3)
    newest = make(tmp_path, 12)
    assert newest == tmp_path / "iter_0000012"
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "12"
    assert find_checkpoint(str(tmp_path)) == CheckpointFolder(newest, 12)
    assert find_checkpoint(tmp_path, 3) == CheckpointFolder(tmp_path / "iter_0000003", 3)


def test_converted_model_has_no_iteration(tmp_path: Path):
    assert find_checkpoint(make(tmp_path, None).parent) == CheckpointFolder(tmp_path / "release", None)


def test_checkpoint_can_be_given_by_its_own_folder(tmp_path: Path):
    path = make(tmp_path, 5)
    make(tmp_path, 6)
    assert find_checkpoint(path) == CheckpointFolder(path, 5)


def test_uncommitted_folder_is_not_found_and_is_replaced(tmp_path: Path):
    make(tmp_path, 0)
    partial = folder.begin(tmp_path, 1)
    (partial / "half").write_text("x")
    assert partial.name == "iter_0000001.tmp"
    assert find_checkpoint(tmp_path) == CheckpointFolder(tmp_path / "iter_0000000", 0)
    assert list(folder.begin(tmp_path, 1).iterdir()) == []


def test_saving_the_same_rollout_again_replaces_the_checkpoint(tmp_path: Path):
    (make(tmp_path, 1) / "old").write_text("x")
    path = make(tmp_path, 1)
    assert not (path / "old").exists()
    assert names(tmp_path) == ["iter_0000001", "latest_checkpointed_iteration.txt"]


def test_replacement_killed_between_its_two_renames_keeps_the_old_checkpoint(tmp_path: Path):
    (make(tmp_path, 1) / "old").write_text("x")
    folder.begin(tmp_path, 1)
    (tmp_path / "iter_0000001").rename(tmp_path / "iter_0000001.old")
    assert find_checkpoint(tmp_path) == CheckpointFolder(tmp_path / "iter_0000001.old", 1)
    folder.begin(tmp_path, 2)
    assert names(tmp_path) == ["iter_0000001", "iter_0000002.tmp", "latest_checkpointed_iteration.txt"]
    assert (tmp_path / "iter_0000001" / "old").exists()


def test_new_save_removes_only_leftovers_of_killed_runs(tmp_path: Path):
    make(tmp_path, 1)
    for left in ("iter_0000007.tmp", "iter_0000001.old", "notes.tmp", "iter_5.tmp", "hf"):
        (tmp_path / left).mkdir()
    folder.begin(tmp_path, 2)
    kept = ["hf", "iter_0000001", "iter_0000002.tmp", "iter_5.tmp", "latest_checkpointed_iteration.txt", "notes.tmp"]
    assert names(tmp_path) == kept


def test_torn_checkpoint_is_rejected_with_its_damage(tmp_path: Path):
    path = make(tmp_path, 1)
    (path / "__0_0.distcp").write_text("{")
    with pytest.raises(ValueError, match="iter_0000001 is not loaded, it is incomplete: __0_0.distcp has 1 bytes of 2"):
        find_checkpoint(tmp_path)
    (path / "__0_0.distcp").unlink()
    with pytest.raises(ValueError, match="it is incomplete: __0_0.distcp is missing"):
        find_checkpoint(path)
    (path / "slimrl_checkpoint.json").write_text("{")
    with pytest.raises(ValueError, match="its slimrl_checkpoint.json is truncated"):
        find_checkpoint(path)
    (make(tmp_path, None) / ".metadata").unlink()
    with pytest.raises(ValueError, match="it is no torch_dist checkpoint, or an incomplete one: it has no .metadata"):
        find_checkpoint(tmp_path)


def test_only_training_checkpoints_are_counted(tmp_path: Path):
    for iteration in (3, 1):
        make(tmp_path, iteration)
    make(tmp_path, None)
    shutil.copytree(tmp_path / "iter_0000003", tmp_path / "iter_0000008")  # says 3 inside
    (tmp_path / "iter_0000009").mkdir()
    (tmp_path / "iter_0000009" / "metadata.json").write_text("{}")  # written by another program
    assert folder.own_iterations(tmp_path) == [1, 3]


def test_deleted_checkpoint_loses_its_name_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    make(tmp_path, 1)
    make(tmp_path, 2)
    monkeypatch.setattr(shutil, "rmtree", lambda path: None)  # a kill before the files are deleted
    folder.remove(tmp_path, 1)
    assert names(tmp_path) == ["iter_0000001.tmp", "iter_0000002", "latest_checkpointed_iteration.txt"]


def test_missing_step_and_unreadable_tracker_are_named(tmp_path: Path):
    make(tmp_path, 1)
    with pytest.raises(FileNotFoundError, match="iter_0000007 does not exist"):
        find_checkpoint(tmp_path, 7)
    (tmp_path / folder.TRACKER_NAME).write_text("one")
    with pytest.raises(ValueError, match="says 'one': it must hold an iteration number or the word release"):
        find_checkpoint(tmp_path)


def test_data_state_round_trips(tmp_path: Path):
    state = {"epoch": 2, "order": torch.arange(3), "buffer": [{"label": None, "text": "é"}], "rng": (3, (1, 2), None)}
    folder.write_data_state(tmp_path, folder.encode_data_state(state))
    loaded = folder.read_data_state(tmp_path)
    assert torch.equal(loaded.pop("order"), state.pop("order"))
    assert loaded == state
    assert folder.read_data_state(tmp_path / "absent") is None


def test_data_state_that_could_not_be_loaded_is_rejected_on_save():
    with pytest.raises(ValueError, match="not plain data"):
        folder.encode_data_state({"folder": CheckpointFolder(Path("x"), 1)})
