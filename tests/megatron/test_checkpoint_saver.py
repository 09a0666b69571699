"""Asynchronous saves, failing saves and exports, with real ranks."""

from __future__ import annotations

import dataclasses
import resource
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from slimrl.arguments import Arguments
from slimrl.data.train_batch import RolloutBatch
from tests.end_to_end import checkpoints
from tests.megatron import ranks, tiny
from tests.megatron.launch import RankPool

pytestmark = pytest.mark.slow

DATA_STATE = {"offset": 3, "returned": [[{"tokens": [1, 2], "weight_versions": ["1"]}]]}


def saving_args(models: Any, folder: Path, **changes: Any) -> Arguments:
    flags = dict(
        ref_load=str(models.policy),
        hf_checkpoint=str(models.policy_hf),
        save=str(folder),
        tensor_model_parallel_size=2,
        sequence_parallel=True,
        use_distributed_optimizer=True,
    )
    return tiny.tiny_args(**(flags | models.flags | changes))


@dataclasses.dataclass
class Held:
    """State of a rank while its checkpoint was held back, and after."""

    while_held: list[str]
    after: list[str]
    names_at_second_save: list[str]
    weights: dict[str, Tensor]  # at the call of the first save, by Hugging Face name
    later_weights: dict[str, Tensor]


def save_while_training(
    rank: int, world_size: int, init_method: str, args: Arguments, rollouts: list[RolloutBatch]
) -> Held:
    """Saves twice with a slow copy to the host, the first time with the files held back until a rollout is trained.

    Training, and offloading after the second save, must wait for the copy.
    """
    from slimrl.megatron.checkpoint import io

    root = Path(args.save)
    released, write = threading.Event(), io.write

    def held_back(*arguments: Any) -> Any:
        assert released.wait(60)
        return write(*arguments)

    def copy_slowly(prepared: Any) -> None:
        time.sleep(0.3)
        copy(prepared)

    copy = io.Prepared.copy_to_host
    io.write = held_back
    io.Prepared.copy_to_host = copy_slowly
    args.async_save = False  # the same state, saved synchronously
    trainer = ranks.start(rank, world_size, init_method, args)
    trainer.train(0, ranks.share_of(trainer, rollouts[0]))
    weights = ranks.export(trainer)
    released.set()
    trainer.save(0, DATA_STATE, root / "in_the_way")
    released.clear()
    trainer._saver.close()
    trainer._saver = type(trainer._saver)(
        background=True, retention=trainer._saver._retention, timeout=trainer._saver._timeout
    )
    trainer.hook_args.async_save = True
    trainer.save(0, DATA_STATE)
    trainer.train(1, ranks.share_of(trainer, rollouts[1]))
    while_held = names(root)
    threading.Timer(0.3, released.set).start()
    trainer.save(1, DATA_STATE)  # waits for the first
    names_at_second_save = names(root)
    trainer.memory.sleep()
    trainer.memory.wake()
    trainer.finish_saves()
    io.Prepared.copy_to_host = copy
    trainer._saver.close()
    trainer._saver = type(trainer._saver)(
        background=False, retention=trainer._saver._retention, timeout=trainer._saver._timeout
    )
    trainer.save(1, DATA_STATE, root / "in_the_way")
    held = Held(while_held, names(root), names_at_second_save, weights, ranks.export(trainer))
    trainer.close()
    return held


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir() if path.name != "in_the_way")


def test_async_checkpoint_has_the_state_at_its_call(models: Any, two_ranks: RankPool, tmp_path: Path):
    args = saving_args(models, tmp_path, async_save=True, save_hf=str(tmp_path / "hf_{rollout_id}"))
    rollouts = [tiny.recorded_rollout(seed) for seed in range(2)]
    seen = two_ranks.run(save_while_training, args, rollouts)
    for held in seen:
        assert held.while_held[1:] == ["hf_0", "iter_0000000.tmp"]  # the export of the synchronous save exists
        assert "latest_checkpointed_iteration.txt" in held.names_at_second_save
        assert "iter_0000000" in held.names_at_second_save
        assert held.after == ["hf_0", "hf_1", "iter_0000000", "iter_0000001", "latest_checkpointed_iteration.txt"]
    for name in ("iter_0000000", "iter_0000001"):
        folders = (tmp_path / name, tmp_path / "in_the_way" / name)
        assert checkpoints.differences(*map(checkpoints.read, folders)) == []
    assert any((value != seen[0].later_weights[name]).any() for name, value in seen[0].weights.items())
    assert (tmp_path / "latest_checkpointed_iteration.txt").read_text() == "1"
    check_export(tmp_path / "hf_0", seen[0].weights)
    check_export(tmp_path / "hf_1", seen[0].later_weights)


def check_export(folder: Path, weights: dict[str, Tensor]) -> None:
    """Asserts that the folder has exactly these weights and that transformers loads them."""
    from transformers import AutoModelForCausalLM

    loaded = dict(AutoModelForCausalLM.from_pretrained(folder).state_dict())
    if "lm_head.weight" not in weights:
        del loaded["lm_head.weight"]  # tied
    assert loaded.keys() == weights.keys()
    assert [name for name, value in weights.items() if not (loaded[name] == value).all()] == []


@contextmanager
def no_room(here: bool) -> Iterator[None]:
    """Limits files to 2000 bytes: writing fails like on a full disk."""
    if not here:
        yield
        return
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (2000, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


def save_without_room(
    rank: int, world_size: int, init_method: str, args: Arguments, rollout: RolloutBatch
) -> dict[str, str]:
    """Errors of saves during which one rank has no disk space, and the folders after each."""
    import torch.distributed as dist

    from slimrl.platform.collective_errors import CheckpointError

    trainer = ranks.start(rank, world_size, init_method, args)
    trainer.train(0, ranks.share_of(trainer, rollout))
    trainer.save(0, DATA_STATE)
    trainer.finish_saves()
    errors = {}
    for victim in range(world_size):
        with no_room(rank == victim):
            try:
                trainer.save(1, DATA_STATE)
                trainer.finish_saves()
            except CheckpointError as error:
                errors[f"rank {victim} has no room"] = f"{error} | {names(Path(args.save))}"
        dist.barrier()  # all ranks have listed the folder before the next save begins
    trainer.save(2, DATA_STATE)
    trainer.close()
    return errors


@pytest.mark.parametrize("asynchronous", [False, True])
def test_rank_without_disk_space_fails_the_save_everywhere_and_keeps_older_ones(
    asynchronous: bool, models: Any, two_ranks: RankPool, tmp_path: Path
):
    args = saving_args(models, tmp_path, async_save=asynchronous, save_total_limit=1)
    errors = two_ranks.run(save_without_room, args, tiny.recorded_rollout(0))
    for by_rank in errors:
        assert len(by_rank) == 2
        for victim, text in by_rank.items():
            start = f"saving {tmp_path}/iter_0000001 failed, older checkpoints are untouched: {victim.split(' has')[0]}"
            assert text.startswith(start)
            assert f"OSError: [Errno 27] File too large: '{tmp_path}/iter_0000001.tmp/" in text
            assert f"of these {tmp_path}/iter_0000000 is whole: free some disk space" in text
            assert text.endswith("| ['iter_0000000', 'latest_checkpointed_iteration.txt']")
    assert names(tmp_path) == ["iter_0000002", "latest_checkpointed_iteration.txt"]  # and 0 was deleted


def save_to_unwritable_folders(
    rank: int, world_size: int, init_method: str, args: Arguments, in_the_way: Path
) -> list[str]:
    """Errors of a save whose root is a file, and of one whose export would overwrite something."""
    from slimrl.platform.collective_errors import CheckpointError

    trainer = ranks.start(rank, world_size, init_method, args)
    errors = []
    for folder in (in_the_way, None):
        try:
            trainer.save(0, DATA_STATE, folder)
        except CheckpointError as error:
            errors.append(str(error))
    trainer.close()
    return errors


@pytest.mark.parametrize("asynchronous", [False, True])
def test_unwritable_folder_is_named_on_every_rank_and_checkpoints_are_kept(
    asynchronous: bool, models: Any, two_ranks: RankPool, tmp_path: Path
):
    (tmp_path / "file").touch()
    (tmp_path / "hf_0").mkdir()
    (tmp_path / "hf_0" / "thesis.tex").touch()
    args = saving_args(models, tmp_path / "save", save_hf=str(tmp_path / "hf_{rollout_id}"), async_save=asynchronous)
    for root, export in two_ranks.run(save_to_unwritable_folders, args, tmp_path / "file"):
        assert root == f"rank 0: FileExistsError: [Errno 17] File exists: '{tmp_path}/file'"
        assert "hf_0 is not replaced, because it also has thesis.tex" in export
    assert names(tmp_path / "save") == ["iter_0000000", "latest_checkpointed_iteration.txt"]
