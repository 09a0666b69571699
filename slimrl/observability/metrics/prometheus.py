"""The run's metrics as Prometheus gauges over HTTP, and a file with the targets for Prometheus.

One gauge per metric: `slimrl_` and the metric's name with `_` for what Prometheus does not allow, the exact name in the
label `metric`. Lives in the driver; the server is a thread of its own that reads what was reported last.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from slimrl.arguments.namespace import ReportArguments
from slimrl.observability.metrics import metric_of
from slimrl.observability.metrics.registry import METRICS
from slimrl.processes.files import atomic_file

if TYPE_CHECKING:
    from prometheus_client.core import GaugeMetricFamily

TARGETS_FILE = "prometheus.json"
_ALL_ADDRESSES = ("0.0.0.0", "::", "")


class PrometheusError(OSError):
    """The endpoint cannot be opened; the message has the fix."""


@dataclasses.dataclass(frozen=True)
class Target:
    """A target to scrape: `address` is host:port."""

    job: str
    address: str
    path: str = "/metrics"


def gauge_name(name: str) -> str:
    """`rollout/response_len/mean` -> `slimrl_rollout_response_len_mean`."""
    return "slimrl_" + re.sub(r"[^a-zA-Z0-9_]", "_", name)


def scrape_targets(flags: ReportArguments, server_urls: Sequence[str], driver: str, router: str) -> list[Target]:
    """The run, its servers (--sglang-enable-metrics) and its router (--router-prometheus-port).

    `driver` and `router` are the addresses of their machines, which stand for "all addresses" (0.0.0.0, ::).
    """
    targets = []
    if flags.prometheus_port is not None:
        targets.append(Target("slimrl", _address(flags.prometheus_host, driver, flags.prometheus_port)))
    if flags.sglang_options.get("enable_metrics"):
        targets += [Target("sglang", url.partition("://")[2].rstrip("/")) for url in server_urls]
    router_port = flags.router_options.get("prometheus_port")
    if router_port is not None and server_urls:
        host = flags.router_options.get("prometheus_host", "127.0.0.1")  # as slimrl.engines.sglang.router starts it
        targets.append(Target("router", _address(host, router, router_port)))
    return targets


def _address(host: str, machine: str, port: int) -> str:
    """`host:port` under which others reach a server that listens on `host` of `machine`."""
    host = machine if host in _ALL_ADDRESSES else host
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def write_targets(path: Path, run: str, targets: Sequence[Target]) -> None:
    """Prometheus' `file_sd` format; replaced in one move, because Prometheus watches the file."""
    groups = [
        {"targets": [target.address], "labels": {"job": target.job, "run": run, "__metrics_path__": target.path}}
        for target in targets
    ]
    with atomic_file(path) as unfinished:
        unfinished.write_text(json.dumps(groups, indent=2) + "\n", encoding="utf-8")


class PrometheusEndpoint:
    """Implements `charts.MetricWriter`: `http://<host>:<port>/metrics` until `close`."""

    def __init__(self, host: str, port: int, run: str) -> None:
        """Opens the port. Raises PrometheusError if it cannot be opened."""
        from prometheus_client import CollectorRegistry, start_http_server

        self._run = run
        self._values: dict[str, dict[str, float]] = {}  # by axis; a dict that is there is never changed
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        except OSError as error:
            raise PrometheusError(
                f"--prometheus-port {port} on {host} cannot be opened ({error}): give another port or --prometheus-host"
            ) from error

    def begin(self, starts: Mapping[str, int]) -> None:
        """Exports the axis positions, so that the run is visible before its first step."""
        for axis, number in starts.items():
            self.add(axis, number, {})

    def add(self, axis: str, number: int, values: Mapping[str, float]) -> None:
        """Replaces the values of this axis: what is not reported at its new place is not shown as if it was."""
        own = self._values.get(axis, {})
        kept = own if own.get(axis) == number else {}
        self._values[axis] = {**kept, **values, axis: number}

    def collect(self) -> Iterator[GaugeMetricFamily]:
        """For prometheus_client, from the server's thread: every gauge; names that become one share a family."""
        from prometheus_client.core import GaugeMetricFamily

        families: dict[str, GaugeMetricFamily] = {}
        values = {name: value for own in list(self._values.values()) for name, value in own.items()}
        for name, value in values.items():
            own = gauge_name(name)
            if own not in families:
                metric = metric_of(name, METRICS)
                meaning = name if metric is None else metric.meaning + (f" ({metric.unit})" if metric.unit else "")
                families[own] = GaugeMetricFamily(own, meaning, labels=("metric", "run"))
            families[own].add_metric((name, self._run), value)
        yield from families.values()

    def close(self, *, failed: bool) -> None:
        """Closes the port."""
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
