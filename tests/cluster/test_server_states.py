"""A server that blocks others is named with its stopped processes; healthy servers are not."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import subprocess
import sys
import types

import psutil
import pytest
from aiohttp import web

from slimrl.cluster.engines import health_monitor
from slimrl.cluster.engines.health_monitor import states_of
from slimrl.engines.sglang.control import ServerControl

LOADS = {"timestamp": "2026-01-01T00:00:00+00:00", "loads": []}


class Engine:
    """Answers according to `stopped`: a list, an error, or never (None)."""

    def __init__(self, name: str, url: str | None, stopped: list[str] | Exception | None) -> None:
        self.label, self.url, self._stopped = f"SGLang server {name}", url, stopped

    def control(self, timeout_s: float) -> ServerControl:
        return ServerControl(self.url, timeout_s, "k")

    async def stopped(self) -> list[str]:
        if self._stopped is None:
            await asyncio.sleep(60)
        if isinstance(self._stopped, Exception):
            raise self._stopped
        return self._stopped


@pytest.fixture
def stopped_child():
    """A child of this process that SIGSTOP has stopped."""
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
    child.send_signal(signal.SIGSTOP)
    os.waitpid(child.pid, os.WUNTRACED)
    yield child
    child.kill()
    child.wait()


async def states(engines, router=None):
    """States of engines; "well" is the address of a server that answers, "silent" of one that does not."""

    def well(request: web.Request) -> web.Response:
        if request.headers.get("Authorization") != "Bearer k":
            return web.Response(status=401)
        return web.Response(text=json.dumps(LOADS))

    async def silent(request: web.Request) -> web.Response:
        await asyncio.sleep(60)
        return web.Response()

    app = web.Application()
    app.router.add_get("/well/v1/loads", well)
    app.router.add_get("/silent/v1/loads", silent)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    base = f"http://127.0.0.1:{runner.addresses[0][1]}"
    for engine in engines:
        engine.url = engine.url and f"{base}/{engine.url}"
    try:
        return [state.replace(base, "") for state in await states_of(engines, router)]
    finally:
        await runner.cleanup()


def test_only_unresponsive_or_stopped_servers_are_named(monkeypatch):
    monkeypatch.setattr(health_monitor, "STATE_TIMEOUT_S", 0.3)
    engines = [
        Engine("0", "well", []),
        Engine("1", "silent", []),
        Engine("2", "silent", ["sglang::scheduler (4711)", "python (4712)"]),
        Engine("3", "well", None),
        Engine("4", "well", RuntimeError("dead")),
        Engine("5", None, []),
    ]
    assert asyncio.run(states(engines)) == [
        "SGLang server 1 (/silent) does not answer",
        "SGLang server 2 (/silent) has stopped processes: sglang::scheduler (4711), python (4712) (SIGSTOP or a"
        " debugger: `kill -CONT` lets them continue)",
        "SGLang server 3 (/well) does not answer: no reply from its actor",
        "SGLang server 4 (/well) cannot be queried: RuntimeError",
    ]


def test_stopped_router_is_named_by_its_process(stopped_child):
    name = psutil.Process(stopped_child.pid).name()
    router = types.SimpleNamespace(label="the SGLang router", pid=os.getpid())
    (state,) = asyncio.run(states([Engine("0", "well", [])], router))
    assert state.startswith(f"the SGLang router has stopped processes: {name} ({stopped_child.pid}) (SIGSTOP or a")
