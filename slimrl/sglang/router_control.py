"""The list of servers of a router, and a router that somebody else runs.

The router acts on additions and removals later than it answers, and it calls itself healthy without any server; the
methods here return when the thing is done. Called by the fleet, through `router.RouterProcess` or `RunningRouter`.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import msgspec

from slimrl.processes import POLL_INTERVAL_S
from slimrl.sglang.calls import answers, call
from slimrl.sglang.errors import EngineError, EngineUnavailableError
from slimrl.sglang.shapes import shaped

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 10.0
REMOVE_TIMEOUT_S = 30.0


class _Worker(msgspec.Struct):
    id: str
    url: str
    is_healthy: bool


class _Workers(msgspec.Struct):
    workers: list[_Worker]


class RouterControl:
    """What is asked of any router; a subclass says where it is.

    `key` is shown to the router, and given to it for its calls to the servers.
    """

    host: str
    key: str | None = None

    @property
    def port(self) -> int:
        """The HTTP port."""
        raise NotImplementedError

    @property
    def url(self) -> str:
        """e.g. http://127.0.0.1:21000"""
        return f"http://{self.host}:{self.port}"

    def add_worker(self, url: str) -> None:
        """Registers a server; `wait_ready` tells when it is in use.

        A server that was there before under the same URL is removed first: its circuit breaker may still be open.
        """
        self.remove_worker(url)
        self._call("POST", "/workers", {"url": url} if self.key is None else {"url": url, "api_key": str(self.key)})

    def remove_worker(self, url: str) -> None:
        """Unregisters a server and returns when it is gone; its requests in flight end normally."""
        deadline = time.monotonic() + REMOVE_TIMEOUT_S
        asked: set[str] = set()
        while worker_ids := {worker["id"] for worker in self.workers() if worker["url"] == url}:
            for worker_id in worker_ids - asked:
                self._call("DELETE", f"/workers/{worker_id}")
            asked |= worker_ids
            if time.monotonic() > deadline:
                raise EngineUnavailableError(f"the router {self.url} did not remove {url} in {REMOVE_TIMEOUT_S:g} s")
            time.sleep(POLL_INTERVAL_S)

    def workers(self) -> list[dict[str, Any]]:
        """What the router knows of each server: "id", "url", "is_healthy", "load", ..."""
        answer = self._call("GET", "/workers")
        shaped(answer, _Workers, f"{self.url}/workers")
        return answer["workers"]

    def is_ready(self, n_workers: int) -> bool:
        """Whether `n_workers` servers are in use."""
        try:
            healthy = sum(worker["is_healthy"] for worker in self.workers())
        except EngineError:
            return False
        return healthy >= n_workers and (n_workers == 0 or answers(f"{self.url}/readiness"))

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        return call(method, self.url + path, body, timeout_s=CALL_TIMEOUT_S, key=self.key)


class RunningRouter(RouterControl):
    """A router of the user's (`--sglang-router-ip`): it is never started or ended here.

    Servers that were not added here are somebody else's, and stay. `added` are those that were, by another object.
    """

    pid = None
    log_path: Path | None = None

    def __init__(self, host: str, port: int, added: Iterable[str] = (), key: str | None = None) -> None:
        self.host, self._port, self.key = host, port, key
        self.added = set(added)

    @property
    def port(self) -> int:
        """The HTTP port."""
        return self._port

    def add_worker(self, url: str) -> None:
        """As in general; it may be removed from now on."""
        try:
            super().add_worker(url)
        finally:
            self.added.add(url)  # also where only the answer was lost

    def remove_worker(self, url: str) -> None:
        """As in general; nothing where somebody else added it."""
        if url in self.added:
            super().remove_worker(url)
            self.added.discard(url)

    def check(self) -> None:
        """Raises EngineError where nobody answers, or where it sends requests to servers that are not of this run."""
        named = f"the router {self.url} (--sglang-router-ip, --sglang-router-port)"
        try:
            others = [worker["url"] for worker in self.workers()]
        except EngineError as error:
            raise EngineUnavailableError(f"{named} cannot be asked for its servers: {error}") from error
        if others:
            raise EngineError(
                f"{named} sends requests to {', '.join(others)} already, which the run does not know: take them out, as"
                " it registers its own servers itself"
            )

    def restart(self, log_path: Path | None) -> None:
        """Nothing: whoever runs it starts it again, which `wait_alive` waits for."""

    def wait_alive(self, timeout_s: float) -> None:
        """Waits until it answers. Raises EngineUnavailableError when the time is over."""
        self._wait(lambda: answers(f"{self.url}/health"), timeout_s)

    def wait_ready(self, n_workers: int, timeout_s: float) -> None:
        """Waits until `n_workers` servers are in use. Raises EngineUnavailableError when the time is over."""
        self._wait(lambda: self.is_ready(n_workers), timeout_s)

    def poll(self) -> int | None:
        """None: its process is not ours to see."""
        return None

    def last_log_lines(self, count: int = 20) -> str:
        """A sentence in place of them."""
        return f"(the log of {self.url} is with whoever runs it)"

    def stop(self, timeout_s: float = 0.0) -> None:
        """Takes the servers of this run out; the router goes on. A router that is gone is passed over."""
        try:
            for url in sorted(self.added):
                self.remove_worker(url)
        except EngineUnavailableError as error:
            logger.warning("still behind the router %s: %s: %s", self.url, ", ".join(sorted(self.added)), error)

    def _wait(self, done: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not done():
            if time.monotonic() > deadline:
                raise EngineUnavailableError(f"the router {self.url} was not ready after {timeout_s:g} s")
            time.sleep(POLL_INTERVAL_S)
