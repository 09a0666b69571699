"""Asynchronous generation through the router: token ids in, token ids and log-probabilities out.

Promises at most `concurrency` requests in flight, answers whose ids and log-probabilities are aligned, and the
engine's own words in every error. What is sent again, and how often:

| what happened | what follows |
| --- | --- |
| the engine refused (HTTP 4xx), or sent it elsewhere (3xx) | never sent again |
| the answer has not the form of an engine's, or values that it cannot have | never sent again |
| the request took longer than `request_timeout_s` | never sent again |
| nobody took it: no router listens, or it has no server (HTTP 503) | again, for `keep_trying_s` on end |
| whoever worked on it was lost: the connection broke, or another HTTP 5xx | again, `MAX_LOSSES` times in all |
| it was answered with weights that nobody sent (`weights_are_updated`) | again, as for a lost server |
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar

import aiohttp
import orjson

from slimrl.engines.auth import bearer
from slimrl.engines.protocol import (
    EngineRequestError,
    EngineResponseError,
    EngineTimeoutError,
    EngineUnavailableError,
    Generation,
    aborted_answer,
)
from slimrl.engines.sglang.responses import RequestStats, ResponseReader, decoded

logger = logging.getLogger(__name__)

T = TypeVar("T")

# the router's policy "manual" sends equal keys to one server (its prefix cache), see `routing.py`
SESSION_HEADER = "X-SMG-Routing-Key"
MAX_LOSSES = 6  # a request that every server dies of must not end all of them
KEEP_TRYING_S = 16.0
FIRST_BACKOFF_S = 0.25  # doubles
LONGEST_BACKOFF_S = 2.0
CONNECT_TIMEOUT_S = 10.0
_SHOWN_SERVERS = 4
ABORT_INTERVAL_S = 0.1
ABORT_REQUEST_TIMEOUT_S = 10.0
ABORT_PATIENCE_S = 120.0  # an engine heeds an abort between two steps; the longest is the prefill of a long prompt


class _RejectedError(Exception):
    """Nobody began to work on the request."""


class _ConnectionLostError(Exception):
    """Whoever worked on the request was lost; generation has no side effects, so another may restart."""


class RouterClient:
    """Implements `slimrl.engines.protocol.EngineClient`. Use as `async with`, within one event loop.

    `server_urls` are the servers behind the router, which does not pass aborts on; set it again when they change.
    `request_timeout_s` bounds one attempt, from its start to the last byte of the answer. `keep_trying_s` is how long
    a request that nobody takes is offered again: long enough for a router or the only server to be replaced.
    `weights_are_updated`: weights that were sent have numbers for versions, and an answer with others is not used: it
    is of a server that its owner started again, which is noticed a moment later. `key` is shown to router and servers.
    `vocabulary`: ids from this on are refused.
    """

    def __init__(
        self,
        router_url: str,
        server_urls: Sequence[str],
        *,
        concurrency: int,
        request_timeout_s: float,
        keep_trying_s: float = KEEP_TRYING_S,
        weights_are_updated: bool = False,
        key: str | None = None,
        vocabulary: int | None = None,
    ) -> None:
        if concurrency < 1:
            raise ValueError(f"concurrency is {concurrency}: at least one request must be able to run")
        self.router_url = router_url.rstrip("/")
        self.server_urls = [url.rstrip("/") for url in server_urls]
        self._key = key
        self._concurrency = concurrency
        self._request_timeout_s = request_timeout_s
        self._keep_trying_s = keep_trying_s
        self._weights_are_updated = weights_are_updated
        self._reader = ResponseReader(vocabulary)
        # a semaphore looks through those that it woke already, which costs more than a request where thousands wait
        self._gpus: asyncio.LifoQueue[None] = asyncio.LifoQueue()
        for _ in range(concurrency):
            self._gpus.put_nowait(None)
        self._session: aiohttp.ClientSession | None = None
        self._in_flight = 0
        self._waiting = 0  # requests between two tries
        self.resent = 0  # how often any request was sent again
        self.requests = RequestStats()
        self._aborted = asyncio.Event()  # of the requests that are made from now on; each abort ends one

    async def __aenter__(self) -> RouterClient:
        self._aborted = asyncio.Event()
        self._session = self._new_session()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Drops every connection; requests in flight are cancelled by the servers, and none is sent again."""
        session, self._session = self._session, None
        if session is not None:
            self._aborted.set()  # whoever waits to try again finds the client closed
            await session.close()

    @property
    def in_flight(self) -> int:
        """Requests that were sent and not yet answered."""
        return self._in_flight

    async def generate(
        self, input_ids: list[int], sampling_params: dict[str, Any], session_id: str | None = None
    ) -> Generation:
        """Continue `input_ids`; `sampling_params` go to the engine unchanged (send one `sampling_seed` per request).

        An aborted request that no engine had begun has no tokens and the weight version "".

        `session_id` keeps the requests of one conversation on one server, where the router's policy heeds it. Raises
        EngineRequestError (refused: the body says why), EngineTimeoutError, EngineUnavailableError (after retries), and
        EngineResponseError.
        """
        payload = {"input_ids": input_ids, "sampling_params": sampling_params, "return_logprob": True}
        answer = await self._answered("/generate", payload, session_id, self._generation)
        if answer is None:
            return Generation([], [], "abort", "")
        generation, sent_ns = answer
        generation.sent_ns = sent_ns
        return generation

    async def ask(self, path: str, payload: dict[str, Any], session_id: str | None = None) -> Any:
        """The decoded answer to a POST of `payload` to the router's `path`; sent again as `generate` does.

        An aborted request that no engine had begun has the answer of `aborted_answer`, on a path that has one. Raises
        as `generate` does, and ValueError where a stream is asked for.
        """
        if payload.get("stream"):
            raise ValueError(f"{path}: answers are taken whole: leave stream out")

        def read(content: bytes) -> Any:
            if path == "/generate" and payload.get("return_logprob") and content.startswith(b"{"):
                self._generation(content)  # checked and counted as any other
            return decoded(content)

        answer = await self._answered(path, payload, session_id, read)
        return aborted_answer(path) if answer is None else answer[0]

    def _generation(self, content: bytes) -> Generation:
        try:
            generation = self._reader.generation(content, self.requests)
        except EngineResponseError as error:
            servers = ", ".join(self.server_urls[:_SHOWN_SERVERS])
            more = f" and {len(self.server_urls) - _SHOWN_SERVERS} more" * (len(self.server_urls) > _SHOWN_SERVERS)
            behind = f", by a server behind it ({servers}{more})" if servers else ""
            raise EngineResponseError(f"{self.router_url}/generate was answered{behind}: {error}") from error
        if self._weights_are_updated:
            _require_updated(generation)
        return generation

    async def _answered(
        self, path: str, payload: dict[str, Any], session_id: str | None, read: Callable[[bytes], T]
    ) -> tuple[T, int] | None:
        """What `read` makes of the answer, and when the request was sent; None where it was aborted before."""
        body = orjson.dumps(payload)
        headers = {SESSION_HEADER: session_id} if session_id is not None else {}
        aborted = self._aborted
        tries = _RetryPolicy(self._keep_trying_s)
        while True:
            await self._gpus.get()
            try:
                session = self._open()
                if aborted.is_set() and aborted_answer(path) is not None:  # while it waited for its turn
                    return None
                sent_ns = time.monotonic_ns()
                return read(await self._post(session, path, body, headers)), sent_ns
            except (_RejectedError, _ConnectionLostError) as error:
                if self._session is None:
                    raise EngineUnavailableError(f"{error} (the client was closed)") from error
                backoff_s = tries.backoff_after(error)
                self.resent += 1
                # one line per outage, not one per request
                level = logging.DEBUG if self._waiting else logging.WARNING
                logger.log(level, "%s: trying again in %.2g s", error, backoff_s)
            finally:
                self._gpus.put_nowait(None)
            await self._wait(backoff_s, aborted)

    async def abort_all(self) -> None:
        """Abort every request that has been made; returns when all of them have returned.

        Those still waiting for a GPU or for another try return without tokens, and so do those that a server which
        hangs holds for more than ABORT_PATIENCE_S. Requests made before this returns may be aborted too.
        """
        self._aborted.set()
        self._aborted = asyncio.Event()
        deadline = time.monotonic() + ABORT_PATIENCE_S
        failed: set[str] = set()
        while True:
            await asyncio.gather(*(self._abort_on(url, failed) for url in self.server_urls))
            if self._in_flight == 0:
                return
            if time.monotonic() >= deadline:
                deadline = float("inf")
                await self._hang_up()
            await asyncio.sleep(ABORT_INTERVAL_S)  # a request may have been between router and server just now

    async def _hang_up(self) -> None:
        """Breaks every connection off: whoever waits for an answer finds that it was aborted."""
        logger.warning("%d requests do not heed an abort: their connections are closed", self._in_flight)
        session, self._session = self._open(), self._new_session()
        await session.close()

    async def _wait(self, seconds: float, aborted: asyncio.Event) -> None:
        self._waiting += 1
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(aborted.wait(), seconds)
        finally:
            self._waiting -= 1

    async def _abort_on(self, server_url: str, failed: set[str]) -> None:
        timeout = aiohttp.ClientTimeout(total=ABORT_REQUEST_TIMEOUT_S)
        # a fresh connection: servers drop idle ones after 5 s
        headers = {"Connection": "close"}
        try:
            async with self._open().post(
                f"{server_url}/abort_request",
                data=b'{"abort_all": true}',
                timeout=timeout,
                headers=headers,
                allow_redirects=False,
            ) as response:
                if response.status != 200:
                    raise EngineUnavailableError(
                        f"{server_url}/abort_request failed with HTTP {response.status}: {await response.text()}"
                    )
        except (aiohttp.ClientError, TimeoutError) as error:
            # a lost server has nothing left to abort; its requests are the router's to move or fail
            if server_url not in failed:
                logger.warning("no abort on %s: %s: %s", server_url, type(error).__name__, error)
            failed.add(server_url)

    async def _post(self, session: aiohttp.ClientSession, path: str, body: bytes, headers: dict[str, str]) -> bytes:
        url = f"{self.router_url}{path}"
        started = time.monotonic()
        self._in_flight += 1
        try:
            async with session.post(url, data=body, headers=headers, allow_redirects=False) as response:
                content = await response.read()
                status = response.status
        except (aiohttp.ClientConnectorError, aiohttp.ConnectionTimeoutError) as error:
            raise _RejectedError(f"{url} cannot be reached: {error}") from error
        except TimeoutError as error:
            raise EngineTimeoutError(f"{url} did not answer within {self._request_timeout_s:g} s") from error
        except aiohttp.ClientError as error:
            raise _ConnectionLostError(f"{url} broke off: {type(error).__name__}: {error}") from error
        finally:
            self._in_flight -= 1
        if status == 200:
            return content
        words = content.decode(errors="replace")
        if 300 <= status < 500:
            raise EngineRequestError(url, status, words)
        if time.monotonic() - started >= self._request_timeout_s:  # the router measures the same time
            raise EngineTimeoutError(f"{url} did not answer within {self._request_timeout_s:g} s: {words}")
        kind = _RejectedError if status == 503 else _ConnectionLostError
        raise kind(f"{url} failed with HTTP {status}: {words}")

    def _new_session(self) -> aiohttp.ClientSession:
        return aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=60.0),
            timeout=aiohttp.ClientTimeout(total=self._request_timeout_s, sock_connect=CONNECT_TIMEOUT_S),
            headers={"Content-Type": "application/json", **bearer(self._key)},
        )

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("the client is not open (yet, or any more): use it as 'async with RouterClient(...)'")
        return self._session


def _require_updated(generation: Generation) -> None:
    for version in (generation.weight_version, *(version for version, _ in generation.version_spans)):
        if not version.isdecimal():
            raise _ConnectionLostError(f"a server answered with the weights {version!r}, which this run never sent")


class _RetryPolicy:
    """How often one request was sent in vain."""

    def __init__(self, keep_trying_s: float) -> None:
        self._keep_trying_s = keep_trying_s
        self._count = 0
        self._losses = 0
        self._untaken_since: float | None = None
        self._backoff_s = FIRST_BACKOFF_S

    def backoff_after(self, error: _RejectedError | _ConnectionLostError) -> float:
        """Seconds to wait before the next try. Raises EngineUnavailableError where there is to be none."""
        self._count += 1
        if isinstance(error, _ConnectionLostError):
            self._losses += 1
            self._untaken_since = None
            hopeless = self._losses > MAX_LOSSES
        else:
            self._untaken_since = self._untaken_since or time.monotonic()
            hopeless = time.monotonic() - self._untaken_since >= self._keep_trying_s
        if hopeless:
            raise EngineUnavailableError(f"{error} (tried {self._count} times)") from error
        backoff_s, self._backoff_s = self._backoff_s, min(2 * self._backoff_s, LONGEST_BACKOFF_S)
        return backoff_s
