"""GPU arithmetic, and Ray's real placement on logical GPUs."""

import logging
import signal
import sys

import pytest
import ray
from ray._raylet import AuthenticationMode

from slimrl.arguments import Arguments
from slimrl.arguments.layout import placement
from slimrl.cluster import ray_session as ray_session_module
from slimrl.cluster.placement import (
    ENGINE_SHARE,
    PROBE_SHARE,
    REWARD_SHARE,
    TRAIN_SHARE,
    GpuBundle,
    GpuBundles,
    engine_parts,
    in_order,
    plan_gpus,
)
from slimrl.cluster.ray_session import InsufficientGpusError, _own_signal_handler, check_gpus, ray_session
from slimrl.cluster.supervisor import ProcessDiedError, Supervisor
from slimrl.cluster.watchdog import WaitTarget, WatchdogConfig, poll_actors


def flags(**changes):
    values = {
        "actor_num_nodes": 1,
        "actor_num_gpus_per_node": 2,
        "rollout_num_gpus": 6,
        "rollout_num_gpus_per_engine": 2,
        "colocate": False,
        "debug_train_only": False,
        "debug_rollout_only": False,
        "rm_model": None,
        "rm_url": None,
        "rm_num_gpus": 3,
        "rm_colocate": False,
        "rm_num_gpus_per_engine": 1,
    }
    return Arguments(**{**values, **changes})


def test_training_gpus_come_before_rollout_gpus():
    plan = plan_gpus(flags())
    assert (plan.total, list(plan.train), list(plan.rollout)) == (8, [0, 1], [2, 3, 4, 5, 6, 7])


def test_colocated_roles_share_gpus_from_the_first():
    plan = plan_gpus(flags(colocate=True, actor_num_gpus_per_node=4, rollout_num_gpus=4))
    assert (plan.total, list(plan.train), list(plan.rollout)) == (4, [0, 1, 2, 3], [0, 1, 2, 3])


@pytest.mark.parametrize(("colocate", "reward"), [(False, [8, 9, 10]), (True, [6, 7, 8])])
def test_reward_model_comes_last_and_shares_no_gpu(colocate, reward):
    plan = plan_gpus(flags(colocate=colocate, rm_model="judge"))
    assert list(plan.reward) == reward and plan.total == reward[-1] + 1 and plan.rollout.stop == reward[0]


def test_colocated_reward_model_has_the_first_shared_gpus():
    plan = plan_gpus(flags(colocate=True, rm_model="judge", rm_colocate=True))
    assert list(plan.reward) == [0, 1, 2] and plan.total == 6 and list(plan.rollout) == [0, 1, 2, 3, 4, 5]
    assert pytest.approx(1.0) == TRAIN_SHARE + ENGINE_SHARE + REWARD_SHARE + PROBE_SHARE  # of a GPU that all use


@pytest.mark.parametrize("changes", [{}, {"rm_url": "http://a:1"}, {"debug_train_only": True}])
def test_only_started_servers_take_gpus(changes):
    plan = plan_gpus(flags(**{"rm_model": "judge" if changes else None, **changes}))
    assert not plan.reward and plan.total == 2 + len(plan.rollout)


def test_replay_needs_no_rollout_gpus():
    assert plan_gpus(flags(debug_train_only=True)).total == 2


def gpus_on(*nodes):
    """GPUs in order; `nodes` are the GPU counts of 10.0.0.1, 10.0.0.2, ..."""
    places = [(node, gpu) for node, count in enumerate(nodes, start=1) for gpu in range(count)]
    return [GpuBundle(bundle, f"n{node}", f"10.0.0.{node}", gpu) for bundle, (node, gpu) in enumerate(places)]


def parts(changes, *nodes):
    """[(node, GPUs)] of each engine."""
    plan = plan_gpus(flags(**changes))
    engines = engine_parts(plan.engine_ranges, gpus_on(*nodes))
    return [[(part.node, list(part.gpus)) for part in engine] for engine in engines]


def test_gpus_are_sorted_numerically_by_address_node_and_index():
    places = [("b", "10.0.0.10", 0), ("c", "10.0.0.9", 1), ("c", "10.0.0.9", 0), ("a", "10.0.0.10", 1)]
    ordered = in_order(GpuBundle(bundle, *place) for bundle, place in enumerate(places))
    assert [gpu.bundle for gpu in ordered] == [2, 1, 3, 0]


def test_gpus_named_by_uuid_keep_a_stable_order():
    gpus = [GpuBundle(bundle, "a", "10.0.0.1", gpu) for bundle, gpu in enumerate(["GPU-9f", "GPU-1a", "MIG-0"])]
    assert [gpu.gpu_id for gpu in in_order(gpus)] == ["GPU-1a", "GPU-9f", "MIG-0"]


def test_engines_on_one_node_take_adjacent_gpus():
    split = {"actor_num_gpus_per_node": 2, "rollout_num_gpus": 6, "rollout_num_gpus_per_engine": 2}
    assert parts(split, 8) == [[("n1", [2, 3])], [("n1", [4, 5])], [("n1", [6, 7])]]
    assert parts(split, 4, 4) == [[("n1", [2, 3])], [("n2", [4, 5])], [("n2", [6, 7])]]


def test_engine_larger_than_a_node_has_one_part_per_node():
    four_nodes = {"actor_num_nodes": 4, "colocate": True, "actor_num_gpus_per_node": 2, "rollout_num_gpus": 8}
    assert parts({**four_nodes, "rollout_num_gpus_per_engine": 4}, 2, 2, 2, 2) == [
        [("n1", [0, 1]), ("n2", [2, 3])],
        [("n3", [4, 5]), ("n4", [6, 7])],
    ]
    split = {"actor_num_gpus_per_node": 2, "rollout_num_gpus": 4, "rollout_num_gpus_per_engine": 4}
    assert parts(split, 2, 2, 2) == [[("n2", [2, 3]), ("n3", [4, 5])]]


def test_engine_split_between_two_partial_nodes_is_rejected():
    colocated = {"colocate": True, "actor_num_gpus_per_node": 8, "rollout_num_gpus": 8}
    with pytest.raises(
        InsufficientGpusError, match="engine 1 would get 1 of the 3 on 10.0.0.1, 1 of the 5 on 10.0.0.2"
    ):
        parts(colocated, 3, 5)  # GPUs 2 and 3
    assert [len(engine) for engine in parts(colocated, 4, 4)] == [1, 1, 1, 1]


def test_engine_with_uneven_parts_is_rejected():
    colocated = {"colocate": True, "actor_num_gpus_per_node": 8, "rollout_num_gpus": 8}
    with pytest.raises(
        InsufficientGpusError, match="engine 0 would get 5 of the 5 on 10.0.0.1, 3 of the 3 on 10.0.0.2"
    ):
        parts({**colocated, "rollout_num_gpus_per_engine": 8}, 5, 3)
    assert len(parts({**colocated, "rollout_num_gpus_per_engine": 8}, 4, 4)[0]) == 2


def test_insufficient_cluster_is_rejected_with_both_numbers():
    check_gpus(4, 4)
    with pytest.raises(InsufficientGpusError, match="ask for 4 GPUs and the Ray cluster has 3"):
        check_gpus(4, 3)


@pytest.mark.parametrize(
    ("addresses", "mode", "warned"),
    [
        (["10.0.0.1", "10.0.0.2"], AuthenticationMode.DISABLED, True),
        (["10.0.0.1", "10.0.0.2"], AuthenticationMode.TOKEN, False),
        (["127.0.0.1", "127.0.0.1"], AuthenticationMode.DISABLED, False),  # two Ray nodes of one machine
    ],
)
def test_run_that_joins_an_unauthenticated_multi_node_cluster_warns(monkeypatch, caplog, addresses, mode, warned):
    gone = {"NodeManagerAddress": "10.0.0.9", "Alive": False}
    nodes = [{"NodeManagerAddress": address, "Alive": True} for address in addresses]
    monkeypatch.setattr(ray_session_module.ray, "nodes", lambda: [*nodes, gone])
    monkeypatch.setattr(ray_session_module, "get_authentication_mode", lambda: mode)
    with caplog.at_level(logging.WARNING, "slimrl"):
        ray_session_module._warn_of_open_cluster()
    assert len(caplog.messages) == warned
    if warned:
        assert "spans 2 nodes (10.0.0.1, 10.0.0.2) and has no authentication" in caplog.text


class Ended(KeyboardInterrupt):
    """Raised by the run's own signal handler."""


def end(number, _):
    raise Ended(signal.Signals(number).name)


@pytest.mark.parametrize("others", [lambda number, _: sys.exit(number), lambda *_: None], ids=["leaves", "ignored"])
def test_signal_received_by_a_foreign_handler_is_passed_to_the_run(others):
    before = signal.signal(signal.SIGTERM, end)
    try:
        with pytest.raises(Ended, match="SIGTERM"), _own_signal_handler():
            signal.signal(signal.SIGTERM, others)
            signal.raise_signal(signal.SIGTERM)
        assert signal.getsignal(signal.SIGTERM) is end
        with _own_signal_handler():
            pass  # no further signal arrived
        with pytest.raises(SystemExit, match="3"), _own_signal_handler():
            sys.exit(3)
    finally:
        signal.signal(signal.SIGTERM, before)


@pytest.mark.slow
def test_train_worker_and_engine_share_a_gpu_and_a_death_ends_the_wait():
    @ray.remote(concurrency_groups={"watch": 1})
    class Member:
        def gpu(self):
            return ray.get_gpu_ids()

        @ray.method(concurrency_group="watch")
        def watch(self):
            import threading

            threading.Event().wait()

        def die(self):
            import os

            os._exit(3)

    with ray_session(2):
        gpus = GpuBundles(plan_gpus(flags(colocate=True, rollout_num_gpus=2)))
        assert len({(gpu.node_ip, gpu.gpu_id) for gpu in gpus.gpus}) == 2
        members = [Member.options(**gpus.options(0, share)).remote() for share in (TRAIN_SHARE, ENGINE_SHARE)]
        assert [ray.get(member.gpu.remote()) for member in members] == [[gpus.gpus[0].gpu_id]] * 2
        supervisor = Supervisor(WatchdogConfig(0, None))
        awaited = WaitTarget("nothing", lambda _: "")
        for name, member in zip(("one", "two"), members, strict=True):
            supervisor.watch(member.watch.remote(), lambda error, name=name: f"{name} died")
        assert supervisor.get([members[0].gpu.remote()], awaited) == [[gpus.gpus[0].gpu_id]]
        members[1].die.remote()
        with pytest.raises(ProcessDiedError, match="two died"):
            supervisor.get([members[0].watch.remote()], awaited)
        # a status query to a dead process has no answer, and that is no error for the caller
        assert poll_actors([member.gpu.remote() for member in members]) == [[gpus.gpus[0].gpu_id], None]


PPO = {"advantage_estimator": "ppo", "critic_num_nodes": 1, "critic_num_gpus_per_node": 3}


@pytest.mark.parametrize(
    ("changes", "train", "critic", "rollout", "total"),
    [
        ({}, [0, 1], [2, 3, 4], [5, 6, 7, 8, 9, 10], 11),
        (
            {"colocate": True, "rollout_num_gpus": 5, "rollout_num_gpus_per_engine": 1},
            [0, 1],
            [2, 3, 4],
            [0, 1, 2, 3, 4],
            5,
        ),
        ({"debug_train_only": True}, [0, 1], [2, 3, 4], [], 5),
        ({"debug_rollout_only": True}, [], [], [0, 1, 2, 3, 4, 5], 6),
        ({"advantage_estimator": "grpo"}, [0, 1], [], [2, 3, 4, 5, 6, 7], 8),
        ({"num_rollout": 0}, [0, 1], [], [2, 3, 4, 5, 6, 7], 8),
    ],
    ids=["separate", "colocated", "training only", "generation only", "no critic", "evaluation only"],
)
def test_critic_has_the_gpus_after_the_policys(changes, train, critic, rollout, total):
    args = flags(**{"num_rollout": 3, **PPO, **changes})
    plan = plan_gpus(args)
    assert (list(plan.train), list(plan.critic), list(plan.rollout), plan.total) == (train, critic, rollout, total)
    planned = placement(args, None)  # of the dry run
    assert (list(planned.train), list(planned.critic), planned.total) == (train, critic, total)
    assert [gpu for engine in planned.engines for gpu in engine] == rollout
