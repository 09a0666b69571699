"""What the client and the control do when things fail, against a small stand-in for the router."""

from __future__ import annotations

import asyncio
import contextlib
import socket

import orjson
import pytest
from aiohttp import web

from slimrl.sglang import client as client_module
from slimrl.sglang.client import SESSION_HEADER, RouterClient
from slimrl.sglang.control import ServerControl
from slimrl.sglang.errors import EngineError, EngineRequestError, EngineTimeoutError, EngineUnavailableError
from slimrl.sglang.ports import claim_ports

ANSWER = {
    "text": "ab",
    "output_ids": [3, 4],
    "meta_info": {
        "id": "1",
        "finish_reason": {"type": "stop", "matched": 4},
        "output_token_logprobs": [[-0.5, 3, None], [-0.25, 4, None]],
        "weight_version": "7",
    },
}


@pytest.fixture(autouse=True)
def short_waits(monkeypatch):
    monkeypatch.setattr(client_module, "FIRST_BACKOFF_S", 0.01)


@contextlib.asynccontextmanager
async def stand_in(handler, path="/generate"):
    """An HTTP server that answers POSTs by `handler`; gives its URL."""
    app = web.Application()
    app.router.add_post(path, handler)
    app.router.add_post("/abort_request", lambda request: web.Response())
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    finally:
        await runner.cleanup()


async def generate(url: str, *, timeout_s: float = 20, **arguments):
    async with RouterClient(url, [], concurrency=4, request_timeout_s=timeout_s) as client:
        return await client.generate([1, 2], {"max_new_tokens": 2, "sampling_seed": 9}, **arguments)


def test_the_request_and_the_answer_pass_unchanged():
    seen = {}

    async def handler(request):
        seen.update(orjson.loads(await request.read()), session=request.headers.get(SESSION_HEADER))
        return web.json_response(ANSWER)

    async def body():
        async with stand_in(handler) as url:
            return await generate(url, session_id="conversation 5")

    answer = asyncio.run(body())
    assert (answer.token_ids, answer.log_probs, answer.finish_reason) == ([3, 4], [-0.5, -0.25], "stop")
    assert (answer.weight_version, answer.text) == ("7", "ab")
    assert seen == {
        "input_ids": [1, 2],
        "sampling_params": {"max_new_tokens": 2, "sampling_seed": 9},
        "return_logprob": True,
        "session": "conversation 5",
    }


def outcome(statuses: list[int]):
    """Answer or error, and the number of calls, where the router answers with `statuses`, the last one for ever."""
    calls = 0

    async def handler(request):
        nonlocal calls
        status = statuses[min(calls, len(statuses) - 1)]
        calls += 1
        return web.json_response(ANSWER) if status == 200 else web.Response(status=status, text="because")

    async def body():
        async with stand_in(handler) as url:
            return await generate(url)

    try:
        return asyncio.run(body()), calls
    except EngineError as error:
        return error, calls


@pytest.mark.parametrize("status", [400, 404, 408, 422, 429])
def test_a_refusal_is_never_sent_again_and_its_words_are_shown(status):
    error, calls = outcome([status])
    assert isinstance(error, EngineRequestError)
    assert (error.status, error.body, calls) == (status, "because", 1)
    assert f"HTTP {status}: because" in str(error)


def test_a_lost_server_is_answered_by_trying_again():
    answer, calls = outcome([503, 500, 200])
    assert answer.token_ids == [3, 4] and calls == 3


def test_trying_again_has_an_end():
    error, calls = outcome([503])
    assert calls == client_module.MAX_RETRIES + 1
    assert "HTTP 503: because (tried 7 times)" in str(error)


def test_a_router_that_does_not_listen_is_tried_again_then_named():
    claim = claim_ports()
    with pytest.raises(EngineUnavailableError, match=rf"127.0.0.1:{claim.first}/generate cannot be reached.*7 times"):
        asyncio.run(generate(f"http://127.0.0.1:{claim.first}"))
    claim.release()


def test_a_connection_that_breaks_after_sending_is_not_tried_again():
    calls = 0

    async def handler(request):
        nonlocal calls
        calls += 1
        await request.read()
        request.transport.abort()
        return web.Response()

    async def body():
        async with stand_in(handler) as url:
            await generate(url)

    with pytest.raises(EngineUnavailableError, match="broke off"):
        asyncio.run(body())
    assert calls == 1


def test_a_silent_engine_is_a_time_out():
    async def handler(request):
        await asyncio.sleep(30)

    async def body():
        async with stand_in(handler) as url:
            await generate(url, timeout_s=0.2)

    with pytest.raises(EngineTimeoutError, match=r"within 0\.2 s"):
        asyncio.run(body())


def test_misaligned_log_probs_are_an_error():
    async def handler(request):
        return web.json_response({**ANSWER, "output_ids": [3, 5]})

    async def body():
        async with stand_in(handler) as url:
            await generate(url)

    with pytest.raises(EngineUnavailableError, match="log-probabilities"):
        asyncio.run(body())


def test_never_more_requests_are_in_flight_than_allowed():
    running = most = 0

    async def handler(request):
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0.02)
        running -= 1
        return web.json_response(ANSWER)

    async def body():
        async with (
            stand_in(handler) as url,
            RouterClient(url, [], concurrency=3, request_timeout_s=20) as client,
        ):
            await asyncio.gather(*(client.generate([1], {}) for _ in range(12)))

    asyncio.run(body())
    assert most == 3


def test_an_abort_reaches_requests_that_wait_to_be_tried_again_at_once(monkeypatch):
    monkeypatch.setattr(client_module, "FIRST_BACKOFF_S", 30.0)

    async def handler(request):
        return web.Response(status=503)

    async def body():
        async with (
            stand_in(handler) as url,
            RouterClient(url, [url], concurrency=1, request_timeout_s=20) as client,
        ):
            tasks = [asyncio.create_task(client.generate([1], {})) for _ in range(3)]
            await asyncio.sleep(0.05)
            await client.abort_all()
            async with asyncio.timeout(2):
                return await asyncio.gather(*tasks)

    answers = asyncio.run(body())
    assert [(a.finish_reason, a.token_ids, a.weight_version) for a in answers] == [("abort", [], "")] * 3


def test_control_tells_refusals_time_outs_and_absence_apart():
    async def handler(request):
        if request.path == "/pause_generation":
            return web.Response(status=400, text="no")
        await asyncio.sleep(30)

    async def body():
        async with stand_in(handler, "/{any}") as url:
            with pytest.raises(EngineRequestError, match="/pause_generation refused the request with HTTP 400: no"):
                await asyncio.to_thread(ServerControl(url, timeout_s=5).pause)
            with pytest.raises(EngineTimeoutError, match="/continue_generation did not answer within 0.2 s"):
                await asyncio.to_thread(ServerControl(url, timeout_s=0.2).continue_)

    asyncio.run(body())
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    absent = ServerControl(f"http://127.0.0.1:{port}", timeout_s=1)
    assert not absent.healthy()
    with pytest.raises(EngineUnavailableError, match="cannot be reached"):
        absent.weight_version()


def test_control_wants_a_url():
    with pytest.raises(ValueError, match="http://host:port"):
        ServerControl("127.0.0.1:3000")
