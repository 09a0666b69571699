"""Runs inside the SGLang server: exact counts of the requests of each LoRA adapter, and calls for those of one run.

SGLang unloads an adapter when no request uses it, and every other load or unload waits meanwhile. Up to 0.5.20 it does
not count down for a request that is aborted in the queue, or rejected before it gets there: the unload then never ends,
and no run can update its adapter any more. Nor does it forget an adapter that was unloaded: a late request loads it
again, and of one that came as tensors it asks the Hugging Face Hub, while loads and generation wait. `install` corrects
both and adds two calls, with the server's key:

| call | answer |
| --- | --- |
| `GET /lora_adapter_requests` | `{"adapters": {name: number of requests that use it}}` |
| `POST /abort_lora_adapter_requests` `{"prefix": text}` | ends the requests whose adapter's name begins so |

Called by `engines.sglang.entry` for servers with --enable-lora; `control` and `client` use the calls.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable, Iterable, Iterator, Sequence
from typing import Any

COUNTS_PATH = "/lora_adapter_requests"
ABORT_PATH = "/abort_lora_adapter_requests"


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
                _release(manager, states[rid].obj.lora_id)


def _release(manager: Any, adapter_id: str) -> None:
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
