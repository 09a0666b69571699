"""The SGLang router, as a child process or an external one: its list of servers and its default routing policy.

The router responds before an addition or removal takes effect, and reports itself healthy without any server; the
methods here return when the change has taken effect.
The router's default policy, `cache_aware`, routes by tokens: samples of one prompt go to one server, and a conversation
stays on the server of its first turns as long as its history only grows and that server is not overloaded. It ignores
the session of a request. `manual` sends the first request of a session to the least loaded server and all later ones
to the same server. Runs with a custom generate function, whose samples may be conversations, use `manual` unless
--router-policy is given.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from slimrl.engines.http import call, decode_as, is_reachable, key_environment
from slimrl.engines.protocol import EngineError, EngineUnavailableError
from slimrl.engines.sglang.kv_transfer import role_of
from slimrl.engines.sglang.server_args import RESERVED_ROUTER, render_options, router_flags
from slimrl.processes import POLL_INTERVAL_S, ManagedProcess, importable
from slimrl.processes.child_process import PortReservation, claim_port, claim_ports

logger = logging.getLogger(__name__)

CALL_TIMEOUT_S = 10.0
ADDED_AT_ONCE = 16
REMOVE_TIMEOUT_S = 30.0


class _Worker(msgspec.Struct):
    id: str
    url: str
    is_healthy: bool


class _Workers(msgspec.Struct):
    workers: list[_Worker]


class RouterControl:
    """HTTP calls to a router; subclasses define its address.

    `key` authenticates calls to the router, and the router's calls to the servers.
    """

    host: str
    key: str | None = None
    label = "the SGLang router"
    is_external = False

    @property
    def port(self) -> int:
        """The HTTP port."""
        raise NotImplementedError

    @property
    def url(self) -> str:
        """e.g. http://127.0.0.1:21000"""
        return f"http://{self.host}:{self.port}"

    def add_worker(self, url: str) -> None:
        """Registers a server; `wait_ready` waits until it is in use.

        Removes an earlier server with the same URL first: its circuit breaker may still be open.
        """
        self.remove_worker(url)
        self._add(url)

    def add_workers(self, urls: Sequence[str]) -> None:
        """`add_worker` for many servers, with one reading of the router's list and several calls at once."""
        present = set(self.server_urls())
        for url in urls:
            if url in present:
                self.remove_worker(url)
        with ThreadPoolExecutor(ADDED_AT_ONCE) as pool:
            list(pool.map(self._add, urls))

    def _add(self, url: str) -> None:
        key = {} if self.key is None else {"api_key": str(self.key)}
        self._call("POST", "/workers", {"url": url, **key, **self._role_of(url)})

    def _role_of(self, url: str) -> dict[str, Any]:
        """The fields of a server's registration that say what it does of each request; none for a whole server."""
        return {}

    def remove_worker(self, url: str) -> None:
        """Unregisters a server and waits until it is removed; its requests in flight end normally."""
        deadline = time.monotonic() + REMOVE_TIMEOUT_S
        requested: set[str] = set()
        while worker_ids := {worker["id"] for worker in self.workers() if worker["url"] == url}:
            for worker_id in worker_ids - requested:
                self._call("DELETE", f"/workers/{worker_id}")
            requested |= worker_ids
            if time.monotonic() > deadline:
                raise EngineUnavailableError(f"the router {self.url} did not remove {url} in {REMOVE_TIMEOUT_S:g} s")
            time.sleep(POLL_INTERVAL_S)

    def workers(self) -> list[dict[str, Any]]:
        """The router's record of each server: "id", "url", "is_healthy", "load", ..."""
        answer = self._call("GET", "/workers")
        decode_as(answer, _Workers, f"{self.url}/workers")
        return answer["workers"]

    def server_urls(self) -> list[str]:
        """The URLs of the registered servers."""
        return [worker["url"] for worker in self.workers()]

    def responds(self, timeout_s: float) -> bool:
        """Whether it responds, with or without servers; never raises."""
        return is_reachable(f"{self.url}/health", timeout_s)

    def is_ready(self, n_workers: int) -> bool:
        """Whether `n_workers` servers are in use."""
        try:
            healthy = sum(worker["is_healthy"] for worker in self.workers())
        except EngineError:
            return False
        return healthy >= n_workers and (n_workers == 0 or is_reachable(f"{self.url}/readiness"))

    def _call(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        return call(method, self.url + path, body, timeout_s=CALL_TIMEOUT_S, key=self.key)


class ExternalRouter(RouterControl):
    """Implements `engines.server_protocol.ExternalRouter` (--sglang-router-ip): never started or ended here.

    Servers that this run did not add are left registered. `added` are servers that the run added by another object.
    """

    is_external = True
    pid = None
    log_path: Path | None = None

    def __init__(self, host: str, port: int, added: Iterable[str] = (), key: str | None = None) -> None:
        self.host, self._port, self.key = host, port, key
        self.added = set(added)

    @property
    def port(self) -> int:
        """The HTTP port."""
        return self._port

    def _add(self, url: str) -> None:
        """Registers a server and records it in `added`."""
        try:
            super()._add(url)
        finally:
            self.added.add(url)  # even if the call failed: only its response may have been lost

    def remove_worker(self, url: str) -> None:
        """Unregisters a server; does nothing if this run did not add it."""
        if url in self.added:
            super().remove_worker(url)
            self.added.discard(url)

    def open(self) -> None:
        """Calls `check`."""
        self.check()

    def check(self) -> None:
        """Raises EngineError if it does not respond, or has servers that are not of this run."""
        name = f"the router {self.url} (--sglang-router-ip, --sglang-router-port)"
        try:
            others = self.server_urls()
        except EngineError as error:
            raise EngineUnavailableError(f"{name} cannot list its servers: {error}") from error
        if others:
            raise EngineError(
                f"{name} already has the servers {', '.join(others)}, which are not of this run: remove them; the run"
                " registers its servers itself"
            )

    def restart(self, log_path: Path | None) -> None:
        """Does nothing: its owner restarts it, and `wait_alive` waits for that."""

    def wait_alive(self, timeout_s: float) -> None:
        """Waits until it responds. Raises EngineUnavailableError on timeout."""
        self._wait(lambda: is_reachable(f"{self.url}/health"), timeout_s)

    def wait_ready(self, n_workers: int, timeout_s: float) -> None:
        """Waits until `n_workers` servers are in use. Raises EngineUnavailableError on timeout."""
        self._wait(lambda: self.is_ready(n_workers), timeout_s)

    def poll(self) -> int | None:
        """None: its process is not visible from here."""
        return None

    def last_log_lines(self, count: int = 20) -> str:
        """A sentence instead: the log is not accessible."""
        return f"(the log of the external router {self.url} is not accessible)"

    def stop(self, timeout_s: float = 0.0) -> None:
        """Unregisters the servers of this run; the router keeps running. Only logs a router that is gone."""
        try:
            for url in sorted(self.added):
                self.remove_worker(url)
        except EngineUnavailableError as error:
            servers = ", ".join(sorted(self.added))
            logger.warning("servers still registered with the router %s: %s: %s", self.url, servers, error)

    def _wait(self, done: Callable[[], bool], timeout_s: float) -> None:
        deadline = time.monotonic() + timeout_s
        while not done():
            if time.monotonic() > deadline:
                raise EngineUnavailableError(f"the router {self.url} was not ready after {timeout_s:g} s")
            time.sleep(POLL_INTERVAL_S)


DEFAULTS: dict[str, Any] = {
    "log_level": "warn",
    # with the router's defaults a dead server stays in use for more than a minute
    "health_check_interval_secs": 1,
    "health_failure_threshold": 2,
    "health_success_threshold": 1,
    # with the router's defaults, requests with a shared prefix may pile up to 64 more than the least loaded server has
    "balance_abs_threshold": 10,
    "balance_rel_threshold": 1.2,
    "prometheus_host": "127.0.0.1",  # its metrics need no key, and its default is all addresses
}


# The router must reach the servers directly, not through a proxy for the internet.
NO_PROXY = {"NO_PROXY": "*", "no_proxy": "*"}


class RouterProcess(RouterControl):
    """Implements `engines.server_protocol.Router`; `options` are by the router's own names (see `router_options`).

    Clients call it at `host`, where it listens unless `options` have a "host"; calls without `key` are rejected.
    `port` None: a free port, chosen when the process starts.
    """

    def __init__(
        self,
        *,
        log_path: Path,
        host: str = "127.0.0.1",
        port: int | None = None,
        options: Mapping[str, Any] | None = None,
        key: str | None = None,
    ) -> None:
        self.host = host
        self.key = key
        self.log_path = Path(log_path)
        self._wanted_port = port
        self._options = dict(options or {})
        self._listens_on = self._options.pop("host", host)
        self._reservations: list[PortReservation] = []
        self._process: ManagedProcess | None = None

    @property
    def port(self) -> int:
        """The HTTP port. Raises RuntimeError before `start` if none was given."""
        if self._wanted_port is None and not self._reservations:
            raise RuntimeError("the router has no port yet: start it first")
        return self._wanted_port or self._reservations[0].first

    def open(self) -> None:
        """`start`."""
        self.start()

    def start(self) -> None:
        """Starts the process without waiting for it. Raises OSError if the requested port is taken."""
        self._release_ports()
        wanted = self._wanted_port
        self._reservations.append(claim_port(wanted, self.host) if wanted else claim_ports(1, self.host))
        self._reservations.append(claim_ports(1, self.host))
        self._launch()

    def _launch(self) -> None:
        self._process = ManagedProcess(
            router_command(self._listens_on, self.port, self._reservations[1].first, self._options),
            name=f"SGLang router {self.url}",
            log_path=self.log_path,
            environment=importable() | NO_PROXY | key_environment(self.key),
        )
        self._process.start()

    def restart(self, log_path: Path) -> None:
        """Restarts it after its end, at the same address and without servers, with its output in `log_path`."""
        if not self._reservations:
            raise RuntimeError("the SGLang router was not started")
        assert self._process is not None  # `start` reserves ports before it creates the process
        self._process.stop()
        self.log_path = Path(log_path)
        self._launch()

    def _role_of(self, url: str) -> dict[str, Any]:
        return role_of(url, self.key) if self._options.get("pd_disaggregation") else {}

    def wait_alive(self, timeout_s: float) -> None:
        """Waits until the router responds, with or without servers.

        Raises ProcessStartError (exit code, last log lines) if it dies, or on timeout.
        """
        self._started().wait_until(lambda: is_reachable(f"{self.url}/health"), timeout_s)

    def wait_ready(self, n_workers: int, timeout_s: float) -> None:
        """Waits until `n_workers` servers are in use. Raises ProcessStartError if the router dies, or on timeout."""
        self._started().wait_until(lambda: self.is_ready(n_workers), timeout_s)

    @property
    def pid(self) -> int:
        """Process id of the subreaper above the router."""
        return self._started().pid

    def poll(self) -> int | None:
        """None while the router runs (or was not started), then its exit code."""
        return self._process.poll() if self._process is not None else None

    def last_log_lines(self, count: int = 20) -> str:
        """The last `count` lines of the router's log."""
        return self._started().last_log_lines(count)

    def stop(self, timeout_s: float = 0.0) -> None:
        """Ends the router and frees its ports; with `timeout_s` it may first finish requests in flight."""
        if self._process is not None:
            self._process.stop(timeout_s)
        self._release_ports()

    def _release_ports(self) -> None:
        for reservation in self._reservations:
            reservation.release()
        self._reservations.clear()

    def _started(self) -> ManagedProcess:
        if self._process is None:
            raise RuntimeError("the SGLang router was not started")
        return self._process


def router_command(host: str, port: int, metrics_port: int, options: Mapping[str, Any]) -> list[str]:
    """The command line. Raises ValueError for an option that the router does not have or that slimrl sets."""
    managed = {"host": host, "port": port}
    clash = sorted(options.keys() & (RESERVED_ROUTER.keys() - SET_BY_ROUTER_OPTIONS))
    if clash:
        raise ValueError(f"--router-{clash[0].replace('_', '-')} is set by slimrl itself ({RESERVED_ROUTER[clash[0]]})")
    chosen = {**DEFAULTS, "prometheus_port": metrics_port, **options, **managed}
    return [sys.executable, "-m", "slimrl.engines.sglang.entry", "router", *render_options(chosen, router_flags())]


SET_BY_ROUTER_OPTIONS = {"request_timeout_secs", "pd_disaggregation"}
BY_SESSION: dict[str, Any] = {"policy": "manual", "assignment_mode": "min_load"}


def router_options(
    given: Mapping[str, Any], *, request_timeout_s: int, conversations: bool, disaggregated: bool = False
) -> dict[str, Any]:
    """The router's options by its own names; the user's options, `given`, win.

    `conversations`: requests may belong to multi-turn conversations, each of which must stay on one server.
    `disaggregated`: the servers are prefill and decode servers, and conversations find their cached prefix by tokens.
    """
    routing = BY_SESSION if conversations and "policy" not in given else {}
    if disaggregated:
        # an aborted request ends with HTTP 500 while its cache is on the way: that is no fault of the servers
        routing = {"pd_disaggregation": True, "disable_circuit_breaker": True}
    return {"request_timeout_secs": request_timeout_s, **routing, **given}
