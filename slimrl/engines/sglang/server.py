"""One SGLang server as a child process: command line, ports and environment.

The process is `python -m slimrl.engines.sglang.entry server` on a machine with CUDA, and
`python -m slimrl.engines.sglang.cpu_patches` on any other; both run `sglang.launch_server`. A server over several nodes
has one such process on each of them (`NodePart`); the first answers requests.

Default options and environment are pure functions of `ServerLaunch`, the user's options, which win over all defaults,
and the inherited variables. Based on the source of SGLang 0.5.20.
"""

from __future__ import annotations

import json
import logging
import os
import re
import sys
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any

from slimrl.engines.http import IDLE_CONNECTION_S, KEY_OPTION, call, is_reachable, key_environment
from slimrl.engines.server_protocol import WHOLE_SERVER, NodePart, ServerLaunch
from slimrl.engines.sglang.entry import BATCH_INVARIANT
from slimrl.engines.sglang.kv_transfer import role_environment, role_options
from slimrl.engines.sglang.server_args import (
    RESERVED,
    has_plain_experts,
    own_models,
    render_options,
    sees_images,
    server_flags,
)
from slimrl.platform.launch_env import Network, kernel_cache, network_environment
from slimrl.processes import ManagedProcess, importable
from slimrl.processes.child_process import PortReservation, claim_port, claim_ports

FLASH_ATTENTION_3 = "fa3"
# SGLang's arithmetic for one other trainer, with log-probabilities in bfloat16; with --true-on-policy-mode on GPUs its
# flag stands for that mode, whose operators servers then have
ON_POLICY_TARGET = "rl_on_policy_target"
DISABLED, BREAKABLE = "disabled", "breakable"
_ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
OF_OWN_MODELS, OWN_MODELS = "SGLANG_EXTERNAL_MODEL_PACKAGE", "slimrl.engines.sglang.models"
# options with which the server needs other kernels for experts than those of its default
_CHOOSE_EXPERT_KERNELS = ("moe_a2a_backend", "enable_waterfill", "quantization")
_BETWEEN_SETTINGS = re.compile(r",(?![^\[]*\])")  # commas outside brackets


def default_options(
    launch: ServerLaunch,
    options: Mapping[str, Any],
    known: Collection[str],
    *,
    has_images: bool = False,
    has_experts: bool = False,
) -> dict[str, Any]:
    """slimrl's default options by the server's names; the user's `options` win. `known` are the server's options.

    `has_images`: its model is a vision-language model. `has_experts`: its model has experts that are not quantised.
    """
    if not launch.cuda:
        return {}
    defaults: dict[str, Any] = {}
    if _chosen_backend(options, "prefill") is None:
        # The server's default captures prefill in breakable graphs, whose inputs may be overwritten by those of
        # another batch size: silently wrong tokens (sgl-project/sglang#37606).
        defaults |= {"cuda_graph_backend_prefill": DISABLED}
    if launch.batch_invariant:  # the trainer attends with this library
        defaults |= {"attention_backend": FLASH_ATTENTION_3}
    if launch.memory_saver and options.get("speculative_algorithm") is not None:
        # Weight updates do not include draft weights: after a release they must be restored from host memory.
        defaults |= {"enable_draft_weights_cpu_backup": True}
    if has_experts and not any(options.get(name) not in (None, False, "none") for name in _CHOOSE_EXPERT_KERNELS):
        # What the server takes by default on Hopper. Its default on Blackwell (flashinfer_trtllm, for most families)
        # permutes the weights of experts when they are loaded, and weight updates then fail (sgl-project/sglang#27787).
        defaults |= {"moe_runner_backend": "triton"}
    if has_images:  # as the trainer: on a GPU, resized pixels are rounded in another way
        own = "image_processor_backend"
        defaults |= {own: "pil"} if own in known else {"disable_fast_image_processor": True}  # before 0.5.20
    return {name: value for name, value in defaults.items() if name in known and name not in options}


def server_environment(
    launch: ServerLaunch, options: Mapping[str, Any], inherited: Mapping[str, str], *, ranks: int, base_gpu_id: int
) -> dict[str, str]:
    """Variables of the server in addition to this process's own, which are `inherited`.

    `options` are the user's, since no default selects breakable graphs. `ranks` counts the ranks of all its nodes.
    """
    common = {
        # /health responds at once instead of generating a token: the router polls it every second, and a server that
        # is paused for a weight update is healthy
        "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",
        # it would keep the features of images over weight updates, which change the vision tower
        "SGLANG_VLM_CACHE_SIZE_MB": "0",
        "SGLANG_TIMEOUT_KEEP_ALIVE": str(IDLE_CONNECTION_S),
        **_of_network(launch.network, inherited),
    }
    decided = _on_gpus(launch, options, inherited) if launch.cuda else _on_cpu(ranks, base_gpu_id)
    return common | decided


def model_environment(model: Path, inherited: Mapping[str, str]) -> dict[str, str]:
    """The package with the class of the model in the folder `model`, if SGLang has none."""
    if OF_OWN_MODELS in inherited or not own_models(model):
        return {}
    return {OF_OWN_MODELS: OWN_MODELS}


def _of_network(network: Network, inherited: Mapping[str, str]) -> dict[str, str]:
    decided = network_environment(network, inherited)
    if network.interface and not {"SGLANG_HOST_IP", "HOST_IP"} & inherited.keys():
        # the address announced to other nodes; SGLang's default is the address of the route to the internet, if any
        decided["SGLANG_HOST_IP"] = network.address
    return decided


def _on_gpus(launch: ServerLaunch, options: Mapping[str, Any], inherited: Mapping[str, str]) -> dict[str, str]:
    decided: dict[str, str] = {}
    if launch.gpus is not None:
        decided["CUDA_VISIBLE_DEVICES"] = ",".join(map(str, launch.gpus))
    decided |= launch.nccl
    if channels := launch.nccl.get("NCCL_MIN_NCHANNELS"):  # what SGLang sets both limits to
        decided["SGLANG_DETERMINISTIC_NCCL_NCHANNELS"] = channels
    if launch.shares_gpus and "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK" not in inherited:
        # A replacement server may start next to onloaded training ranks, whose memory differs by their layers: the
        # free memory of the server's GPUs is then unequal, and the check would abort the start.
        decided["SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK"] = "false"
    if not launch.memory_saver:
        return decided
    backends = [_chosen_backend(options, phase) for phase in ("prefill", "decode")]
    if BREAKABLE not in backends and "SGLANG_MEMORY_SAVER_CUDA_GRAPH" not in inherited:
        # Without it CUDA graphs stay on the device while memory is released. Incompatible with breakable graphs.
        decided["SGLANG_MEMORY_SAVER_CUDA_GRAPH"] = "1"
    return decided | without_expandable_segments(inherited)


def without_expandable_segments(inherited: Mapping[str, str]) -> dict[str, str]:
    """The `inherited` allocator settings that have expandable_segments:True, without it: the memory saver fails."""
    changed = {}
    for name in _ALLOCATOR_SETTINGS:
        settings = _BETWEEN_SETTINGS.split(inherited.get(name, ""))
        kept = [one for one in settings if not re.fullmatch(r"\s*expandable_segments\s*:\s*true\s*", one, re.I)]
        if kept != settings:
            changed[name] = ",".join(kept)
    return changed


def _on_cpu(ranks: int, base_gpu_id: int) -> dict[str, str]:
    decided = {"OMP_NUM_THREADS": "1"}
    if ranks > 1:  # by default SGLang wants a NUMA node per rank, also for ranks on other machines
        decided["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(_cores(ranks, base_gpu_id, sorted(os.sched_getaffinity(0))))
    return decided


def _cores(ranks: int, first: int, cores: Sequence[int]) -> list[str]:
    return [str(cores[(first + rank) % len(cores)]) for rank in range(ranks)]


def _chosen_backend(options: Mapping[str, Any], phase: str) -> str | None:
    """The CUDA graph backend of `phase` ("prefill", "decode") set by `options`, in the server's precedence."""
    config = options.get("cuda_graph_config")
    config = json.loads(config) if isinstance(config, str) else config or {}
    explicit = config.get(phase)
    if isinstance(explicit, dict) and "backend" in explicit:
        return explicit["backend"]
    if (chosen := options.get(f"cuda_graph_backend_{phase}")) is not None:
        return chosen
    off = options.get(f"disable_{phase}_cuda_graph") or options.get("disable_cuda_graph")
    return DISABLED if off else None


# the rendezvous port, followed by those of data-parallel attention: 6 sockets, one per data-parallel rank, and the 13th
# for the handshake between nodes
NEIGHBOUR_PORTS = 14
GRACEFUL_STOP_S = 20.0
FREEZE_TIMEOUT_S = 60.0
SHARED_MEMORY_PREFIXES = ("sglang_", "sgl_", "multi_tokenizer_args_", "psm_")  # the last is Python's own

logger = logging.getLogger(__name__)


class ServerProcess:
    """Implements `engines.server_protocol.ServerProcess`.

    It uses `tensor_parallel_size` times `--sglang-pp-size` GPUs, or is the part of such a server on this machine.
    `options` are the user's --sglang-* options by the engine's names; they win over slimrl's defaults. Clients call it
    at `host`, where it listens unless `options` have a "host"; calls without `key` are rejected. `port` None: a free
    port, chosen when the process starts. `launch` has the properties of the machine and the run; None: a standalone
    server on the GPUs that are visible to torch (which takes seconds to import).
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
        base_gpu_id: int = 0,
        random_seed: int = 0,
        part: NodePart = WHOLE_SERVER,
        launch: ServerLaunch | None = None,
        key: str | None = None,
    ) -> None:
        self.host = host
        self.key = key
        self._launch = ServerLaunch(cuda=_has_gpu()) if launch is None else launch
        self.log_path = Path(log_path)
        self.part = part
        self._wanted_port = port
        self._options = {name: value for name, value in (options or {}).items() if name not in ("host", KEY_OPTION)}
        self._managed: dict[str, Any] = {
            "model_path": str(model_path),
            "tp_size": tensor_parallel_size,
            "host": (options or {}).get("host", host),
            "base_gpu_id": base_gpu_id,
            "random_seed": random_seed,
            "skip_server_warmup": True,
            "enable_memory_saver": self._launch.memory_saver,
        }
        self._dp_size = self._options.get("dp_size", 1)
        self._reservations: list[PortReservation] = []
        self._process: ManagedProcess | None = None

    @property
    def port(self) -> int:
        """The HTTP port. Raises RuntimeError before `start` if none was given."""
        if self._wanted_port is None and not self._reservations:
            raise RuntimeError("the server has no port yet: start it first")
        return self._wanted_port or self._reservations[0].first

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
        """Reserves the ports until `stop`; returns the rendezvous "host:port" of the ranks of all nodes.

        Needed before `start` only on the first of several nodes. Raises OSError if the requested port is taken.
        """
        self._release_ports()
        wanted = self._wanted_port
        self._reservations.append(claim_port(wanted, self.host) if wanted else claim_ports(1, self.host))
        self._reservations.append(claim_ports(2 + NEIGHBOUR_PORTS + self._dp_size, self.host))
        return self.part.rendezvous or f"{self.host}:{self._reservations[1].first + 1}"

    def start(self) -> None:
        """Starts the process without waiting for it. Raises OSError if the requested port is taken."""
        if not self._reservations:
            self.claim()
        rendezvous_options = rendezvous(self._options, self.host, self._reservations[1].first, self.part)
        role = role_options(self._launch.worker_type, self._bootstrap_port(), cuda=self._launch.cuda)
        managed = self._managed | {"port": self.port} | rendezvous_options | role
        ranks = managed["tp_size"] * self._options.get("pp_size", 1)
        launch = self._launch
        if launch.cuda and launch.memory_saver and (changed := without_expandable_segments(os.environ)):
            logger.warning("%s: removed expandable_segments, the memory saver does not support it", ", ".join(changed))
        process = ManagedProcess(
            server_command(managed, self._options, launch),
            name=f"SGLang server {self.url}" + (f" (node {self.part.rank})" if self.part.count > 1 else ""),
            log_path=self.log_path,
            environment=importable()
            | kernel_cache(os.environ)
            | key_environment(self.key)
            | role_environment(launch.worker_type, self.host, os.environ, cuda=launch.cuda)
            | model_environment(Path(managed["model_path"]), os.environ)
            | server_environment(launch, self._options, os.environ, ranks=ranks, base_gpu_id=managed["base_gpu_id"]),
            shared_memory_prefixes=SHARED_MEMORY_PREFIXES,
        )
        process.start()
        self._process = process  # only now: other threads ask for its pid

    def _bootstrap_port(self) -> int:
        """Of a prefill server, the last of the ports that its first node has claimed."""
        first = self._reservations[1].first + 1
        if self.part.rendezvous is not None:
            first = int(self.part.rendezvous.rpartition(":")[2])
        return first + NEIGHBOUR_PORTS + self._dp_size

    def wait_ready(self, timeout_s: float) -> None:
        """Waits until the server responds; call it on the first of several nodes, which responds when all are ready.

        Raises ProcessStartError (exit code, last log lines) if it dies, or on timeout.
        """
        self._started().wait_until(lambda: is_reachable(f"{self.url}/health"), timeout_s)
        # The objects that exist now live as long as the server. Without the freeze every flush of the cache, two per
        # weight update, would scan all of them: 0.3 s on the CPU, where a flush runs the garbage collector.
        call("POST", f"{self.url}/freeze_gc", timeout_s=FREEZE_TIMEOUT_S, key=self.key)

    def poll(self) -> int | None:
        """None while the server runs (or was not started), then its exit code."""
        return self._process.poll() if self._process is not None else None

    def last_log_lines(self, count: int = 20) -> str:
        """The last `count` lines of the server's log."""
        return self._started().last_log_lines(count)

    def stop(self, timeout_s: float | None = None) -> None:
        """Ends the server's process tree and frees its ports.

        `timeout_s` is the time for a graceful exit; default: 0 on the CPU, where SGLang's graceful exit takes seconds
        and releases nothing more than a kill.
        """
        if self._process is not None:
            self._process.stop((GRACEFUL_STOP_S if self._launch.cuda else 0.0) if timeout_s is None else timeout_s)
        self._release_ports()

    def _release_ports(self) -> None:
        for reservation in self._reservations:
            reservation.release()
        self._reservations.clear()

    def _started(self) -> ManagedProcess:
        if self._process is None:
            raise RuntimeError("the SGLang server was not started")
        return self._process


def server_command(managed: Mapping[str, Any], options: Mapping[str, Any], launch: ServerLaunch) -> list[str]:
    """The command line of slimrl's `managed` options and the user's; raises ValueError for reserved options."""
    clash = sorted(options.keys() & RESERVED.keys())
    if clash:
        raise ValueError(f"--sglang-{clash[0].replace('_', '-')} is set by slimrl itself ({RESERVED[clash[0]]})")
    entry = ("slimrl.engines.sglang.entry", "server") if launch.cuda else ("slimrl.engines.sglang.cpu_patches",)
    flags = server_flags()
    model = Path(managed["model_path"]) if "model_path" in managed else Path()
    known = {flag.dest for flag in flags.values()}
    defaults = default_options(
        launch, options, known, has_images=sees_images(model), has_experts=has_plain_experts(model)
    )
    own = [BATCH_INVARIANT] if launch.batch_invariant else []
    given = {name: value for name, value in options.items() if not own or name != ON_POLICY_TARGET}
    return [sys.executable, "-m", *entry, *own, *render_options({**defaults, **given, **managed}, flags)]


def rendezvous(options: Mapping[str, Any], host: str, first_port: int, part: NodePart = WHOLE_SERVER) -> dict[str, Any]:
    """The rendezvous options: one port, and consecutive ones on several nodes or with data-parallel attention."""
    settings: dict[str, Any] = {"nccl_port": first_port}
    if part.count > 1 or options.get("enable_dp_attention"):
        settings["dist_init_addr"] = part.rendezvous or f"{host}:{first_port + 1}"
    if part.count > 1:
        settings |= {"nnodes": part.count, "node_rank": part.rank}
    return settings


def _has_gpu() -> bool:
    from slimrl.platform import is_cpu

    return not is_cpu()
