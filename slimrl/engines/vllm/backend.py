"""vLLM's row in the table of engines (`engines.backend`), chosen by `--rollout-engine vllm`, and the `--vllm-*` flags.

Its server speaks SGLang's HTTP calls (`environment/slimrl_vllm_server.py`), so router, client and control are SGLang's.

The flags are those of `vllm serve` in vLLM's own environment, read by its interpreter when one is given. The driver
asks the environment once, which takes as long as importing vllm there (seconds).
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimrl.arguments.parser import PassthroughFlag

if TYPE_CHECKING:
    from slimrl.arguments.parser import PassthroughTables
    from slimrl.engines.backend import (
        ClientFactory,
        ControlFactory,
        ExternalRouterFactory,
        RouterFactory,
        ServerFactory,
    )
    from slimrl.engines.server_protocol import ExternalServer
    from slimrl.models.adapters import AdapterConfig, SharedAdapter

ENVIRONMENT = Path(__file__).parent / "environment"  # the modules that run inside vLLM's environment
PYTHON_FLAG = "--vllm-python"
PRINT_FLAGS, MARK = "--slimrl-print-flags", "slimrl_vllm_flags:"  # as in environment/slimrl_vllm_server.py
PROBE_TIMEOUT_S = 180.0
TESTED = "0.27.1"  # the version that slimrl's modules there were written for

_SIZE = "--rollout-num-gpus-per-engine is the number of GPUs of an engine on one node"
_NODES = "an engine has one node"
_REPLICAS = "--vllm-data-parallel-size is the number of replicas behind the one API server of an engine"
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
    "data_parallel_size_local": _REPLICAS,
    "data_parallel_rank": _REPLICAS,
    "data_parallel_start_rank": _REPLICAS,
    "data_parallel_backend": _REPLICAS,
    "data_parallel_hybrid_lb": _REPLICAS,
    "data_parallel_external_lb": _REPLICAS,
    "data_parallel_multi_port_external_lb": _REPLICAS,
    "data_parallel_address": _NODES,
    "data_parallel_rpc_port": "a free port, chosen at the start",
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
    check_environment(python)
    return passed_flags(_printed(python, "slimrl_vllm_server.py", PRINT_FLAGS))


def check_environment(python: str) -> None:
    """Raises ImportError, naming the version, if the vllm of `python` lacks what slimrl's modules take from it."""
    found = _printed(python, "slimrl_vllm_check.py")
    if absent := found["absent"]:
        more = f" and {len(absent) - 1} more names" if len(absent) > 1 else ""
        raise ImportError(
            f"{python} has vllm {found['version']} without {absent[0]}{more}, which slimrl's calls need: install vllm"
            f" {TESTED} there, or name the interpreter of an environment that has it ({PYTHON_FLAG})"
        )


def _printed(python: str, script: str, *words: str) -> Any:
    """The JSON that a script in vLLM's environment prints behind `MARK`. Raises ImportError without one."""
    command = [python, str(ENVIRONMENT / script), *words]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=PROBE_TIMEOUT_S, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        raise ImportError(f"{python} does not run: {error}; {PYTHON_FLAG} names the interpreter") from None
    lines = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    if done.returncode or not lines:
        last = (done.stderr.strip().splitlines() or ["it prints nothing"])[-1]
        raise ImportError(f"{python} has no usable vllm: {last}; {PYTHON_FLAG} names the interpreter of one that has")
    return json.loads(lines[-1])


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


class VllmBackend:
    """Implements `EngineBackend`."""

    title = "vLLM"
    packages = ("sglang_router",)  # in this environment; vllm is in its own

    @property
    def server(self) -> ServerFactory:
        """One server on one node."""
        from slimrl.engines.vllm.server import ServerProcess

        return ServerProcess

    @property
    def router(self) -> RouterFactory:
        """The SGLang router as a child process."""
        from slimrl.engines.sglang.router import RouterProcess

        return RouterProcess

    @property
    def external_router(self) -> ExternalRouterFactory:
        """An external SGLang router."""
        from slimrl.engines.sglang.router import ExternalRouter

        return ExternalRouter

    @property
    def client(self) -> ClientFactory:
        """Generation through the router."""
        from slimrl.engines.sglang.client import RouterClient

        return RouterClient

    @property
    def control(self) -> ControlFactory:
        """Weights, pauses and load of one server."""
        from slimrl.engines.sglang.control import ServerControl

        return ServerControl

    def inspect(
        self,
        address: str,
        hf_checkpoint: str,
        *,
        needs_weight_sync: bool = True,
        key: str | None = None,
        adapter: SharedAdapter | None = None,
    ) -> ExternalServer:
        """Checks whether an external server, vLLM's with the calls of slimrl, can serve the run, without adapters."""
        from slimrl.engines.vllm.server import inspect

        return inspect(address, hf_checkpoint, needs_weight_sync=needs_weight_sync, key=key)

    def router_options(
        self, given: Mapping[str, Any], *, request_timeout_s: int, conversations: bool, disaggregated: bool = False
    ) -> dict[str, Any]:
        """See `sglang.router.router_options`."""
        from slimrl.engines.sglang.router import router_options

        return router_options(given, request_timeout_s=request_timeout_s, conversations=conversations)

    def flags(self, words: Sequence[str]) -> PassthroughTables:
        """--vllm-<x>, read from vLLM's own environment when one is given."""
        return {"vllm": lambda: server_flags(interpreter(words))}

    def check_machine(
        self,
        model: str | Path,
        *,
        cuda: bool,
        releases_memory: bool,
        kv_transfers: Sequence[str] = (),
        mooncake: bool = False,
        draft_branches: int = 1,
        python: str | None = None,
    ) -> None:
        """Its environment has what slimrl's modules there take from vllm.

        On a CPU vLLM has no sleep mode, and no attention of heads of other sizes than `CPU_HEAD_SIZES`.
        """
        from slimrl.engines.protocol import EngineUnsupportedError
        from slimrl.engines.vllm.server import check_cpu_can_serve

        try:
            check_environment(python or sys.executable)
        except ImportError as error:
            raise EngineUnsupportedError(str(error)) from None
        if not cuda:
            check_cpu_can_serve(Path(model), releases_memory=releases_memory)

    def adapter_options(self, adapters: AdapterConfig, *, releases_memory: bool) -> dict[str, Any]:
        """Raises EngineError: vLLM servers get merged weights."""
        from slimrl.engines.protocol import EngineError

        raise EngineError("vLLM servers get LoRA adapters merged into the weights: give --lora-merge")

    def delta_options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Raises EngineError: vLLM servers get whole weights."""
        from slimrl.engines.protocol import EngineError

        raise EngineError("vLLM servers get whole weights: leave --update-weight-mode delta out")

    def point_to_point_options(self, given: Mapping[str, Any]) -> dict[str, Any]:
        """Raises EngineError: vLLM servers get whole weights."""
        from slimrl.engines.protocol import EngineError

        raise EngineError("vLLM servers get whole weights: leave --update-weight-transfer-mode p2p out")

    def routing_options(self) -> dict[str, Any]:
        """Raises EngineError: the routing of vLLM servers is not read."""
        from slimrl.engines.protocol import EngineError

        raise EngineError("the routing of vLLM servers is not read: leave --use-rollout-routing-replay out")

    def cpu_options(self, words: Sequence[str]) -> list[str]:
        """The defaults that `ServerProcess` adds on a machine without CUDA."""
        from slimrl.engines.vllm.server import ON_CPU, rendered

        return [*rendered(ON_CPU), *words]
