"""The GPUs' memory changes hands in one order, and each change is timed."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

from slimrl.cluster.colocate import Turns


class Events:
    """Both sides and the clock, writing into one list."""

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


def loop(turns: Turns, events: Events, steps: int) -> None:
    """What the synchronous loop does."""
    with turns.push():
        events.seen.append("push")
    for _ in range(steps):
        events.seen.append("generate")
        turns.begin_training()
        events.seen += ["train", "save"]
        with turns.push():
            events.seen.append("push")


PUSHED = [
    "training keeps its weights",
    "engines resume weights",
    "push",
    "training sleeps",
    "engines resume kv_cache cuda_graph",
]


def test_memory_changes_hands_around_training_and_around_the_push():
    events = Events()
    loop(Turns(events, events, events.timed), events, steps=2)
    step = ["generate", "engines release", "training wakes", "train", "save", *PUSHED]
    assert events.seen == [*PUSHED, *step, *step]
    pushed = ["park_training", "resume_engines", "park_training", "resume_engines"]
    assert events.phases == [*pushed, *(["release_engines", "wake_training", *pushed] * 2)]


def test_an_engine_that_ends_a_push_with_a_token_has_its_cache_by_then():
    events = Events()
    loop(Turns(events, events, events.timed, tokens_with_push=True), events, steps=0)
    assert events.seen == [
        "training keeps its weights",
        "engines resume weights kv_cache cuda_graph",
        "push",
        "training sleeps",
    ]


def test_each_side_can_stay_where_it_is():
    events = Events()
    loop(Turns(None, events, events.timed), events, steps=1)
    resumed = ["engines resume weights", "push", "engines resume kv_cache cuda_graph"]
    assert events.seen == [*resumed, "generate", "engines release", "train", "save", *resumed]
    events = Events()
    loop(Turns(events, None, events.timed), events, steps=1)
    parked = ["training keeps its weights", "push", "training sleeps"]
    assert events.seen == [*parked, "generate", "training wakes", "train", "save", *parked]
    events = Events()
    loop(Turns(None, None, events.timed), events, steps=1)
    assert events.seen == ["push", "generate", "train", "save", "push"] and events.phases == []


def test_two_rounds_of_training_without_a_push_between_change_nothing():
    events = Events()
    turns = Turns(events, events, events.timed)
    turns.begin_training()  # at the start the engines are released and training is awake
    turns.begin_training()
    assert events.seen == []
