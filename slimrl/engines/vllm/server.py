"""One vLLM server as a child process, in vLLM's own environment; and the check of an external one (`inspect`).

The process is `<python> environment/slimrl_vllm_server.py`: vLLM's OpenAI server with the calls of slimrl. `python` is
the interpreter of an environment that has vllm; slimrl need not be installed there. Based on the source of vLLM 0.27.1.
The owner of an external server starts the same program; the check is SGLang's, and what slimrl's calls rely on.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slimrl.engines.backend import PYTHON_OPTION
from slimrl.engines.http import (
    EXTERNAL_ENGINES,
    IDLE_CONNECTION_S,
    KEY_OPTION,
    call,
    decode_as,
    is_reachable,
    key_environment,
)
from slimrl.engines.protocol import EngineError, EngineUnsupportedError
from slimrl.engines.server_protocol import WHOLE_SERVER, NodePart, ServerLaunch
from slimrl.engines.sglang import external_server_check as sglang
from slimrl.engines.vllm.backend import ENVIRONMENT
from slimrl.platform.launch_env import network_environment
from slimrl.processes import ManagedProcess
from slimrl.processes.child_process import PortReservation, claim_port, claim_ports

KV_CACHE_BYTES = 1 << 28  # of a server without CUDA, whose default is a share of the machine's memory
GRACEFUL_STOP_S = 20.0
SHARED_MEMORY_PREFIXES = ("psm_", "sem.mp-")  # Python's own

# as for SGLang: log-probabilities are those of the distribution at the request's temperature
LOGPROBS_MODE = "processed_logprobs"
ON_CPU = {"dtype": "float32", "enforce_eager": True, "kv_cache_memory_bytes": KV_CACHE_BYTES}
# of the attention on a CPU; the server of another head dimension ends with an assertion
CPU_HEAD_SIZES = (32, 64, 80, 96, 112, 128, 160, 192, 224, 256, 512)


class ServerProcess:
    """Implements `engines.server_protocol.ServerProcess` for a server on one node.

    `tensor_parallel_size` ranks have the model: with the option data_parallel_size they form that many replicas, each
    with its own part of the requests, and weight updates count the ranks through all replicas. `options` are vLLM's
    options by their names ("max_model_len"), and `python`. They win over slimrl's defaults. Raises ValueError for a
    server over several nodes, without `python`, and for replicas that do not divide the ranks.
    """

    def __init__(
        self,
        model_path: str | Path,
        *,
        log_path: Path,
        host: str = "127.0.0.1",
        port: int | None = None,
        tensor_parallel_size: int = 1,
        options: Mapping[str, Any] | None = None,
        random_seed: int = 0,
        part: NodePart = WHOLE_SERVER,
        launch: ServerLaunch | None = None,
        key: str | None = None,
    ) -> None:
        if part.count > 1:
            raise ValueError(f"a vLLM server over {part.count} nodes is not supported: use engines of one node")
        given = dict(options or {})
        if PYTHON_OPTION not in given:
            raise ValueError("a vLLM server needs the option python: the interpreter of the environment that has vllm")
        replicas = int(given.get("data_parallel_size") or 1)
        if tensor_parallel_size % replicas:
            raise ValueError(f"{replicas} replicas of a vLLM server do not divide its {tensor_parallel_size} GPUs")
        self._python = given.pop(PYTHON_OPTION)
        self.host, self.key, self.part, self.log_path = host, key, part, Path(log_path)
        self._launch = launch if launch is not None else ServerLaunch(cuda=False)
        self._wanted_port = port
        given.pop(KEY_OPTION, None)
        self._managed: dict[str, Any] = {
            "model": str(model_path),
            "host": given.pop("host", host),
            "tensor_parallel_size": tensor_parallel_size // replicas,
            "seed": random_seed,
            "logprobs_mode": LOGPROBS_MODE,
            "worker_extension_cls": "slimrl_vllm_worker.WorkerExtension",
            "enable_sleep_mode": self._launch.memory_saver,
        }
        self._options = given
        self._reservation: PortReservation | None = None
        self._process: ManagedProcess | None = None

    @property
    def port(self) -> int:
        """The HTTP port. Raises RuntimeError before `start` if none was given."""
        if self._wanted_port is None and self._reservation is None:
            raise RuntimeError("the server has no port yet: start it first")
        if self._wanted_port is not None:
            return self._wanted_port
        assert self._reservation is not None
        return self._reservation.first

    @property
    def url(self) -> str:
        """e.g. http://127.0.0.1:21000"""
        return f"http://{self.host}:{self.port}"

    @property
    def started(self) -> bool:
        """Whether its process was started; stays true after its end."""
        return self._process is not None

    @property
    def pid(self) -> int:
        """Process id of the subreaper, the root of the server's process tree."""
        return self._started().pid

    def claim(self) -> str:
        """Reserves the port until `stop`; returns "host:port". Raises OSError if the requested port is taken."""
        self._release_port()
        wanted = self._wanted_port
        self._reservation = claim_port(wanted, self.host) if wanted else claim_ports(1, self.host)
        return f"{self.host}:{self.port}"

    def start(self) -> None:
        """Starts the process without waiting for it. Raises OSError if the requested port is taken."""
        if self._reservation is None:
            self.claim()
        defaults = {} if self._launch.cuda else ON_CPU
        process = ManagedProcess(
            [
                str(self._python),
                str(ENVIRONMENT / "slimrl_vllm_server.py"),
                *rendered({**defaults, **self._options, **self._managed, "port": self.port}),
            ],
            name=f"vLLM server {self.url}",
            log_path=self.log_path,
            environment=server_environment(self._launch, os.environ) | key_environment(self.key),
            shared_memory_prefixes=SHARED_MEMORY_PREFIXES,
        )
        process.start()
        self._process = process

    def wait_ready(self, timeout_s: float) -> None:
        """Waits until the server responds. Raises ProcessStartError (exit code, last log lines)."""
        self._started().wait_until(lambda: is_reachable(f"{self.url}/health"), timeout_s)

    def poll(self) -> int | None:
        """None while the server runs (or was not started), then its exit code."""
        return self._process.poll() if self._process is not None else None

    def last_log_lines(self, count: int = 20) -> str:
        """The last `count` lines of the server's log."""
        return self._started().last_log_lines(count)

    def stop(self, timeout_s: float | None = None) -> None:
        """Ends the server's process tree and frees its port."""
        if self._process is not None:
            self._process.stop((GRACEFUL_STOP_S if self._launch.cuda else 0.0) if timeout_s is None else timeout_s)
        self._release_port()

    def _release_port(self) -> None:
        if self._reservation is not None:
            self._reservation.release()
            self._reservation = None

    def _started(self) -> ManagedProcess:
        if self._process is None:
            raise RuntimeError("the vLLM server was not started")
        return self._process


def rendered(options: Mapping[str, Any]) -> list[str]:
    """The command line words of `options` by name; None leaves a flag out, False is its `--no-` form."""
    words: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        elif isinstance(value, list | tuple):
            words += [f"--{flag}", *map(str, value)]
        elif value is not None:
            words.append(f"--{flag}={value}")
    return words


def check_cpu_can_serve(model: Path, *, releases_memory: bool) -> None:
    """Raises EngineUnsupportedError if a server of the model in this folder cannot run on a CPU."""
    if releases_memory:
        raise EngineUnsupportedError(
            "vLLM has no sleep mode on a CPU, so its servers cannot release their memory: give --no-offload-rollout"
        )
    config: dict[str, Any] = json.loads((model / "config.json").read_text(encoding="utf-8"))
    text = config.get("text_config") or config
    heads, width = text.get("num_attention_heads"), text.get("hidden_size")
    size = text.get("head_dim") or (width // heads if heads and width else None)
    if size is not None and size not in CPU_HEAD_SIZES:
        raise EngineUnsupportedError(
            f"vLLM's attention on a CPU has no heads of dimension {size} ({model}/config.json), only of"
            f" {', '.join(map(str, CPU_HEAD_SIZES))}: use another model, or --rollout-engine sglang"
        )


def server_environment(launch: ServerLaunch, inherited: Mapping[str, str]) -> dict[str, str]:
    """Variables of the server besides the `inherited` ones.

    PYTHONPATH has only the modules for vLLM's environment, not those of this one.
    """
    common = {"PYTHONPATH": str(ENVIRONMENT), "VLLM_NO_USAGE_STATS": "1", "DO_NOT_TRACK": "1"}
    common |= {"VLLM_HTTP_TIMEOUT_KEEP_ALIVE": str(IDLE_CONNECTION_S)}
    common |= network_environment(launch.network, inherited)
    if not launch.cuda:
        return common | {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
    visible = {} if launch.gpus is None else {"CUDA_VISIBLE_DEVICES": ",".join(map(str, launch.gpus))}
    return {**common, **launch.nccl, **visible}


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
    replicas = int(info.get("data_parallel_size", 1))
    return dataclasses.replace(found, tensor_parallel_size=found.tensor_parallel_size * replicas)
