"""Whose state new ranks get; tests/megatron/test_step_state.py takes real states."""

from __future__ import annotations

import threading
from multiprocessing import Pipe
from types import SimpleNamespace

import pytest

from slimrl.cluster.training import train_group
from slimrl.cluster.training.train_group import NoPeerStateError, check_memory, choose_sources, take_over
from slimrl.cluster.training.train_messages import (
    StateReadError,
    StateReport,
    StateRequests,
    answer_requests,
    host_name,
    why_not_shared,
)
from tests.megatron.tiny import tiny_args

TP2_DP2 = [(0, 0, 0, 0), (0, 1, 0, 0), (0, 0, 0, 0), (0, 1, 0, 0)]
WHOLE = StateReport(5, "", None)
STEPPING = StateReport(None, "was in an optimizer step of rollout 5", None)


def test_new_ranks_get_the_state_of_a_survivor_with_their_part_of_the_model():
    assert choose_sources(TP2_DP2, [WHOLE] * 4, 5) == [0, 1, 0, 1]  # read from one rank of each part
    assert choose_sources(TP2_DP2, [None, WHOLE, WHOLE, WHOLE], 5) == [2, 1, 2, 1]
    assert choose_sources(TP2_DP2, [WHOLE, WHOLE, None, None], 5) == [0, 1, 0, 1]


def test_one_whole_state_of_each_part_is_enough():
    assert choose_sources(TP2_DP2, [STEPPING, WHOLE, WHOLE, None], 5) == [2, 1, 2, 1]


@pytest.mark.parametrize(
    ("reports", "why"),
    [
        ([None, WHOLE, None, WHOLE], "no rank that is left has the part of the model of rank 0"),
        ([WHOLE, STEPPING, WHOLE, None], "rank 1 was in an optimizer step of rollout 5"),
        ([WHOLE, None, WHOLE, StateReport(6, "", None)], "rank 3 has trained up to rollout 5, the run up to 4"),
        ([None] * 4, "no rank that is left has the part of the model of rank 0"),
    ],
)
def test_missing_state_is_named(reports, why):
    with pytest.raises(NoPeerStateError, match=f"^{why}$"):
        choose_sources(TP2_DP2, reports, 5)


@pytest.mark.parametrize(
    ("flags", "why"),
    [
        ({"use_distributed_optimizer": True}, "--use-distributed-optimizer gives each data-parallel rank its own part"),
        ({"use_megatron_fsdp": True}, "--use-megatron-fsdp gives each data-parallel rank its own part"),
        (
            {"critic_num_gpus_per_node": 1, "critic_num_nodes": 1, "advantage_estimator": "ppo"},
            "the critic has ranks of its own",
        ),
        ({"fp8_format": "hybrid"}, "layers keep scales with --fp8-format"),
        ({"custom_megatron_before_train_step_hook_path": "a.b"}, "--custom-megatron-before-train-step-hook-path may"),
        ({"custom_megatron_before_log_prob_hook_path": "a.b"}, "--custom-megatron-before-log-prob-hook-path may"),
    ],
)
def test_flags_with_which_no_rank_has_the_state_of_another_are_named(flags, why):
    assert why_not_shared(tiny_args()) is None
    args = tiny_args(**flags)
    with pytest.raises(NoPeerStateError, match=f"^{why}"):
        take_over(SimpleNamespace(), args, 5)  # without asking any rank


class State:
    """A rank's state."""

    nbytes = 7

    def report(self):
        return 5, "", 2

    def read(self):
        return b"weights"


class Unreadable(State):
    """A rank whose device has failed."""

    def read(self):
        raise RuntimeError("CUDA error: out of memory")


def test_requests_are_answered_beside_the_calls_of_a_rank_until_its_process_ends():
    ours, theirs = Pipe()
    state = []
    answer_requests(theirs, lambda: state[0] if state else None)
    requests = StateRequests(ours)
    assert requests.report() == StateReport(None, "is not loaded yet", None)
    state.append(State())
    report = requests.report()
    assert (report.first, report.why, report.saved, report.nbytes, report.host) == (5, "", 2, 7, host_name())
    assert 0 < report.free < 2**60
    assert requests.read() == b"weights"
    state[0] = Unreadable()
    with pytest.raises(StateReadError, match="^RuntimeError: CUDA error: out of memory$"):
        requests.read()
    assert requests.report().first == 5  # requests are still answered
    thread = next(thread for thread in threading.enumerate() if thread.name == "state")
    ours.close()
    thread.join(30)
    assert not thread.is_alive()
    ours, theirs = Pipe()
    theirs.close()
    assert StateRequests(ours).report() is None


def test_survivor_that_ends_while_it_hands_over_is_named(monkeypatch):
    class Method:
        def __init__(self, result):
            self.result = result

        def remote(self):
            return self.result

    class Ended(train_group.RayError): ...

    def get(refs):
        raise Ended

    def unreadable(refs):
        raise StateReadError("RuntimeError: out of memory")

    worker = SimpleNamespace(report_state=Method(WHOLE), read_state=Method(("state", "end")))
    group = SimpleNamespace(workers=[worker, worker], parts=[(0,), (0,)])
    monkeypatch.setattr(train_group, "poll_actors", lambda refs: [WHOLE, None])
    monkeypatch.setattr(train_group, "ray", SimpleNamespace(wait=lambda refs, **_: (refs, []), get=lambda refs: None))
    taken = take_over(group, tiny_args(), 5)
    assert (taken.first, taken.states, taken.sources) == (5, ["state", "state"], [0, 0])
    assert taken.sentence == "the state of their data-parallel peers in memory (rank 0)"
    monkeypatch.setattr(train_group.ray, "get", get)
    with pytest.raises(NoPeerStateError, match="ended while it handed over its state"):
        take_over(group, tiny_args(), 5)
    monkeypatch.setattr(train_group.ray, "get", unreadable)
    with pytest.raises(NoPeerStateError, match="could not hand over its state: RuntimeError: out of memory"):
        take_over(group, tiny_args(), 5)
    monkeypatch.setattr(train_group.ray, "wait", lambda refs, **_: ([], refs))
    with pytest.raises(NoPeerStateError, match="did not hand over its state within 600 s"):
        take_over(group, tiny_args(), 5)


def test_states_that_do_not_fit_into_the_memory_of_a_host_come_from_the_checkpoint():
    def report(host, nbytes, free):
        return StateReport(5, "", None, nbytes, host, free)

    gib = 2**30
    check_memory([report("a", 10 * gib, 80 * gib), report("a", 10 * gib, 81 * gib), report("b", 20 * gib, 80 * gib)])
    with pytest.raises(
        NoPeerStateError, match="^handing over 20.0 GiB of state takes 80.0 GiB of host memory, and a has"
    ):
        check_memory([report("a", 10 * gib, 79 * gib), report("a", 10 * gib, 90 * gib)])
