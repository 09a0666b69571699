"""`post` and `get` as functions written for slime call them: a URL, a payload, and the decoded answer.

A request to the run's own router, made while a sample is generated, goes the way of all generation: through the client
of the run, which limits, repeats and aborts it. Any other is a plain call, repeated where nobody answered.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

import aiohttp
import orjson

from slimrl.rollout.errors import ServiceError
from slimrl.rollout.making import Making, own_headers

logger = logging.getLogger(__name__)

TIME_LIMIT_S = 600.0
CONNECT_LIMIT_S = 10.0
PAUSE_S = 1.0
_TOO_MANY_REQUESTS = 429


class RequestFailedError(ServiceError):
    """The service refused the request, or did not answer it in all attempts."""


class _NoAnswerError(Exception):
    """It may answer later."""


async def post(url: str, payload: Any, max_retries: int = 60, headers: Mapping[str, str] | None = None) -> Any:
    """The decoded JSON that `url` answers to a POST of `payload` as JSON, or its text where it is none.

    Sent up to `max_retries` times, a second apart, where the connection failed, or with HTTP 429 and 5xx. Raises
    RequestFailedError after that, and at once for any other status than 2xx. To the run's router, from within a
    generate function, `max_retries` and `headers` are the client's own (`slimrl.sglang.client`), and so are the errors.
    """
    making = Making.current()
    if making is not None and url.startswith(f"{making.router_url}/"):
        return await making.ask(url, payload or {})
    for attempt in range(1, max_retries + 1):
        try:
            return await _call("POST", url, orjson.dumps(payload or {}, default=_plain), headers)
        except _NoAnswerError as error:
            if attempt == max_retries:
                raise RequestFailedError(f"{error} (tried {attempt} times)") from error
            logger.warning("%s: trying again in %g s", error, PAUSE_S)
        await asyncio.sleep(PAUSE_S)
    raise ValueError(f"post was called with max_retries {max_retries}: give at least 1")


async def get(url: str) -> Any:
    """The decoded JSON, or text, that `url` answers to a GET. Raises RequestFailedError where it fails."""
    try:
        return await _call("GET", url, None, None)
    except _NoAnswerError as error:
        raise RequestFailedError(str(error)) from error


async def _call(method: str, url: str, body: bytes | None, headers: Mapping[str, str] | None) -> Any:
    timeout = aiohttp.ClientTimeout(total=TIME_LIMIT_S, sock_connect=CONNECT_LIMIT_S)
    sent = {"Content-Type": "application/json", **own_headers(url), **(headers or {})}
    try:
        # no proxy from the environment, and no redirect: the payload is for the address that was given
        async with (
            aiohttp.ClientSession(timeout=timeout, trust_env=False) as session,
            session.request(method, url, data=body, headers=sent, allow_redirects=False) as response,
        ):
            status, content = response.status, await response.read()
    except TimeoutError as error:
        raise _NoAnswerError(f"{url} did not answer within {TIME_LIMIT_S:g} s") from error
    except aiohttp.ClientError as error:
        raise _NoAnswerError(f"{url} cannot be reached: {type(error).__name__}: {error}") from error
    if status == _TOO_MANY_REQUESTS or status >= 500:
        raise _NoAnswerError(f"{url} failed with HTTP {status}: {content[:300].decode(errors='replace')}")
    if not 200 <= status < 300:
        raise RequestFailedError(f"{url} answered HTTP {status}: {content[:300].decode(errors='replace')}")
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        return content.decode(errors="replace")


def _plain(value: Any) -> Any:
    """Arrays and NumPy's numbers as JSON has them."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__} is no JSON")
