"""Asynchronous generation through the router: token ids in, token ids and log-probabilities out.

Guarantees: at most `concurrency` requests in flight; token ids and log-probabilities of a response are aligned; errors
contain the engine's message. Retries:

| failure | retry |
| --- | --- |
| the engine rejected (HTTP 4xx) or redirected (3xx) the request | never |
| the response is malformed or has impossible values | never |
| the request took longer than `request_timeout_s` | never |
| no server accepted it: no router listens, or it has no server (HTTP 503) | for `retry_timeout_s` |
| the server was lost: the connection broke, or another HTTP 5xx | `MAX_LOSSES` times in all |
| the response is from weights that this run did not send (`weights_are_updated`) | as for a lost server |
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar

import orjson

from slimrl.data.routed_experts import RoutingShape
from slimrl.engines.http import ConnectionPool, NotConnectedError, bearer
from slimrl.engines.prompt_images import PromptImages
from slimrl.engines.protocol import (
    RETRY_TIMEOUT_S,
    EngineRequestError,
    EngineResponseError,
    EngineTimeoutError,
    EngineUnavailableError,
    Generation,
    RequestStats,
    aborted_answer,
)
from slimrl.engines.server_pools import ServerPools
from slimrl.engines.sglang.adapters import AdapterOfRequests, answer_with_version, with_version
from slimrl.engines.sglang.inputs import videos
from slimrl.engines.sglang.responses import ResponseReader, decoded
from slimrl.models.adapters import SharedAdapter

logger = logging.getLogger(__name__)

T = TypeVar("T")

# the router's policy "manual" sends equal keys to one server (for its prefix cache), see `router.py`
SESSION_HEADER = "X-SMG-Routing-Key"
MAX_LOSSES = 6  # bounds the damage of a request that crashes every server
FIRST_BACKOFF_S = 0.25  # doubles
LONGEST_BACKOFF_S = 2.0
CONNECT_TIMEOUT_S = 10.0
_SHOWN_SERVERS = 4
ABORT_INTERVAL_S = 0.1
ABORT_REQUEST_TIMEOUT_S = 10.0
ABORT_PATIENCE_S = 120.0  # an engine aborts between two steps; the longest step is the prefill of a long prompt


class _RejectedError(ConnectionError):
    """No server accepted the request."""


class _ConnectionLostError(ConnectionError):
    """The server of a request was lost; generation has no side effects, so another server can restart it."""


class RouterClient:
    """Implements `slimrl.engines.protocol.EngineGroupClient`. Use as `async with`, within one event loop.

    `server_urls` are the servers for aborts, which the router does not forward; assign it when they change.
    `request_timeout_s` bounds one attempt, from its start to the last byte of the response. `retry_timeout_s` is how
    long a request that no server accepts is retried: long enough to replace the router or the only server.
    `weights_are_updated`: versions of sent weights are numbers; responses of other versions are rejected (a server that
    its owner has just restarted). `key` is sent to router and servers. Token ids >= `vocabulary` are rejected. Requests
    for generation use the LoRA adapter `adapter`, unless they name another one or None; of a shared adapter the version
    of `use_weight_version`, which their responses then have. With `routing`, training's return the chosen experts.
    """

    def __init__(
        self,
        router_url: str,
        server_urls: Sequence[str],
        *,
        concurrency: int,
        request_timeout_s: float,
        retry_timeout_s: float = RETRY_TIMEOUT_S,
        weights_are_updated: bool = False,
        key: str | None = None,
        vocabulary: int | None = None,
        adapter: str | SharedAdapter | None = None,
        routing: RoutingShape | None = None,
    ) -> None:
        if concurrency < 1:
            raise ValueError(f"concurrency is {concurrency}: at least one request must be able to run")
        self.router_url = router_url.rstrip("/")
        self.server_urls = [url.rstrip("/") for url in server_urls]
        self._headers = {"Content-Type": "application/json", **bearer(key)}
        self._concurrency = concurrency
        self._request_timeout_s = request_timeout_s
        self._retry_timeout_s = retry_timeout_s
        self._reader = ResponseReader(vocabulary)
        self._routing = routing
        self._servers = ServerPools(self._headers, connect_timeout_s=CONNECT_TIMEOUT_S)
        self._adapter = AdapterOfRequests(adapter)
        self._weights_are_updated = weights_are_updated and not self._adapter.is_shared
        # not a semaphore: it scans the waiters that it has woken, which is slow with thousands of waiters
        self._permits: asyncio.LifoQueue[None] = asyncio.LifoQueue()
        self._surplus = 0  # permits to withdraw, after the concurrency was lowered
        for _ in range(concurrency):
            self._permits.put_nowait(None)
        self._connections: ConnectionPool | None = None
        self._in_flight = 0
        self._waiting = 0  # requests between two attempts
        self.resent = 0  # number of resent requests
        self.requests = RequestStats()
        self._aborted = asyncio.Event()  # of the requests made since the last abort, which replaced it

    async def __aenter__(self) -> RouterClient:
        self._aborted = asyncio.Event()
        self._connections = self._new_connections()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Drops every connection; the servers cancel requests in flight, and none is resent."""
        connections, self._connections = self._connections, None
        if connections is not None:
            self._aborted.set()  # wakes requests that wait for a retry; they find the client closed
            await connections.close()
            await self._servers.close()

    @property
    def in_flight(self) -> int:
        """Number of requests that were sent and not yet answered."""
        return self._in_flight

    async def generate(
        self,
        input_ids: list[int],
        sampling_params: dict[str, Any],
        session_id: str | None = None,
        images: PromptImages | None = None,
    ) -> Generation:
        """Continue `input_ids`; `sampling_params` go to the engine unchanged (send one `sampling_seed` per request).

        A request that was aborted before an engine accepted it has no tokens and the weight version "". The engine's
        processor gives each of `images` its tokens; a prompt of another length than `input_ids` is an error.

        `session_id` keeps the requests of one conversation on one server, if the router's policy supports it. Raises
        EngineRequestError (rejected, with the body), EngineTimeoutError, EngineUnavailableError (after retries), and
        EngineResponseError.
        """
        payload = {"input_ids": input_ids, "sampling_params": sampling_params, "return_logprob": True}
        routing = None if self.requests.is_apart else self._routing  # an evaluation needs none
        if routing is not None:
            payload["return_routed_experts"] = True
        if images is not None:
            payload |= videos.payload(input_ids, images)
        read, direct = functools.partial(self._generation, routing=routing), routing is not None
        response = await self._request("/generate", payload, session_id, read, direct=direct)
        if response is None:
            return Generation([], [], "abort", "")
        generation, sent_ns = response
        if images is not None and generation.prompt_tokens != len(input_ids):
            raise EngineResponseError(
                f"the engine made {generation.prompt_tokens} tokens of a prompt with images that has {len(input_ids)}:"
                " its image processor must be that of --hf-checkpoint (preprocessor_config.json)"
            )
        generation.sent_ns = sent_ns
        return generation

    async def ask(self, path: str, payload: dict[str, Any], session_id: str | None = None) -> Any:
        """The decoded response to a POST of `payload` to the router's `path`, with the retries of `generate`.

        A request that was aborted before an engine accepted it returns `aborted_answer`, if `path` has one. Raises as
        `generate` does, and ValueError for a streaming request.
        """
        if payload.get("stream"):
            raise ValueError(f"{path}: streaming is not supported: remove stream from the payload")

        def read(content: bytes, version: str | None) -> Any:
            if path == "/generate" and payload.get("return_logprob") and content.startswith(b"{"):
                self._generation(content, version)  # validated and counted like any other
            answer = decoded(content)
            return answer if version is None else answer_with_version(answer, version)

        response = await self._request(path, payload, session_id, read)
        return aborted_answer(path) if response is None else response[0]

    def use_weight_version(self, version: str) -> None:
        """As `EngineGroupClient.use_weight_version`."""
        self._adapter.use(version)

    def _generation(self, content: bytes, version: str | None, routing: RoutingShape | None = None) -> Generation:
        try:
            generation = self._reader.generation(content, self.requests, routing)
        except EngineResponseError as error:
            servers = ", ".join(self.server_urls[:_SHOWN_SERVERS])
            more = f" and {len(self.server_urls) - _SHOWN_SERVERS} more" * (len(self.server_urls) > _SHOWN_SERVERS)
            behind = f", by a server behind it ({servers}{more})" if servers else ""
            raise EngineResponseError(f"{self.router_url}/generate was answered{behind}: {error}") from error
        if self._weights_are_updated:
            _require_updated(generation)
        return generation if version is None else with_version(generation, version)

    async def _request(
        self,
        path: str,
        payload: dict[str, Any],
        session_id: str | None,
        read: Callable[[bytes, str | None], T],
        *,
        direct: bool = False,
    ) -> tuple[T, int] | None:
        """`read(response, version)` and the time when the request was sent; None if it was aborted before it was sent.

        `version` is that of the adapter in the attempt that was answered; None if the server reports it. `direct`: it
        goes to one of the servers themselves.
        """
        headers = {SESSION_HEADER: session_id} if session_id is not None else None
        aborted, policy = self._aborted, _RetryPolicy(self._retry_timeout_s)
        while True:
            await self._permits.get()
            try:
                connections = self._open()
                if aborted.is_set() and aborted_answer(path) is not None:  # while it waited for a permit
                    return None
                named, version = self._adapter.named_in(path, payload)
                sent_ns = time.monotonic_ns()
                body = orjson.dumps(named)
                if direct:
                    content = await self._post_directly(path, body, session_id)
                else:
                    content = await self._post(self.router_url, connections, path, body, headers)
                return read(content, version), sent_ns
            except (_RejectedError, _ConnectionLostError) as error:
                if self._connections is None:
                    raise EngineUnavailableError(f"{error} (the client was closed)") from error
                backoff_s = policy.backoff_after(error)
                self.resent += 1
                # one line per outage, not one per request
                level = logging.DEBUG if self._waiting else logging.WARNING
                logger.log(level, "%s: trying again in %.2g s", error, backoff_s)
            finally:
                self._return_permit()
            await self._wait(backoff_s, aborted)

    @property
    def concurrency(self) -> int:
        """As `EngineGroupClient.concurrency`."""
        return self._concurrency

    def set_concurrency(self, requests: int) -> None:
        """As `EngineGroupClient.set_concurrency`."""
        self._surplus += self._concurrency - requests
        self._concurrency = requests
        while self._surplus < 0:
            self._surplus += 1
            self._permits.put_nowait(None)

    def _return_permit(self) -> None:
        if self._surplus > 0:
            self._surplus -= 1
        else:
            self._permits.put_nowait(None)

    async def abort_all(self) -> None:
        """Abort every request made so far; returns when all of them have returned.

        Requests that wait for a permit or a retry return without tokens, as do requests that a hung server holds for
        more than ABORT_PATIENCE_S. Requests made before this returns may be aborted, too.
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
                await self._close_connections()
            await asyncio.sleep(ABORT_INTERVAL_S)  # a request may have been between router and server

    async def _close_connections(self) -> None:
        """Closes every connection: the requests in flight fail, and return as aborted."""
        logger.warning("%d requests ignored the abort: closing their connections", self._in_flight)
        connections, self._connections = self._open(), self._new_connections()
        await connections.close()
        await self._servers.close()

    async def _wait(self, seconds: float, aborted: asyncio.Event) -> None:
        self._waiting += 1
        try:
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(aborted.wait(), seconds)
        finally:
            self._waiting -= 1

    async def _abort_on(self, server_url: str, failed: set[str]) -> None:
        # a fresh connection: servers of others may drop idle ones after 5 s
        self._open()
        headers = {"Connection": "close", **self._headers}
        try:
            async with ConnectionPool(server_url, headers, connect_timeout_s=ABORT_REQUEST_TIMEOUT_S) as connection:
                path, body = self._adapter.abort_call()
                status, content = await connection.post(path, body, timeout_s=ABORT_REQUEST_TIMEOUT_S)
            if status != 200:
                raise EngineUnavailableError(
                    f"{server_url}{path} failed with HTTP {status}: {content.decode(errors='replace')}"
                )
        except (ConnectionError, TimeoutError) as error:
            # a lost server has nothing to abort; the router moves or fails its requests
            if server_url not in failed:
                logger.warning("cannot abort requests on %s: %s: %s", server_url, type(error).__name__, error)
            failed.add(server_url)

    async def _post_directly(self, path: str, body: bytes, session_id: str | None) -> bytes:
        try:
            with self._servers.chosen(self.server_urls, session_id) as (url, connections):
                return await self._post(url, connections, path, body, None)
        except ConnectionRefusedError as error:
            raise _RejectedError(str(error)) from error

    async def _post(
        self, url: str, connections: ConnectionPool, path: str, body: bytes, headers: dict[str, str] | None
    ) -> bytes:
        url, started = f"{url}{path}", time.monotonic()
        self._in_flight += 1
        try:
            status, content = await connections.post(path, body, headers, timeout_s=self._request_timeout_s)
        except NotConnectedError as error:
            raise _RejectedError(f"{url} cannot be reached: {error}") from error
        except TimeoutError as error:
            raise EngineTimeoutError(f"{url} did not answer within {self._request_timeout_s:g} s") from error
        except ConnectionError as error:
            raise _ConnectionLostError(f"{url} broke off: {type(error).__name__}: {error}") from error
        finally:
            self._in_flight -= 1
        if status == 200:
            return content
        text = content.decode(errors="replace")
        if 300 <= status < 500:
            if self._adapter.is_absent(text):
                raise _ConnectionLostError(f"{url}: a server has no longer the run's adapter: {text}")
            raise EngineRequestError(url, status, text)
        if time.monotonic() - started >= self._request_timeout_s:  # the router has the same timeout
            raise EngineTimeoutError(f"{url} did not answer within {self._request_timeout_s:g} s: {text}")
        kind = _RejectedError if status == 503 else _ConnectionLostError
        raise kind(f"{url} failed with HTTP {status}: {text}")

    def _new_connections(self) -> ConnectionPool:
        return ConnectionPool(self.router_url, self._headers, connect_timeout_s=CONNECT_TIMEOUT_S)

    def _open(self) -> ConnectionPool:
        if self._connections is None:
            raise RuntimeError("the client is not open (yet, or any more): use it as 'async with RouterClient(...)'")
        return self._connections


def _require_updated(generation: Generation) -> None:
    for version in (generation.weight_version, *(version for version, _ in generation.version_spans)):
        if not version.isdecimal():
            raise _ConnectionLostError(f"a server answered with the weights {version!r}, which this run never sent")


class _RetryPolicy:
    """Counts the failed attempts of one request."""

    def __init__(self, retry_timeout_s: float) -> None:
        self._retry_timeout_s = retry_timeout_s
        self._count = 0
        self._losses = 0
        self._rejected_since: float | None = None
        self._backoff_s = FIRST_BACKOFF_S

    def backoff_after(self, error: _RejectedError | _ConnectionLostError) -> float:
        """Seconds to wait before the next attempt. Raises EngineUnavailableError if no attempts are left."""
        self._count += 1
        if isinstance(error, _ConnectionLostError):
            self._losses += 1
            self._rejected_since = None
            exhausted = self._losses > MAX_LOSSES
        else:
            self._rejected_since = self._rejected_since or time.monotonic()
            exhausted = time.monotonic() - self._rejected_since >= self._retry_timeout_s
        if exhausted:
            raise EngineUnavailableError(f"{error} (tried {self._count} times)") from error
        backoff_s, self._backoff_s = self._backoff_s, min(2 * self._backoff_s, LONGEST_BACKOFF_S)
        return backoff_s
