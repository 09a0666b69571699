"""Calls from training to a server, traced in the timeline: each reaches the server unchanged."""

from __future__ import annotations

import inspect
import types

import pytest

from slimrl.engines.server_protocol import WeightControl
from slimrl.weights.update.engine_fanout import TRACK, traced

METHODS = [name for name, value in vars(WeightControl).items() if inspect.isfunction(value) and name[0] != "_"]


class NotedTimeline:
    """Records the spans."""

    records = True

    def __init__(self) -> None:
        self.rows: list[tuple[str, str, str]] = []

    def add_span(self, track: str, name: str, begin_ns: int, end_ns: int, *, process: str) -> None:
        assert begin_ns <= end_ns
        self.rows.append((track, name, process))


def arguments_of(name: str) -> tuple[list[str], dict[str, str]]:
    """A distinct value for each parameter: its name."""
    parameters = list(inspect.signature(getattr(WeightControl, name)).parameters.values())[1:]
    named = {one.name: one.name for one in parameters if one.kind is inspect.Parameter.KEYWORD_ONLY}
    return [one.name for one in parameters if one.name not in named], named


@pytest.mark.parametrize("name", METHODS)
def test_call_reaches_the_server_with_all_arguments_and_is_traced(name):
    calls, timeline = [], NotedTimeline()

    def call(*arguments, **options):
        calls.append((list(arguments), options))
        return "answer"

    call.__name__ = name
    server = traced(types.SimpleNamespace(url="http://s", **{name: call}), timeline)
    arguments, options = arguments_of(name)
    answer = getattr(server, name)(*arguments, **options)
    assert calls == [(arguments, options)]
    silent = inspect.signature(getattr(WeightControl, name)).return_annotation == "None"
    assert answer == (None if silent else "answer")
    assert timeline.rows == [(TRACK, name.rstrip("_"), "server http://s")]


def test_failed_call_is_traced_and_raises_the_server_error():
    timeline = NotedTimeline()

    def flush_pipeline():
        raise RuntimeError("the server is gone")

    server = traced(types.SimpleNamespace(url="http://s", flush_pipeline=flush_pipeline), timeline)
    with pytest.raises(RuntimeError, match="the server is gone"):
        server.flush_pipeline()
    assert timeline.rows == [(TRACK, "flush_pipeline", "server http://s")]
