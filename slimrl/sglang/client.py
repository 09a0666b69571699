"""Asynchronous generation through the router: token ids in, token ids and log-probabilities out.

Promises at most `concurrency` requests in flight, answers whose ids and log-probabilities are aligned, and the
engine's own words in every error. A request that an engine refused (HTTP 4xx) is never sent again; one that surely did
not reach it, or that the router answered with HTTP 5xx because its server was lost, is, a bounded number of times.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import time
from collections.abc import Sequence
from types import TracebackType
from typing import Any

import aiohttp
import orjson

from slimrl.rollout.engine import Generation
from slimrl.sglang.errors import EngineRequestError, EngineTimeoutError, EngineUnavailableError

logger = logging.getLogger(__name__)

# the router's policies "manual" and "consistent_hashing" send equal keys to one server (its prefix cache)
SESSION_HEADER = "X-SMG-Routing-Key"
MAX_RETRIES = 6
FIRST_BACKOFF_S = 0.25  # doubles: 16 s in all
ABORT_INTERVAL_S = 0.1
ABORT_REQUEST_TIMEOUT_S = 10.0


class _NoServerError(Exception):
    """No server worked on the request to its end: it may be sent again."""


class RouterClient:
    """Implements `slimrl.rollout.engine.EngineClient`. Use as `async with`, within one event loop.

    `server_urls` are the servers behind the router, which does not pass aborts on. `request_timeout_s` bounds one
    attempt, from its start to the last byte of the answer.
    """

    def __init__(
        self, router_url: str, server_urls: Sequence[str], *, concurrency: int, request_timeout_s: float
    ) -> None:
        if concurrency < 1:
            raise ValueError(f"concurrency is {concurrency}: at least one request must be able to run")
        self.router_url = router_url.rstrip("/")
        self.server_urls = [url.rstrip("/") for url in server_urls]
        self._concurrency = concurrency
        self._request_timeout_s = request_timeout_s
        self._slots = asyncio.Semaphore(concurrency)
        self._session: aiohttp.ClientSession | None = None
        self._in_flight = 0
        self._aborted = asyncio.Event()  # of the requests that are made from now on; each abort ends one

    async def __aenter__(self) -> RouterClient:
        connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=60.0)
        self._session = aiohttp.ClientSession(
            connector=connector,
            timeout=aiohttp.ClientTimeout(total=self._request_timeout_s),
            headers={"Content-Type": "application/json"},
        )
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Drops every connection; requests in flight are cancelled by the servers."""
        if self._session is not None:
            await self._session.close()
            self._session = None

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
        EngineRequestError (refused: the body says why), EngineTimeoutError, EngineUnavailableError (after retries).
        """
        body = orjson.dumps({"input_ids": input_ids, "sampling_params": sampling_params, "return_logprob": True})
        headers = {SESSION_HEADER: session_id} if session_id is not None else {}
        aborted = self._aborted
        backoff_s = FIRST_BACKOFF_S
        deadline = time.monotonic() + self._request_timeout_s  # the router counts its own time-outs as lost servers
        for attempt in itertools.count(1):
            async with self._slots:
                if aborted.is_set():  # while it waited for its turn
                    return Generation([], [], "abort", "")
                try:
                    return _generation(await self._post(body, headers))
                except _NoServerError as error:
                    if attempt > MAX_RETRIES or time.monotonic() > deadline:
                        raise EngineUnavailableError(f"{error} (tried {attempt} times)") from error
                    logger.warning("%s: trying again in %.2g s", error, backoff_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(aborted.wait(), backoff_s)
            backoff_s *= 2
        raise AssertionError("unreachable: the count has no end")

    async def abort_all(self) -> None:
        """Abort every request that has been made; returns when all of them have returned.

        Those still waiting for a slot or for another try return without tokens. Requests made before this returns may
        be aborted too.
        """
        self._aborted.set()
        self._aborted = asyncio.Event()
        while True:
            await asyncio.gather(*(self._abort_on(url) for url in self.server_urls))
            if self._in_flight == 0:
                return
            await asyncio.sleep(ABORT_INTERVAL_S)  # a request may have been between router and server just now

    async def _abort_on(self, server_url: str) -> None:
        timeout = aiohttp.ClientTimeout(total=ABORT_REQUEST_TIMEOUT_S)
        # a fresh connection: servers drop idle ones after 5 s
        headers = {"Connection": "close"}
        try:
            async with self._open().post(
                f"{server_url}/abort_request", data=b'{"abort_all": true}', timeout=timeout, headers=headers
            ) as response:
                if response.status != 200:
                    raise EngineUnavailableError(
                        f"{server_url}/abort_request failed with HTTP {response.status}: {await response.text()}"
                    )
        except (aiohttp.ClientError, TimeoutError) as error:
            # a lost server has nothing left to abort; its requests are the router's to move or fail
            logger.warning("no abort on %s: %s: %s", server_url, type(error).__name__, error)

    async def _post(self, body: bytes, headers: dict[str, str]) -> dict[str, Any]:
        url = f"{self.router_url}/generate"
        self._in_flight += 1
        try:
            async with self._open().post(url, data=body, headers=headers) as response:
                content = await response.read()
                status = response.status
        except TimeoutError as error:
            raise EngineTimeoutError(f"{url} did not answer within {self._request_timeout_s:g} s") from error
        except aiohttp.ClientConnectorError as error:  # surely not sent; any other break may have come later
            raise _NoServerError(f"{url} cannot be reached: {error}") from error
        except aiohttp.ClientError as error:
            raise EngineUnavailableError(f"{url} broke off: {type(error).__name__}: {error}") from error
        finally:
            self._in_flight -= 1
        if 400 <= status < 500:
            raise EngineRequestError(url, status, content.decode(errors="replace"))
        if status != 200:
            raise _NoServerError(f"{url} failed with HTTP {status}: {content.decode(errors='replace')}")
        return orjson.loads(content)

    def _open(self) -> aiohttp.ClientSession:
        if self._session is None:
            raise RuntimeError("the client is not open: use it as 'async with RouterClient(...)'")
        return self._session


def _generation(answer: dict[str, Any]) -> Generation:
    """The engine's answer, checked: one log-probability per new token, of that token."""
    meta = answer["meta_info"]
    token_ids, scored = answer["output_ids"], meta["output_token_logprobs"]
    if [entry[1] for entry in scored] != token_ids:
        raise EngineUnavailableError(
            f"the engine answered {len(token_ids)} token ids and log-probabilities of {len(scored)} others:"
            f" request {meta['id']}, finish reason {meta['finish_reason']}"
        )
    return Generation(
        token_ids=token_ids,
        log_probs=[entry[0] for entry in scored],
        finish_reason=meta["finish_reason"]["type"],
        weight_version=meta["weight_version"],
        text=answer.get("text", ""),
    )
