"""Prefill and decode on different SGLang servers: their options and environment, and how the router knows them.

A prefill server computes the KV cache of a prompt and sends it to the decode server that the router chose for the
request, which generates the response. The servers find each other by the bootstrap server of the prefill server. What
moves the cache is `--sglang-disaggregation-transfer-backend`: Mooncake by default, which uses RDMA and, on machines
without a GPU, TCP.
"""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Mapping
from typing import Any

import msgspec

from slimrl.arguments.engine_groups import DECODE, DEFAULT_TRANSFER, PREFILL, REGULAR
from slimrl.engines.http import call, decode_as
from slimrl.engines.protocol import EngineUnsupportedError
from slimrl.processes import importable

logger = logging.getLogger("slimrl")

MODULES = {DEFAULT_TRANSFER: "mooncake.engine", "nixl": "nixl", "mori": "mori"}  # that SGLang imports for a backend
_OPEN = (
    "whose ports listen on all addresses of a machine and need no key: restrict access to its network"
    " (docs/security.md)"
)
IMPORT_TIMEOUT_S = 60.0
CALL_TIMEOUT_S = 10.0


class _Role(msgspec.Struct):
    """Fields of a server's /server_info."""

    disaggregation_mode: str
    disaggregation_bootstrap_port: int


def role_options(worker_type: str, bootstrap_port: int, *, cuda: bool) -> dict[str, Any]:
    """The server's options of its `worker_type`; none for a server that prefills and decodes."""
    if worker_type == REGULAR:
        return {}
    options: dict[str, Any] = {"disaggregation_mode": worker_type}
    if worker_type == PREFILL:
        options["disaggregation_bootstrap_port"] = bootstrap_port
    elif not cuda:  # the default keeps the cache of retracted requests in memory that CUDA has pinned
        options["disaggregation_decode_retraction_backup"] = "cpu_tensor"
    return options


def role_environment(worker_type: str, host: str, inherited: Mapping[str, str], *, cuda: bool) -> dict[str, str]:
    """Variables of a server of this `worker_type` at `host`, in addition to those that are `inherited`."""
    if worker_type == REGULAR:
        return {}
    decided = {} if cuda else {"MC_FORCE_TCP": "1"}
    if not {"SGLANG_HOST_IP", "HOST_IP"} & inherited.keys():
        decided["SGLANG_HOST_IP"] = host  # where the servers reach each other
    return {name: value for name, value in decided.items() if name not in inherited}


def role_of(url: str, key: str | None) -> dict[str, Any]:
    """The fields of the registration of the server at `url` with the router, as the server itself describes its role.

    Raises EngineError if it does not answer.
    """
    answer = call("GET", f"{url}/server_info", timeout_s=CALL_TIMEOUT_S, key=key)
    role = decode_as(answer, _Role, f"{url}/server_info")
    if role.disaggregation_mode == PREFILL:
        return {"worker_type": PREFILL, "bootstrap_port": role.disaggregation_bootstrap_port}
    return {"worker_type": DECODE} if role.disaggregation_mode == DECODE else {}


def check_installed(transfer: str, *, cuda: bool) -> None:
    """Raises EngineUnsupportedError if the backend cannot be imported here, or does not move caches of CPUs.

    Warns that its ports are open: no backend has a key.
    """
    if not cuda and transfer != DEFAULT_TRANSFER:
        raise EngineUnsupportedError(
            f"--sglang-disaggregation-transfer-backend {transfer} moves KV caches between GPUs, and there is none:"
            f" leave it out for {DEFAULT_TRANSFER}, which moves them over TCP"
        )
    if (module := MODULES.get(transfer)) is not None:
        needs = f"prefill and decode on different servers need {transfer}"
        _check_import(module, needs, "docs/engine-groups.md, prefill and decode")
    logger.warning("prefill servers send KV caches by %s, %s", transfer, _OPEN)


def check_mooncake() -> None:
    """Raises EngineUnsupportedError if weights cannot be sent by Mooncake; warns that its ports are open."""
    needs = "--update-weight-transport mooncake needs Mooncake"
    _check_import(MODULES[DEFAULT_TRANSFER], needs, "docs/weight-updates.md, point to point")
    logger.warning("training sends weights by Mooncake, %s", _OPEN)


def _check_import(module: str, needs: str, page: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", f"import {module}"],
        env={**os.environ, **importable()},
        capture_output=True,
        text=True,
        timeout=IMPORT_TIMEOUT_S,
    )
    if done.returncode:
        cause = (done.stderr.strip().splitlines() or [f"exit code {done.returncode}"])[-1]
        raise EngineUnsupportedError(
            f"{needs}, and `import {module}` fails ({cause}): install it on every node ({page})"
        )
