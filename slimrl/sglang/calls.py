"""One blocking HTTP call to a server or the router.

Promises a fresh connection per call (servers drop idle ones after 5 s), no proxy whatever the environment says, and
errors that name the URL. Imports only the standard library.
"""

from __future__ import annotations

import http.client
import json
import urllib.parse
from typing import Any

from slimrl.sglang.errors import EngineError, EngineRequestError, EngineTimeoutError, EngineUnavailableError


def call(method: str, url: str, body: dict[str, Any] | None = None, *, timeout_s: float) -> Any:
    """The decoded JSON of the answer, or its text where it is none.

    Raises EngineRequestError for HTTP 3xx and 4xx, EngineTimeoutError where nothing comes for `timeout_s`, and
    EngineUnavailableError for HTTP 5xx and broken or refused connections.
    """
    parts = urllib.parse.urlsplit(url)
    connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=timeout_s)
    payload = json.dumps(body) if body is not None else None
    headers = {"Connection": "close", "Content-Type": "application/json"}
    try:
        connection.request(method, f"{parts.path}?{parts.query}" if parts.query else parts.path, payload, headers)
        response = connection.getresponse()
        status, text = response.status, response.read().decode(errors="replace")
    except TimeoutError as error:
        raise EngineTimeoutError(f"{url} did not answer within {timeout_s:g} s") from error
    except (OSError, http.client.HTTPException) as error:
        raise EngineUnavailableError(f"{url} cannot be reached: {type(error).__name__}: {error}") from error
    finally:
        connection.close()
    if 300 <= status < 500:
        raise EngineRequestError(url, status, text)
    if status >= 500:
        raise EngineUnavailableError(f"{url} failed with HTTP {status}: {text}")
    return json.loads(text) if text.startswith(("{", "[")) else text


def answers(url: str, timeout_s: float = 1.0) -> bool:
    """Whether a GET succeeds; never raises for an absent or failing server."""
    try:
        call("GET", url, timeout_s=timeout_s)
    except EngineError:
        return False
    return True
