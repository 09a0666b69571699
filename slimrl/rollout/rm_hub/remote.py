"""Requests for rewards over HTTP: to a service (`--rm-type remote_rm --rm-url ...`), or to SGLang servers of a model.

A request that a service rejects is never repeated. Prompts and responses are sent only to the given address: redirects
are rejected. Every wait is bounded. A failure is an error that names the service, never a reward of 0. Owned by the
reward scorer.

The servers of one model (a reward model, or the teacher of on-policy distillation) are a pool: each request goes to the
server with the fewest; if a server is unreachable, another one answers. At most `concurrency` requests are in flight
per server.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import logging
import time
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import aiohttp
import orjson

from slimrl.data.sample import Sample
from slimrl.engines.protocol import ServiceError
from slimrl.rollout.rm_hub.grader_pool import encoded

ATTEMPTS = 5
TIME_LIMIT_S = 120.0
CONNECT_LIMIT_S = 15.0  # of one address: longer than a busy server's, and bounded where its machine is down
FIRST_PAUSE_S = 0.5
MAX_CONNECTIONS = 128
MAX_REPLY_BYTES = 1 << 20
_TOO_MANY_REQUESTS = 429


class RemoteRewardError(ServiceError):
    """The reward service returned no reward; the message names its address and the cause."""


class RemoteRefused(RemoteRewardError):
    """The service returned HTTP 3xx or 4xx: the address or the request is wrong, so it is not retried."""


class RemoteUnreachable(RemoteRewardError):
    """The service failed, timed out or could not be reached in every attempt."""


class RemoteGone(RemoteUnreachable):
    """No connection to the service in the last attempt: nothing listens there, or its process has ended."""


class RemoteReward:
    """Posts `{"prompt", "response", "label"}` to one address; the JSON response is the reward.

    `name` replaces the address in messages. `ask` posts other JSON. `key` is sent as the bearer token.
    """

    def __init__(
        self,
        url: str,
        *,
        time_limit_s: float = TIME_LIMIT_S,
        first_pause_s: float = FIRST_PAUSE_S,
        name: str | None = None,
        key: str | None = None,
        max_reply_bytes: int = MAX_REPLY_BYTES,
    ) -> None:
        self._url = url
        self._headers = {"Content-Type": "application/json"} | ({"Authorization": f"Bearer {key}"} if key else {})
        self._name = name or f"--rm-url {url}"
        self._timeout = aiohttp.ClientTimeout(total=time_limit_s, sock_connect=CONNECT_LIMIT_S)
        self._time_limit_s = time_limit_s
        self._first_pause_s = first_pause_s
        self._max_reply_bytes = max_reply_bytes
        self._session: aiohttp.ClientSession | None = None
        self._loop: asyncio.AbstractEventLoop | None = None
        self._in_flight: set[asyncio.Timeout] = set()

    async def reward(self, sample: Sample, response: str | None = None) -> float | dict[str, Any]:
        """The reward of a sample; `response` replaces its response if given.

        Raises RemoteRefused for HTTP 3xx or 4xx, RemoteUnreachable if all attempts fail, RemoteRewardError if the
        response is neither a number nor a JSON object.
        """
        text = sample.response if response is None else response
        body = encoded({"prompt": sample.prompt, "response": text, "label": sample.label})
        return self._parsed(await self.ask(body))

    async def ask(self, body: bytes) -> bytes:
        """Posts this JSON and returns the response. Raises RemoteRefused and RemoteUnreachable like `reward`."""
        cause, failed = "", RemoteUnreachable
        for attempt in range(ATTEMPTS):
            if attempt:
                await asyncio.sleep(self._first_pause_s * 2 ** (attempt - 1))
            try:
                async with self._until_moved():
                    return await self._post(body)
            except (
                aiohttp.ClientConnectionError,
                aiohttp.ServerDisconnectedError,
                aiohttp.ClientPayloadError,
            ) as error:
                cause, failed = f"{type(error).__name__}: {error}", RemoteGone
            except TimeoutError:
                cause, failed = f"no response within {self._time_limit_s:g} s", RemoteUnreachable
            except _Busy as error:
                cause, failed = str(error), RemoteUnreachable
        raise failed(f"{self._name} returned no reward in {ATTEMPTS} attempts, last error: {cause}; check the service")

    def move(self, url: str, name: str) -> None:
        """Sends everything to another address from now on, also requests in flight, whose machine may not answer."""
        self._url, self._name = url, name
        for limit in self._in_flight:
            limit.reschedule(0.0)

    @contextlib.asynccontextmanager
    async def _until_moved(self) -> AsyncIterator[None]:
        """Raises TimeoutError in the block when `move` is called."""
        async with asyncio.timeout(None) as limit:
            self._in_flight.add(limit)
            try:
                yield
            finally:
                self._in_flight.discard(limit)

    def close(self) -> None:
        """Closes the connections; if their event loop is running, asynchronously."""
        session, loop, self._session = self._session, self._loop, None
        if session is None or loop is None or loop.is_closed():
            return
        if loop.is_running():
            asyncio.run_coroutine_threadsafe(session.close(), loop)
        else:
            loop.run_until_complete(session.close())

    async def _post(self, body: bytes) -> bytes:
        async with self._open_session().post(
            self._url, data=body, headers=self._headers, timeout=self._timeout, allow_redirects=False
        ) as reply:
            if 300 <= reply.status < 400:
                raise RemoteRefused(
                    f"{self._name} redirects (HTTP {reply.status}) to {reply.headers.get('Location', 'nowhere')!r}, but"
                    " prompts and responses are sent only to the given address: set --rm-url to the final address"
                )
            content = bytearray()
            async for chunk in reply.content.iter_chunked(1 << 16):
                content += chunk
                if len(content) > self._max_reply_bytes:
                    raise RemoteRewardError(
                        f"{self._name} returned more than {self._max_reply_bytes} bytes: return only the reward"
                    )
            shown = content[:300].decode(errors="replace")
            if reply.status == _TOO_MANY_REQUESTS or reply.status >= 500:
                raise _Busy(f"HTTP {reply.status}: {shown}")
            if reply.status != 200:
                raise RemoteRefused(f"{self._name} returned HTTP {reply.status}: {shown}; fix the request")
        return bytes(content)

    def _open_session(self) -> aiohttp.ClientSession:
        loop = asyncio.get_running_loop()
        if self._session is None or self._session.closed or self._loop is not loop:
            # no proxy from the environment: reward services are local
            self._session = aiohttp.ClientSession(
                connector=aiohttp.TCPConnector(limit=MAX_CONNECTIONS), trust_env=False, auto_decompress=True
            )
            self._loop = loop
        return self._session

    def _parsed(self, content: bytes) -> float | dict[str, Any]:
        try:
            reward = orjson.loads(content)
        except orjson.JSONDecodeError as error:
            raise RemoteRewardError(f"{self._name} returned {content[:300]!r}, which is not JSON") from error
        if isinstance(reward, dict):
            return reward
        if isinstance(reward, bool) or not isinstance(reward, int | float):
            raise RemoteRewardError(f"{self._name} returned {reward!r}: it must be a number or an object")
        return float(reward)


class _Busy(Exception):
    """A retryable response: HTTP 5xx or 429."""


logger = logging.getLogger(__name__)

AVOIDED_S = 60.0  # an unreachable server is used only as the last choice for this long
REPLACED_WITHIN_S = 1200.0  # a lost server, with --use-fault-tolerance
_Answer = TypeVar("_Answer")


def patience(*, replaced: bool) -> float:
    """Seconds for which a request is repeated while no server of the model is reachable; `replaced`: lost ones are."""
    return REPLACED_WITHIN_S if replaced else 0.0


def addresses(url: str) -> list[str]:
    """The server addresses in `--rm-url`."""
    return [part.strip().rstrip("/") for part in url.split(",") if part.strip()]


@dataclasses.dataclass(eq=False)
class _Server:
    """One server, its requests in flight, and until when (`time.monotonic`) it is used only as the last choice."""

    url: str
    service: RemoteReward
    slots: asyncio.Semaphore
    in_flight: int = 0
    avoided_until: float = 0.0


class ServerPool:
    """The servers at `urls`; messages call them "<owner>'s server <url>"."""

    def __init__(
        self,
        urls: list[str],
        path: str,
        *,
        owner: str,
        concurrency: int,
        key: str | None,
        time_limit_s: float = TIME_LIMIT_S,
        max_reply_bytes: int = MAX_REPLY_BYTES,
        patience_s: float = 0.0,
    ) -> None:
        """Requests are posted to `path`; `key` is sent as the bearer token.

        While no server listens, a request is repeated for `patience_s`: lost servers are replaced.
        """
        self._patience_s, self._path, self._owner = patience_s, path, owner
        self._servers = [
            _Server(
                url,
                RemoteReward(
                    f"{url}{path}",
                    name=self._name(url),
                    key=key,
                    time_limit_s=time_limit_s,
                    max_reply_bytes=max_reply_bytes,
                ),
                asyncio.Semaphore(concurrency),
            )
            for url in urls
        ]
        self._slots = asyncio.Semaphore(concurrency * len(urls))

    def _name(self, url: str) -> str:
        return f"{self._owner}'s server {url}"

    def move(self, old: str, new: str) -> None:
        """The replacement of the server at `old` is at `new`; does nothing if this pool has no such server."""
        for server in self._servers:
            if server.url == old:
                server.url, server.avoided_until = new, 0.0
                server.service.move(f"{new}{self._path}", self._name(new))

    async def ask(self, body: bytes, read: Callable[[bytes, str], _Answer]) -> _Answer:
        """`read(response, url)` of the first reachable server's response to this JSON.

        Raises RemoteRefused for HTTP 3xx or 4xx, RemoteUnreachable if all attempts on all servers fail, and the errors
        of `read`.
        """
        async with self._slots:
            remaining, deadline = list(self._servers), time.monotonic() + self._patience_s
            gone = False  # a server of this round
            while True:
                now = time.monotonic()
                server = min(remaining, key=lambda one: (one.avoided_until > now, one.in_flight))
                remaining.remove(server)
                server.in_flight += 1
                try:
                    async with server.slots:
                        return read(await server.service.ask(body), server.url)
                except RemoteUnreachable as error:
                    is_new = server.avoided_until <= now
                    server.avoided_until = time.monotonic() + AVOIDED_S
                    gone = gone or isinstance(error, RemoteGone)
                    if remaining:
                        logger.warning("%s; retrying on another server", error)
                    elif gone and time.monotonic() < deadline:
                        if is_new:
                            logger.warning("%s; waiting for its replacement", error)
                        remaining, gone = list(self._servers), False
                    else:
                        raise
                finally:
                    server.in_flight -= 1

    def close(self) -> None:
        """Closes the connections."""
        for server in self._servers:
            server.service.close()
