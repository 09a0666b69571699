"""Failure handling of the client and of engine control, against a small fake router."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import math
import re
import socket
import threading
import time

import orjson
import pytest
from aiohttp import web

from slimrl.arguments import Arguments
from slimrl.cluster.engines.engine_group import has_conversations
from slimrl.engines.http import call
from slimrl.engines.protocol import (
    EngineError,
    EngineRequestError,
    EngineResponseError,
    EngineTimeoutError,
    EngineUnavailableError,
)
from slimrl.engines.sglang import client as client_module
from slimrl.engines.sglang.client import SESSION_HEADER, RouterClient
from slimrl.engines.sglang.control import ServerControl
from slimrl.engines.sglang.responses import ResponseReader
from slimrl.engines.sglang.router import router_options
from slimrl.processes.child_process import claim_ports

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
    monkeypatch.setattr(client_module, "LONGEST_BACKOFF_S", 0.1)


@contextlib.asynccontextmanager
async def stand_in(handler, path="/generate", port=0):
    """An HTTP server that answers POSTs with `handler`; yields its URL."""
    app = web.Application()
    app.router.add_post(path, handler)
    app.router.add_post("/abort_request", lambda request: web.Response())
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", port)
    await site.start()
    try:
        yield f"http://127.0.0.1:{site._server.sockets[0].getsockname()[1]}"
    finally:
        await runner.cleanup()


async def generate(
    url: str, *, timeout_s: float = 20, retry_timeout_s: float = 20, weights_are_updated: bool = False, **arguments
):
    times = {"request_timeout_s": timeout_s, "retry_timeout_s": retry_timeout_s}
    async with RouterClient(url, [], concurrency=4, weights_are_updated=weights_are_updated, **times) as client:
        return await client.generate([1, 2], {"max_new_tokens": 2, "sampling_seed": 9}, **arguments)


@pytest.mark.parametrize(
    ("reported", "spans"),
    [
        ([{"version": "6", "start": 0, "end": 1}, {"version": "7", "start": 1, "end": 2}], [["6", 1], ["7", 1]]),
        ([{"version": "6", "start": 0, "end": 1}, {"version": "7", "start": 1, "end": 3}], [["6", 1], ["7", 1]]),
        ([{"version": "6", "start": 0, "end": 1}], [["6", 1], ["7", 1]]),
        ([{"version": "7", "start": 0, "end": 0}], [["7", 2]]),
        (None, [["7", 2]]),
    ],
)
def test_response_reports_which_weights_sampled_which_tokens(reported, spans):
    meta = ANSWER["meta_info"] | ({} if reported is None else {"weight_versions": reported})
    assert ResponseReader().generation(orjson.dumps(ANSWER | {"meta_info": meta})).version_spans == spans


def test_request_and_response_pass_unchanged():
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


def outcome(statuses: list[int], **arguments):
    """Response or error, and the number of calls, when the router answers with `statuses`, repeating the last one."""
    calls = 0

    async def handler(request):
        nonlocal calls
        status = statuses[min(calls, len(statuses) - 1)]
        calls += 1
        return web.json_response(ANSWER) if status == 200 else web.Response(status=status, text="because")

    async def body():
        async with stand_in(handler) as url:
            return await generate(url, **arguments)

    try:
        return asyncio.run(body()), calls
    except EngineError as error:
        return error, calls


@pytest.mark.parametrize("status", [400, 404, 408, 422, 429])
def test_rejection_is_not_retried_and_its_text_is_shown(status):
    error, calls = outcome([status])
    assert isinstance(error, EngineRequestError)
    assert (error.status, error.body, calls) == (status, "because", 1)
    assert f"HTTP {status}: because" in str(error)


def test_request_of_a_lost_server_is_retried():
    answer, calls = outcome([503, 500, 200])
    assert answer.token_ids == [3, 4] and calls == 3


def test_request_that_loses_several_servers_in_a_row_is_given_up():
    error, calls = outcome([500])
    assert calls == client_module.MAX_LOSSES + 1
    assert "HTTP 500: because (tried 7 times)" in str(error)


def test_request_without_a_server_is_retried_for_the_given_time(monkeypatch):
    monkeypatch.setattr(client_module, "LONGEST_BACKOFF_S", 0.02)
    error, calls = outcome([503], retry_timeout_s=0.5)
    assert client_module.MAX_LOSSES + 1 < calls <= 27  # after 0, 0.01, 0.03, 0.05, ... s
    assert f"HTTP 503: because (tried {calls} times)" in str(error)


def test_lost_servers_count_even_with_rejections_in_between():
    error, calls = outcome([500, 503, 500, 503, 500, 503, 500, 503, 500, 503, 500, 503, 500, 200])
    assert isinstance(error, EngineUnavailableError) and calls == 13


def test_unreachable_router_is_retried_then_named():
    claim = claim_ports()
    url = f"http://127.0.0.1:{claim.first}"
    with pytest.raises(EngineUnavailableError, match=rf"{url}/generate cannot be reached.*tried \d+ times"):
        asyncio.run(generate(url, retry_timeout_s=0.1))
    claim.release()


def test_request_survives_a_router_restart_at_the_same_url():
    port = claim_ports()

    async def handler(request):
        return web.json_response(ANSWER)

    async def body():
        url = f"http://127.0.0.1:{port.first}"
        async with RouterClient(url, [], concurrency=4, request_timeout_s=20, retry_timeout_s=20) as client:
            tasks = [asyncio.create_task(client.generate([1], {})) for _ in range(8)]
            await asyncio.sleep(0.2)
            port.release()
            async with stand_in(handler, port=port.first):
                return await asyncio.gather(*tasks)

    assert [answer.token_ids for answer in asyncio.run(body())] == [[3, 4]] * 8


def test_connection_that_breaks_before_or_during_the_response_is_retried():
    seen = []

    async def handler(request):
        seen.append(await request.read())
        if len(seen) == 1:
            request.transport.abort()
        if len(seen) == 2:
            response = web.StreamResponse(headers={"Content-Length": "1000"})
            await response.prepare(request)
            await response.write(b'{"text": "a')
            request.transport.abort()
            return response
        return web.json_response(ANSWER)

    async def body():
        async with stand_in(handler) as url:
            return await generate(url)

    assert asyncio.run(body()).token_ids == [3, 4]
    assert len(seen) == 3 and len(set(seen)) == 1


def test_pending_requests_end_when_the_client_closes_and_are_not_resent(monkeypatch):
    monkeypatch.setattr(client_module, "FIRST_BACKOFF_S", 30.0)
    calls = 0

    async def handler(request):
        nonlocal calls
        calls += 1
        if calls == 1:
            return web.Response(status=503)
        await asyncio.sleep(30)

    async def body():
        async with stand_in(handler) as url:
            client = RouterClient(url, [], concurrency=4, request_timeout_s=20)
            async with client:
                tasks = [asyncio.create_task(client.generate([1], {})) for _ in range(2)]
                await asyncio.sleep(0.2)
            async with asyncio.timeout(2):
                return await asyncio.gather(*tasks, return_exceptions=True)

    waiting, in_flight = asyncio.run(body())
    assert "not open" in str(waiting) and "the client was closed" in str(in_flight)
    assert calls == 2


def test_router_uses_session_affinity_for_conversations_by_default():
    plain, own = Arguments(), Arguments(custom_generate_function_path="mine.generate")

    def options(args: Arguments) -> dict:
        return router_options(args.router_options, request_timeout_s=60, conversations=has_conversations(args))

    assert options(plain) == {"request_timeout_secs": 60}
    assert options(own) == {"request_timeout_secs": 60, "policy": "manual", "assignment_mode": "min_load"}
    own.router_options = {"policy": "cache_aware", "request_timeout_secs": 7}
    assert options(own) == own.router_options


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"<html>", "cannot be read: JSON is malformed.*begins '<html>'"),
        (orjson.dumps({**ANSWER, "meta_info": {}}), "cannot be read: .*missing required field"),
        (orjson.dumps(ANSWER).replace(b"-0.25", b"null"), "cannot be read: Expected `float`, got `null`"),
    ],
)
def test_invalid_response_reports_its_error(content, message):
    with pytest.raises(EngineResponseError, match=message):
        ResponseReader().generation(content)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"output_ids": [3, 64]}, "output_ids[1] is 64, and the model has 64 tokens"),
        ({"output_ids": [-1, 4]}, "output_ids[0] is -1, and the model has 64 tokens"),
        ({"log_probs": [-0.5, 0.25]}, "output_token_logprobs[1] is 0.25, which is not a log-probability"),
        ({"log_probs": [-3.4e38, -1.0]}, "output_token_logprobs[0] is -3.4e+38, which is not a log-prob"),
        ({"log_probs": [math.nan, -1.0]}, "output_token_logprobs[0] is nan, which is not a log-probability"),
        (
            {"log_probs": [-1.0, -math.inf]},
            "output_token_logprobs[1] is -inf, which is not a log-probability",
        ),
    ],
)
def test_impossible_response_is_rejected_with_its_value(changes, message):
    ids, log_probs = changes.get("output_ids", [3, 4]), changes.get("log_probs", [-0.5, -0.25])
    scored = [[log_prob, token_id, None] for log_prob, token_id in zip(log_probs, ids, strict=True)]
    answer = ANSWER | {"output_ids": ids, "meta_info": ANSWER["meta_info"] | {"output_token_logprobs": scored}}
    with pytest.raises(EngineResponseError, match=re.escape(f"the engine's answer cannot be used: {message}")):
        ResponseReader(64).generation(json.dumps(answer).encode())


def test_log_prob_rounded_above_zero_and_last_token_of_the_vocabulary_are_accepted():
    scored = [[2e-7, 3, None], [0.0, 63, None]]
    answer = ANSWER | {"output_ids": [3, 63], "meta_info": ANSWER["meta_info"] | {"output_token_logprobs": scored}}
    assert ResponseReader(64).generation(orjson.dumps(answer)).token_ids == [3, 63]
    assert ResponseReader().generation(orjson.dumps(answer)).log_probs == [2e-7, 0.0]


def test_unusable_response_names_router_and_servers_and_is_not_retried():
    calls = 0

    async def handler(request):
        nonlocal calls
        calls += 1
        return web.json_response(ANSWER)

    async def body():
        async with stand_in(handler) as url:
            client = RouterClient(
                url, [f"http://10.0.0.{n}:30000" for n in range(6)], concurrency=1, request_timeout_s=20, vocabulary=4
            )
            async with client:
                await client.generate([1], {})

    with pytest.raises(EngineResponseError) as caught:
        asyncio.run(body())
    assert calls == 1
    assert re.search(
        r"http://127\.0\.0\.1:\d+/generate was answered, by a server behind it \(http://10\.0\.0\.0:30000, .*"
        r"http://10\.0\.0\.3:30000 and 2 more\): the engine's answer cannot be used: output_ids\[1\] is 4, and the",
        str(caught.value),
    )


def test_redirect_is_a_rejection_and_the_prompt_is_sent_nowhere_else():
    asked = []

    async def handler(request):
        asked.append(request.path)
        return web.Response(status=307, headers={"Location": "/elsewhere"}, text="moved")

    async def body():
        async with stand_in(handler, "/{any}") as url:
            await generate(url)

    with pytest.raises(EngineRequestError, match="/generate rejected the request with HTTP 307: moved"):
        asyncio.run(body())
    assert asked == ["/generate"]


@pytest.mark.parametrize(
    "foreign",
    [
        {"weight_version": "default"},
        {"weight_versions": [{"version": "default", "start": 0, "end": 1}, {"version": "7", "start": 1, "end": 2}]},
    ],
)
@pytest.mark.parametrize("updated", [True, False])
def test_response_with_an_unknown_weight_version_is_not_used(foreign, updated):
    calls = 0

    async def handler(request):
        nonlocal calls
        calls += 1
        meta = ANSWER["meta_info"] | (foreign if calls == 1 else {})
        return web.json_response(ANSWER | {"meta_info": meta})

    async def body():
        async with stand_in(handler) as url:
            return await generate(url, weights_are_updated=updated)

    answer = asyncio.run(body())
    versions = {answer.weight_version, *(version for version, _ in answer.version_spans)}
    assert (calls, "default" in versions) == ((2, False) if updated else (1, True))


def test_server_that_never_gets_weights_ends_the_request_by_name():
    async def handler(request):
        return web.json_response(ANSWER | {"meta_info": ANSWER["meta_info"] | {"weight_version": "default"}})

    async def body():
        async with stand_in(handler) as url:
            await generate(url, weights_are_updated=True)

    with pytest.raises(EngineUnavailableError, match="the weights 'default', which this run never sent .tried 7 times"):
        asyncio.run(body())


def test_silent_engine_times_out():
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

    with pytest.raises(EngineResponseError, match="log-probabilities"):
        asyncio.run(body())


def test_requests_in_flight_do_not_exceed_the_limit():
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


def test_abort_reaches_requests_waiting_for_a_retry_immediately(monkeypatch):
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


def test_abort_returns_requests_held_by_a_hung_server_and_the_client_continues(monkeypatch):
    monkeypatch.setattr(client_module, "ABORT_PATIENCE_S", 0.3)
    hangs = True

    async def handler(request):
        if hangs:
            await asyncio.sleep(30)
        return web.json_response(ANSWER)

    async def body():
        nonlocal hangs
        async with (
            stand_in(handler) as url,
            RouterClient(url, [url], concurrency=4, request_timeout_s=60) as client,
        ):
            tasks = [asyncio.create_task(client.generate([1], {})) for _ in range(6)]
            await asyncio.sleep(0.1)
            async with asyncio.timeout(3):
                await client.abort_all()
                answers = await asyncio.gather(*tasks)
            hangs = False
            return answers, client.in_flight, await client.generate([1], {})

    answers, in_flight, after = asyncio.run(body())
    assert [(a.finish_reason, a.token_ids, a.weight_version) for a in answers] == [("abort", [], "")] * 6
    assert in_flight == 0 and after.token_ids == [3, 4]


def test_control_distinguishes_rejections_timeouts_and_absence():
    async def handler(request):
        if request.path == "/pause_generation":
            return web.Response(status=400, text="no")
        await asyncio.sleep(30)

    async def body():
        async with stand_in(handler, "/{any}") as url:
            with pytest.raises(EngineRequestError, match="/pause_generation rejected the request with HTTP 400: no"):
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


@contextlib.contextmanager
def dripping(*pieces: bytes, every_s: float):
    """A server that sends these chunks one by one, repeating the last one; yields its address."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        done = threading.Event()

        def serve():
            connection, _ = listener.accept()
            with connection, contextlib.suppress(OSError):
                connection.recv(65536)
                for number in itertools.count():
                    connection.sendall(pieces[min(number, len(pieces) - 1)])
                    if done.wait(every_s):
                        return

        thread = threading.Thread(target=serve)
        thread.start()
        try:
            yield f"http://127.0.0.1:{listener.getsockname()[1]}"
        finally:
            done.set()
            thread.join(10)


@pytest.mark.parametrize(
    "pieces",
    [
        [b"HTTP/1.1 200 OK\r\nContent-Length: 100000\r\n\r\n", b"["],
        [b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\n[\r\n"],
        [b"HTTP/1.1 200 OK\r\nX-Long: ", b"a"],
        [b"H", b"T"],
    ],
    ids=["body", "chunks", "header", "status"],
)
def test_slowly_dripping_response_ends_at_the_time_limit(pieces):
    with dripping(*pieces, every_s=0.05) as url:
        started = time.monotonic()
        with pytest.raises(EngineTimeoutError, match="/health did not answer within 0.4 s"):
            call("GET", f"{url}/health", timeout_s=0.4)
        assert time.monotonic() - started < 1.5


def test_chunked_response_within_the_time_limit_is_complete():
    head = b"HTTP/1.1 200 OK\r\nContent-Length: 8\r\n\r\n"
    with dripping(head, b'{"a"', b": 1}", every_s=0.05) as url:
        assert call("GET", f"{url}/health", timeout_s=10) == {"a": 1}


@pytest.mark.parametrize(
    ("text", "ask", "message"),
    [
        ("null", "weight_version", "/model_info did not answer as SGLang does: Expected `object`, got `null`"),
        ("{}", "weight_version", "missing required field `weight_version`; it answered {}"),
        ('{"weight_version": 7}', "weight_version", r"got `int` - at `\$.weight_version`; it answered"),
        ("[1, 2]", "server_info", r"Expected `object`, got `array`; it answered \[1, 2\]"),
        ("{garbage", "server_info", r"/server_info answered invalid JSON .*: '\{garbage'"),
        ("<html>", "server_info", "Expected `object`, got `str`; it answered '<html>'"),
        ('{"ranks": null}', "weights_checksum", r"got `null` - at `\$.ranks`; it answered"),
    ],
)
def test_control_reports_the_invalid_field_and_its_value(text, ask, message):
    async def handler(request):
        return web.Response(text=text)

    async def body():
        app = web.Application()
        app.router.add_route("*", "/{any}", handler)
        runner = web.AppRunner(app, shutdown_timeout=0.1)
        await runner.setup()
        await web.TCPSite(runner, "127.0.0.1", 0).start()
        try:
            control = ServerControl(f"http://127.0.0.1:{runner.addresses[0][1]}", timeout_s=5)
            await asyncio.to_thread(getattr(control, ask))
        finally:
            await runner.cleanup()

    with pytest.raises(EngineResponseError, match=message):
        asyncio.run(body())


def test_control_needs_a_url():
    with pytest.raises(ValueError, match="http://host:port"):
        ServerControl("127.0.0.1:3000")


def response_with(entries: str, output_ids: list[int], rest: str = "") -> bytes:
    """A response whose log-probabilities are the JSON `entries`, with `rest` after them."""
    meta = '"id": "1", "finish_reason": {"type": "stop"}, "weight_version": "7"'
    meta += f', "output_token_logprobs":{entries}{rest}'
    return f'{{"text":"]]","output_ids":{output_ids},"meta_info":{{{meta}}}}}'.encode()


@pytest.mark.parametrize(
    ("entries", "rest"),
    [
        ("[[-0.5,3,null],[-1e-05,4,null]]", ""),
        ("[[-0.5,3,null],[0,4,null]]", ',"input_token_logprobs":[],"x":1'),
        ("[[-0.5, 3, null], [-0.25, 4, null]]", ""),
        ("[[-0.5,3,null],[-1e29,4,null]]", ""),
        ("[[-0.5,3,null],[-0.25,4,null]]", ',"input_top_logprobs":[[1],[2]]'),
        ('[[-0.5,3,"]]"],[-0.25,4,"b"]]', ""),
        ("[[-0.5,3],[-0.25,4]]", ""),
    ],
)
def test_response_is_the_same_read_entry_by_entry_or_at_once(entries, rest):
    content = response_with(entries, [3, 4], rest)
    generation = ResponseReader(64).generation(content)
    expected = json.loads(content)["meta_info"]["output_token_logprobs"]
    assert generation.log_probs == [entry[0] for entry in expected]
    assert [type(value) for value in generation.log_probs] == [float, float]
    assert (generation.token_ids, generation.text, generation.weight_version) == ([3, 4], "]]", "7")
    assert generation.version_spans == [["7", 2]]


@pytest.mark.parametrize(
    "entries",
    [
        "[[-0.5,3,null],[true,4,null]]",
        "[[-0.5,3,null],[false,4,null]]",
        "[[-0.5,3,null],[-0.25,5,null]]",
        "[[-0.5,3,null]]",
        "[[-0.5,3,null],[-0.25,4,null],[-0.25,4,null]]",
        "[[-0.5,3,null],[-1e31,4,null]]",
        "[[-0.5,3,null],[0.002,4,null]]",
        '[[-0.5,3,null],["-0.25",4,null]]',
        "[[-0.5,3,null],[null,4,null]]",
        "[[-0.5,3,null],[-0.25,4,null]",
        "[]",
    ],
)
def test_unusable_entries_are_errors(entries):
    with pytest.raises(EngineResponseError):
        ResponseReader(64).generation(response_with(entries, [3, 4]))


def test_usual_response_stays_packed_and_an_empty_one_is_usable():
    usual = ResponseReader(64).generation(response_with("[[-0.5,3,null]]", [3]))
    assert len(usual.column("token_ids")) == 1 and not isinstance(usual.column("log_probs"), list)
    empty = ResponseReader(64).generation(response_with("[]", []))
    assert (empty.token_ids, empty.log_probs) == ([], [])
