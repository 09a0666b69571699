"""What Ray reads from the environment when it is imported. Imports nothing heavy: call it before `import ray`."""

from __future__ import annotations

import os
import secrets


def prepare_ray_environment() -> None:
    """Gives a local cluster an access token of its own; Ray would otherwise write one into the home folder.

    Inside a cluster (RAY_ADDRESS is set), or where the user chose a mode, nothing is changed.
    """
    if "RAY_ADDRESS" not in os.environ and "RAY_AUTH_MODE" not in os.environ:
        os.environ["RAY_AUTH_MODE"] = "token"
        os.environ.setdefault("RAY_AUTH_TOKEN", secrets.token_hex(32))
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
