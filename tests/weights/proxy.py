"""A real HTTP proxy in front of a real server, which answers, modifies or kills on a selected call."""

from __future__ import annotations

import base64
import http.client
import json
import threading
import uuid
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from safetensors.torch import load_file, save_file

UPDATES = {
    "colocated": "/update_weights_from_tensor",
    "split": "/update_weights_from_distributed",
    "disk": "/update_weights_from_disk",
    "p2p": "/update_weights_from_tensor",
}
Action = Callable[[dict[str, Any]], dict[str, Any] | None]


class Proxy:
    """Forwards every call to `target`; a context manager.

    `tamper(path, action, calls)` passes the bodies of those calls to `path` (counted from 0 since then) to `action`:
    its result is forwarded, and None is answered with HTTP 400 instead.
    """

    def __init__(self, target: str) -> None:
        self._target = urlsplit(target)
        self._rule: tuple[str, Action, range] | None = None
        self._count = 0
        self._lock = threading.Lock()
        proxy = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                proxy._handle(self)

            do_POST = do_GET

            def log_message(self, *_: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"

    def __enter__(self) -> Proxy:
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._server.server_close()

    def tamper(self, path: str, action: Action, calls: range = range(1)) -> None:
        with self._lock:
            self._rule, self._count = (path, action, calls), 0

    def leave_alone(self) -> None:
        self._rule = None

    def _handle(self, request: BaseHTTPRequestHandler) -> None:
        body = request.rfile.read(int(request.headers.get("Content-Length", 0)))
        action = self._due(request.path)
        if action is not None:
            changed = action(json.loads(body))
            if changed is None:
                return self._answer(request, 400, b'{"message": "the proxy refuses this call"}')
            body = json.dumps(changed).encode()
        connection = http.client.HTTPConnection(self._target.hostname, self._target.port, timeout=120)
        try:
            connection.request(request.command, request.path, body, {"Content-Type": "application/json"})
            response = connection.getresponse()
            self._answer(request, response.status, response.read())
        except (OSError, http.client.HTTPException):
            request.close_connection = True  # like the server
        finally:
            connection.close()

    def _due(self, path: str) -> Action | None:
        with self._lock:
            if self._rule is None or self._rule[0] != path:
                return None
            number, self._count = self._count, self._count + 1
            return self._rule[1] if number in self._rule[2] else None

    @staticmethod
    def _answer(request: BaseHTTPRequestHandler, status: int, text: bytes) -> None:
        request.send_response(status)
        request.send_header("Content-Length", str(len(text)))
        request.end_headers()
        request.wfile.write(text)


def refuse(_: dict[str, Any]) -> None:
    """The call never reaches the server."""


def exchange_key_and_value(body: dict[str, Any]) -> dict[str, Any]:
    """Exchanges the first layer's key and value weights (of one shape) if the call has them."""
    names = ["model.layers.0.self_attn.k_proj.weight", "model.layers.0.self_attn.v_proj.weight"]
    other = dict(zip(names, reversed(names), strict=True))
    if "names" in body:
        body["names"] = [other.get(name, name) for name in body["names"]]
    elif "model_path" in body:
        body["model_path"] = str(_copied(Path(body["model_path"]), other))
    else:
        body["serialized_named_tensors"] = [_renamed(payload, other) for payload in body["serialized_named_tensors"]]
    return body


def _copied(folder: Path, other: dict[str, str]) -> Path:
    """Another folder with the names exchanged, because the other server is reading the first."""
    changed = folder.with_name(f"changed {uuid.uuid4().hex}")
    changed.mkdir()
    for path in folder.iterdir():
        if path.suffix == ".safetensors":
            tensors = {other.get(name, name): tensor for name, tensor in load_file(path).items()}
            save_file(tensors, changed / path.name, metadata={"format": "pt"})
        else:
            text = path.read_text()
            for name in other:
                text = text.replace(name, other[name].upper())
            for name in other:
                text = text.replace(name.upper(), name)
            (changed / path.name).write_text(text)
    return changed


def _renamed(payload: str, other: dict[str, str]) -> str:
    """The payload's own pickle with names of equal length exchanged in place, because it references open memory."""
    raw = base64.b64decode(payload)
    for name in other:
        raw = raw.replace(name.encode(), other[name].upper().encode())
    for name in other:
        raw = raw.replace(name.upper().encode(), name.encode())
    return base64.b64encode(raw).decode()
