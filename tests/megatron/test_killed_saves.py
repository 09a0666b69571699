"""Saves that are killed: at random moments with real ranks, and after every single step on the disk.

Each kill prints a line: `pytest -s tests/megatron/test_killed_saves.py`.
"""

from __future__ import annotations

import hashlib
import random
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from slimrl.arguments import Arguments
from slimrl.data.train_batch import RolloutBatch
from slimrl.megatron.checkpoint import folder as checkpoint_folder
from slimrl.megatron.checkpoint.folder import Retention, find_checkpoint
from tests.end_to_end import checkpoints
from tests.megatron import ranks, tiny
from tests.megatron.launch import RankPool

KILLS = 20
SEED = 7


def digest(trainer: Any, offset: int) -> str:
    """Digest of all state from which this rank resumes."""
    total = hashlib.sha256(str(offset).encode())
    for name, value in sorted(ranks.local_state(trainer).items()):
        total.update(name.encode())
        total.update(value.contiguous().numpy().tobytes())
    return total.hexdigest()


def train_and_save(
    rank: int, world_size: int, init_method: str, args: Arguments, rollouts: list[RolloutBatch], log: Path
) -> None:
    """Resumes, then trains and saves twice; logs its progress line by line."""

    def say(*words: object) -> None:
        with (log / str(rank)).open("a") as file:
            file.write(" ".join(map(str, words)) + "\n")

    trainer = ranks.start(rank, world_size, init_method, args)
    first = trainer.start_rollout_id
    offset = -1 if trainer.data_state is None else trainer.data_state["offset"]
    say("loaded", first - 1, digest(trainer, offset))
    for rollout_id in (first, first + 1):
        trainer.train(rollout_id, ranks.share_of(trainer, rollouts[rollout_id % len(rollouts)]))
        say("saving", rollout_id, digest(trainer, rollout_id))
        trainer.save(rollout_id, {"offset": rollout_id})
        say("saved", rollout_id - args.async_save)
    trainer.close()
    say("saved", first + 1)
    say("done")


class RankLogs:
    """The log files of the ranks of one round."""

    def __init__(self, folder: Path, size: int):
        self.folder = folder
        self.folder.mkdir()
        self._size = size

    def lines(self, word: str) -> list[dict[int, str]]:
        """For each rank: the last word of the lines that begin with `word`, by rollout."""
        found = []
        for rank in range(self._size):
            path = self.folder / str(rank)
            words = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
            found.append({int(line[1]): line[-1] for line in words if line[0] == word and len(line) > 1})
        return found

    def wait_for(self, word: str, deadline_s: float = 60) -> None:
        """Waits until every rank has written a line with this word."""
        deadline = time.monotonic() + deadline_s
        paths = [self.folder / str(rank) for rank in range(self._size)]
        while not all(path.exists() and word in path.read_text() for path in paths):
            assert time.monotonic() < deadline, f"the ranks never came to {word!r}"
            time.sleep(0.001)


def names(root: Path) -> list[str]:
    return sorted(path.name for path in root.iterdir()) if root.exists() else []


@pytest.mark.slow
def test_kill_during_a_save_loses_at_most_the_steps_since_the_previous_save(
    models: Any, two_ranks: RankPool, tmp_path: Path
):
    moments = random.Random(SEED)
    root = tmp_path / "save"
    args = tiny.tiny_args(
        ref_load=str(models.policy),
        load=str(root),
        save=str(root),
        save_total_limit=2,
        use_distributed_optimizer=True,
        num_rollout=1000,
        num_steps_per_rollout=1,
        **models.flags,
    )
    rollouts = [tiny.recorded_rollout(seed, samples=4) for seed in range(3)]
    saved: list[dict[int, str]] = [{}, {}]  # for each rank, by rollout: the digest of the saved state
    spans: dict[bool, float] = {}  # seconds from the first save to the end of an undisturbed round of each kind

    def round_trip(number: int, *, asynchronous: bool) -> None:
        before = find_checkpoint(root)
        newest = -1 if before is None else before.iteration
        again = number % 3 == 2 and (root / f"iter_{newest - 1:07d}").is_dir()  # the newest is repeated
        args.async_save, args.ckpt_step = asynchronous, newest - 1 if again else None
        logs = RankLogs(tmp_path / f"round{number}", two_ranks.world_size)
        two_ranks._start(train_and_save, f"file://{logs.folder}/store", (args, rollouts, logs.folder))
        try:
            logs.wait_for("saving")
            started = time.perf_counter()
            if asynchronous in spans:
                moment = moments.uniform(0, 1.1 * spans[asynchronous])
                time.sleep(moment)
            else:
                logs.wait_for("done")
                moment = spans[asynchronous] = time.perf_counter() - started
        finally:
            two_ranks.kill()
        for rank, (loaded, saving) in enumerate(zip(logs.lines("loaded"), logs.lines("saving"), strict=True)):
            for iteration, found in loaded.items():
                assert iteration == (newest - 1 if again else newest)
                assert iteration == -1 or found == saved[rank][iteration], "what was loaded is not what was saved"
            saved[rank] |= saving
        check(number, moment, newest, logs, asynchronous)

    def check(number: int, moment: float, newest: int, logs: RankLogs, asynchronous: bool) -> None:
        complete = max((max(lines, default=-1) for lines in logs.lines("saved")), default=-1)
        begun = max(max(lines) for lines in logs.lines("saving"))
        found = find_checkpoint(root)
        iteration = -1 if found is None else found.iteration
        kind, span = "async" if asynchronous else "sync", spans[asynchronous]
        print(
            f"kill {number:2} ({kind}) at {moment * 1000:4.0f} of {span * 1000:4.0f} ms: resumes after {iteration:2},"
            f" before {newest:2}, begun {begun:2}; there is {', '.join(names(root)[:-1])}"
        )
        assert max(newest, complete) <= iteration <= max(newest, begun)
        if found is not None:
            checkpoints.read(found.path)  # fully, with torch's own reader

    round_trip(0, asynchronous=False)
    round_trip(1, asynchronous=True)
    for number in range(2, KILLS + 2):
        round_trip(number, asynchronous=number % 2 == 0)


class _KilledError(BaseException):
    """Simulates SIGKILL: nothing of the program runs after it."""


def save(root: Path, iteration: int) -> None:
    """The disk operations of a save, without tensors."""
    partial = checkpoint_folder.begin(root, iteration)
    for name in ("metadata.json", ".metadata"):
        checkpoint_folder.write_bytes(partial / name, b"{}")
    checkpoint_folder.write_manifest(partial, iteration)
    checkpoint_folder.commit(root, iteration)
    Retention(2).apply(root, iteration)


def killed_before_step(number: int, root: Path, iteration: int, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Runs `save`, killed before its n-th disk operation; False if it has fewer."""
    steps = 0

    def counted(step: Callable[..., Any]) -> Callable[..., Any]:
        def run(*arguments: Any, **options: Any) -> Any:
            nonlocal steps
            steps += 1
            if steps > number:
                raise _KilledError
            return step(*arguments, **options)

        return run

    def remove_half(folder: Path, *_: Any, **__: Any) -> None:
        """Removes file by file, so that a kill may hit between two."""
        for path in sorted(folder.iterdir()):
            path.unlink()
        folder.rmdir()

    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", remove_half)
        for name in ("rename", "replace", "mkdir", "unlink", "rmdir", "open"):
            patched.setattr(Path, name, counted(getattr(Path, name)))
        try:
            save(root, iteration)
        except _KilledError:
            return True
    return False


@pytest.mark.parametrize("iteration", [3, 4])  # 3 is repeated, 4 is new
def test_kill_before_any_disk_operation_leaves_a_complete_checkpoint(
    iteration: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    number = 0
    while True:
        root = tmp_path / str(number)
        for before in (1, 2, 3):
            save(root, before)
        if not killed_before_step(number, root, iteration, monkeypatch):
            break
        found = find_checkpoint(root)
        assert found is not None and found.iteration in {3, iteration}
        assert not any(path.suffix == "" and checkpoint_folder.find_corruption(path) for path in root.glob("iter_*"))
        save(root, 4)
        assert names(root) == ["iter_0000003", "iter_0000004", "latest_checkpointed_iteration.txt"]
        number += 1
    assert number > 15
