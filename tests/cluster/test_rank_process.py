"""What a training process answers to its actor, call by call."""

from __future__ import annotations

import pickle
import sys
import threading
from multiprocessing import Pipe

from slimrl.cluster.training import train_process
from slimrl.observability.tracer import Timeline


class RankOnBrokenDevice:
    """After an error its device refuses everything, as CUDA does after an illegal access."""

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

    def sleep(self) -> None:
        sys.exit("a layer of the user's")


def answers_of(rank, methods, monkeypatch):
    """What `serve` answers to each call, in order."""
    monkeypatch.setattr(train_process, "Rank", rank)
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


def test_an_error_of_a_call_reaches_the_actor_though_the_device_is_lost(monkeypatch):
    answers = answers_of(RankOnBrokenDevice, ("prepare", "train", "wake"), monkeypatch)
    assert answers["prepare"] == [("memory", {"cuda_peak_gib": 1.5}), ("value", "ready")]
    ((kind, (summary, trace)),) = answers["train"]
    assert (kind, summary) == ("error", "ValueError: the kernel that read beyond its tensor")
    assert "in train" in trace
    ((kind, (summary, _)),) = answers["wake"]  # a device that is lost is no success
    assert kind == "error" and "illegal memory access" in summary


def test_code_that_asks_for_the_end_of_the_process_has_failed_like_any_other(monkeypatch):
    answers = answers_of(RankOnBrokenDevice, ("sleep", "prepare"), monkeypatch)
    ((kind, (summary, trace)),) = answers["sleep"]
    assert (kind, summary) == ("error", "SystemExit: a layer of the user's")
    assert "in sleep" in trace
    assert answers["prepare"][-1] == ("value", "ready")
