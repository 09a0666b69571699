"""Trainer and engines offload and onload in a fixed order, and each change is timed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from slimrl.cluster.colocate import ColocatedMemory


class Events:
    """Trainer, engines and timer, all writing into one list."""

    def __init__(self) -> None:
        self.seen: list[str] = []
        self.phases: list[str] = []

    def sleep(self, *, keep_weights: bool) -> None:
        self.seen.append("training keeps its weights" if keep_weights else "training sleeps")

    def wake(self) -> None:
        self.seen.append("training wakes")

    def release(self) -> None:
        self.seen.append("engines release")

    def resume(self, tags: Sequence[str]) -> None:
        self.seen.append("engines resume " + " ".join(tags))

    @contextlib.contextmanager
    def timed(self, phase: str) -> Iterator[None]:
        self.phases.append(phase)
        yield


def loop(memory: ColocatedMemory, events: Events, steps: int) -> None:
    """The synchronous training loop."""
    with memory.weight_update():
        events.seen.append("weight_update")
    for _ in range(steps):
        events.seen.append("generate")
        memory.onload_trainer()
        events.seen += ["train", "save"]
        with memory.weight_update():
            events.seen.append("weight_update")


PUSHED = [
    "training keeps its weights",
    "engines resume weights",
    "weight_update",
    "training sleeps",
    "engines resume kv_cache cuda_graph",
]


def test_memory_is_exchanged_around_training_and_weight_update():
    events = Events()
    loop(ColocatedMemory(events, events, events.timed), events, steps=2)
    step = ["generate", "engines release", "training wakes", "train", "save", *PUSHED]
    assert events.seen == [*PUSHED, *step, *step]
    updated = ["park_training", "resume_engines", "park_training", "resume_engines"]
    assert events.phases == [*updated, *(["release_engines", "wake_training", *updated] * 2)]


def test_engine_that_generates_within_a_weight_update_has_its_kv_cache():
    events = Events()
    loop(ColocatedMemory(events, events, events.timed, tokens_during_weight_update=True), events, steps=0)
    assert events.seen == [
        "training keeps its weights",
        "engines resume weights kv_cache cuda_graph",
        "weight_update",
        "training sleeps",
    ]


def test_each_role_can_stay_resident():
    events = Events()
    loop(ColocatedMemory(None, events, events.timed), events, steps=1)
    resumed = ["engines resume weights", "weight_update", "engines resume kv_cache cuda_graph"]
    assert events.seen == [*resumed, "generate", "engines release", "train", "save", *resumed]
    events = Events()
    loop(ColocatedMemory(events, None, events.timed), events, steps=1)
    offloaded = ["training keeps its weights", "weight_update", "training sleeps"]
    assert events.seen == [*offloaded, "generate", "training wakes", "train", "save", *offloaded]
    events = Events()
    loop(ColocatedMemory(None, None, events.timed), events, steps=1)
    assert events.seen == ["weight_update", "generate", "train", "save", "weight_update"] and events.phases == []


def test_consecutive_training_without_a_weight_update_changes_nothing():
    events = Events()
    memory = ColocatedMemory(events, events, events.timed)
    memory.onload_trainer()  # at startup the engines are offloaded and the trainer is resident
    memory.onload_trainer()
    assert events.seen == []
