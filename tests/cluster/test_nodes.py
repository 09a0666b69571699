"""What the nodes of a run must have in common; tests/end_to_end/test_machines.py compares real ones."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from slimrl.cluster.nodes import comparison
from slimrl.cluster.nodes.comparison import (
    CODE,
    CommonPath,
    NodeState,
    SharedFile,
    common_paths,
    differences,
    versions,
)
from slimrl.processes.files import LOCK_NAME, only_run_in
from tests.megatron.tiny import tiny_args


def test_each_difference_of_each_node_is_named():
    own = NodeState("10.0.0.1", {"slimrl": "0.1.0", "torch": "2.11.0", CODE: "aa"}, [])
    same = NodeState("10.0.0.2", dict(own.versions), [])
    older = NodeState("10.0.0.3", {"slimrl": "0.1.0", "torch": "2.10.0", "numpy": "2.1", CODE: "aa"}, [])
    without = NodeState("10.0.0.4", {"slimrl": "0.1.0", CODE: "bb"}, ["has no --load /data/x: copy it there"])
    assert differences(own, [same]) == []
    assert differences(own, [same, older, without]) == [
        "node 10.0.0.3 has other versions than the driver's node 10.0.0.1: numpy 2.1 (here none), torch 2.10.0 (here"
        " 2.11.0): install the same lock and use the same checkout on every node",
        "node 10.0.0.4 has other versions than the driver's node 10.0.0.1: slimrl's code bb (here aa), torch not"
        " installed (here 2.11.0): install the same lock and use the same checkout on every node",
        "node 10.0.0.4 has no --load /data/x: copy it there",
    ]


def test_versions_hold_a_hash_of_the_code():
    found = versions()
    assert found["torch"].startswith("2.") and len(found[CODE]) == 12 and found == versions()


@pytest.fixture
def short_wait(monkeypatch: pytest.MonkeyPatch) -> None:
    """For the file systems of other nodes, which show a new file late."""
    monkeypatch.setattr(comparison, "SHARED_WITHIN_S", 0.7)


def test_file_that_a_network_file_system_shows_late_is_found(tmp_path: Path):
    folder = tmp_path / "checkpoints"
    folder.mkdir()
    path = CommonPath("--save", str(folder), SharedFile(folder / "mark", "text", "a reason"))
    late = threading.Timer(0.8, lambda: (folder / "mark").write_text("text"))
    late.start()
    assert path.problem() == ""
    late.join()


def test_folder_of_checkpoints_must_be_that_of_the_driver(tmp_path: Path, short_wait: None):
    model, save = tmp_path / "model", tmp_path / "checkpoints"
    model.mkdir()
    args = tiny_args(hf_checkpoint=str(model), ref_load="Qwen/Qwen3-4B", save=str(save), load=str(save))
    with only_run_in(save, flag="--save", name="one"), common_paths(args) as paths:
        assert [(path.flag, path.path) for path in paths] == [("--hf-checkpoint", str(model)), ("--save", str(save))]
        assert [path.problem() for path in paths] == ["", ""]
        lock = (save / LOCK_NAME).read_text()
    # on another node, the folder is another one, with or without a run of its own
    for text in (None, lock.replace("one", "two")):
        if text is not None:
            (save / LOCK_NAME).write_text(text)
        assert paths[1].problem() == (
            f"has another folder at --save {save} than the driver's node: a checkpoint needs the files of all ranks in"
            " one folder; give one on a file system that all nodes share"
        )
    model.rmdir()
    assert paths[0].problem() == (
        f"has no --hf-checkpoint {model}: copy it there, or give a path on a file system that all nodes share"
    )
    assert CommonPath("--load", "/nowhere").problem().startswith("has no --load /nowhere")


def test_folders_of_the_critic_and_of_weight_files_must_be_those_of_the_driver(tmp_path: Path, short_wait: None):
    critic, weights = tmp_path / "critic", tmp_path / "not/yet"  # the run creates the second
    critic.mkdir()
    folders = {"save": str(tmp_path / "save"), "critic_save": str(critic), "update_weight_disk_dir": str(weights)}
    args = tiny_args(hf_checkpoint="Qwen/Qwen3-4B", critic_load=str(critic), **folders)
    with only_run_in(tmp_path / "save", flag="--save", name="one"), common_paths(args) as paths:
        assert [path.flag for path in paths] == ["--update-weight-disk-dir", "--save", "--critic-save"]
        assert [path.problem() for path in paths] == ["", "", ""]
        assert not weights.exists()
    assert list(critic.iterdir()) == [] and sorted(tmp_path.iterdir()) == [critic, tmp_path / "save"]  # nothing is left
    # what another node sees that does not share them
    assert paths[0].problem() == (
        f"has another folder at --update-weight-disk-dir {weights} than the driver's node: engines read there what"
        " training writes; give one on a file system that all nodes share"
    )
    assert paths[2].problem().startswith(f"has another folder at --critic-save {critic} than the driver's node: a")
    with common_paths(args) as of_a_run_that_saves_nothing:
        assert [path.flag for path in of_a_run_that_saves_nothing] == ["--critic-load", "--update-weight-disk-dir"]
