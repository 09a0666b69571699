"""Whether a running SGLang server of the user's can serve a run: asked before anything is sent to it.

Called by the external engines; everything that is wrong with a server is said at once.
"""

from __future__ import annotations

import dataclasses
import json
import socket
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from slimrl.engines.http import answers, call, shaped
from slimrl.engines.protocol import EngineError, EngineRequestError, EngineUnavailableError

TIMEOUT_S = 10.0
LISTEN_TIMEOUT_S = 5.0
HTTP_UNAUTHORIZED = 401
TOKEN_TIMEOUT_S = 25.0  # a server itself gives up after 20 s
STARTED_WITH = "default"  # the version of weights that nobody sent
FLAG = "--rollout-external-engine-addrs"
# what a run asks of a server besides generation; all are there in SGLang 0.5.18 and later
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
# written by transformers itself, or about numbers that a server may hold in another format
IGNORED_KEYS = {"transformers_version", "torch_dtype", "dtype", "_name_or_path", "use_cache"}


@dataclasses.dataclass(frozen=True)
class ExternalServer:
    """A server that can be used. `started` tells it from another that its owner starts at the same address later."""

    url: str
    tensor_parallel_size: int
    started: Any
    key: str | None = dataclasses.field(default=None, repr=False)

    def was_replaced(self) -> bool:
        """Whether another server answers there now; False where none does."""
        try:
            answer = call("GET", f"{self.url}/server_info", timeout_s=TIMEOUT_S, key=self.key)
            return _identity(shaped(answer, dict[str, Any], f"{self.url}/server_info")) != self.started
        except EngineError:
            return False


class _ServerInfo(msgspec.Struct):
    """What is read of /server_info."""

    tp_size: int
    version: str | None = None
    pp_size: int = 1
    dp_size: int = 1
    enable_dp_attention: bool | None = None
    quantization: str | None = None
    disaggregation_mode: str = "null"
    skip_tokenizer_init: bool | None = None


class _ModelInfo(msgspec.Struct):
    """What is read of /model_info."""

    is_generation: bool
    model_path: str
    weight_version: str
    model_type: str | None = None
    architectures: list[str] | None = None


class _Paths(msgspec.Struct):
    paths: dict[str, Any]


def inspect(address: str, hf_checkpoint: str, *, weights_come: bool = True, key: str | None = None) -> ExternalServer:
    """The server at "host:port", to which `key` is shown. Raises EngineError with a sentence for each thing that is
    wrong with it.

    Where no `weights_come`, it must have those that it was started with, and not be paused: nobody would change that.
    """
    url = f"http://{address}"
    try:
        server = call("GET", f"{url}/server_info", timeout_s=TIMEOUT_S, key=key)
        model = call("GET", f"{url}/model_info", timeout_s=TIMEOUT_S, key=key)
        paths = call("GET", f"{url}/openapi.json", timeout_s=TIMEOUT_S, key=key)
        paths = shaped(paths, _Paths, f"{url}/openapi.json").paths
        for answer, shape, path in ((server, _ServerInfo, "server_info"), (model, _ModelInfo, "model_info")):
            shaped(answer, shape, f"{url}/{path}")
    except EngineUnavailableError as error:
        raise EngineUnavailableError(_no_server(address, error)) from error
    except EngineRequestError as error:
        if error.status != HTTP_UNAUTHORIZED:
            raise EngineError(_no_sglang(address, error)) from error
        raise EngineError(
            f"{FLAG} {address}: the server asks for another key (HTTP 401): give that of its --api-key as"
            " --sglang-api-key"
        ) from error
    except (EngineError, KeyError, TypeError) as error:
        raise EngineError(_no_sglang(address, error)) from error
    wrong = [*_of_server(server, paths), *_of_model(model, Path(hf_checkpoint))]
    if not weights_come and not wrong:
        wrong = [*_of_what_it_holds(url, model)]
    if wrong:
        raise EngineError("\n".join(f"{FLAG} {address}: {sentence}" for sentence in wrong))
    return ExternalServer(url, server["tp_size"], _identity(server), key)


def check_somebody_listens(addresses: Sequence[str]) -> None:
    """One TCP connection to each "host:port", before anything starts. Raises EngineUnavailableError with a sentence
    for each that nobody listens at.
    """
    with ThreadPoolExecutor(max(len(addresses), 1)) as pool:
        silent = [sentence for sentence in pool.map(_silence, addresses) if sentence]
    if silent:
        raise EngineUnavailableError("\n".join(silent))


def _silence(address: str) -> str | None:
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), LISTEN_TIMEOUT_S).close()
    except OSError as error:
        return _no_server(address, error)
    return None


def _no_sglang(address: str, error: Exception) -> str:
    return f"{FLAG} {address}: what answers there does not speak as an SGLang server: {error}"


def _no_server(address: str, error: Exception) -> str:
    return f"{FLAG} {address}: no server answers there: {error}; start it first"


def _identity(server: dict[str, Any]) -> Any:
    return server.get("startup_time"), server.get("random_seed"), server.get("nccl_port")


def _of_server(server: dict[str, Any], paths: dict[str, Any]) -> Iterator[str]:
    missing = [path for path in NEEDED_PATHS if path not in paths]
    if missing:
        yield f"it runs SGLang {server.get('version')}, which has no {', '.join(missing)}: use 0.5.18 or later"
    if server.get("pp_size", 1) > 1:
        size = server["pp_size"]
        yield f"it has --pp-size {size}, and pipeline stages take no weights from other GPUs: leave it out"
    if server.get("dp_size", 1) > 1 and not server.get("enable_dp_attention"):
        yield f"it holds --dp-size {server['dp_size']} copies of the model: start them as servers of their own"
    if server.get("quantization"):
        yield (
            f"it runs with --quantization {server['quantization']}, and weights are sent as the checkpoint has them:"
            " leave it out"
        )
    if server.get("disaggregation_mode", "null") != "null":
        yield f"it has --disaggregation-mode {server['disaggregation_mode']}: every engine must read and write"
    if server.get("skip_tokenizer_init"):
        yield "it has --skip-tokenizer-init and would return no text: leave it out"


def _of_model(model: dict[str, Any], hf_checkpoint: Path) -> Iterator[str]:
    if not model["is_generation"]:
        yield f"it serves {model['model_path']}, which does not generate"
        return
    own = _config(hf_checkpoint)
    theirs = Path(model["model_path"]) / "config.json"
    if theirs.is_file():  # seen from here
        other = _config(theirs.parent)
        differ = sorted(key for key in own.keys() | other.keys() if own.get(key) != other.get(key))
    else:
        differ = [key for key in ("model_type", "architectures") if model.get(key) not in (None, own.get(key))]
    if differ:
        yield (
            f"it serves {model['model_path']}, whose config.json differs from that of --hf-checkpoint {hf_checkpoint}"
            f" in {', '.join(differ)}: serve the model that is trained"
        )


def _of_what_it_holds(url: str, model: dict[str, Any]) -> Iterator[str]:
    version = model["weight_version"]
    if version != STARTED_WITH:
        yield f"it has the weights {version!r} of another run, and --debug-rollout-only updates none: restart it"
    elif not answers(f"{url}/health_generate", TOKEN_TIMEOUT_S):
        yield (
            f"it makes no token within {TOKEN_TIMEOUT_S:g} s, as after a weight update that was cut off:"
            " POST /continue_generation to it, or restart it"
        )


def _config(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return {key: value for key, value in config.items() if key not in IGNORED_KEYS}
