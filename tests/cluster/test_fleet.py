"""The watch over a fleet that is told to end: what ends then is no death."""

from __future__ import annotations

import asyncio

import pytest

from slimrl.arguments import Arguments
from slimrl.cluster.engines.engine_group import EngineGroup
from slimrl.engines.sglang.router import RouterProcess

ROUTER_READY_TIMEOUT_S = 60.0


class EngineKilledWhileClosing:
    """An engine whose actor is gone before its watch has seen the end, as Ray's `kill` makes it."""

    def __init__(self) -> None:
        self._killed = asyncio.Event()

    async def watch(self) -> str:
        await self._killed.wait()
        raise RuntimeError("the actor died unexpectedly")

    async def close(self) -> None:
        self._killed.set()
        await asyncio.sleep(0.05)


def test_functions_of_the_users_find_the_router_where_slime_has_its_address():
    args = Arguments(rm_type="math")
    told = EngineGroup([], [], None, "http://10.0.0.7:3100", 30.0).reachable(args)
    assert (told.sglang_router_ip, told.sglang_router_port, told.rm_type) == ("10.0.0.7", 3100, "math")
    assert args.sglang_router_ip is None


@pytest.mark.slow
def test_a_fleet_that_is_closed_reports_no_death(tmp_path):
    async def run() -> str:
        router = RouterProcess(host="127.0.0.1", options={}, log_path=tmp_path / "router.log")
        router.start()
        try:
            router.wait_alive(ROUTER_READY_TIMEOUT_S)
            fleet = EngineGroup([EngineKilledWhileClosing()], [], router, router.url, 30.0)
            watch = asyncio.ensure_future(fleet.watch())
            await asyncio.sleep(0)
            assert not watch.done()
            await fleet.close()
            return await asyncio.wait_for(watch, 10)
        finally:
            router.stop()

    assert asyncio.run(run()) == "the fleet was closed"
