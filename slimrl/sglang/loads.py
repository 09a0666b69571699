"""How busy a server is. Called by the rollout manager when the driver wonders what it is waiting for."""

from __future__ import annotations

import dataclasses
import datetime
from typing import Any

from slimrl.sglang.calls import call
from slimrl.sglang.errors import EngineError


@dataclasses.dataclass(frozen=True)
class ServerLoad:
    """Requests of a server, as its scheduler last wrote them down `seconds` ago (one that works does so all the time).

    `prefilled` tells whether it has ever worked on a request. All are None where the server does not answer.
    """

    url: str
    running: int | None = None
    waiting: int | None = None
    seconds: float | None = None
    prefilled: bool | None = None


def load_of(server_url: str, timeout_s: float, key: str | None = None) -> ServerLoad:
    """Asks the server, for at most `timeout_s`; over its data-parallel copies the sums and the oldest sign.

    An answer that is none (a load without numbers, the page of a proxy) counts as no answer.
    """
    try:
        return _read(server_url, call("GET", f"{server_url}/v1/loads", timeout_s=timeout_s, key=key))
    except (EngineError, KeyError, TypeError, ValueError):
        return ServerLoad(server_url)


def _read(server_url: str, answer: dict[str, Any]) -> ServerLoad:
    loads = answer["loads"]
    now = datetime.datetime.fromisoformat(answer["timestamp"]).timestamp()  # the server's clock, not ours
    return ServerLoad(
        server_url,
        running=sum(load["num_running_reqs"] for load in loads),
        waiting=sum(load["num_waiting_reqs"] for load in loads),
        seconds=max((now - load["timestamp"] for load in loads), default=0.0),
        prefilled=any(load["total_prefill_uncached_tokens"] for load in loads),
    )
