"""Where checkpoints lie: the tracker file decides, half-written folders do not count."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from slimrl.megatron import checkpoint_folder
from slimrl.megatron.checkpoint_folder import CheckpointFolder, find_checkpoint


def make(root: Path, iteration: int | None) -> Path:
    (checkpoint_folder.begin(root, iteration) / "metadata.json").write_text("{}")
    return checkpoint_folder.commit(root, iteration)


def test_an_absent_or_empty_folder_holds_no_checkpoint(tmp_path: Path):
    assert find_checkpoint(None) is None
    assert find_checkpoint(tmp_path / "absent") is None
    assert find_checkpoint(tmp_path) is None


def test_the_newest_committed_checkpoint_is_found_and_older_ones_by_step(tmp_path: Path):
    make(tmp_path, 3)
    newest = make(tmp_path, 12)
    assert newest == tmp_path / "iter_0000012"
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "12"
    assert find_checkpoint(str(tmp_path)) == CheckpointFolder(newest, 12)
    assert find_checkpoint(tmp_path, 3) == CheckpointFolder(tmp_path / "iter_0000003", 3)


def test_a_converted_model_has_no_iteration(tmp_path: Path):
    assert find_checkpoint(make(tmp_path, None).parent) == CheckpointFolder(tmp_path / "release", None)


def test_a_checkpoint_can_be_named_by_its_own_folder(tmp_path: Path):
    path = make(tmp_path, 5)
    make(tmp_path, 6)
    assert find_checkpoint(path) == CheckpointFolder(path, 5)


def test_a_folder_that_was_never_committed_is_not_found_and_gives_way(tmp_path: Path):
    make(tmp_path, 0)
    partial = checkpoint_folder.begin(tmp_path, 1)
    (partial / "half").write_text("x")
    assert partial.name == "iter_0000001.tmp"
    assert find_checkpoint(tmp_path) == CheckpointFolder(tmp_path / "iter_0000000", 0)
    assert list(checkpoint_folder.begin(tmp_path, 1).iterdir()) == []


def test_saving_the_same_rollout_again_replaces_the_old_checkpoint(tmp_path: Path):
    (make(tmp_path, 1) / "old").write_text("x")
    path = make(tmp_path, 1)
    assert [entry.name for entry in path.iterdir()] == ["metadata.json"]
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["iter_0000001", "latest_checkpointed_iteration.txt"]


def test_a_missing_step_and_an_unreadable_tracker_are_named(tmp_path: Path):
    make(tmp_path, 1)
    with pytest.raises(FileNotFoundError, match="iter_0000007 does not exist"):
        find_checkpoint(tmp_path, 7)
    (tmp_path / checkpoint_folder.TRACKER_NAME).write_text("one")
    with pytest.raises(ValueError, match="says 'one': it must hold an iteration number or the word release"):
        find_checkpoint(tmp_path)


def test_the_data_state_comes_back_as_it_was(tmp_path: Path):
    state = {"epoch": 2, "order": torch.arange(3), "buffer": [{"label": None, "text": "é"}], "rng": (3, (1, 2), None)}
    checkpoint_folder.write_data_state(tmp_path, checkpoint_folder.encode_data_state(state))
    loaded = checkpoint_folder.read_data_state(tmp_path)
    assert torch.equal(loaded.pop("order"), state.pop("order"))
    assert loaded == state
    assert checkpoint_folder.read_data_state(tmp_path / "absent") is None


def test_a_data_state_that_could_not_be_loaded_is_refused_when_it_is_saved():
    with pytest.raises(ValueError, match="not plain data"):
        checkpoint_folder.encode_data_state({"folder": CheckpointFolder(Path("x"), 1)})
