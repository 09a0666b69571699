"""One blocking HTTP call to a server or the router, the validation of its response, and the API key of a run.

`call` opens a new connection each time (servers drop idle ones after 5 s), ignores proxy variables, follows no
redirect, ends within the timeout however slowly a response arrives, and raises errors that name the URL. `decode_as`
validates a response against a msgspec struct of the required fields; a response may have more.
`check_servers_reachable` checks external servers before anything is started.

The key of a run's servers and router is never in a command line or a log: a child receives it in its environment and
removes it there first, and its `repr` is `***`.
"""

from __future__ import annotations

import dataclasses
import http.client
import json
import os
import secrets
import socket
import time
import urllib.parse
from collections.abc import MutableMapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING, Any, TypeVar

import msgspec

from slimrl.engines.protocol import (
    EngineError,
    EngineRequestError,
    EngineResponseError,
    EngineTimeoutError,
    EngineUnavailableError,
)

if TYPE_CHECKING:
    from slimrl.arguments import Arguments

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


def with_key(args: Arguments) -> Arguments:
    """`args` with the run's key in the server options: --sglang-api-key, or a new key."""
    given = args.sglang_options.get(KEY_OPTION)
    key = Key(given) if given else new_key()
    rm_options = args.rm_server_options
    # not for external servers, which may need another key or none
    if args.rm_url is None and args.opd_teacher_urls is None:
        rm_options = rm_options | {KEY_OPTION: Key(rm_options[KEY_OPTION]) if rm_options.get(KEY_OPTION) else key}
    return dataclasses.replace(
        args, sglang_options=args.sglang_options | {KEY_OPTION: key}, rm_server_options=rm_options
    )


def key_of(args: Arguments) -> str | None:
    """The run's key; None before `with_key`."""
    return args.sglang_options.get(KEY_OPTION)


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
LISTEN_TIMEOUT_S = 5.0


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
        raise EngineResponseError(
            f"{url} answered invalid JSON ({error}): {text[:SHOWN_CHARS]!r}{'...' * (len(text) > SHOWN_CHARS)}"
        ) from error


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
        shown = repr(answer)
        shown = shown if len(shown) <= SHOWN_CHARS else f"{shown[:SHOWN_CHARS]}..."
        raise EngineResponseError(f"{url} did not answer as SGLang does: {error}; it answered {shown}") from error


def check_servers_reachable(addresses: Sequence[str]) -> None:
    """Connects once to each "host:port". Raises EngineUnavailableError with one sentence per failed address."""
    with ThreadPoolExecutor(max(len(addresses), 1)) as pool:
        errors = [error for error in pool.map(_connection_error, addresses) if error]
    if errors:
        raise EngineUnavailableError("\n".join(errors))


def no_server(address: str, error: Exception) -> str:
    """The error message for an address at which no server responds."""
    return f"{EXTERNAL_ENGINES} {address}: no server answers there: {error}; start it first"


def _connection_error(address: str) -> str | None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), LISTEN_TIMEOUT_S).close()
    except OSError as error:
        return no_server(address, error)
    return None
