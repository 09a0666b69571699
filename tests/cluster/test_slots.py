"""Slot arithmetic, and the real placement of Ray on logical GPUs."""

import types

import pytest
import ray

from slimrl.cluster.session import SlotsMissingError, check_slots, ray_session, worker_environment
from slimrl.cluster.slots import ENGINE_SHARE, TRAIN_SHARE, Slots, plan_slots
from slimrl.cluster.supervise import ProcessDiedError, Supervisor


def flags(**changes):
    values = {
        "actor_num_nodes": 1,
        "actor_num_gpus_per_node": 2,
        "rollout_num_gpus": 6,
        "colocate": False,
        "debug_train_only": False,
        "debug_rollout_only": False,
    }
    return types.SimpleNamespace(**{**values, **changes})


def test_split_training_comes_first_and_rollout_behind_it():
    plan = plan_slots(flags())
    assert (plan.total, list(plan.train), list(plan.rollout)) == (8, [0, 1], [2, 3, 4, 5, 6, 7])


def test_colocated_sides_share_slots_from_the_first():
    plan = plan_slots(flags(colocate=True, actor_num_gpus_per_node=4, rollout_num_gpus=4))
    assert (plan.total, list(plan.train), list(plan.rollout)) == (4, [0, 1, 2, 3], [0, 1, 2, 3])


def test_replay_needs_no_rollout_slots():
    assert plan_slots(flags(debug_train_only=True)).total == 2


def test_too_small_a_cluster_is_refused_with_both_numbers():
    check_slots(4, 4)
    with pytest.raises(SlotsMissingError, match="ask for 4 GPU slots and the Ray cluster has 3"):
        check_slots(4, 3)


def test_environment_given_by_flag_wins():
    assert worker_environment({"OMP_NUM_THREADS": "3"})["OMP_NUM_THREADS"] == "3"


@pytest.mark.slow
def test_a_train_worker_and_an_engine_share_a_slot_and_a_death_ends_the_wait():
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
        slots = Slots(plan_slots(flags(colocate=True, rollout_num_gpus=2)))
        assert len({(slot.node_ip, slot.gpu_id) for slot in slots.slots}) == 2
        members = [Member.options(**slots.options(0, share)).remote() for share in (TRAIN_SHARE, ENGINE_SHARE)]
        assert [ray.get(member.gpu.remote()) for member in members] == [[slots.slots[0].gpu_id]] * 2
        supervisor = Supervisor()
        for name, member in zip(("one", "two"), members, strict=True):
            supervisor.watch(member.watch.remote(), lambda error, name=name: f"{name} died")
        assert supervisor.get([members[0].gpu.remote()]) == [[slots.slots[0].gpu_id]]
        members[1].die.remote()
        with pytest.raises(ProcessDiedError, match="two died"):
            supervisor.get([members[0].watch.remote()])
