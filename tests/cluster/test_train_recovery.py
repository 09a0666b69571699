"""What new ranks repeat, and when they are made; tests/end_to_end/test_rank_recovery.py kills real ones."""

from __future__ import annotations

import contextlib

import pytest

from slimrl.arguments.checkpoints import TRACKER_NAME
from slimrl.cluster.ray_session import InsufficientGpusError
from slimrl.cluster.supervisor import ProcessDiedError, TrainNodeLostError, TrainWorkerDiedError
from slimrl.cluster.training import train_recovery
from slimrl.cluster.training.train_group import NoPeerStateError, PeerState
from slimrl.cluster.training.train_recovery import LOSSES_PER_ROLLOUT, RANKS_LOST, TrainRecovery
from slimrl.cluster.training.train_worker import NotFiniteError, RankFailedError
from tests.megatron.tiny import tiny_args

DIED = TrainWorkerDiedError("train worker rank 1 died with exit code -9; last lines of rank1.log:\nmany")


class Group:
    """A group of ranks that records its calls; a call in `dies` loses a rank once per entry."""

    def __init__(self) -> None:
        self.calls: list[tuple] = []
        self.dies: list[str] = []
        self.first = 0
        self.loaded: list[str | None] = []
        self.peers: PeerState | str = "no peers"
        self.lost: TrainWorkerDiedError | None = None

    def __getattr__(self, name: str):
        def call(*arguments, **keywords):
            self.calls.append((name, *arguments, *keywords.values()))
            if name in self.dies:
                self.dies.remove(name)
                raise DIED
            return []

        return call

    def initialize(self):
        return self.first, None

    def find_lost(self):
        return self.lost

    def train(self, rollout_id, batches, progress=None):
        self.calls.append(("train", rollout_id, batches))
        if "train" in self.dies:
            self.dies.remove("train")
            raise DIED
        return [{"loss": float(rollout_id)}]

    def restart(self, args, states=None):
        if "restart" in self.dies:
            self.dies.remove("restart")
            raise DIED
        if states is not None:
            self.calls.append(("restart", *states))
            return self.peers.first
        self.calls.append(("restart",))
        self.loaded.append((args.load, args.ckpt_step))
        return self.first


class Waits:
    """The supervisor's part: the handler of losses, which is off while the ranks are needed."""

    def __init__(self) -> None:
        self.handler = None

    def set_loss_handler(self, handler) -> None:
        self.handler = handler

    def stop_watching(self) -> None:
        self.handler = None

    @contextlib.contextmanager
    def raising_losses(self):
        handler, self.handler = self.handler, None
        try:
            yield
        finally:
            self.handler = handler


@pytest.fixture
def made(tmp_path, monkeypatch):
    def taken(group, args, first):
        group.calls.append(("take over", first))
        if isinstance(group.peers, str):
            raise NoPeerStateError(group.peers)
        return group.peers

    monkeypatch.setattr(train_recovery, "take_over", taken)

    def make(**flags):
        group, waits = Group(), Waits()
        args = tiny_args(save=str(tmp_path / "save"), save_interval=3, load=str(tmp_path / "load"), **flags)
        trainers = TrainRecovery(group, args, waits)
        assert waits.handler is None  # a loss before the ranks hold a model ends the run
        trainers.initialize()
        return trainers, group, waits

    return make


def test_new_ranks_repeat_the_rollouts_since_the_checkpoint_that_they_load(made, tmp_path):
    # a checkpoint of another run, which this one neither wrote nor loaded
    (tmp_path / "save" / "iter_0000009").mkdir(parents=True)
    (tmp_path / "save" / TRACKER_NAME).write_text("9")
    trainers, group, _ = made()
    for rollout in range(5):
        assert trainers.train(rollout, [f"batch {rollout}"]) == [{"loss": float(rollout)}]
        if rollout == 2:
            trainers.save(2, None)
    group.calls.clear()
    group.dies, group.first = ["train"], 3
    assert trainers.train(5, ["batch 5"]) == [{"loss": 5.0}]
    trained = [("train", number, [f"batch {number}"]) for number in range(3, 6)]
    assert group.calls == [("train", 5, ["batch 5"]), ("forget",), ("take over", 5), ("restart",), *trained]
    assert group.loaded == [(str(tmp_path / "save"), 2)]
    assert trainers.take_metrics()[RANKS_LOST] == 1.0
    assert trainers.take_metrics()[RANKS_LOST] == 0.0


def test_new_ranks_start_as_the_run_did_while_it_has_saved_nothing(made, tmp_path):
    (tmp_path / "save").mkdir()
    (tmp_path / "save" / TRACKER_NAME).write_text("9")  # of another run
    trainers, group, _ = made(ckpt_step=4)
    group.dies = ["train"]
    trainers.train(0, [0])
    assert group.loaded == [(str(tmp_path / "load"), 4)]


def test_save_in_the_background_is_repeated_and_its_batches_are_held_until_it_is_complete(made):
    trainers, group, _ = made(async_save=True)
    for rollout in range(4):
        trainers.train(rollout, [rollout])
        if rollout in (1, 3):
            trainers.save(rollout, {"prompt": rollout})
    group.calls.clear()
    group.dies, group.first = ["update_weights"], 2  # the save after rollout 3 may be lost with the ranks
    trainers.update_weights(4)
    assert [call for call in group.calls if call[0] in ("train", "save")] == [
        ("train", 2, [2]),
        ("train", 3, [3]),
        ("save", 3, {"prompt": 3}),
    ]
    assert group.loaded[-1][1] == 1
    trainers.train(4, [4])
    trainers.save(4, None)  # now the save after rollout 3 is complete
    group.calls.clear()
    group.dies, group.first = ["train"], 4
    trainers.train(5, [5])
    assert group.loaded[-1][1] == 3
    assert [call[1] for call in group.calls if call[0] == "train"] == [5, 4, 5]


def test_first_save_in_the_background_that_was_complete_is_what_new_ranks_load(made):
    trainers, group, _ = made(async_save=True)
    trainers.train(0, [0])
    trainers.save(0, None)
    trainers.train(1, [1])
    group.calls.clear()
    group.dies, group.first = ["update_weights"], 1  # --load is --save, and its newest checkpoint is this one
    trainers.update_weights(2)
    assert [call for call in group.calls if call[0] in ("train", "save")] == [("train", 1, [1])]


def test_new_ranks_with_another_state_end_the_run_by_name(made):
    trainers, group, _ = made()
    trainers.train(0, [0])
    trainers.save(0, None)
    group.dies, group.first = ["train"], 0
    with pytest.raises(ProcessDiedError, match="exit code -9; new ranks begin with rollout 0, the run needs 1"):
        trainers.train(1, [1])


def test_failed_replacement_ends_the_run_as_a_loss(made, monkeypatch):
    trainers, group, _ = made()
    monkeypatch.setattr(group, "restart", lambda *_: (_ for _ in ()).throw(RankFailedError("out of memory\ntrace")))
    group.dies = ["train"]
    with pytest.raises(ProcessDiedError, match="rank 1 died .*; its replacement failed: out of memory$"):
        trainers.train(0, [0])


def test_offloaded_ranks_are_replaced_when_they_are_needed(made):
    trainers, group, waits = made()
    trainers.train(0, [0])
    trainers.sleep(keep_weights=False)
    group.calls.clear()
    waits.handler(DIED)
    trainers.sleep(keep_weights=False)  # not to be replaced for it
    assert group.calls == [("forget",)]
    trainers.wake()
    assert group.calls == [("forget",), ("take over", 1), ("restart",), ("train", 0, [0])]  # new ranks are onloaded
    group.calls.clear()
    group.dies = ["sleep"]
    trainers.sleep(keep_weights=True)
    offload = ("sleep", True)
    assert group.calls == [offload, ("forget",), ("take over", 1), ("restart",), ("train", 0, [0]), offload]
    group.calls.clear()
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


class Spares:
    """Records whether each call was for a lost node."""

    def __init__(self) -> None:
        self.taken: list[bool] = []
        self.failure: Exception | None = None

    def allow(self) -> None: ...

    def take_over(self, *, node_is_lost: bool) -> None:
        self.taken.append(node_is_lost)
        if self.failure is not None:
            raise self.failure


def test_offloaded_ranks_of_a_lost_node_have_a_spare_one_before_they_are_needed(made):
    """Servers start there meanwhile; without a spare node the run ends at once, not when it waits for the servers."""
    trainers, _, waits = made()
    trainers._spares = spares = Spares()
    trainers.sleep(keep_weights=False)
    waits.handler(DIED)
    assert spares.taken == []  # the process alone
    waits.handler(TrainNodeLostError("the machine went down"))
    assert spares.taken == [True]
    trainers.wake()
    assert spares.taken == [True, False]  # it has been replaced
    trainers.sleep(keep_weights=False)
    spares.failure = InsufficientGpusError("no other node has 1 free GPUs")
    with pytest.raises(ProcessDiedError, match="went down; its replacement failed: no other node has 1 free GPUs"):
        waits.handler(TrainNodeLostError("the machine went down"))


def test_node_that_is_lost_while_ranks_are_offloaded_is_replaced_at_once(made, monkeypatch):
    trainers, group, _ = made()
    trainers._spares = spares = Spares()

    def lose(*, keep_weights):
        raise TrainNodeLostError("the machine went down")

    monkeypatch.setattr(group, "sleep", lose, raising=False)
    trainers.sleep(keep_weights=False)
    assert spares.taken == [True] and ("restart",) not in group.calls


def test_ranks_that_are_onloaded_are_replaced_at_once(made):
    trainers, group, waits = made()
    trainers.train(0, [0])
    group.calls.clear()
    waits.handler(DIED)
    assert group.calls == [("forget",), ("take over", 1), ("restart",), ("train", 0, [0])]


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
    trainers.close()
    assert group.calls[-1] == ("end",)
    trainers, group, _ = made()
    group.dies = ["leave"]
    trainers.close()
    assert group.calls[-1] == ("kill",)  # the other ranks may wait for the lost one
    trainers, group, _ = made(async_save=True)
    trainers.train(0, [0])
    trainers.save(0, None)
    group.dies = ["leave"]
    with pytest.raises(TrainWorkerDiedError):
        trainers.close()


def test_new_ranks_with_the_state_of_their_peers_repeat_nothing(made, caplog):
    trainers, group, _ = made()
    for rollout in range(4):
        trainers.train(rollout, [rollout])
    trainers.sleep(keep_weights=True)
    group.calls.clear()
    group.dies, group.peers = ["update_weights"], PeerState(4, ["state of 1", "state of 1"], [1, 1], None)
    trainers.update_weights(4)
    first, *after = [call for call in group.calls if call[0] != "connect_engines"]
    assert (first, after[-1]) == (("update_weights", 4), ("update_weights", 4))
    restart = ("restart", "state of 1", "state of 1")
    assert after[:-1] == [("forget",), ("take over", 4), restart, ("sleep", True)]
    peers = "new training processes continue from the state of their data-parallel peers in memory (rank 1)"
    assert f"{peers}; no training had to be repeated" in caplog.text
    group.calls.clear()
    group.dies, group.peers = ["train"], "rank 0 was in an optimizer step of rollout 4"
    trainers.train(4, [4])
    repeated = [("train", rollout, [rollout]) for rollout in (4, 0, 1, 2, 3, 4)]  # no checkpoint has the first four
    assert [call for call in group.calls if call[0] == "train"] == repeated
    assert "from the checkpoint (rank 0 was in an optimizer step of rollout 4); 4 rollouts were trained" in caplog.text


def test_state_of_the_peers_is_used_again_if_the_new_ranks_are_lost_too(made):
    trainers, group, _ = made()
    trainers.train(0, [0])
    group.calls.clear()
    group.dies, group.peers = ["train", "restart"], PeerState(1, ["state"], [0], None)
    trainers.train(1, [1])
    first, *after = group.calls
    assert after == [("forget",), ("take over", 1), ("forget",), ("restart", "state"), first]


def test_state_that_cannot_be_restored_leaves_the_checkpoint(made, monkeypatch, caplog):
    trainers, group, _ = made()
    trainers.train(0, [0])
    restart = group.restart

    def failing(args, states=None):
        if states is not None:
            raise RankFailedError("out of memory\ntrace")
        return restart(args)

    monkeypatch.setattr(group, "restart", failing)
    group.dies, group.peers = ["train"], PeerState(1, ["state"], [0], None)
    assert trainers.train(1, [1]) == [{"loss": 1.0}]
    assert "the state of the peers is not usable: out of memory" in caplog.text
    assert "from the checkpoint (that of the peers failed); 1 rollouts" in caplog.text


def test_failed_collective_of_a_survivor_is_the_loss_of_the_rank_that_has_ended(made, monkeypatch):
    trainers, group, _ = made()
    train, failures = group.train, [RankFailedError("Connection reset by peer\ntrace")]

    def failing(*arguments):
        if failures:
            raise failures.pop()
        return train(*arguments)

    monkeypatch.setattr(group, "train", failing)
    with pytest.raises(RankFailedError, match="Connection reset"):  # all ranks live
        trainers.train(0, [0])
    group.lost = DIED
    for error in (RankFailedError("Connection reset by peer\ntrace"), NotFiniteError("the loss is nan")):
        failures.append(error)
        if isinstance(error, NotFiniteError):
            with pytest.raises(NotFiniteError):
                trainers.train(0, [0])
        else:
            assert trainers.train(0, [0]) == [{"loss": 0.0}]
            assert ("restart",) in group.calls


@pytest.mark.parametrize(
    ("trained", "saved", "calls"),
    [
        (2, None, ["take over", "restart peers", "save 1"]),  # the state that was being saved
        (3, 1, ["take over", "restart peers"]),  # a survivor knows it to be complete
        (3, None, ["take over", "restart", "train 0", "train 1", "save 1", "train 2"]),  # it would be missing
    ],
)
def test_save_in_the_background_is_not_lost_with_the_ranks(made, trained, saved, calls):
    trainers, group, _ = made(async_save=True)
    for rollout in range(trained):
        trainers.train(rollout, [rollout])
        if rollout == 1:
            trainers.save(1, {"prompt": 1})
    group.calls.clear()
    group.dies, group.peers = ["evaluate_held_out"], PeerState(trained, ["peers"], [0], saved)
    trainers.evaluate_held_out()
    words = [" ".join(map(str, call[:2])) for call in group.calls]
    of_recovery = ("take over", "restart", "train", "save")
    found = ["take over" if word.startswith("take over") else word for word in words if word.startswith(of_recovery)]
    assert found == calls
