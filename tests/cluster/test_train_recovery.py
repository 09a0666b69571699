"""What new ranks repeat, and when they are made; tests/end_to_end/test_rank_recovery.py kills real ones."""

from __future__ import annotations

import contextlib

import pytest

from slimrl.arguments.checkpoints import TRACKER_NAME
from slimrl.cluster.supervisor import ProcessDiedError, TrainWorkerDiedError
from slimrl.cluster.training.train_recovery import LOSSES_PER_ROLLOUT, RANKS_LOST, TrainRecovery
from tests.megatron.tiny import tiny_args

DIED = TrainWorkerDiedError("train worker rank 1 died with exit code -9; last lines of rank1.log:\nmany")


class Group:
    """A group of ranks that records its calls; a call in `dies` loses a rank once per entry."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.dies: list[str] = []
        self.first = 0
        self.loaded: list[str | None] = []

    def __getattr__(self, name: str):
        def call(*arguments, **keywords):
            self.calls.append((name, *arguments, *keywords.values()))
            if name in self.dies:
                self.dies.remove(name)
                raise DIED
            return []

        return call

    def train(self, rollout_id, batches, progress=None):
        self.calls.append(("train", rollout_id, batches))
        if "train" in self.dies:
            self.dies.remove("train")
            raise DIED
        return [{"loss": float(rollout_id)}]

    def restart(self, args):
        self.calls.append(("restart",))
        self.loaded.append(args.load)
        return self.first


class Waits:
    """The supervisor's part: the handler of losses, which is off while the ranks are needed."""

    def __init__(self) -> None:
        self.handler = None

    def set_loss_handler(self, handler) -> None:
        self.handler = handler

    @contextlib.contextmanager
    def raising_losses(self):
        handler, self.handler = self.handler, None
        yield
        self.handler = handler


@pytest.fixture
def made(tmp_path):
    def make(**flags):
        group, waits = Group(), Waits()
        args = tiny_args(save=str(tmp_path / "save"), save_interval=3, load=str(tmp_path / "load"), **flags)
        return TrainRecovery(group, args, waits), group, waits

    return make


def test_new_ranks_repeat_the_rollouts_since_the_checkpoint_that_they_load(made, tmp_path):
    trainers, group, _ = made()
    for rollout in range(5):
        assert trainers.train(rollout, [f"batch {rollout}"]) == [{"loss": float(rollout)}]
        if rollout == 2:
            trainers.save(2, None)
            (tmp_path / "save" / "iter_0000002").mkdir(parents=True)
            (tmp_path / "save" / TRACKER_NAME).write_text("2")
    group.calls.clear()
    group.dies, group.first = ["train"], 3
    assert trainers.train(5, ["batch 5"]) == [{"loss": 5.0}]
    trained = [("train", number, [f"batch {number}"]) for number in range(3, 6)]
    assert group.calls == [("train", 5, ["batch 5"]), ("forget",), ("restart",), *trained]
    assert group.loaded == [str(tmp_path / "save")]
    assert trainers.take_metrics()[RANKS_LOST] == 1.0
    assert trainers.take_metrics()[RANKS_LOST] == 0.0


def test_batches_are_held_until_a_save_in_the_background_is_complete(made):
    trainers, group, _ = made(async_save=True)
    for rollout in range(4):
        trainers.train(rollout, [rollout])
        if rollout in (1, 3):
            trainers.save(rollout, None)
    group.calls.clear()
    group.dies, group.first = ["update_weights"], 2  # the save after rollout 3 is lost with the ranks
    trainers.update_weights(4)
    assert [call for call in group.calls if call[0] == "train"] == [("train", 2, [2]), ("train", 3, [3])]


def test_checkpoint_older_than_the_held_batches_ends_the_run_by_name(made):
    trainers, group, _ = made()
    for rollout in range(3):
        trainers.train(rollout, [rollout])
    trainers.save(1, None)
    group.dies, group.first = ["train"], 0
    with pytest.raises(
        ProcessDiedError, match="rank 1 died .* continues with rollout 0, and the batches from there on"
    ):
        trainers.train(3, [3])


def test_offloaded_ranks_are_replaced_when_they_are_needed(made):
    trainers, group, waits = made()
    trainers.train(0, [0])
    trainers.sleep(keep_weights=False)
    group.calls.clear()
    waits.handler(DIED)
    assert group.calls == [("forget",)]
    trainers.wake()
    assert group.calls == [("forget",), ("restart",), ("train", 0, [0])]  # new ranks are onloaded
    group.calls.clear()
    trainers.sleep(keep_weights=True)
    group.dies = ["update_weights"]
    trainers.connect_engines(["engine"])
    trainers.update_weights(1)
    after = group.calls[group.calls.index(("restart",)) :]
    assert after == [
        ("restart",),
        ("train", 0, [0]),
        ("sleep", True),  # as they were
        ("connect_engines", ["engine"]),
        ("update_weights", 1),
    ]


def test_ranks_that_are_onloaded_are_replaced_at_once(made):
    trainers, group, waits = made()
    trainers.train(0, [0])
    group.calls.clear()
    waits.handler(DIED)
    assert group.calls == [("forget",), ("restart",), ("train", 0, [0])]


def test_losses_again_and_again_end_the_run(made):
    trainers, group, _ = made()
    group.dies = ["train"] * (LOSSES_PER_ROLLOUT + 1)
    with pytest.raises(ProcessDiedError, match="ranks were lost 4 times in one rollout") as raised:
        trainers.train(0, [0])
    assert not isinstance(raised.value, TrainWorkerDiedError)
    trainers, group, _ = made()
    for rollout in range(LOSSES_PER_ROLLOUT + 1):  # each rollout is progress
        group.dies, group.first = ["train"], 0
        trainers.train(rollout, [rollout])


def test_loss_at_the_end_matters_only_for_a_save_in_the_background(made):
    trainers, group, _ = made()
    group.dies = ["leave"]
    trainers.close()
    assert group.calls[-1] == ("end",)
    trainers, group, _ = made(async_save=True)
    group.dies = ["leave"]
    with pytest.raises(TrainWorkerDiedError):
        trainers.close()
