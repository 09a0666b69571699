"""One blocking HTTP call to a server or the router, and the check that its answer has the expected form.

`call` opens a fresh connection each time (servers drop idle ones after 5 s), uses no proxy whatever the environment
says, follows no redirect, ends within the time limit however slowly an answer arrives, and raises errors that name the
URL. `shaped` checks an answer once, where it is read, against a msgspec struct of the fields that are needed; an answer
may have more.
"""

from __future__ import annotations

import http.client
import json
import socket
import time
import urllib.parse
from typing import Any, TypeVar

import msgspec

from slimrl.engines.auth import bearer
from slimrl.engines.protocol import (
    EngineError,
    EngineRequestError,
    EngineResponseError,
    EngineTimeoutError,
    EngineUnavailableError,
)

SHOWN_CHARS = 200


def call(method: str, url: str, body: dict[str, Any] | None = None, *, timeout_s: float, key: str | None = None) -> Any:
    """The decoded JSON of the answer, or its text where it is none; `key` is shown to who asks for one.

    Raises EngineRequestError for HTTP 3xx and 4xx, EngineTimeoutError where the whole answer has not come within
    `timeout_s`, EngineUnavailableError for HTTP 5xx and broken or refused connections, and EngineResponseError for JSON
    that is cut off or malformed.
    """
    parts = urllib.parse.urlsplit(url)
    connection = _BoundedConnection(parts.hostname or "", parts.port or 80, time.monotonic() + timeout_s)
    payload = json.dumps(body) if body is not None else None
    headers = {"Connection": "close", "Content-Type": "application/json", **bearer(key)}
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
    return _decoded(url, text) if text.startswith(("{", "[")) or text == "null" else text


def answers(url: str, timeout_s: float = 1.0, key: str | None = None) -> bool:
    """Whether a GET succeeds; never raises for an absent or failing server."""
    try:
        call("GET", url, timeout_s=timeout_s, key=key)
    except EngineError:
        return False
    return True


def _decoded(url: str, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise EngineResponseError(
            f"{url} answered what is no JSON ({error}): {text[:SHOWN_CHARS]!r}{'...' * (len(text) > SHOWN_CHARS)}"
        ) from error


class _BoundedConnection(http.client.HTTPConnection):
    """All of it has to be over at `deadline` (`time.monotonic`): a time limit of a socket bounds each read alone."""

    def __init__(self, host: str, port: int, deadline: float) -> None:
        super().__init__(host, port, timeout=_left(deadline))
        self._deadline = deadline

    def connect(self) -> None:
        """Opens the connection."""
        super().connect()
        self.sock = _BoundedSocket(self.sock, self._deadline)


class _BoundedSocket(socket.socket):
    """A socket whose operations together end at a deadline."""

    def __init__(self, opened: socket.socket, deadline: float) -> None:
        """Takes the connection over from `opened`."""
        super().__init__(opened.family, opened.type, opened.proto, fileno=opened.detach())
        self._deadline = deadline

    def recv_into(self, *arguments: Any) -> int:
        """As of any socket, which the file that is made of one reads by."""
        self.settimeout(_left(self._deadline))
        return super().recv_into(*arguments)

    def sendall(self, *arguments: Any) -> None:
        """As of any socket, which bounds all of it by its time limit."""
        self.settimeout(_left(self._deadline))
        super().sendall(*arguments)


def _left(deadline: float) -> float:
    """Seconds until then. Raises TimeoutError where there are none."""
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    return left


Shape = TypeVar("Shape")


def shaped(answer: Any, shape: type[Shape], url: str) -> Shape:
    """`answer`, which came from `url`, as `shape`. Raises EngineResponseError that names the field and what came."""
    try:
        return msgspec.convert(answer, shape)
    except msgspec.ValidationError as error:
        shown = repr(answer)
        shown = shown if len(shown) <= SHOWN_CHARS else f"{shown[:SHOWN_CHARS]}..."
        raise EngineResponseError(f"{url} did not answer as SGLang does: {error}; it answered {shown}") from error
