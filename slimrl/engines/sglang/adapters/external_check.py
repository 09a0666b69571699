"""What an external SGLang server needs for the LoRA adapters of several runs. Called by `external_server_check`."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from slimrl.engines.sglang.adapters.server_patches import ABORT_PATH, COUNTS_PATH
from slimrl.models.adapters import SharedAdapter

_ALL = "all"  # as target: every projection
LEAST_PER_BATCH = 2  # a run's adapter, and that of another run or the base
# options that an external server with adapters must not have, with the reason
_NONE_OF = {
    "max_loaded_loras": "with which an update of one run removes the adapter of another",
    "tokenizer_worker_num": "and a call about adapters reaches only one of these processes",
    "dp_size": "and adapters are not loaded into several copies of a model",
    "speculative_algorithm": "and draft models do not have the adapters",
}
PROGRAM = (
    "python3 -m slimrl.engines.sglang.entry server (without a GPU: python3 -m slimrl.engines.sglang.cpu_patches) and"
    " the flags of sglang.launch_server"
)


def problems_with_adapters(
    server: Mapping[str, Any], paths: Mapping[str, Any], loaded: Sequence[str], adapter: SharedAdapter
) -> Iterator[str]:
    """One sentence per reason that the server cannot load the run's adapters.

    `server` is its /server_info, `paths` its calls, `loaded` the names of its adapters.
    """
    config = adapter.config
    targets = " ".join(config.targets)
    if not server.get("enable_lora"):
        yield (
            "it loads no LoRA adapters: start it with --enable-lora --max-lora-rank"
            f" {config.rank} --lora-target-modules {targets}, or give --lora-merge"
        )
        return
    if COUNTS_PATH not in paths or ABORT_PATH not in paths:
        yield f"it has no calls for the adapters of one run: start it with {PROGRAM}"
    if (server.get("max_lora_rank") or 0) < config.rank:
        yield f"it has --max-lora-rank {server.get('max_lora_rank')}, and --lora-rank is {config.rank}: give it that"
    allowed = server.get("lora_target_modules") or []
    if _ALL not in allowed and (absent := [name for name in config.targets if name not in allowed]):
        yield f"it has --lora-target-modules without {' '.join(absent)}: start it with {targets}"
    if server.get("max_loras_per_batch", LEAST_PER_BATCH) < LEAST_PER_BATCH:
        yield "it has --max-loras-per-batch 1, so that runs wait for each other: give the number of runs and one more"
    for option, reason in _NONE_OF.items():
        if (given := server.get(option)) not in (None, 1):
            yield f"it has --{option.replace('_', '-')} {given}, {reason}: start it without"
    if taken := adapter.of_others(loaded):
        yield (
            f"another run has its adapter {', '.join(taken)} there: give this run another --lora-name than"
            f" {adapter.name}; if that run has ended without removing it, POST /unload_lora_adapter with that lora_name"
        )
