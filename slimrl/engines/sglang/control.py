"""Synchronous calls to one SGLang server: caches, pauses, weights, memory, load. Generation goes through `client`.

Errors hold the URL, the status and the server's text. Training ranks use this module without sglang.

**Stale KV.** A KV cache computed with the old weights and read with the new ones gives wrong log-probabilities without
an error. Change weights only inside `weight_update`, which prevents this.
"""

from __future__ import annotations

import contextlib
import datetime
import time
import urllib.parse
from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from slimrl.engines.http import call, decode_as, is_reachable
from slimrl.engines.protocol import EngineError, EngineRequestError
from slimrl.engines.server_protocol import CALL_TIMEOUT_S, RunningRequests, ServerLoad
from slimrl.engines.sglang.adapters import AdapterControl
from slimrl.engines.sglang.server_args import DELTA_LOADER, POINT_TO_POINT_LOADER, PULL_LOADER
from slimrl.engines.sglang.versions import has_per_token_versions

HTTP_BAD_REQUEST = 400
HTTP_NOT_FOUND = 404
POLL_INTERVAL_S = 0.05
HEALTH_TIMEOUT_S = 5.0
LOADS = "/v1/loads"


class _Version(msgspec.Struct):
    weight_version: str


class _Checksums(msgspec.Struct):
    ranks: list[dict[str, Any]]


class _Paths(msgspec.Struct):
    paths: dict[str, Any]


class ServerControl(AdapterControl):
    """Implements `engines.server_protocol.ServerControl` for the server at `url`.

    Every call has the timeout `timeout_s`, which must cover the transfer of a whole model, and sends `key`.
    Every method raises EngineRequestError (the server rejected the call), EngineUnavailableError (no server, or HTTP
    5xx), EngineTimeoutError, or EngineResponseError (not a response of SGLang). Methods are thread-safe.
    """

    def __init__(self, url: str, timeout_s: float = CALL_TIMEOUT_S, key: str | None = None) -> None:
        self.url = url.rstrip("/")
        self._key = key
        self.timeout_s = timeout_s
        if urllib.parse.urlsplit(self.url).scheme != "http":
            raise ValueError(f"{url!r} is not a server URL: give it as http://host:port")
        self._has_sessions: bool | None = None  # of weight updates; None before the first one

    # -- weights -------------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def weight_update(self, version: str, *, running: RunningRequests = "abort") -> Iterator[None]:
        """Change the weights inside this context, by any number of `update_weights_from_*` calls.

        If the body raises, the server stays paused: it must not generate with partially updated weights. Repeat the
        update in another `weight_update`, or stop the server. See `begin_weight_update` for `running`.
        """
        self.begin_weight_update(running)
        yield
        self.end_weight_update(version, running)

    def begin_weight_update(self, running: RunningRequests = "abort") -> None:
        """Pauses the server and ensures that no KV of the old weights is read with the new ones.

        Running requests: "abort" returns them with their tokens so far (finish reason "abort") and raises
        EngineRequestError if any is left. "retract" puts them back into the queue, to continue with the new weights
        and recomputed KV. Servers before 0.5.21 recompute correctly only with --disable-radix-cache; without it, and
        before 0.5.19, it raises EngineError. Requests that arrive during the update wait.

        Until `end_weight_update` no other call may flush the cache: with requests in the queue that kills the server.
        """
        if running == "retract":
            self._check_can_retract()
        self.pause(running)
        if running == "abort":
            self.flush_cache()  # raises while any request runs: before any weight has changed
        self._open_session()

    def end_weight_update(self, version: str, running: RunningRequests = "abort") -> None:
        """Empties the KV cache, sets the new `version` and resumes the server; `running` as in `begin_weight_update`.

        `version` is set only here, after all weights have been updated.
        """
        self.commit_weight_update(version, running)
        self.continue_()

    def commit_weight_update(self, version: str, running: RunningRequests = "abort") -> None:
        """`end_weight_update` without resuming, for several servers that must all commit before any resumes.

        Each then needs `continue_`.
        """
        closed = self._has_sessions is not False and self._post_if_there("/end_weight_update")
        if running == "abort" or closed:  # older servers cannot flush while requests wait in the queue
            self.flush_cache()
        self.set_weight_version(version)

    def flush_pipeline(self) -> None:
        """Waits until all pipeline stages have completed all earlier calls, by generating a token.

        The server answers most calls when its first stage is done; a token passes through all stages. The server must
        not be paused.
        """
        sampling = {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True}
        self._post("/generate", {"input_ids": [0], "sampling_params": sampling})

    def update_weights_from_tensor(
        self,
        serialized: Sequence[str],
        *,
        load_format: str | None = None,
        flush_cache: bool = False,
        weight_version: str | None = None,
        timeout_s: float | None = None,
    ) -> None:
        """Loads named tensors from memory shared within this machine; `timeout_s` replaces that of every call.

        `serialized` has one entry per tensor-parallel rank: base64 of a `multiprocessing.reduction.ForkingPickler`
        dump of `list[tuple[str, torch.Tensor]]`, names as in the Hugging Face checkpoint, full (unsplit) tensors.
        The tensors must live until the call returns. CPU tensors need
        `torch.multiprocessing.set_sharing_strategy("file_system")` in the sender: the default kills the server.
        `load_format` "flattened_bucket" takes one dict {"flattened_tensor", "metadata"} instead. A draft model keeps
        its weights: SGLang would load those of the model into it.
        """
        body = {"serialized_named_tensors": list(serialized), "load_format": load_format, "disable_draft_model": True}
        self._update("/update_weights_from_tensor", body, flush_cache, weight_version, timeout_s)

    def update_weights_from_distributed(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        *,
        group_name: str,
        load_format: str | None = None,
        flush_cache: bool = False,
        weight_version: str | None = None,
    ) -> None:
        """Receives tensors by one broadcast each, in this order, from rank 0 of the group `group_name`.

        `dtypes` like "float32" or "bfloat16". The call blocks until the broadcasts are done, so the sender calls it
        from another thread (one per server) and broadcasts concurrently.
        """
        body = {
            "names": list(names),
            "dtypes": list(dtypes),
            "shapes": [list(shape) for shape in shapes],
            "group_name": group_name,
            "load_format": load_format,
        }
        self._update("/update_weights_from_distributed", body, flush_cache, weight_version)

    def update_weights_from_disk(
        self,
        model_path: str,
        *,
        load_format: str | None = None,
        flush_cache: bool = False,
        weight_version: str | None = None,
    ) -> None:
        """Loads a Hugging Face folder that the server can read."""
        body = {"model_path": str(model_path), "load_format": load_format}
        self._update("/update_weights_from_disk", body, flush_cache, weight_version)

    def update_weights_from_changes(self, serialized: list[str]) -> None:
        """Changes elements of the weights; the server has `server_args.delta_options`."""
        self.update_weights_from_tensor(serialized, load_format=DELTA_LOADER)

    def pull_weights(self, serialized: list[str]) -> None:
        """Loads a version through the checkpoint of each rank's host; the server has `server_args.delta_options`."""
        self.update_weights_from_tensor(serialized, load_format=PULL_LOADER)

    def update_weights_from_shards(self, serialized: list[str], timeout_s: float | None = None) -> None:
        """One step of a point-to-point update; the server has `server_args.point_to_point_options`."""
        self.update_weights_from_tensor(serialized, load_format=POINT_TO_POINT_LOADER, timeout_s=timeout_s)

    def init_weights_update_group(
        self,
        *,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: Literal["nccl", "gloo"],
    ) -> None:
        """Joins a process group, as ranks `rank_offset` .. + tensor-parallel size - 1; blocks until all have joined."""
        self._post(
            "/init_weights_update_group",
            {
                "master_address": master_address,
                "master_port": master_port,
                "rank_offset": rank_offset,
                "world_size": world_size,
                "group_name": group_name,
                "backend": backend,
            },
        )

    def destroy_weights_update_group(self, group_name: str, *, timeout_s: float | None = None) -> None:
        """Leaves the process group; set `timeout_s` for servers that may be stuck waiting for a broadcast."""
        self._post("/destroy_weights_update_group", {"group_name": group_name}, timeout_s)

    def weight_version(self) -> str:
        """The version that the server reports with every response."""
        return decode_as(self._get("/model_info"), _Version, f"{self.url}/model_info").weight_version

    def set_weight_version(self, version: str) -> None:
        """Sets the version of the loaded weights."""
        self._post("/update_weight_version", {"new_version": version, "abort_all_requests": False})

    # -- verification of weights ---------------------------------------------------------------------------------

    def snapshot_weights(self) -> None:
        """Makes the server keep a copy of its weights, for `compare_weights`."""
        self._post("/weights_checker", {"action": "snapshot"})

    def reset_weights(self) -> None:
        """Overwrites all weights with random numbers, so that only a complete update can restore them."""
        self._post("/weights_checker", {"action": "reset_tensors"})

    def compare_weights(self) -> None:
        """Raises EngineRequestError, naming each tensor that differs from the snapshot, unless all are equal."""
        self._post("/weights_checker", {"action": "compare"})

    def weights_checksum(self) -> list[dict[str, Any]]:
        """Per tensor-parallel rank, in order: {"checksums": {parameter: hex digits}, "parallelism_info": {...}}.

        Parameters have the server's own names (query, key and value fused, ...). On the CPU a checksum is XXH3 (128
        bits) of the tensor's contiguous bytes, by `cpu_patches`; on CUDA it is sglang's `gpu_tensor_hash`.
        """
        answer = self._post("/weights_checker", {"action": "checksum"})
        ranks = decode_as(answer, _Checksums, f"{self.url}/weights_checker").ranks
        for rank in ranks:
            # the layers of a server with --enable-lora contain the layers of the model; "draft." is a draft model's
            named = {name.replace(".base_layer.", "."): one for name, one in rank["checksums"].items()}
            rank["checksums"] = {name: one for name, one in named.items() if not name.startswith("draft.")}
            if isinstance(rank["parallelism_info"], list):  # of the model, then of its draft models
                rank["parallelism_info"] = rank["parallelism_info"][0]
        return sorted(ranks, key=lambda rank: rank["parallelism_info"]["tp_rank"])

    # -- requests, caches, memory --------------------------------------------------------------------------------

    def pause(self, mode: Literal["abort", "retract", "in_place"] = "abort") -> None:
        """Stops generation; later requests wait. "abort" returns running requests, the other modes keep them."""
        self._post("/pause_generation", {"mode": mode})

    def continue_(self) -> None:
        """Ends the pause."""
        self._post("/continue_generation", {})

    def abort_all(self) -> None:
        """Returns every running and queued request with its tokens so far."""
        self._post("/abort_request", {"abort_all": True})

    def flush_cache(self, wait_s: float = 10.0) -> None:
        """Empties the KV cache, which requires that no request runs.

        Raises EngineRequestError if running requests do not end within `wait_s`.
        """
        deadline = time.monotonic() + wait_s
        while True:
            try:
                self._post("/flush_cache")
                return
            except EngineRequestError:
                if time.monotonic() > deadline:
                    raise
            time.sleep(POLL_INTERVAL_S)

    def release_memory(self, tags: Sequence[str] | None = None) -> None:
        """Releases device memory: "kv_cache", "weights", ..., or all (None). Needs the memory saver (GPU only)."""
        self._post("/release_memory_occupation", {"tags": list(tags)} if tags else {})

    def resume_memory(self, tags: Sequence[str] | None = None) -> None:
        """Reallocates the memory. Its contents are lost: update the weights afterwards."""
        self._post("/resume_memory_occupation", {"tags": list(tags)} if tags else {})

    def healthy(self) -> bool:
        """Whether the server responds; never raises for an absent server."""
        return is_reachable(f"{self.url}/health", timeout_s=min(HEALTH_TIMEOUT_S, self.timeout_s))

    def load(self) -> ServerLoad:
        """Its request counts, summed over data-parallel ranks, with the oldest timestamp; never raises.

        A malformed response (a load without numbers, the page of a proxy) counts as no response.
        """
        try:
            return _read(self.url, self._get(LOADS))
        except (EngineError, KeyError, TypeError, ValueError):
            return ServerLoad(self.url)

    def responds(self) -> bool:
        """Whether its HTTP server responds, whatever its scheduler does; /health waits for a token. Never raises."""
        return is_reachable(self.url + LOADS, self.timeout_s, self._key)

    def scheduler_responds(self) -> bool:
        """Whether its scheduler responds; never raises."""
        return is_reachable(f"{self.url}/server_info", self.timeout_s, self._key)

    def server_info(self) -> dict[str, Any]:
        """The server's resolved arguments and state, by the engine's own names."""
        return decode_as(self._get("/server_info"), dict[str, Any], f"{self.url}/server_info")

    # -- transport -----------------------------------------------------------------------------------------------

    def _update(
        self,
        path: str,
        body: dict[str, Any],
        flush_cache: bool,
        weight_version: str | None,
        timeout_s: float | None = None,
    ) -> None:
        # flush_cache is always sent: the server's default, true, kills it while requests are queued
        self._post(path, {**body, "flush_cache": flush_cache, "weight_version": weight_version}, timeout_s)

    def _open_session(self) -> None:
        """Opens the session for weight updates, which servers have since 0.5.21; others are asked once."""
        if self._has_sessions is False:
            return
        try:
            self._has_sessions = self._post_if_there("/begin_weight_update")
        except EngineRequestError as error:
            if error.status != HTTP_BAD_REQUEST:
                raise
            self._has_sessions = True
            self._post("/end_weight_update", {})  # closes the session of a failed update; raises if there is none
            self._post("/begin_weight_update", {})

    def _check_can_retract(self) -> None:
        info = self.server_info()
        if info.get("engine") == "vllm":  # recomputes the KV of every request that it holds
            return
        if not has_per_token_versions(str(info.get("version"))):
            raise EngineError(
                f"{self.url} runs SGLang {info.get('version')}, which does not report which weight version sampled"
                " which token of a request that continues after an update: install sglang 0.5.19 or later"
            )
        if not info["disable_radix_cache"] and not self._has("/begin_weight_update"):
            raise EngineError(
                f"{self.url} runs SGLang {info.get('version')}, which continues requests after a weight update with"
                " stale KV from its radix cache: add --sglang-disable-radix-cache or install sglang 0.5.21 or later"
            )

    def _has(self, path: str) -> bool:
        return path in decode_as(self._get("/openapi.json"), _Paths, f"{self.url}/openapi.json").paths

    def _post_if_there(self, path: str) -> bool:
        try:
            self._post(path, {})
        except EngineRequestError as error:
            if error.status == HTTP_NOT_FOUND:
                return False
            raise
        return True

    def _get(self, path: str) -> Any:
        return call("GET", self.url + path, timeout_s=self.timeout_s, key=self._key)

    def _post(self, path: str, body: dict[str, Any] | None = None, timeout_s: float | None = None) -> Any:
        return call("POST", self.url + path, body, timeout_s=timeout_s or self.timeout_s, key=self._key)


def _read(server_url: str, answer: dict[str, Any]) -> ServerLoad:
    loads = answer["loads"]
    now = datetime.datetime.fromisoformat(answer["timestamp"]).timestamp()  # by the server's clock
    return ServerLoad(
        server_url,
        running=sum(load["num_running_reqs"] for load in loads),
        waiting=sum(load["num_waiting_reqs"] for load in loads),
        seconds=max((now - load["timestamp"] for load in loads), default=0.0),
        prefilled=any(load["total_prefill_uncached_tokens"] for load in loads),
    )
