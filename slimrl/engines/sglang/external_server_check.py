"""Checks whether an external SGLang server can serve a run, before anything is sent to it.

Called by the external engines; all problems of a server are reported together.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec

from slimrl.engines.http import EXTERNAL_ENGINES, call, decode_as, is_reachable, no_server
from slimrl.engines.protocol import EngineError, EngineRequestError, EngineUnavailableError
from slimrl.engines.sglang.adapters import ABORT_PATH, COUNTS_PATH
from slimrl.engines.sglang.control import ServerControl
from slimrl.models.adapters import SharedAdapter

TIMEOUT_S = 10.0
HTTP_UNAUTHORIZED = 401
TOKEN_TIMEOUT_S = 25.0  # the server's own timeout is 20 s
STARTED_WITH = "default"  # the version of the weights that a server loads at start
# the endpoints that a run uses besides generation; SGLang 0.5.18 and later have all of them
NEEDED_PATHS = (
    "/init_weights_update_group",
    "/update_weights_from_distributed",
    "/update_weights_from_disk",
    "/update_weight_version",
    "/pause_generation",
    "/continue_generation",
    "/flush_cache",
    "/v1/loads",
)
# keys of config.json that transformers writes itself, or that concern the number format, which may differ
IGNORED_KEYS = {"transformers_version", "torch_dtype", "dtype", "_name_or_path", "use_cache"}
_ALL_TARGETS = "all"  # as target: every projection
LEAST_PER_BATCH = 2  # a run's adapter, and that of another run or the base
# options that an external server with adapters must not have, with the reason
_NOT_WITH_ADAPTERS = {
    "max_loaded_loras": "with which an update of one run removes the adapter of another",
    "tokenizer_worker_num": "and a call about adapters reaches only one of these processes",
    "dp_size": "and adapters are not loaded into several copies of a model",
    "speculative_algorithm": "and draft models do not have the adapters",
}
PROGRAM = (
    "python3 -m slimrl.engines.sglang.entry server (without a GPU: python3 -m slimrl.engines.sglang.cpu_patches) and"
    " the flags of sglang.launch_server"
)


@dataclasses.dataclass(frozen=True)
class ExternalServer:
    """Implements `engines.server_protocol.ExternalServer`.

    `started` distinguishes it from another server that its owner starts at the same address later.
    """

    url: str
    tensor_parallel_size: int
    started: Any
    key: str | None = dataclasses.field(default=None, repr=False)

    def was_replaced(self) -> bool:
        """Whether another server responds at its address now; False if none responds."""
        try:
            answer = call("GET", f"{self.url}/server_info", timeout_s=TIMEOUT_S, key=self.key)
            return _identity(decode_as(answer, dict[str, Any], f"{self.url}/server_info")) != self.started
        except EngineError:
            return False


class _ServerInfo(msgspec.Struct):
    """The required fields of /server_info."""

    tp_size: int
    version: str | None = None
    pp_size: int = 1
    dp_size: int = 1
    enable_dp_attention: bool | None = None
    quantization: str | None = None
    disaggregation_mode: str = "null"
    skip_tokenizer_init: bool | None = None


class _ModelInfo(msgspec.Struct):
    """The required fields of /model_info."""

    is_generation: bool
    model_path: str
    weight_version: str
    model_type: str | None = None
    architectures: list[str] | None = None


class _Paths(msgspec.Struct):
    paths: dict[str, Any]


def inspect(
    address: str,
    hf_checkpoint: str,
    *,
    needs_weight_sync: bool = True,
    key: str | None = None,
    adapter: SharedAdapter | None = None,
) -> ExternalServer:
    """The server at "host:port", called with `key`. Raises EngineError with one sentence per problem.

    Without `needs_weight_sync` it must have the weights that it was started with, and must not be paused: the run would
    change neither. With `adapter` it keeps these weights, and loads the run's adapters beside those of other runs.
    """
    url = f"http://{address}"
    try:
        server = call("GET", f"{url}/server_info", timeout_s=TIMEOUT_S, key=key)
        model = call("GET", f"{url}/model_info", timeout_s=TIMEOUT_S, key=key)
        paths = call("GET", f"{url}/openapi.json", timeout_s=TIMEOUT_S, key=key)
        paths = decode_as(paths, _Paths, f"{url}/openapi.json").paths
        for answer, shape, path in ((server, _ServerInfo, "server_info"), (model, _ModelInfo, "model_info")):
            decode_as(answer, shape, f"{url}/{path}")
        loaded = _loaded_adapters(url, paths, key)
    except EngineUnavailableError as error:
        raise EngineUnavailableError(no_server(address, error)) from error
    except EngineRequestError as error:
        if error.status != HTTP_UNAUTHORIZED:
            raise EngineError(_no_sglang(address, error)) from error
        raise EngineError(
            f"{EXTERNAL_ENGINES} {address}: the server requires another key (HTTP 401): give its --api-key as"
            " --sglang-api-key"
        ) from error
    except (EngineError, KeyError, TypeError) as error:
        raise EngineError(_no_sglang(address, error)) from error
    problems = [*_server_problems(server, paths), *_model_problems(model, Path(hf_checkpoint))]
    problems += _adapter_problems(server, model, paths, loaded, adapter, needs_weight_sync=needs_weight_sync)
    if not needs_weight_sync and not problems:
        problems = [*_weight_problems(url, model)]
    if problems:
        raise EngineError("\n".join(f"{EXTERNAL_ENGINES} {address}: {problem}" for problem in problems))
    return ExternalServer(url, server["tp_size"], _identity(server), key)


def _loaded_adapters(url: str, paths: Mapping[str, Any], key: str | None) -> list[str]:
    if COUNTS_PATH not in paths:
        return []
    return sorted(ServerControl(url, TIMEOUT_S, key).adapter_requests())


def _adapter_problems(
    server: dict[str, Any],
    model: dict[str, Any],
    paths: Mapping[str, Any],
    loaded: list[str],
    adapter: SharedAdapter | None,
    *,
    needs_weight_sync: bool,
) -> Iterator[str]:
    if adapter is not None:
        yield from _missing_for_adapters(server, paths, loaded, adapter)
        if (version := model["weight_version"]) != STARTED_WITH:
            yield f"it has the weights {version!r} of another run, and adapters need the base: restart it"
    elif needs_weight_sync and loaded:
        yield (
            f"it serves the adapters {', '.join(loaded)} of other runs, and this run would replace their base: use"
            " other servers, or train adapters (--lora-rank without --lora-merge)"
        )


def _missing_for_adapters(
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
    if _ALL_TARGETS not in allowed and (absent := [name for name in config.targets if name not in allowed]):
        yield f"it has --lora-target-modules without {' '.join(absent)}: start it with {targets}"
    if server.get("max_loras_per_batch", LEAST_PER_BATCH) < LEAST_PER_BATCH:
        yield "it has --max-loras-per-batch 1, so that runs wait for each other: give the number of runs and one more"
    for option, reason in _NOT_WITH_ADAPTERS.items():
        if (given := server.get(option)) not in (None, 1):
            yield f"it has --{option.replace('_', '-')} {given}, {reason}: start it without"
    if taken := adapter.of_others(loaded):
        yield (
            f"another run has its adapter {', '.join(taken)} there: give this run another --lora-name than"
            f" {adapter.name}; if that run has ended without removing it, POST /unload_lora_adapter with that lora_name"
        )


def _no_sglang(address: str, error: Exception) -> str:
    return f"{EXTERNAL_ENGINES} {address}: this is no server with SGLang's calls: {error}"


def _identity(server: dict[str, Any]) -> Any:
    return server.get("startup_time"), server.get("random_seed"), server.get("nccl_port")


def _server_problems(server: dict[str, Any], paths: dict[str, Any]) -> Iterator[str]:
    missing = [path for path in NEEDED_PATHS if path not in paths]
    if missing:
        yield f"it runs SGLang {server.get('version')}, which has no {', '.join(missing)}: use 0.5.18 or later"
    if server.get("pp_size", 1) > 1:
        size = server["pp_size"]
        yield f"it has --pp-size {size}, and pipeline stages cannot receive weights from other GPUs: remove the flag"
    if server.get("dp_size", 1) > 1 and not server.get("enable_dp_attention"):
        yield f"it holds --dp-size {server['dp_size']} copies of the model: start each as a separate server"
    if server.get("quantization"):
        yield (
            f"it runs with --quantization {server['quantization']}, but weights are sent in the checkpoint's format:"
            " remove the flag"
        )
    if server.get("disaggregation_mode", "null") != "null":
        yield f"it has --disaggregation-mode {server['disaggregation_mode']}: every engine must prefill and decode"
    if server.get("skip_tokenizer_init"):
        yield "it has --skip-tokenizer-init and would return no text: remove the flag"


def _model_problems(model: dict[str, Any], hf_checkpoint: Path) -> Iterator[str]:
    if not model["is_generation"]:
        yield f"it serves {model['model_path']}, which is not a generative model"
        return
    own = _config(hf_checkpoint)
    theirs = Path(model["model_path"]) / "config.json"
    if theirs.is_file():  # accessible from this machine
        other = _config(theirs.parent)
        differ = sorted(key for key in own.keys() | other.keys() if own.get(key) != other.get(key))
    else:
        differ = [key for key in ("model_type", "architectures") if model.get(key) not in (None, own.get(key))]
    if differ:
        yield (
            f"it serves {model['model_path']}, whose config.json differs from that of --hf-checkpoint {hf_checkpoint}"
            f" in {', '.join(differ)}: serve the trained model"
        )


def _weight_problems(url: str, model: dict[str, Any]) -> Iterator[str]:
    version = model["weight_version"]
    if version != STARTED_WITH:
        yield f"it has the weights {version!r} of another run, and --debug-rollout-only updates none: restart it"
    elif not is_reachable(f"{url}/health_generate", TOKEN_TIMEOUT_S):
        yield (
            f"it generates no token within {TOKEN_TIMEOUT_S:g} s, as after an interrupted weight update:"
            " POST /continue_generation to it, or restart it"
        )


def _config(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return {key: value for key, value in config.items() if key not in IGNORED_KEYS}
