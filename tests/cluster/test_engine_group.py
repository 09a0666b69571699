"""Closing an engine group: processes that end then are not reported as failures."""

from __future__ import annotations

import asyncio

import pytest

from slimrl.arguments import Arguments
from slimrl.cluster.engines.engine_group import EngineGroup
from slimrl.engines.sglang.router import RouterProcess

ROUTER_READY_TIMEOUT_S = 60.0


class EngineKilledWhileClosing:
    """An engine whose actor dies before its watch sees it, as with Ray's `kill`."""

    def __init__(self) -> None:
        self._killed = asyncio.Event()

    async def watch(self) -> str:
        await self._killed.wait()
        raise RuntimeError("the actor died unexpectedly")

    async def close(self) -> None:
        self._killed.set()
        await asyncio.sleep(0.05)


def test_custom_functions_find_the_router_at_the_slime_address_attributes():
    args = Arguments(rm_type="math")
    adapted = EngineGroup([], [], None, "http://10.0.0.7:3100", 30.0).reachable(args)
    assert (adapted.sglang_router_ip, adapted.sglang_router_port, adapted.rm_type) == ("10.0.0.7", 3100, "math")
    assert args.sglang_router_ip is None


@pytest.mark.slow
def test_closed_engine_group_reports_no_failure(tmp_path):
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

    assert asyncio.run(run()) == "the engines were closed"
