"""A server's control that notes in the timeline how long each call to the server took, as the server's own time.

Made by `WeightUpdater` for every server, where a timeline is recorded; raises what the server's control raises.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from typing import Any, cast

from slimrl.observability.timeline_recorder import Timeline
from slimrl.weights.servers import ServerControl

TRACK = "calls from training"


def traced(server: ServerControl, timeline: Timeline) -> ServerControl:
    """`server`, of which every call is noted; itself where nothing is recorded."""
    return cast(ServerControl, _TracedServer(server, timeline)) if timeline.records else server


class _TracedServer:
    def __init__(self, server: ServerControl, timeline: Timeline) -> None:
        self._server = server
        self._timeline = timeline

    @property
    def url(self) -> str:
        return self._server.url

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return functools.partial(self._call, name.rstrip("_"), getattr(self._server, name))

    def _call(self, name: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
        started = time.monotonic_ns()
        try:
            return call(*arguments, **options)
        finally:
            server = f"server {self._server.url}"
            self._timeline.beside(TRACK, name, started, time.monotonic_ns(), process=server)
