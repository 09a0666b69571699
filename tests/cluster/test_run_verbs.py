"""The driver's steps around a weight update: servers replaced while it waits, and what is saved when."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest

from slimrl.arguments import Arguments
from slimrl.cluster.rollout_manager_proxy import RolloutManagerProxy
from slimrl.cluster.run import Run
from slimrl.cluster.training import train_group
from slimrl.cluster.training.train_group import TrainGroup
from slimrl.observability.tracer import Timeline


class Remote:
    """An actor whose methods record their calls and answer with that."""

    def __init__(self, calls: list) -> None:
        self._calls = calls

    def __getattr__(self, name):
        def remote(*arguments):
            self._calls.append((name, *arguments))
            return name, *arguments

        return SimpleNamespace(remote=remote)


class World:
    """Supervisor, trainers and weight update recovery in one; `lost_in` is the wait that loses the last server."""

    def __init__(self, lost_in: str | None) -> None:
        self.calls: list[tuple] = []
        self.waits: list[str] = []
        self._lost_in = lost_in
        self._rescue = None
        self.last_weight_update: dict[str, float] = {}

    def get(self, refs, awaited, progress=None):
        self.waits.append(awaited.what)
        self._lose(refs[0][0])
        return list(refs)

    @contextlib.contextmanager
    def trainer_idle(self, version, rescue):
        self._rescue = rescue
        self._lose("idle")
        yield
        self._rescue = None

    def sync_weights(self, version, update):
        update(version)

    def update_weights(self, version):
        self.calls.append(("update_weights", version))

    def progress(self):
        return 0, 0

    def train(self, rollout_id, batches, update):
        return []

    def _lose(self, where: str) -> None:
        if where == self._lost_in and self._rescue is not None:
            self._lost_in = None
            self._rescue()


def run_in(world: World, **changes) -> Run:
    values = {"timeline": False, "num_rollout": 9, "update_weights_in_flight": False, "max_weight_staleness": 2}
    args = Arguments(**{**values, **changes})
    return Run(args, 0, world, RolloutManagerProxy(Remote(world.calls)), world, None, Timeline.off(), world)


@pytest.mark.parametrize("lost_in", ["idle", "drain", None])
def test_servers_resynced_during_a_drain_are_not_updated_twice(lost_in):
    world = World(lost_in)
    run = run_in(world)
    run.update_weights(0)
    run.train(SimpleNamespace(rollout_id=0, metrics={}, batches=[]))
    run.drain_generation(("generate", 1))
    run.update_weights(1)
    assert [call for call in world.calls if call[0] == "update_weights"] == [
        ("update_weights", 0),
        ("update_weights", 1),
    ]
    assert world.calls[-1] == ("set_weight_version", 1, 9)  # the groups that the drain held back
    assert run.weight_version == 1


def test_trainer_weights_are_sent_again_when_no_server_has_them():
    world = World("drain")
    run = run_in(world)
    run.update_weights(0)
    run.drain_generation(("generate", 1))
    assert [call for call in world.calls if call[0] == "update_weights"] == [
        ("update_weights", 0),
        ("update_weights", 0),
    ]


def test_wait_for_in_flight_groups_is_not_labelled_as_a_rollout():
    world = World(None)
    run = run_in(world)
    generation = run.start_generation(4)
    run.drain_generation(generation)
    assert world.waits == ["the groups in flight"]
    one_ahead = World(None)
    run = run_in(one_ahead, max_weight_staleness=None)
    run.drain_generation(run.start_generation(4))
    assert one_ahead.waits == ["generation of rollout 4"]


@pytest.mark.parametrize(("save", "saved"), [(None, [False] * 9), ("folder", [False, True] * 4 + [True])])
def test_generation_is_notified_which_rollouts_are_checkpointed(save, saved):
    world = World(None)
    run = run_in(world, save=save, save_interval=2)
    for rollout_id in range(9):
        run.start_generation(rollout_id)
    assert world.calls == [("generate", rollout_id, saves) for rollout_id, saves in enumerate(saved)]


def test_only_rank_0_receives_the_data_state(monkeypatch):
    monkeypatch.setattr(train_group, "_target", lambda workers, what: SimpleNamespace(what=what))
    group, calls = TrainGroup.__new__(TrainGroup), []
    group.workers, group._supervisor = [Remote(calls) for _ in range(3)], World(None)
    group.save(7, {"offset": 3})
    assert calls == [("save", 7, {"offset": 3}), ("save", 7, None), ("save", 7, None)]


@pytest.mark.parametrize("eval_interval", [None, 2, 1])
def test_next_rollout_is_generated_once_and_after_an_evaluation(eval_interval):
    world = World(None)
    run = run_in(world, num_rollout=3, eval_interval=eval_interval, max_weight_staleness=None)
    ahead = []
    world.get = lambda refs, awaited, progress=None: [SimpleNamespace(seconds=0.0, rollout_id=ref[1]) for ref in refs]
    for rollout_id in run.rollout_ids:
        assert run.generate(rollout_id).rollout_id == rollout_id
        run.generate_next(rollout_id)
        ahead.append(max(call[1] for call in world.calls if call[0] == "generate") > rollout_id)
    assert [call[1] for call in world.calls if call[0] == "generate"] == [0, 1, 2]
    assert ahead == {None: [True, True, False], 2: [True, False, False], 1: [False] * 3}[eval_interval]
