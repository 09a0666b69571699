"""What Ray and torch read from the environment when they are imported. Imports nothing heavy: call it before them."""

from __future__ import annotations

import os
import secrets

from slimrl.processes.folders import kernel_cache

ON_LOOPBACK = {
    # Ray's nodes of one machine: it would listen on all addresses, and take one of loopback for a mistake
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # its own figures about the machine: the ports for them ask for no token, and nobody reads them
    "AUTOSCALER_METRIC_PORT": "-1",
    "DASHBOARD_METRIC_PORT": "-1",
    "RAY_enable_metrics_collection": "0",
}


def prepare_ray_environment() -> None:
    """Gives a local cluster an access token of its own, which Ray would otherwise write into the home folder, and lets
    it listen on loopback alone.

    Inside a cluster (RAY_ADDRESS is set), or where the user chose otherwise, nothing of that is changed. Compiled
    kernels of this process, and of all below it, go into a folder of this user's alone (`kernel_cache`).
    """
    if "RAY_ADDRESS" not in os.environ:
        for name, value in ON_LOOPBACK.items():
            os.environ.setdefault(name, value)
        if "RAY_AUTH_MODE" not in os.environ:
            os.environ["RAY_AUTH_MODE"] = "token"
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.update(kernel_cache(os.environ))
