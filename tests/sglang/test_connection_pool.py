"""Connections of the client: which are used again, how a response ends, and what is refused."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
import uvloop

from slimrl.engines.http import ConnectionPool, NotConnectedError

WHOLE = b"HTTP/1.1 200 OK\r\nContent-Length: 5\r\n\r\nwhole"


@contextlib.asynccontextmanager
async def pool_on(*responses: bytes, ends: bool = False, **arguments):
    """A pool on a server that sends one of `responses` per request, in pieces, and then `ends` the connection.

    Yields the pool and the requests of each connection.
    """
    connections: list[list[bytes]] = []
    left = list(responses)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        requests: list[bytes] = []
        connections.append(requests)
        with contextlib.suppress(asyncio.IncompleteReadError):
            while left:
                head = await reader.readuntil(b"\r\n\r\n")
                length = int(head.lower().split(b"content-length: ")[1].split(b"\r\n")[0])
                requests.append(head + await reader.readexactly(length))
                response = left.pop(0)
                for start in range(0, len(response), 7):
                    writer.write(response[start : start + 7])
                    await writer.drain()
                if ends:
                    break
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    async with ConnectionPool(f"http://127.0.0.1:{port}", {}, connect_timeout_s=5, **arguments) as pool:
        yield pool, connections
    server.close()


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_requests_in_turn_share_a_connection_and_concurrent_ones_do_not(run):
    async def body():
        async with pool_on(*[WHOLE] * 5) as (pool, connections):
            for number in range(3):
                assert await pool.post("/a", b"%d" % number, timeout_s=5) == (200, b"whole")
            await asyncio.gather(*(pool.post("/b", b"x" * 100, {"X-Key": "k"}, timeout_s=5) for _ in range(2)))
            return connections, pool.headers["Host"]

    (first, second), host = run(body())
    assert first[1] == f"POST /a HTTP/1.1\r\nHost: {host}\r\nContent-Length: 1\r\n\r\n1".encode()
    assert (len(first), len(second)) == (4, 1)
    assert b"\r\nX-Key: k\r\nContent-Length: 100\r\n" in second[0]


@pytest.mark.parametrize(
    ("response", "expected"),
    [
        (b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n3\r\nabc\r\n2\r\nde\r\n0\r\n\r\n", (200, b"abcde")),
        (b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 201 Created\r\nContent-Length: 2\r\n\r\nok", (201, b"ok")),
        (b"HTTP/1.0 200 OK\r\n\r\nuntil the end", (200, b"until the end")),
        (b"HTTP/1.1 503 Service Unavailable\r\nContent-Length: 0\r\nConnection: close\r\n\r\n", (503, b"")),
    ],
    ids=["chunked", "after 100", "until the connection ends", "empty"],
)
def test_response_is_complete_however_its_end_is_marked(response, expected):
    async def body():
        async with pool_on(response, WHOLE, ends=True) as (pool, connections):
            first = await pool.post("/a", b"", timeout_s=5)
            await asyncio.sleep(0.05)  # the end of the connection arrives
            return [first, await pool.post("/a", b"", timeout_s=5)], len(connections)

    assert asyncio.run(body()) == ([expected, (200, b"whole")], 2)  # the second one on a new connection


@pytest.mark.parametrize(
    ("response", "error", "message"),
    [
        (b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\npart", ConnectionResetError, "the server closed the connection"),
        (b"", ConnectionResetError, "the server closed the connection"),
        (b"220 mail.example.com\r\n\r\n", ConnectionError, "the response is not HTTP"),
    ],
    ids=["truncated", "none", "another protocol"],
)
def test_incomplete_response_is_an_error(response, error, message):
    async def body():
        async with pool_on(response, ends=True) as (pool, _):
            await pool.post("/a", b"", timeout_s=5)

    with pytest.raises(error, match=message):
        asyncio.run(body())


def test_late_response_is_not_taken_for_that_of_the_next_request():
    async def body():
        async with pool_on(b"HTTP/1.1 200 OK\r\n", WHOLE) as (pool, connections):
            with pytest.raises(TimeoutError):
                await pool.post("/a", b"1", timeout_s=0.05)
            cancelled = asyncio.create_task(pool.post("/a", b"2", timeout_s=5))
            await asyncio.sleep(0)
            cancelled.cancel()
            await asyncio.wait([cancelled])
            return await pool.post("/a", b"3", timeout_s=5), [requests[-1][-1:] for requests in connections if requests]

    assert asyncio.run(body()) == ((200, b"whole"), [b"1", b"3"])


def test_closed_pool_fails_its_requests_at_once():
    async def body():
        async with pool_on(b"HTTP/1.1 200 OK\r\n\r\nno end", WHOLE) as (pool, _):
            waiting = asyncio.create_task(pool.post("/a", b"", timeout_s=60))
            await asyncio.sleep(0.05)
            await pool.close()
            async with asyncio.timeout(1):
                await asyncio.wait([waiting])
            with pytest.raises(NotConnectedError, match="were closed"):
                await pool.post("/a", b"", timeout_s=60)
            return waiting.exception()

    assert isinstance(asyncio.run(body()), ConnectionResetError)


def test_header_with_a_line_break_is_refused():
    async def body():
        async with pool_on() as (pool, _):
            await pool.post("/a", b"", {"X-Key": "a\r\nHost: other"}, timeout_s=5)

    with pytest.raises(ValueError, match="'X-Key'.*remove the line break"):
        asyncio.run(body())
    with pytest.raises(ValueError, match="http://host:port"):
        ConnectionPool("10.0.0.1:3000", {}, connect_timeout_s=5)


@pytest.mark.parametrize("run", [asyncio.run, uvloop.run], ids=["asyncio", "uvloop"])
def test_request_ends_at_once_when_it_is_cancelled_at_any_moment(run):
    async def silent(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read()
        writer.close()

    async def body():
        server = await asyncio.start_server(silent, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with ConnectionPool(url, {}, connect_timeout_s=5) as pool:
            for turns in range(20):  # while it connects, as the connection arrives, and while it waits
                task = asyncio.create_task(pool.post("/generate", b"x", timeout_s=30))
                for _ in range(turns):
                    await asyncio.sleep(0)
                task.cancel()
                done, _ = await asyncio.wait([task], timeout=5)
                assert done == {task} and task.cancelled(), f"after {turns} turns of the loop"
        server.close()

    run(body())


def test_connection_whose_end_was_read_is_not_used_again():
    async def body():
        async with pool_on(WHOLE, WHOLE) as (pool, connections):
            await pool.post("/a", b"1", timeout_s=5)
            (unused,) = pool._unused
            unused.eof_received()
            assert await pool.post("/a", b"2", timeout_s=5) == (200, b"whole")
            assert [len(requests) for requests in connections] == [1, 1]

    asyncio.run(body())
