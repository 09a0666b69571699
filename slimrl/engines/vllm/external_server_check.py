"""Checks whether an external vLLM server can serve a run: SGLang's checks, and what slimrl's calls rely on.

Its owner starts `slimrl_vllm_server.py` in vLLM's environment, which sets all of it.
"""

from __future__ import annotations

from typing import Any

from slimrl.engines.http import EXTERNAL_ENGINES, call, decode_as
from slimrl.engines.protocol import EngineError
from slimrl.engines.sglang import external_server_check as sglang
from slimrl.engines.vllm.server import LOGPROBS_MODE

NEEDED = {"logprobs_mode": LOGPROBS_MODE, "worker_extension": "slimrl_vllm_worker.WorkerExtension"}


def inspect(
    address: str, hf_checkpoint: str, *, needs_weight_sync: bool = True, key: str | None = None
) -> sglang.ExternalServer:
    """The server at "host:port", called with `key`. Raises EngineError with one sentence per problem."""
    found = sglang.inspect(address, hf_checkpoint, needs_weight_sync=needs_weight_sync, key=key)
    info = decode_as(
        call("GET", f"{found.url}/server_info", timeout_s=sglang.TIMEOUT_S, key=key),
        dict[str, Any],
        f"{found.url}/server_info",
    )
    if info.get("engine") != "vllm":
        raise EngineError(
            f"{EXTERNAL_ENGINES} {address}: it is an SGLang server, and --rollout-engine is vllm: leave the flag out"
        )
    problems = [
        f"{EXTERNAL_ENGINES} {address}: it has --{name.replace('_', '-')} {info.get(name)} instead of {value}: start"
        " slimrl/engines/vllm/environment/slimrl_vllm_server.py without that flag"
        for name, value in NEEDED.items()
        if info.get(name) != value
    ]
    if problems:
        raise EngineError("\n".join(problems))
    return found
