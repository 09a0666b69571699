"""LoRA adapters in SGLang servers: the calls about them, their names in requests, and corrections of the server.

`AdapterControl` has the calls of `control.ServerControl` about adapters. `AdapterOfRequests` decides for the client
which adapter a request uses, and which weight version its response is from: in a run's own servers one adapter has one
name, and the servers report the version of its weights. In servers that other runs use, too, that number is nobody's:
there each version is an adapter of its own name, and the name in a request decides the version of its response.

`install` runs inside the server (`engines.sglang.entry`, with --enable-lora). SGLang unloads an adapter when no request
uses it, and every other load or unload waits meanwhile. Up to 0.5.20 it does not count down for a request that is
aborted in the queue, or rejected before it gets there: the unload then never ends, and no run can update its adapter
any more. Nor does it forget an adapter that was unloaded: a late request loads it again, and of one that came as
tensors it asks the Hugging Face Hub, while loads and generation wait. `install` corrects both and adds two calls, with
the server's key:

| call | answer |
| --- | --- |
| `GET /lora_adapter_requests` | `{"adapters": {name: number of requests that use it}}` |
| `POST /abort_lora_adapter_requests` `{"prefix": text}` | ends the requests whose adapter's name begins so |
"""

from __future__ import annotations

import abc
import asyncio
import contextlib
import json
from collections.abc import Awaitable, Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import msgspec

from slimrl.data.sample import add_span
from slimrl.engines.http import decode_as
from slimrl.engines.protocol import EngineError, EngineRequestError, Generation
from slimrl.models.adapters import SharedAdapter

COUNTS_PATH = "/lora_adapter_requests"
ABORT_PATH = "/abort_lora_adapter_requests"
_NOT_LOADED = "does not exist"  # of a server that has no adapter of this name


class _Counts(msgspec.Struct):
    adapters: dict[str, int]


class AdapterControl(abc.ABC):
    """Implements the calls about adapters of `engines.server_protocol.WeightControl`. The server has --enable-lora."""

    url: str

    def load_adapter(
        self, name: str, config: dict[str, Any], serialized: list[str], checksums: dict[str, str] | None
    ) -> None:
        """Replaces the LoRA adapter `name`; no request may use it meanwhile."""
        self.unload_adapter(name)
        body = {"lora_name": name, "config_dict": config, "serialized_named_tensors": serialized}
        self._post(
            "/load_lora_adapter_from_tensors",
            {**body, "load_format": "flattened_bucket", "expected_checksums": checksums},
        )

    def unload_adapter(self, name: str) -> None:
        """Removes the adapter if it is loaded.

        SGLang waits until no request uses it, and loads and unloads no other adapter meanwhile.
        """
        try:
            self._post("/unload_lora_adapter", {"lora_name": name})
        except EngineRequestError as error:
            if _NOT_LOADED not in str(error):
                raise

    def adapter_requests(self) -> dict[str, int]:
        """The number of requests that use each loaded adapter, by its name; slimrl's program has started the server."""
        return decode_as(self._get(COUNTS_PATH), _Counts, f"{self.url}{COUNTS_PATH}").adapters

    @abc.abstractmethod
    def _get(self, path: str) -> Any:
        """The decoded response to a GET of `path`."""

    @abc.abstractmethod
    def _post(self, path: str, body: dict[str, Any] | None = None) -> Any:
        """The decoded response to a POST of `body` to `path`."""


GENERATES = ("/generate", "/v1/completions", "/v1/chat/completions")
ADAPTER_FIELD = "lora_path"
# what SGLang answers for an adapter that it does not have: its owner restarted the server, or has just removed it
_UNKNOWN = ("that has never been loaded", "adapters are not loaded", "Failed to implicitly load LoRA adapter")


class AdapterOfRequests:
    """Of the adapter `adapter`: a name, the versions of a shared one, or None for requests of the base."""

    def __init__(self, adapter: str | SharedAdapter | None) -> None:
        self._adapter = adapter
        self._version: str | None = None

    @property
    def is_shared(self) -> bool:
        """Whether each weight version has a name of its own."""
        return isinstance(self._adapter, SharedAdapter)

    def use(self, version: str) -> None:
        """Requests from now on use this version; every server has it."""
        self._version = version

    def named_in(self, path: str, payload: dict[str, Any]) -> tuple[dict[str, Any], str | None]:
        """`payload` with the adapter unless it names one or None, and the version that the response will be from.

        The version is None if the server reports it. Raises EngineError before the first version.
        """
        if self._adapter is None or path not in GENERATES or ADAPTER_FIELD in payload:
            return payload, None
        if not isinstance(self._adapter, SharedAdapter):
            return {ADAPTER_FIELD: self._adapter, **payload}, None
        if self._version is None:
            raise EngineError(f"the adapter {self._adapter.name} has no weights yet: no weight update has ended")
        return {ADAPTER_FIELD: self._adapter.at(self._version), **payload}, self._version

    def abort_call(self) -> tuple[str, bytes]:
        """Path and body of the call that ends the requests of the run on a server."""
        if isinstance(self._adapter, SharedAdapter):
            return ABORT_PATH, json.dumps({"prefix": self._adapter.prefix}).encode()
        return "/abort_request", b'{"abort_all": true}'

    def is_absent(self, rejection: str) -> bool:
        """Whether a server rejected a request because it does not have the run's adapter."""
        return self.is_shared and any(sentence in rejection for sentence in _UNKNOWN)


def with_version(generation: Generation, version: str) -> Generation:
    """`generation` as from `version`, every token of it."""
    generation.weight_version = version
    generation.version_spans = []
    add_span(generation.version_spans, version, generation.new_tokens)
    return generation


def answer_with_version(answer: Any, version: str) -> Any:
    """The decoded response of a server as from `version`, where it reports one; a list is that of several prompts."""
    if isinstance(answer, list):
        return [answer_with_version(one, version) for one in answer]
    if isinstance(answer, Mapping):
        for field in ("meta_info", "metadata"):  # /generate, OpenAI's calls
            if isinstance(found := answer.get(field), dict) and "weight_version" in found:
                found["weight_version"] = version
                found.pop("weight_versions", None)
    return answer


def install(manager_type: Any, app: Any, current_manager: Callable[[], Any]) -> None:
    """Patches `manager_type`, SGLang's TokenizerManager, and adds the calls to the FastAPI `app`.

    `current_manager()` is the server's TokenizerManager once it runs.
    """
    for name, corrected in (
        ("_handle_abort_req", releasing_aborted),
        ("_release_req_states_on_failure", releasing_failed),
        ("unload_lora_adapter", forgetting_before),
        ("load_lora_adapter_from_tensors", forgetting_after),
    ):
        if hasattr(manager_type, name):  # older releases have no such function, and drop nothing there
            setattr(manager_type, name, corrected(getattr(manager_type, name)))

    async def count_requests() -> dict[str, dict[str, int]]:
        registry = current_manager().lora_registry
        loaded = registry.get_all_adapters().values()
        return {"adapters": {ref.lora_name: registry._counters[ref.lora_id].value() for ref in loaded}}

    async def abort_requests(body: dict[str, str]) -> dict[str, int]:
        return {"aborted": abort_with_prefix(current_manager(), body["prefix"])}

    app.add_api_route(COUNTS_PATH, count_requests, methods=["GET"])
    app.add_api_route(ABORT_PATH, abort_requests, methods=["POST"])


def releasing_aborted(handle: Callable[[Any, Any], None]) -> Callable[[Any, Any], None]:
    """`TokenizerManager._handle_abort_req`, which also counts down for the adapter of a request that it ends."""

    def handle_and_release(manager: Any, message: Any) -> None:
        with counted_here(manager, [message.rid]):
            handle(manager, message)

    return handle_and_release


def releasing_failed(drop: Callable[[Any, Iterable[str]], None]) -> Callable[[Any, Iterable[str]], None]:
    """`TokenizerManager._release_req_states_on_failure`, which also counts down for requests that it drops."""

    def drop_and_release(manager: Any, rids: Iterable[str]) -> None:
        rids = list(rids)
        with counted_here(manager, rids):
            drop(manager, rids)

    return drop_and_release


@contextlib.contextmanager
def counted_here(manager: Any, rids: Sequence[str]) -> Iterator[None]:
    """Counts down for the requests of `rids` that are gone after the block.

    SGLang counts down for some of them, now or when it sends the response, if they have an adapter: they have none
    within the block, and those that are gone have none afterwards.
    """
    states = {rid: manager.rid_to_state[rid] for rid in rids if rid in manager.rid_to_state}
    held = {rid: state.obj.lora_path for rid, state in states.items() if manager.enable_lora and state.obj.lora_id}
    for rid in held:
        states[rid].obj.lora_path = None
    try:
        yield
    finally:
        for rid, name in held.items():
            if rid in manager.rid_to_state:
                states[rid].obj.lora_path = name
            elif name:
                _release_adapter(manager, states[rid].obj.lora_id)


def _release_adapter(manager: Any, adapter_id: str) -> None:
    task = asyncio.get_running_loop().create_task(manager.lora_registry.release(adapter_id))
    manager.asyncio_tasks.add(task)  # the loop keeps no reference
    task.add_done_callback(manager.asyncio_tasks.discard)


def forgetting_before(unload: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """`TokenizerManager.unload_lora_adapter`, after which no request loads the adapter again: it is refused at once.

    Adapters that SGLang itself unloads to make room (--max-loaded-loras) are not unloaded by this function.
    """

    async def forget_and_unload(manager: Any, message: Any, *rest: Any) -> Any:
        manager.lora_ref_cache.pop(message.lora_name, None)  # first: the unload waits for requests
        return await unload(manager, message, *rest)

    return forget_and_unload


def forgetting_after(load: Callable[..., Awaitable[Any]]) -> Callable[..., Awaitable[Any]]:
    """`TokenizerManager.load_lora_adapter_from_tensors`, after which no request loads the tensors again."""

    async def load_and_forget(manager: Any, message: Any, *rest: Any) -> Any:
        try:
            return await load(manager, message, *rest)
        finally:
            manager.lora_ref_cache.pop(message.lora_name, None)

    return load_and_forget


def abort_with_prefix(manager: Any, prefix: str) -> int:
    """Ends the requests whose adapter's name begins with `prefix`; returns their number.

    A request that has not reached the scheduler is left to the next call: it would be told once, and miss it.
    """
    found = [
        rid
        for rid, state in manager.rid_to_state.items()
        if isinstance(name := state.obj.lora_path, str)
        and name.startswith(prefix)
        and getattr(state, "dispatched", True)  # older releases tell the scheduler as often as they are asked
    ]
    for rid in found:
        manager.abort_request(rid=rid)
    return len(found)
