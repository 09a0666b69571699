"""The real sglang-router as a child process. Called by the fleet and by tests."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slimrl.processes import ManagedProcess, importable
from slimrl.sglang import access
from slimrl.sglang.calls import answers
from slimrl.sglang.flags import RESERVED_ROUTER, render_options, router_flags
from slimrl.sglang.ports import PortClaim, claim_port, claim_ports
from slimrl.sglang.router_control import RouterControl

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
        self._claims: list[PortClaim] = []
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
            environment=importable() | NO_PROXY | access.for_child(self.key),
        )
        self._process.start()

    def restart(self, log_path: Path) -> None:
        """Starts it anew after its end, at the same address and without servers; its output goes into `log_path`."""
        if not self._claims:
            raise RuntimeError("the SGLang router was not started")
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
    return [sys.executable, "-m", "slimrl.sglang.entry", "router", *render_options(chosen, router_flags())]
