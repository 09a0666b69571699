"""HTTP calls to servers and the router: blocking ones, and the many asynchronous ones of generation; a run's API key.

`call` opens a new connection each time (other servers drop idle ones after 5 s), ignores proxy variables, follows no
redirect, ends within the timeout however slowly a response arrives, and raises errors that name the URL. `decode_as`
validates a response against a msgspec struct of the required fields; a response may have more.

`ConnectionPool` is for POSTs to one address over connections that are kept open. aiohttp's client takes 150 us of the
event loop per request and response of 20 kB, this one 50 us: the client of the engines sends tens of thousands per
rollout, with equal headers, without cookies, proxies, redirects or compression. httptools parses the responses (llhttp,
the parser of Node.js).

The key of a run's servers and router is never in a command line or a log: a child receives it in its environment and
removes it there first, and its `repr` is `***`.
"""

from __future__ import annotations

import asyncio
import http.client
import json
import os
import secrets
import socket
import time
import urllib.parse
from collections import deque
from collections.abc import Mapping, MutableMapping
from types import TracebackType
from typing import Any, TypeVar, cast

import httptools
import msgspec

from slimrl.engines.protocol import (
    EngineError,
    EngineRequestError,
    EngineResponseError,
    EngineTimeoutError,
    EngineUnavailableError,
)

# For how long servers that slimrl starts keep an idle connection: longer than the router, which drops it after 50 s.
# With their default, 5 s, a rollout that begins 5 s after the last one finds connections that are being closed, and the
# router takes a server for broken after ten of them.
IDLE_CONNECTION_S = 120

HIDDEN_KEY = "***"  # as in slimrl.arguments.redact
KEY_VARIABLE = "SLIMRL_SERVER_KEY"
KEY_OPTION = "api_key"  # of SGLang's server and of its router
KEY_BYTES = 32


class Key(str):
    """A key whose `repr` is redacted, also inside a logged list or dataclass."""

    __slots__ = ()

    def __repr__(self) -> str:
        return repr(HIDDEN_KEY)

    def __reduce__(self) -> tuple[type[Key], tuple[str]]:
        return Key, (str(self),)


def new_key() -> Key:
    """A new random key."""
    return Key(secrets.token_urlsafe(KEY_BYTES))


def bearer(key: str | None) -> dict[str, str]:
    """The HTTP header with the key."""
    return {"Authorization": f"Bearer {key}"} if key else {}


def key_environment(key: str | None) -> dict[str, str]:
    """The key as a variable of a child's environment, which only its own user can read."""
    return {KEY_VARIABLE: str(key)} if key else {}


def pop_key_from_environment(environment: MutableMapping[str, str] = os.environ) -> Key | None:
    """Removes the parent's key from the environment, so that no child inherits it, and returns it."""
    key = environment.pop(KEY_VARIABLE, None)
    return Key(key) if key else None


SHOWN_CHARS = 200
EXTERNAL_ENGINES = "--rollout-external-engine-addrs"


def call(method: str, url: str, body: dict[str, Any] | None = None, *, timeout_s: float, key: str | None = None) -> Any:
    """The decoded JSON of the response, or its text if it is not JSON; `key` is sent as a bearer token.

    Raises EngineRequestError for HTTP 3xx and 4xx, EngineTimeoutError if the response is not complete within
    `timeout_s`, EngineUnavailableError for HTTP 5xx and broken or refused connections, and EngineResponseError for
    truncated or malformed JSON.
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


def is_reachable(url: str, timeout_s: float = 1.0, key: str | None = None) -> bool:
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
        raise EngineResponseError(f"{url} answered invalid JSON ({error}): {_shown(repr(text))}") from error


def _shown(text: str) -> str:
    return text if len(text) <= SHOWN_CHARS else f"{text[:SHOWN_CHARS]}..."


class _BoundedConnection(http.client.HTTPConnection):
    """A connection whose operations together end at `deadline` (`time.monotonic`); a socket timeout bounds one read."""

    def __init__(self, host: str, port: int, deadline: float) -> None:
        super().__init__(host, port, timeout=_remaining(deadline))
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
        """`socket.recv_into`, which the response's file object reads by."""
        self.settimeout(_remaining(self._deadline))
        return super().recv_into(*arguments)

    def sendall(self, *arguments: Any) -> None:
        """`socket.sendall`, which its timeout bounds as a whole."""
        self.settimeout(_remaining(self._deadline))
        super().sendall(*arguments)


def _remaining(deadline: float) -> float:
    """Seconds until `deadline`. Raises TimeoutError if it has passed."""
    if (left := deadline - time.monotonic()) <= 0:
        raise TimeoutError
    return left


Shape = TypeVar("Shape")


def decode_as(answer: Any, shape: type[Shape], url: str) -> Shape:
    """`answer` of `url`, converted to `shape`. Raises EngineResponseError with the field and the answer."""
    try:
        return msgspec.convert(answer, shape)
    except msgspec.ValidationError as error:
        shown = _shown(repr(answer))
        raise EngineResponseError(f"{url} did not answer as SGLang does: {error}; it answered {shown}") from error


def no_server(address: str, error: Exception) -> str:
    """The error message for an address at which no server responds."""
    return f"{EXTERNAL_ENGINES} {address}: no server answers there: {error}; start it first"


_FORBIDDEN = frozenset("\r\n\0")
_FIRST_FINAL_STATUS = 200  # 1xx are announcements of another response
_UNUSED_S = 60.0  # connections that were not used for so long are closed


class NotConnectedError(ConnectionError):
    """No connection could be opened, so that nothing was sent."""


class ConnectionPool:
    """Connections to the server of `url`, as many as there are concurrent requests. Use within one event loop.

    `headers` are sent with every request. Raises ValueError for a header with a line break.
    """

    def __init__(self, url: str, headers: Mapping[str, str], *, connect_timeout_s: float) -> None:
        parts = urllib.parse.urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ValueError(f"{url!r} is no address of a server: give http://host:port")
        self._tls = parts.scheme == "https"
        self._host, self._port = parts.hostname, parts.port or (443 if self._tls else 80)
        self._prefix = parts.path.rstrip("/")
        self._connect_timeout_s = connect_timeout_s
        self.headers = {"Host": parts.netloc.rpartition("@")[2], **headers}
        self._head = _header_lines(self.headers)
        self._unused: deque[_Connection] = deque()  # the one used last is on the right
        self._opened: set[_Connection] = set()
        self._closed = False

    async def __aenter__(self) -> ConnectionPool:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.close()

    async def post(
        self, path: str, body: bytes, headers: Mapping[str, str] | None = None, *, timeout_s: float
    ) -> tuple[int, bytes]:
        """Status and content of the response.

        Raises NotConnectedError, TimeoutError if the response is not complete `timeout_s` after the call, and
        ConnectionError if the connection breaks, is closed by `close`, or the response is not HTTP.
        """
        deadline = time.monotonic() + timeout_s
        connection = self._take_unused() or await self._connect(timeout_s)
        extra = _header_lines(headers) if headers else ""
        head = f"POST {self._prefix}{path} HTTP/1.1\r\n{self._head}{extra}Content-Length: {len(body)}\r\n\r\n"
        try:
            response = await connection.exchange(head.encode() + body, deadline - time.monotonic())
        finally:
            if connection.is_reusable:
                self._keep(connection)
            else:
                connection.abort()
        return response

    async def close(self) -> None:
        """Closes every connection; their requests fail."""
        self._closed = True
        for connection in list(self._opened):
            connection.abort()
        await asyncio.sleep(0)  # the transports report it in the next turn of the loop

    def _take_unused(self) -> _Connection | None:
        while self._unused:
            if (connection := self._unused.pop()).is_reusable:
                return connection
        return None

    def _keep(self, connection: _Connection) -> None:
        self._unused.append(connection)
        oldest = self._unused[0]
        if oldest.used_at < connection.used_at - _UNUSED_S:
            self._unused.popleft().abort()

    async def _connect(self, timeout_s: float) -> _Connection:
        within_s = min(self._connect_timeout_s, timeout_s)
        opening = asyncio.get_running_loop().create_connection(
            lambda: _Connection(self._opened), self._host, self._port, ssl=self._tls or None
        )
        try:
            # not `wait_for`, which in Python 3.11 swallows a cancellation that arrives with the connection
            async with asyncio.timeout(within_s):
                _, connection = await opening
        except TimeoutError as error:
            if within_s < self._connect_timeout_s:
                raise
            raise NotConnectedError(f"no connection within {within_s:g} s") from error
        except OSError as error:
            raise NotConnectedError(f"{type(error).__name__}: {error}") from error
        if self._closed:
            connection.abort()
            raise NotConnectedError("the connections were closed")
        return connection


class _Connection(asyncio.Protocol):
    """One connection: a request, its response, and so on."""

    def __init__(self, opened: set[_Connection]) -> None:
        """`opened` contains it from its connection to its loss."""
        self._opened = opened
        self._parser = httptools.HttpResponseParser(self)
        self._chunks: list[bytes] = []
        self._response: asyncio.Future[tuple[int, bytes]] | None = None
        self._has_length = self._has_head = False
        self.is_reusable = False
        self.used_at = 0.0

    def eof_received(self) -> None:
        """Called by the event loop, which then closes the connection."""
        self.is_reusable = False

    async def exchange(self, request: bytes, timeout_s: float) -> tuple[int, bytes]:
        """Sends `request`; returns status and content of its response."""
        loop = asyncio.get_running_loop()
        self.is_reusable = self._has_length = self._has_head = False
        if self._transport.is_closing():
            raise ConnectionResetError("the server closed the connection")
        self._response = response = loop.create_future()
        limit = loop.call_later(timeout_s, self._fail, TimeoutError())
        self._transport.write(request)
        try:
            return await response
        finally:
            limit.cancel()
            self._response = None

    def abort(self) -> None:
        """Closes it at once; a response whose end is that of the connection is not complete by that."""
        self.is_reusable = self._has_head = False
        self._transport.abort()

    def _fail(self, error: Exception) -> None:
        if self._response is not None and not self._response.done():
            self._response.set_exception(error)

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Called by the event loop."""
        self._transport = cast("asyncio.Transport", transport)  # uvloop's transports are not subclasses of asyncio's
        self._opened.add(self)

    def connection_lost(self, error: Exception | None) -> None:
        """Called by the event loop."""
        self.is_reusable = False
        self._opened.discard(self)
        if error is None and self._has_head and not self._has_length:  # such a response ends with its connection
            self._complete()
        self._fail(ConnectionResetError("the server closed the connection" if error is None else str(error)))

    def data_received(self, data: bytes) -> None:
        """Called by the event loop."""
        if self._response is None or self._response.done():  # e.g. a server's reason for closing the connection
            self.abort()
            return
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as error:
            self._fail(ConnectionError(f"the response is not HTTP: {error}"))

    def on_header(self, name: bytes, value: bytes) -> None:
        """Called by the parser."""
        if len(name) in (14, 17) and name.lower() in (b"content-length", b"transfer-encoding"):
            self._has_length = True

    def on_headers_complete(self) -> None:
        """Called by the parser."""
        self._has_head = self._parser.get_status_code() >= _FIRST_FINAL_STATUS

    def on_body(self, chunk: bytes) -> None:
        """Called by the parser."""
        self._chunks.append(chunk)

    def on_message_complete(self) -> None:
        """Called by the parser."""
        if self._has_head:
            self.is_reusable = self._parser.should_keep_alive()
            self.used_at = time.monotonic()
            self._complete()

    def _complete(self) -> None:
        chunks, self._chunks = self._chunks, []
        if self._response is not None and not self._response.done():
            content = chunks[0] if len(chunks) == 1 else b"".join(chunks)
            self._response.set_result((self._parser.get_status_code(), content))


def _header_lines(headers: Mapping[str, str]) -> str:
    for name, value in headers.items():
        if not _FORBIDDEN.isdisjoint(name) or not _FORBIDDEN.isdisjoint(value):
            raise ValueError(f"the header {name!r} is {value!r}: remove the line break")
    return "".join(f"{name}: {value}\r\n" for name, value in headers.items())
