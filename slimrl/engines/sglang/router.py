"""The SGLang router, as a child process or an external one: its list of servers and its default routing policy.

The router acts on additions and removals later than it answers, and it calls itself healthy without any server; the
methods here return when the change has taken effect.
The router's own policy, `cache_aware`, looks at tokens: samples of one prompt go to one server, and a conversation
stays where its first turns were computed as long as its history only grows and no server has far more to do. It ignores
the session of a request. `manual` sends the first request of a session to the server with the least to do, and all
others after it. Runs with a custom generate function, whose samples may be conversations, use `manual`, unless
--router-policy says otherwise.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import msgspec

from slimrl.arguments import Arguments
from slimrl.engines import auth
from slimrl.engines.http import answers, call, shaped
from slimrl.engines.protocol import EngineError, EngineUnavailableError
from slimrl.engines.sglang.server_args import RESERVED_ROUTER, render_options, router_flags
from slimrl.processes import POLL_INTERVAL_S, ManagedProcess, importable
from slimrl.processes.ports import PortReservation, claim_port, claim_ports

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


class ExternalRouter(RouterControl):
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
        """Takes the servers of this run out; the router continues. A router that is gone is passed over."""
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


DEFAULTS: dict[str, Any] = {
    "log_level": "warn",
    # by default a dead server stays in use for more than a minute
    "health_check_interval_secs": 1,
    "health_failure_threshold": 2,
    "health_success_threshold": 1,
    # by default up to 64 more requests than on the idlest server follow a shared prefix
    "balance_abs_threshold": 10,
    "balance_rel_threshold": 1.2,
    "prometheus_host": "127.0.0.1",  # its metrics have no key, and the router's own default is all addresses
}


# Servers are reached directly; the router would otherwise send its requests through a proxy meant for the internet.
NO_PROXY = {"NO_PROXY": "*", "no_proxy": "*"}


class RouterProcess(RouterControl):
    """One router. `options` holds what the user typed after `--router-`, by the router's own names.

    It is called at `host`, where it listens unless `options` have a "host"; who shows no `key` is refused.

    `port` None: a free one is chosen when the process starts. `request_timeout_s` bounds one generation.
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
        self._claims: list[PortReservation] = []
        self._process: ManagedProcess | None = None

    @property
    def port(self) -> int:
        """The HTTP port. Raises RuntimeError before `start` where none was given."""
        if self._wanted_port is None and not self._claims:
            raise RuntimeError("the router has no port yet: start it first")
        return self._wanted_port or self._claims[0].first

    def start(self) -> None:
        """Starts the process and returns at once. Raises OSError where a wanted port is taken."""
        self._release_ports()
        wanted = self._wanted_port
        self._claims.append(claim_port(wanted, self.host) if wanted else claim_ports(1, self.host))
        self._claims.append(claim_ports(1, self.host))
        self._launch()

    def _launch(self) -> None:
        self._process = ManagedProcess(
            router_command(self._listens_on, self.port, self._claims[1].first, self._options),
            name=f"SGLang router {self.url}",
            log_path=self.log_path,
            environment=importable() | NO_PROXY | auth.for_child(self.key),
        )
        self._process.start()

    def restart(self, log_path: Path) -> None:
        """Restarts it after its end, at the same address and without servers; its output goes into `log_path`."""
        if not self._claims:
            raise RuntimeError("the SGLang router was not started")
        assert self._process is not None  # with the ports that it has claimed
        self._process.stop()
        self.log_path = Path(log_path)
        self._launch()

    def wait_alive(self, timeout_s: float) -> None:
        """Waits until the router takes calls, with or without servers.

        Raises ProcessStartError (exit code, last log lines) if it dies or is late.
        """
        self._started().wait_until(lambda: answers(f"{self.url}/health"), timeout_s)

    def wait_ready(self, n_workers: int, timeout_s: float) -> None:
        """Waits until `n_workers` servers are in use. Raises ProcessStartError if the router dies or time is over."""
        self._started().wait_until(lambda: self.is_ready(n_workers), timeout_s)

    @property
    def pid(self) -> int:
        """Process id of the guardian above the router."""
        return self._started().pid

    def poll(self) -> int | None:
        """None while the router runs (or was not started), then its exit code."""
        return self._process.poll() if self._process is not None else None

    def last_log_lines(self, count: int = 20) -> str:
        """The end of the router's log."""
        return self._started().last_log_lines(count)

    def stop(self, timeout_s: float = 0.0) -> None:
        """Ends the router and frees its ports. With `timeout_s` it first finishes what is in flight."""
        if self._process is not None:
            self._process.stop(timeout_s)
        self._release_ports()

    def _release_ports(self) -> None:
        for claim in self._claims:
            claim.release()
        self._claims.clear()

    def _started(self) -> ManagedProcess:
        if self._process is None:
            raise RuntimeError("the SGLang router was not started")
        return self._process


def router_command(host: str, port: int, metrics_port: int, options: Mapping[str, Any]) -> list[str]:
    """The command line. Raises ValueError for an option the router does not have."""
    managed = {"host": host, "port": port}
    clash = sorted(options.keys() & (RESERVED_ROUTER.keys() - {"request_timeout_secs"}))
    if clash:
        raise ValueError(f"--router-{clash[0].replace('_', '-')} is set by slimrl itself ({RESERVED_ROUTER[clash[0]]})")
    chosen = {**DEFAULTS, "prometheus_port": metrics_port, **options, **managed}
    return [sys.executable, "-m", "slimrl.engines.sglang.entry", "router", *render_options(chosen, router_flags())]


BY_SESSION: dict[str, Any] = {"policy": "manual", "assignment_mode": "min_load"}


def routing_options(args: Arguments) -> dict[str, Any]:
    """Options of the router, by its own names; the user's go before them."""
    datasets = args.eval_datasets or []
    converses = args.custom_generate_function_path or any(one.custom_generate_function_path for one in datasets)
    return dict(BY_SESSION) if converses and "policy" not in args.router_options else {}
