"""Engines are stopped whatever the state of their actors."""

from __future__ import annotations

import asyncio
import types

import pytest
from ray.exceptions import ActorDiedError

from slimrl.cluster.engines import engine as engine_module
from slimrl.cluster.engines.engine import Engine
from slimrl.cluster.engines.engine_group import EngineGroup


class FakeActor:
    """Answers a call of `stop` as `answer` does."""

    def __init__(self, answer) -> None:
        self.stop = types.SimpleNamespace(remote=lambda *_: answer())
        self.killed = 0


async def ends() -> None: ...


async def is_dead() -> None:
    raise ActorDiedError


async def hangs() -> None:
    await asyncio.Event().wait()


@pytest.fixture
def made(monkeypatch):
    """Makes an engine of fake actors."""

    def kill(actor: FakeActor) -> None:
        actor.killed += 1

    monkeypatch.setattr(engine_module.ray, "kill", kill)

    def make(*answers) -> tuple[Engine, list[FakeActor]]:
        engine = Engine.__new__(Engine)
        engine._actors = [FakeActor(answer) for answer in answers]
        return engine, engine._actors

    return make


def test_closing_a_killed_engine_raises_nothing(made):
    engine, actors = made(is_dead, ends)
    asyncio.run(engine.close())
    assert [actor.killed for actor in actors] == [1, 1]


def test_engine_with_a_hung_actor_is_killed_after_the_time_limit(made, monkeypatch):
    monkeypatch.setattr(engine_module, "KILL_TIMEOUT_S", 0.05)
    engine, actors = made(hangs, is_dead)
    asyncio.run(asyncio.wait_for(engine.kill(), 10))
    assert [actor.killed for actor in actors] == [1, 1]


def test_engine_group_stops_every_server_before_raising_an_error():
    class FakeEngine:
        def __init__(self, error: str | None) -> None:
            self.error, self.closed = error, False

        async def close(self) -> None:
            if self.error:
                raise OSError(self.error)
            await asyncio.sleep(0.01)
            self.closed = True

    engines = [FakeEngine("it does not end"), FakeEngine(None)]
    router = types.SimpleNamespace(stop=lambda: None)

    async def body():
        with pytest.raises(OSError, match="it does not end"):
            await EngineGroup(engines, [], router, "", 30.0).close()

    asyncio.run(body())
    assert engines[1].closed
