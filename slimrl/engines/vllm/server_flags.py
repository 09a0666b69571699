"""The `--vllm-*` flags: those of `vllm serve` in vLLM's own environment, read by its interpreter when one is given.

The driver asks the environment once, which takes as long as importing vllm there (seconds).
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slimrl.arguments.parser import PassthroughFlag

ENVIRONMENT = Path(__file__).parent / "environment"  # the modules that run inside vLLM's environment
PYTHON_FLAG = "--vllm-python"
MARK = "slimrl_vllm_flags:"  # as in environment/slimrl_vllm_flags.py
PROBE_TIMEOUT_S = 180.0

_SIZE = "--rollout-num-gpus-per-engine is the tensor parallel size of an engine on one node"
_NODES = "an engine has one node"
# options that slimrl sets, or that would change what its calls rely on
MANAGED = {
    "model": "--hf-checkpoint",
    "port": "a free port, chosen at the start",
    "uds": "a free port, chosen at the start",
    "api_key": "a key of the run",
    "seed": "--rollout-seed",
    "tensor_parallel_size": _SIZE,
    "pipeline_parallel_size": _SIZE,
    "prefill_context_parallel_size": _SIZE,
    "decode_context_parallel_size": _SIZE,
    "data_parallel_size": "more engines by --rollout-num-gpus",
    "data_parallel_size_local": "more engines by --rollout-num-gpus",
    "nnodes": _NODES,
    "node_rank": _NODES,
    "master_addr": _NODES,
    "master_port": _NODES,
    "headless": _NODES,
    "api_server_count": "one API server, which knows the requests",
    "logprobs_mode": "log-probabilities at the request's temperature",
    "worker_extension_cls": "weight updates",
    "enable_sleep_mode": "--offload-rollout",
    "root_path": "paths of SGLang's calls",
    "config": "flags of this command line",
}
_TYPES: dict[str, Any] = {"int": int, "float": float, "str": None}


def server_flags(python: str) -> dict[str, PassthroughFlag]:
    """Flag -> declaration, of the vllm that `python` imports. Raises ImportError if that is not possible."""
    command = [python, str(ENVIRONMENT / "slimrl_vllm_flags.py")]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ImportError(f"{python} does not run: {error}; {PYTHON_FLAG} names the interpreter") from None
    lines = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["it prints nothing"])[-1]
        raise ImportError(f"{python} has no usable vllm: {last}; {PYTHON_FLAG} names the interpreter of one that has")
    return passed_flags(json.loads(lines[-1]))


def passed_flags(described: Sequence[dict[str, Any]]) -> dict[str, PassthroughFlag]:
    """The flags as the parser takes them; a switch with an opposite is two."""
    flags: dict[str, PassthroughFlag] = {}
    for one in described:
        dest = one["names"][0].replace("-", "_")
        choices = None if one["choices"] is None else tuple(one["choices"])
        managed = MANAGED.get(dest)
        for name in one["names"]:
            action = "store_true" if one["action"] == "optional_switch" else one["action"]
            if one["action"] == "optional_switch" and name.replace("-", "_") == f"no_{dest}":
                action = "store_false"
            flags[name] = PassthroughFlag(dest, one["nargs"], _TYPES[one["kind"]], choices, action, managed)
    return flags


def interpreter(words: Sequence[str]) -> str:
    """The value of --vllm-python on a command line; this interpreter without one."""
    found = sys.executable
    for word, following in itertools.zip_longest(words, words[1:], fillvalue=""):
        name, equals, value = word.partition("=")
        if name == PYTHON_FLAG:
            found = value if equals else following
    return found
