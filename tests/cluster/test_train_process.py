"""The answers of a training process to its actor, call by call."""

from __future__ import annotations

import pickle
import socket
import sys
import threading
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from types import SimpleNamespace

import pytest

from slimrl.cluster.training import train_process
from slimrl.cluster.training.train_messages import receive_call, send_call
from slimrl.observability.tracer import Timeline


class RankOnBrokenDevice:
    """After an error its device rejects every call, as CUDA does after an illegal access."""

    def __init__(self, *_: object) -> None:
        self._broken = False
        self.timeline = Timeline.off()

    def device_memory(self) -> dict[str, float]:
        if self._broken:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")
        return {"cuda_peak_gib": 1.5}

    def prepare(self) -> str:
        return "ready"

    def train(self) -> None:
        self._broken = True
        raise ValueError("the kernel that read beyond its tensor")

    def wake(self) -> None: ...

    def save(self) -> None:
        raise FloatingPointError("the loss is nan")

    def sleep(self) -> None:
        sys.exit("a custom layer")


def answers_of(rank, methods, monkeypatch):
    """The answers of `serve` to each call, in order."""
    monkeypatch.setattr(train_process, "rank_of", rank)
    ours, theirs = Pipe()
    server = threading.Thread(target=train_process.serve, args=(theirs,))
    server.start()
    ours.send_bytes(pickle.dumps("setup"))
    answers = {}
    for method in methods:
        ours.send_bytes(pickle.dumps((getattr(rank, method), ())))
        answers[method] = []
        while not answers[method] or answers[method][-1][0] == "memory":
            assert ours.poll(30)
            answers[method].append(pickle.loads(ours.recv_bytes()))
    ours.close()
    server.join(30)
    assert not server.is_alive()
    return answers


def test_call_error_reaches_the_actor_when_the_device_is_lost(monkeypatch):
    answers = answers_of(RankOnBrokenDevice, ("prepare", "train", "wake"), monkeypatch)
    assert answers["prepare"] == [("memory", {"cuda_peak_gib": 1.5}), ("value", "ready")]
    ((kind, (summary, trace)),) = answers["train"]
    assert (kind, summary) == ("error", "ValueError: the kernel that read beyond its tensor")
    assert "in train" in trace
    ((kind, (summary, _)),) = answers["wake"]  # a lost device is no success
    assert kind == "error" and "illegal memory access" in summary


@pytest.mark.parametrize("kind", [train_process.PolicyRank, train_process.CriticRank])
def test_no_role_overrides_a_method_that_the_actor_sends_by_the_base_class(kind):
    sent = {name for name in vars(train_process.Rank) if not name.startswith("_")}
    assert {"initialize", "sleep", "wake", "finish_saves", "close"} <= sent and not sent & set(vars(kind))


def test_policy_leaves_the_engines_before_the_process_groups():
    left = []
    rank = train_process.PolicyRank.__new__(train_process.PolicyRank)
    rank._updater = SimpleNamespace(close=lambda: left.append("engines"))
    rank._trainer = SimpleNamespace(close=lambda: left.append("groups"))
    train_process.Rank.close(rank)
    assert left == ["engines", "groups"]


def test_value_that_is_not_finite_is_an_error_of_its_own_kind(monkeypatch):
    ((kind, (summary, _)),) = answers_of(RankOnBrokenDevice, ("save",), monkeypatch)["save"]
    assert (kind, summary) == ("not finite", "FloatingPointError: the loss is nan")


def test_batch_is_passed_as_serialized_bytes_without_pickling_it_again():
    batch = pickle.dumps(list(range(10_000)))
    ours, theirs = socket.socketpair()
    sender, receiver = Connection(ours.detach()), Connection(theirs.detach())
    frames = []

    class Noted:
        def recv_bytes(self) -> bytes:
            frames.append(receiver.recv_bytes())
            return frames[-1]

    arguments = (7, pickle.PickleBuffer(batch))
    sending = threading.Thread(target=send_call, args=(sender, train_process.PolicyRank.train, arguments))
    sending.start()
    method, (rollout_id, received) = receive_call(Noted())
    sending.join(30)
    assert (method, rollout_id) == (train_process.PolicyRank.train, 7)
    assert len(frames) == 2 and len(frames[0]) < 1000
    assert received is frames[1] and received == batch
    send_call(sender, train_process.Rank.wake, ())
    assert receive_call(receiver) == (train_process.Rank.wake, ())
    sender.close()
    with pytest.raises(EOFError):
        receive_call(receiver)


def test_system_exit_in_a_rank_is_an_error_like_any_other(monkeypatch):
    answers = answers_of(RankOnBrokenDevice, ("sleep", "prepare"), monkeypatch)
    ((kind, (summary, trace)),) = answers["sleep"]
    assert (kind, summary) == ("error", "SystemExit: a custom layer")
    assert "in sleep" in trace
    assert answers["prepare"][-1] == ("value", "ready")
