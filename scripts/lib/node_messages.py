"""Short messages between the nodes of a cluster, beside Ray; used by ray_node.py.

The head tells the others how the run ended, before its Ray ends: a node that was not told has lost its head. A node
that Ray refuses tells the head why. Each message is signed with the token of the cluster, RAY_AUTH_TOKEN.
"""

import concurrent.futures
import contextlib
import hashlib
import hmac
import socket
import time
from collections.abc import Iterable

CONNECT_TIMEOUT_S = 2
READ_TIMEOUT_S = 1
MAX_BYTES = 1200  # so that it arrives at once


def _signature(token: str, port: int, text: bytes) -> str:
    return hmac.new(token.encode(), f"slimrl {port} ".encode() + text, hashlib.sha256).hexdigest()


class Listener:
    """Receives messages at `port`, on all addresses of this node."""

    def __init__(self, token: str, port: int = 0) -> None:
        """Port 0 is a free one. Raises OSError if the port is taken."""
        self._token = token
        self._socket = socket.create_server(("", port), backlog=64)
        self._socket.setblocking(False)

    @property
    def port(self) -> int:
        """The port to send to."""
        return self._socket.getsockname()[1]

    def received(self) -> list[str]:
        """The texts that have arrived since the last call. Whatever is not signed with the token is dropped.

        Returns within `READ_TIMEOUT_S`, whatever others send, or do not send.
        """
        found, deadline = [], time.monotonic() + READ_TIMEOUT_S
        while (left := deadline - time.monotonic()) > 0:
            try:
                connection, _ = self._socket.accept()
            except OSError:  # nobody waits
                break
            with connection, contextlib.suppress(OSError):
                connection.settimeout(left)
                signature, _, text = connection.recv(MAX_BYTES).partition(b" ")
                if hmac.compare_digest(signature, _signature(self._token, self.port, text).encode()):
                    found.append(text.decode())
        return found

    def close(self) -> None:
        """Frees the port."""
        self._socket.close()


def send(token: str, text: str, listeners: Iterable[tuple[str, int]]) -> None:
    """Sends `text` to each (address, port); those that do not answer within seconds do not get it."""
    listeners = list(listeners)
    if not listeners:
        return
    with concurrent.futures.ThreadPoolExecutor(min(len(listeners), 64)) as pool:
        list(pool.map(lambda listener: _send(token, text, *listener), listeners))


def _send(token: str, text: str, address: str, port: int) -> None:
    content = text.encode()[: MAX_BYTES - 128].decode(errors="ignore").encode()  # whole characters behind the signature
    with contextlib.suppress(OSError), socket.create_connection((address, port), CONNECT_TIMEOUT_S) as connection:
        connection.sendall(_signature(token, port, content).encode() + b" " + content)
