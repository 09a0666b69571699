"""The driver's steps around a weight update: servers replaced while it waits, and what is saved when."""

from __future__ import annotations

import contextlib
from types import SimpleNamespace

import pytest

from slimrl.arguments import Arguments
from slimrl.cluster.rollout_manager_proxy import RolloutManagerProxy
from slimrl.cluster.run import Run
from slimrl.cluster.training import train_group
from slimrl.cluster.training.policy_and_critic import PolicyAndCritic
from slimrl.cluster.training.train_group import TrainGroup
from slimrl.cluster.training.train_messages import CRITIC, POLICY
from slimrl.cluster.training.train_worker import NotFiniteError
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
    monkeypatch.setattr(train_group, "target_of", lambda workers, what, role: SimpleNamespace(what=what))
    group, calls = TrainGroup.__new__(TrainGroup), []
    group.workers, group._supervisor, group._role = [Remote(calls) for _ in range(3)], World(None), POLICY
    group.save(7, {"offset": 3})
    assert calls == [("save", 7, {"offset": 3}, None), ("save", 7, None, None), ("save", 7, None, None)]


def test_rank_receives_the_batch_of_its_data_parallel_rank_alone(monkeypatch):
    monkeypatch.setattr(train_group, "target_of", lambda workers, what, role: SimpleNamespace(what=what))
    group, calls = TrainGroup.__new__(TrainGroup), []
    group.workers, group._supervisor, group._role = [Remote(calls) for _ in range(4)], World(None), POLICY
    group.data_parallel_ranks = [0, 0, 1, 1]
    group.train(7, [["first", "second"]])
    assert calls == [("train", 7, [batch]) for batch in ("first", "first", "second", "second")]


class Waits:
    """A supervisor whose waits return the calls that they wait for."""

    def __init__(self) -> None:
        self.targets = []

    def get(self, calls, target, progress=None):
        self.targets.append(target)
        return list(calls)


def policy_and_critic(policy_parts, critic_parts):
    """Both groups with recording workers; parts are the data-parallel rank of each rank, of which the last leads."""
    both, critic = PolicyAndCritic.__new__(PolicyAndCritic), TrainGroup.__new__(TrainGroup)
    both._critic, both._critic_sleeps = critic, False
    for group, parts, role in ((both, policy_parts, POLICY), (critic, critic_parts, CRITIC)):
        group._supervisor, group._role, group.data_parallel_ranks = (
            both.__dict__.get("_supervisor") or Waits(),
            role,
            parts,
        )
        group.workers = [Remote([]) for _ in parts]
        group.leaders = [len(parts) - 1 - parts[::-1].index(part) for part in sorted(set(parts))]
    return both


@pytest.mark.parametrize(
    ("policy", "critic", "wanted"),
    [
        ([0, 0, 1, 1], [0, 0, 1, 1], [[1], [1], [3], [3]]),  # the leader of the same samples
        ([0, 0, 1, 1], [0, 0], [[1]] * 4),
        ([0, 1], [0, 0, 1, 1, 2, 2], [[1, 3, 5]] * 2),  # the samples are in any of the parts
    ],
)
def test_values_and_targets_pass_between_the_leaders_of_the_same_samples(policy, critic, wanted):
    both = policy_and_critic(policy, critic)
    waited = []
    both._both = lambda of_policy, of_critic, what, progress: (
        waited.extend(of_policy + of_critic)
        or (
            of_policy,
            of_critic,
        )
    )
    values = [f"values {rank}" for rank in range(len(critic))]
    given = []
    for worker, value in zip(both._critic.workers, values, strict=True):
        worker.__dict__["values"] = SimpleNamespace(
            remote=lambda _, own, value=value: given.append(own) or (value, "end of values")
        )
    passed = []
    for worker in both.workers:
        worker.__dict__["targets"] = SimpleNamespace(
            remote=lambda columns: passed.append(columns) or (columns, "end of targets")
        )
        worker.__dict__["train_scored"] = SimpleNamespace(remote=lambda: [{"loss": 1.0}])
    for worker in both._critic.workers:
        worker.__dict__["train_values"] = SimpleNamespace(remote=lambda *_: [{"critic-value_loss": 2.0}])
    batches = [[f"{name} {part}" for part in sorted(set(parts))] for name, parts in (("p", policy), ("c", critic))]
    metrics = both.train(3, batches)
    assert given == [[f"c {part}"] for part in critic]
    assert waited[: len(policy)] == [("score", 3, [f"p {part}"]) for part in policy]
    assert passed == [[values[rank] for rank in ranks] for ranks in wanted]
    assert metrics == [{"critic-value_loss": 2.0, "loss": 1.0}]
    assert not [call for call in waited if call in passed or call in values]  # columns do not pass through the driver


def test_both_groups_are_named_while_they_are_waited_for(monkeypatch):
    monkeypatch.setattr(train_group, "poll_actors", lambda asked: [None] * len(asked))
    both = policy_and_critic([0, 0], [0])
    both._both([1, 2, 3, 4], [5, 6], "training on rollout 3")
    (target,) = both._supervisor.targets
    # calls: two of the critic, then two rounds of two of the policy
    assert target.describe([1, 3, 5]) == (
        "critic rank 0 does not answer: no reply from its actor; rank 1 does not answer: no reply from its actor;"
        " rank 0 done"
    )


def test_both_are_saved_under_one_name_after_the_policys_previous_save(monkeypatch):
    both, order = policy_and_critic([0], [0]), []
    monkeypatch.setattr(both, "_get", lambda calls, what: order.append(calls[0]))
    both._both = lambda policy, critic, what: order.extend([critic[0], policy[0]]) or (["folder"], [None])
    assert both.save(7, {"offset": 3}) == "folder"
    previous, (critic, rollout, name), policy = order
    assert previous == ("finish_saves",)
    assert (critic, rollout, policy) == ("save_critic", 7, ("save", 7, {"offset": 3}, name))


def test_saves_in_the_background_are_finished_before_a_value_that_is_not_finite_is_reported():
    both, waits = policy_and_critic([0], [0]), []
    for group in (both, both._critic):
        for name in ("values", "targets"):
            group.workers[0].__dict__[name] = SimpleNamespace(remote=lambda *_: ("columns", "end"))

    def both_of(policy, critic, what, progress=None):
        waits.append((policy, critic))
        if len(waits) == 1:
            raise NotFiniteError("the gradient of the critic is not finite")

    both._both = both_of
    with pytest.raises(NotFiniteError):
        both.train(3, [["p 0", "p 1"], ["c 0", "c 1"]])
    assert waits[1:] == [([("finish_saves",)], [("finish_saves",)])]


def test_critic_is_offloaded_whole_and_once():
    both = policy_and_critic([0], [0])
    both._has_slept = both._critic._has_slept = True
    slept = []
    both._both = lambda policy, critic, what: slept.extend([*critic, *policy]) or ([{}], [{}] if critic else [])
    both.sleep(keep_weights=True)
    both.sleep(keep_weights=False)
    assert slept == [("sleep", False), ("sleep", True), ("sleep", False)]
    both.wake()
    assert slept[3:] == [("wake",), ("wake",)]


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
