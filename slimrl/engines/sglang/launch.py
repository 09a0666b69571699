"""The default arguments and the environment of a server, by the machine and the run.

Both are pure functions of `ServerLaunch`, the user's options and the inherited variables. The user's options win over
all defaults. Based on the source of SGLang 0.5.20. Called by `server`.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Collection, Mapping, Sequence
from typing import Any

from slimrl.engines.server_protocol import ServerLaunch
from slimrl.platform.launch_env import Network, network_environment

DISABLED, BREAKABLE = "disabled", "breakable"
_ALLOCATOR_SETTINGS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_BETWEEN_SETTINGS = re.compile(r",(?![^\[]*\])")  # commas outside brackets


def default_options(launch: ServerLaunch, options: Mapping[str, Any], known: Collection[str]) -> dict[str, Any]:
    """slimrl's default options by the server's names; the user's `options` win. `known` are the server's options."""
    if not launch.cuda:
        return {}
    defaults: dict[str, Any] = {}
    if _chosen_backend(options, "prefill") is None:
        # The server's default captures prefill in breakable graphs, whose inputs may be overwritten by those of
        # another batch size: silently wrong tokens (sgl-project/sglang#37606).
        defaults |= {"cuda_graph_backend_prefill": DISABLED}
    if launch.memory_saver and options.get("speculative_algorithm") is not None:
        # Weight updates do not include draft weights: after a release they must be restored from host memory.
        defaults |= {"enable_draft_weights_cpu_backup": True}
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
        **_of_network(launch.network, inherited),
    }
    decided = _on_gpus(launch, options, inherited) if launch.cuda else _on_cpu(ranks, base_gpu_id)
    return common | decided


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
    if launch.nccl_cumem is not None:
        decided["NCCL_CUMEM_ENABLE"] = launch.nccl_cumem
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
