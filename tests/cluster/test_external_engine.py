"""A server of the user's that works for long is alive; one that answers nobody is lost, after the time of the flag."""

from __future__ import annotations

import asyncio
import contextlib

from aiohttp import web

from slimrl.arguments import Arguments
from slimrl.cluster.external_engine import ExternalEngine
from slimrl.sglang.external import ExternalServer

STARTED = (1.0, None, None)


@contextlib.asynccontextmanager
async def busy_server():
    """Answers as SGLang does whose scheduler waits for others: its loads, but neither /health nor /server_info."""

    async def silent(request: web.Request) -> web.Response:
        await asyncio.sleep(30)
        return web.Response()

    app = web.Application()
    app.router.add_get("/v1/loads", lambda request: web.json_response({"loads": []}))
    app.router.add_get("/health", silent)
    app.router.add_get("/server_info", silent)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    try:
        yield runner
    finally:
        await runner.cleanup()


def test_a_server_that_works_for_long_is_alive_and_one_that_is_gone_is_lost():
    async def run() -> None:
        async with busy_server() as runner:
            address = f"127.0.0.1:{runner.addresses[0][1]}"
            engine = ExternalEngine(address, 0, Arguments(rollout_health_check_timeout=0.4))
            engine._server = ExternalServer(engine.url, 1, STARTED)
            watch = asyncio.ensure_future(engine.watch())
            await asyncio.wait([watch], timeout=1.5)
            assert not watch.done()
            await runner.cleanup()
            end = await asyncio.wait_for(watch, 30)
        assert end.what == (
            f"SGLang server 0 of --rollout-external-engine-addrs: http://{address} has not answered for 0.4 s"
            " (--rollout-health-check-timeout)"
        )

    asyncio.run(run())
