"""Which servers keep a run waiting: those that do not answer, and those of which a process is stopped.

Asked by the watchdog through the rollout manager, whatever the driver waits for: a training rank that pushes weights to
a stopped server only says where it waits itself. Promises an answer within seconds.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Protocol

from slimrl.processes import stacks
from slimrl.sglang.loads import load_of

LOOK_TIMEOUT_S = 3.0


class Engine(Protocol):
    """What is needed of an engine."""

    name: str
    url: str | None
    key: str | None  # which its server asks for

    async def stopped(self) -> list[str]:
        """Its processes that the kernel has stopped."""
        ...


async def states_of(engines: Sequence[Engine], router_pid: int | None) -> list[str]:
    """A sentence for each server, and for the router, that keeps others waiting; [] where all is well."""
    found = await asyncio.gather(*(_state(engine) for engine in engines))
    stopped = stacks.stopped_below(router_pid) if router_pid is not None else []
    router = [f"the SGLang router has stopped processes: {_named(stopped)}"] if stopped else []
    return [*router, *(sentence for sentence in found if sentence)]


async def _state(engine: Engine) -> str | None:
    if engine.url is None:  # it has not started
        return None
    try:
        stopped = await asyncio.wait_for(engine.stopped(), LOOK_TIMEOUT_S)
    except TimeoutError:
        return f"SGLang server {engine.name} ({engine.url}) cannot be asked: no answer of its actor"
    except Exception as error:  # a dead actor: the watch over it says so, with the cause
        return f"SGLang server {engine.name} ({engine.url}) cannot be asked: {type(error).__name__}"
    if stopped:
        return f"SGLang server {engine.name} ({engine.url}) has stopped processes: {_named(stopped)}"
    if (await asyncio.to_thread(load_of, engine.url, LOOK_TIMEOUT_S, engine.key)).running is None:
        return f"SGLang server {engine.name} ({engine.url}) does not answer"
    return None


def _named(processes: Sequence[str]) -> str:
    return f"{', '.join(processes)} (SIGSTOP or a debugger: `kill -CONT` lets them go on)"
