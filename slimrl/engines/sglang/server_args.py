"""The flags that pass through slimrl to SGLang (`--sglang-<x>`) and to its router (`--router-<x>`).

The tables come from the installed packages, so they include the flags of new engine versions. Flags that slimrl sets
are marked with the reason. `render_options` is the inverse: from parsed options to the engine's command line.
Called by the parser (only if such a flag is given) and by the server and router processes.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from slimrl.arguments import PassthroughFlag
from slimrl.engines.sglang.versions import DeclaredFlag, read_server_flags
from slimrl.models.adapters import AdapterConfig
from slimrl.models.families.vision import TOWER_CONFIG, decoder_config

# dest of the server's flag -> how slimrl sets it; completes "--sglang-x is set by slimrl itself (...)"
RESERVED: dict[str, str] = {
    "model_path": "--hf-checkpoint",
    "tp_size": "--rollout-num-gpus-per-engine",
    "random_seed": "--rollout-seed plus the index of the server",
    "enable_memory_saver": "--offload-rollout",
    "skip_server_warmup": "always on: the first rollout warms the server",
    "weight_version": "the number of weight updates",
    "port": "slimrl picks a free port",
    "nccl_port": "slimrl picks a free port",
    "dist_init_addr": "slimrl picks a free port",
    "nnodes": "by the GPU placement",
    "node_rank": "by the GPU placement",
    "base_gpu_id": "by the GPU placement",
    "gpu_id_step": "by the GPU placement",
    "config": "give the flags themselves, each as --sglang-<flag>",
    "use_ray": "slimrl starts the server itself",
    "admin_api_key": "the key of --sglang-api-key, or a generated one, is valid for every endpoint",
    "disaggregation_mode": "--prefill-num-servers, or worker_type of --sglang-config",
    "disaggregation_bootstrap_port": "slimrl picks a free port",
    "tokenizer_worker_num": "1: with several SGLang does not check the key",
    "grpc_port": "none: SGLang does not check the key there",
}

RESERVED_ROUTER: dict[str, str] = {
    "port": "--sglang-router-port",
    "request_timeout_secs": "--sglang-router-request-timeout-secs",
    "worker_urls": "slimrl registers the servers it starts",
    "prefill": "slimrl registers the servers it starts",
    "decode": "slimrl registers the servers it starts",
    "pd_disaggregation": "--prefill-num-servers, or worker_type of --sglang-config",
    "mini_lb": "the real router is always used",
    "service_discovery": "slimrl registers the servers it starts",
    "api_key": "--sglang-api-key, or a generated key",
    "control_plane_api_keys": "--sglang-api-key, or a generated key",
}

# the server imports them
DELTA_LOADER = "slimrl.engines.sglang.weight_loaders.load_changes"
POINT_TO_POINT_LOADER = "slimrl.engines.sglang.weight_loaders.receive_pieces"

# Flags that may add an architecture to that of the model's config.json, or replace it.
CHOOSE_ARCHITECTURE = ("--json-model-override-args", "--model-impl", "--speculative-")

# old names in recipes, of flags that newer servers split into prefill and decode; they set the decode flag
HISTORICAL = {"cuda-graph-bs": "cuda-graph-bs-decode", "cuda-graph-max-bs": "cuda-graph-max-bs-decode"}


def server_flags() -> dict[str, PassthroughFlag]:
    """The server's flags by their name without `--sglang-`, aliases included.

    Values that are not numbers stay strings (validated if the format is known): the server parses them itself.
    Raises ModuleNotFoundError if sglang is not installed.
    """
    flags: dict[str, PassthroughFlag] = {}
    for declared in read_server_flags():
        for name in declared.names:
            flags[name] = _server_flag(declared)
            if declared.action == "optional_switch":
                flags[f"no-{name}"] = PassthroughFlag(declared.dest, action="store_false")
    for old, new in HISTORICAL.items():
        if new in flags:
            flags.setdefault(old, flags[new])
    return flags


def router_flags() -> dict[str, PassthroughFlag]:
    """The router's flags by their name without `--router-`. Raises ModuleNotFoundError if it is not installed."""
    from sglang_router.router_args import RouterArgs

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    RouterArgs.add_cli_args(parser)
    return {name[2:]: _router_flag(action) for action in parser._actions for name in action.option_strings}


def adapter_options(adapters: AdapterConfig, *, releases_memory: bool) -> dict[str, Any]:
    """The options of a server that gets such LoRA adapters by tensors; a batch may mix one with the base.

    A server that `releases_memory` keeps the base in host memory meanwhile, because no update sends it again.
    """
    options = {"enable_weights_cpu_backup": True} if releases_memory else {}
    return options | {
        "enable_lora": True,
        "max_lora_rank": adapters.rank,
        "lora_target_modules": list(adapters.targets),
        "max_loras_per_batch": 2,
    }


def delta_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a server that gets changes of weights, beside the loaders that the user has `given`."""
    return {"custom_weight_loader": [*(given.get("custom_weight_loader") or ()), DELTA_LOADER]}


def point_to_point_options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a server that gets shards of weights, beside the loaders that the user has `given`."""
    return {"custom_weight_loader": [*(given.get("custom_weight_loader") or ()), POINT_TO_POINT_LOADER]}


def render_options(options: Mapping[str, Any], flags: Mapping[str, PassthroughFlag]) -> list[str]:
    """The command line words for `options` (dest -> value), e.g. {"tp_size": 2} -> ["--tp-size=2"].

    A switch is written only if its value needs it. Raises ValueError for an option that the package does not have.
    """
    words: list[str] = []
    for dest, value in options.items():
        spellings = {name: flag for name, flag in flags.items() if flag.dest == dest}
        if not spellings:
            raise ValueError(f"the installed engine has no option {dest!r}: it has {len(flags)} others, see its --help")
        words += _render(spellings, value)
    return words


def _render(spellings: Mapping[str, PassthroughFlag], value: Any) -> list[str]:
    name, flag = next(iter(spellings.items()))
    if flag.action != "store":
        wanted = "store_true" if value else "store_false"
        return [f"--{switch}" for switch, flag in spellings.items() if flag.action == wanted][:1]
    if value is None:
        return [f"--{name}"] if flag.nargs == "?" else []
    if isinstance(value, list | tuple):
        return [f"--{name}", *map(str, value)]
    return [f"--{name}={value}"]


def _server_flag(declared: DeclaredFlag) -> PassthroughFlag:
    checks: dict[str, Callable[[str], Any]] = {
        "int": int,
        "float": float,
        "human_readable_int": _count,
        "loads": _json_object,
        "json_list_type": _json_list,
        "parse_cuda_graph_config_arg": _json_object,
    }
    switch = declared.action != "store"
    return PassthroughFlag(
        declared.dest,
        nargs=None if switch else declared.nargs,
        type=None if switch else checks.get(declared.type, str),
        choices=declared.choices,
        action="store_true" if switch else "store",
        managed_by=RESERVED.get(declared.dest),
    )


def _router_flag(action: argparse.Action) -> PassthroughFlag:
    switch = action.nargs == 0
    return PassthroughFlag(
        action.dest,
        nargs=None if switch else action.nargs,
        type=None if switch else cast("Callable[[str], Any]", action.type or str),
        choices=tuple(action.choices) if action.choices is not None else None,
        action="store_true" if switch else "store",
        managed_by=RESERVED_ROUTER.get(action.dest),
    )


def _count(text: str) -> str:
    """Validates an integer, also as 16k, 2M (powers of 1000) or 16Ki, 2Mi (powers of 1024); returns it unchanged."""
    if re.fullmatch(r"-?\d+|\d+(\.\d+)?[kMGT]|\d+[KMGT]i", text.strip()) is None:
        raise ValueError("give an integer, optionally with the suffix k, M, Ki or Mi")
    return text


def _json_object(text: str) -> str:
    if not isinstance(json.loads(text), dict):
        raise ValueError("give a JSON object, e.g. '{\"a\": 1}'")
    return text


def _json_list(text: str) -> str:
    if not isinstance(json.loads(text), list):
        raise ValueError("give a JSON list, e.g. '[\"a\"]'")
    return text


# a server's defaults on a machine without CUDA
CPU_DEFAULTS = (
    "--device=cpu",
    "--attention-backend=torch_native",
    "--dtype=float32",
    "--disable-overlap-schedule",
    "--sleep-on-idle",
)
ADAPTERS = "--enable-lora"
CPU_ADAPTERS = "--lora-backend=torch_native"
CPU_IMAGES = "--image-processor-backend=pil"  # transformers' choice where torchvision is absent
# a CUDA allocator: without it the server accepts calls that release memory but keeps the memory
CUDA_ONLY = ("--enable-memory-saver", "--enable-weights-cpu-backup")
KV_CACHE_BYTES = 1 << 30
KV_CACHE_TOKENS = (8192, 65536)  # minimum and maximum


def with_defaults(argv: Sequence[str]) -> list[str]:
    """The CPU defaults followed by `argv`, which wins: of two equal flags the last counts. Drops CUDA-only flags.

    Limits the KV cache, which would take most of the machine's memory by default.
    """
    model = _model_path(argv)
    cache = [f"--max-total-tokens={kv_cache_tokens(model)}"] if model is not None else []
    adapters = [CPU_ADAPTERS] if ADAPTERS in argv else []
    images = [CPU_IMAGES] if model is not None and sees_images(model) else []
    return [*CPU_DEFAULTS, *adapters, *images, *cache, *(word for word in argv if word not in CUDA_ONLY)]


def sees_images(model: Path) -> bool:
    """Whether the model in this folder has a vision tower; False without a local config.json."""
    return (model / "config.json").is_file() and TOWER_CONFIG in _config(model)


# the number of experts in config.json, by family
_EXPERTS = ("num_experts", "n_routed_experts", "num_local_experts")


def has_plain_experts(model: Path) -> bool:
    """Whether the model in this folder has experts that are not quantised; False without a local config.json."""
    if not (model / "config.json").is_file():
        return False
    config = _config(model)
    decoder = decoder_config(config)
    quantised = "quantization_config" in config or "quantization_config" in decoder
    return not quantised and any(decoder.get(name) for name in _EXPERTS)


def _model_path(argv: Sequence[str]) -> Path | None:
    """The local folder behind `--model-path` (or `--model`), if there is one."""
    words = [part for word in argv for part in (word.split("=", 1) if word.startswith("--") else [word])]
    for flag, value in zip(words, words[1:], strict=False):
        if flag in ("--model-path", "--model") and (Path(value) / "config.json").is_file():
            return Path(value)
    return None


def unused_model_modules(argv: Sequence[str]) -> list[str]:
    """The modules of SGLang's models (`sglang.srt.models`) that do not define the architecture of the served model.

    SGLang imports all of them to find one class. Empty, so that it does, if more than `--model-path` may name an
    architecture, and if no module defines it.
    """
    model = _model_path(argv)
    if model is None or any(word.startswith(CHOOSE_ARCHITECTURE) for word in argv):
        return []
    extended = own_models(model)
    names = [extended.get(name, name) for name in _config(model).get("architectures") or []]
    package = importlib.util.find_spec("sglang")
    if not names or package is None or not package.submodule_search_locations:
        return []
    defines = re.compile(rf"^class ({'|'.join(map(re.escape, names))})\b", re.MULTILINE)
    modules = sorted((Path(package.submodule_search_locations[0]) / "srt" / "models").glob("*.py"))
    unused = [path.stem for path in modules if not defines.search(path.read_text(errors="replace"))]
    return unused if len(unused) < len(modules) else []


# architectures with a class in `slimrl.engines.sglang.models`, and the class of SGLang that it extends
_OWN_MODELS = {
    "Qwen2ForProcessRewardModel": "Qwen2ForRewardModel",
    "Qwen3MoeForSequenceClassification": "Qwen3MoeForCausalLM",
}


def own_models(model: Path) -> dict[str, str]:
    """The architectures of the model in this folder that slimrl has a class for; none without a local config.json."""
    if not (model / "config.json").is_file():
        return {}
    names = _config(model).get("architectures") or []
    return {name: base for name, base in _OWN_MODELS.items() if name in names}


def kv_cache_tokens(model_path: Path) -> int:
    """The number of KV cache tokens that fit into 1 GiB at float32, clamped to `KV_CACHE_TOKENS`."""
    config = decoder_config(_config(model_path))
    bytes_per_token = 4 * config["num_hidden_layers"] * _cached_values(config)
    minimum, maximum = KV_CACHE_TOKENS
    return max(minimum, min(maximum, KV_CACHE_BYTES // bytes_per_token))


def _config(model: Path) -> dict[str, Any]:
    return dict(json.loads((model / "config.json").read_text()))


def _cached_values(config: Mapping[str, Any]) -> int:
    """Cached values per token and layer: keys and values of each KV head, or for MLA one latent and one rotary key."""
    if "kv_lora_rank" in config:
        return config["kv_lora_rank"] + config["qk_rope_head_dim"]
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    return 2 * kv_heads * (config.get("head_dim") or config["hidden_size"] // heads)
