"""Prepares the import of Ray, torch and other large packages: the variables that they read, the garbage collector.

Imports none of them, so that it can run before them.
"""

from __future__ import annotations

import contextlib
import gc
import os
import secrets
from collections.abc import Iterator

from slimrl.processes.folders import kernel_cache

ON_LOOPBACK = {
    # for nodes on one machine: otherwise Ray listens on all addresses and rejects loopback
    "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER": "0",
    # Ray's machine metrics: their ports require no token, and slimrl does not use them
    "AUTOSCALER_METRIC_PORT": "-1",
    "DASHBOARD_METRIC_PORT": "-1",
    "RAY_enable_metrics_collection": "0",
}


def prepare_ray_environment() -> None:
    """Gives a local cluster an access token, which Ray would otherwise write into the home folder, and restricts it to
    loopback.

    Inside a cluster (RAY_ADDRESS is set) these variables stay unchanged, as do those that the user has set. Compiled
    kernels of this process and its descendants go into a private folder of this user (`kernel_cache`).
    """
    if "RAY_ADDRESS" not in os.environ:
        for name, value in ON_LOOPBACK.items():
            os.environ.setdefault(name, value)
        if "RAY_AUTH_MODE" not in os.environ:
            os.environ["RAY_AUTH_MODE"] = "token"
            os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.update(kernel_cache(os.environ))


@contextlib.contextmanager
def uncollected() -> Iterator[None]:
    """The garbage collector is off in this block, and ignores its objects afterwards; for imports of large packages.

    An import creates objects that stay: the collector would scan all of them again and again and free next to nothing,
    which is a fifth of the time that a server needs for its 5000 modules. A full collection of them stops a server for
    0.3 s, and would do so every 1500 requests.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if enabled:
            gc.enable()
