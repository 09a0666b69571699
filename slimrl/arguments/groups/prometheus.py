"""Flags of the Prometheus endpoint."""

from __future__ import annotations

import dataclasses

from slimrl.arguments.flag import flag


@dataclasses.dataclass
class PrometheusArguments:
    """Prometheus."""

    prometheus_port: int | None = flag(
        None, "offer the run's metrics to Prometheus on this port of the driver (off)", at_least=1, at_most=65535
    )
    prometheus_host: str = flag(
        "127.0.0.1", "address that the port listens on; 0.0.0.0 lets other machines scrape it, who then see everything"
    )
