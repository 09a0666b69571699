"""Runs vLLM's OpenAI server with the calls of slimrl: `python slimrl_vllm_server.py <flags of vllm serve>`.

Runs in vLLM's environment, which need not have slimrl. The run's key comes from the environment, because every user of
the machine can read a command line. The calls have the paths and the form of SGLang's server, so that router, client
and control are the same for both engines. A refused call has status 400 and a text that says why.

`python slimrl_vllm_server.py --slimrl-print-flags` prints these flags as JSON instead. Each is {"names", "kind",
"nargs", "choices", "action"}; `kind` is "int", "float" or "str", the last also for values that only vLLM can read.
Importing vllm takes seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import datetime
import hmac
import json
import os
import sys
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from slimrl_vllm_engine import Answer, Engine, RefusedError

KEY_VARIABLE = "SLIMRL_SERVER_KEY"
WORKER_EXTENSION = "slimrl_vllm_worker.WorkerExtension"
OPEN_PATHS = ("/health",)  # without the key
PRINT_FLAGS = "--slimrl-print-flags"
MARK = "slimrl_vllm_flags:"  # at the start of the line: vllm prints others
KINDS: dict[Any, str] = {int: "int", float: "float"}


def main() -> None:
    """Serves until SIGTERM."""
    key = os.environ.pop(KEY_VARIABLE, None)
    own = str(Path(__file__).resolve().parent)
    if own not in os.environ.get("PYTHONPATH", "").split(os.pathsep):  # for the processes of the engine
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (own, os.environ.get("PYTHONPATH"))))
    import uvloop
    from vllm.entrypoints.openai import api_server
    from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    parser = make_arg_parser(FlexibleArgumentParser())
    parser.set_defaults(worker_extension_cls=WORKER_EXTENSION, logprobs_mode="processed_logprobs")
    args = parser.parse_args()
    validate_parsed_serve_args(args)
    _add_calls_to(api_server, key)
    uvloop.run(api_server.run_server(args))


def _add_calls_to(api_server: Any, key: str | None) -> None:
    """Replaces `init_app_state`, the last step before the server listens, by one that also adds slimrl's calls."""
    build, initialize = api_server.build_app, api_server.init_app_state
    apps: list[Any] = []

    def build_app(*arguments: Any, **options: Any) -> Any:
        apps.append(build(*arguments, **options))
        return apps[-1]

    async def init_app_state(client: Any, state: Any, flags: Any, *others: Any) -> None:
        await initialize(client, state, flags, *others)
        engine = Engine(client)
        await engine.on_workers("slimrl_end_with", os.getpid())
        app = apps[-1]
        add_calls(app, engine, _facts(client, flags))
        if key is not None:  # outermost; vLLM has already built the stack, after which FastAPI takes no middleware
            app.middleware_stack = KeyMiddleware(app.middleware_stack or app.build_middleware_stack(), key)
        state.slimrl_watch = asyncio.ensure_future(engine.watch())

    api_server.build_app, api_server.init_app_state = build_app, init_app_state


def _facts(client: Any, flags: Any) -> dict[str, Any]:
    import vllm

    config = client.vllm_config
    parallel, hf_config = config.parallel_config, config.model_config.hf_config
    server = {
        "version": vllm.__version__,
        "engine": "vllm",
        "tp_size": parallel.tensor_parallel_size,
        "pp_size": parallel.pipeline_parallel_size,
        "data_parallel_size": parallel.data_parallel_size,
        "quantization": config.model_config.quantization,
        "sleep_mode": config.model_config.enable_sleep_mode,
        "logprobs_mode": config.model_config.logprobs_mode,
        "worker_extension": parallel.worker_extension_cls,
        "random_seed": config.model_config.seed,
        "max_model_len": config.model_config.max_model_len,
        "model_path": flags.model,
        "served_model_name": flags.served_model_name or flags.model,
    }
    model = {
        "is_generation": config.model_config.runner_type == "generate",
        "model_path": flags.model,
        "model_type": hf_config.model_type,
        "architectures": hf_config.architectures,
    }
    return {"server": server, "model": model}


def add_calls(app: FastAPI, engine: Engine, facts: dict[str, Any]) -> None:
    """Adds every call; `facts` are the constants of /server_info and /model_info."""
    _add_generation(app, engine)
    _add_updates(app, engine)
    _add_state(app, engine, facts)


def _add_generation(app: FastAPI, engine: Engine) -> None:
    async def generate(request: Request) -> Response:
        body = await request.json()
        input_ids = body.get("input_ids")
        if not isinstance(input_ids, list) or not input_ids:
            return _refused("input_ids must be a list of token ids")
        task = asyncio.ensure_future(engine.generate(input_ids, dict(body.get("sampling_params") or {})))
        gone = asyncio.ensure_future(_disconnected(request))
        await asyncio.wait([task, gone], return_when=asyncio.FIRST_COMPLETED)
        gone.cancel()
        if not task.done():
            task.cancel()
            return PlainTextResponse("the client is gone", 499)
        try:
            return JSONResponse(_as_sglang(task.result(), engine.version))
        except ValueError as error:  # vLLM's errors of a bad request are ValueErrors
            return _refused(str(error))

    async def abort(body: dict[str, Any]) -> None:
        if not body.get("abort_all"):
            raise RefusedError("abort_request takes only abort_all")
        await engine.abort_all()

    async def pause(body: dict[str, Any]) -> None:
        await engine.pause(body.get("mode", "abort"))

    app.add_api_route("/generate", generate, methods=["POST"])
    _post(app, "/abort_request", abort)
    _post(app, "/pause_generation", pause)
    _post(app, "/continue_generation", lambda body: engine.resume())
    _post(app, "/flush_cache", lambda body: engine.flush_cache())


async def _disconnected(request: Request) -> None:
    while not await request.is_disconnected():
        await asyncio.sleep(1.0)


def _as_sglang(answer: Answer, version: str) -> dict[str, Any]:
    meta: dict[str, Any] = {
        "id": answer.request_id,
        "finish_reason": {"type": answer.finish_reason},
        "weight_version": answer.spans[-1][0] if answer.spans else version,
        "weight_versions": [{"version": name, "start": start, "end": end} for name, start, end in answer.spans],
        "prompt_tokens": answer.prompt_tokens,
        "completion_tokens": len(answer.token_ids),
        "cached_tokens": answer.cached_tokens,
        "e2e_latency": answer.seconds,
        "output_token_logprobs": [
            [log_prob, token, None] for log_prob, token in zip(answer.log_probs, answer.token_ids, strict=True)
        ],
    }
    return {"text": answer.text, "output_ids": answer.token_ids, "meta_info": meta}


def _add_updates(app: FastAPI, engine: Engine) -> None:
    async def load_tensors(body: dict[str, Any]) -> None:
        await engine.load("slimrl_load_shared", body["serialized_named_tensors"], body.get("load_format"))

    async def load_broadcast(body: dict[str, Any]) -> None:
        if body.get("load_format") != "flattened_bucket":
            raise RefusedError(f"load_format is {body.get('load_format')!r}: only flattened_bucket is supported")
        fields = (body["names"], body["dtypes"], body["shapes"], body["group_name"])
        await engine.load("slimrl_load_broadcast", *fields)

    async def load_folder(body: dict[str, Any]) -> None:
        await engine.load("slimrl_load_folder", body["model_path"])

    async def join(body: dict[str, Any]) -> None:
        names = ("master_address", "master_port", "rank_offset", "world_size", "group_name", "backend")
        await engine.on_workers("slimrl_join", *(body[name] for name in names))

    _post(app, "/begin_weight_update", lambda body: engine.begin_update())
    _post(app, "/end_weight_update", lambda body: engine.end_update())
    _post(app, "/update_weights_from_tensor", load_tensors)
    _post(app, "/update_weights_from_distributed", load_broadcast)
    _post(app, "/update_weights_from_disk", load_folder)
    _post(app, "/init_weights_update_group", join)
    _post(app, "/destroy_weights_update_group", lambda body: engine.on_workers("slimrl_leave", body["group_name"]))
    _post(app, "/update_weight_version", lambda body: engine.set_version(body["new_version"]))
    _post(app, "/release_memory_occupation", lambda body: _release(engine, body.get("tags")))
    _post(app, "/resume_memory_occupation", lambda body: engine.client.wake_up(_tags(body.get("tags"))))


async def _release(engine: Engine, tags: list[str] | None) -> None:
    if not engine.client.vllm_config.model_config.enable_sleep_mode:
        raise RefusedError("this vLLM server has no sleep mode: start it with --enable-sleep-mode")
    # level 2 drops weights and KV cache; vLLM has no level that drops the weights alone
    await engine.client.sleep(level=2)


def _tags(tags: list[str] | None) -> list[str] | None:
    """vLLM's own tags: it has none for CUDA graphs, which it keeps."""
    return None if tags is None else [tag for tag in tags if tag in ("weights", "kv_cache")]


def _add_state(app: FastAPI, engine: Engine, facts: dict[str, Any]) -> None:
    async def loads() -> dict[str, Any]:
        running, waiting = engine.counts()
        load = {
            "num_running_reqs": running,
            "num_waiting_reqs": waiting,
            "timestamp": engine.answered_at,
            "total_prefill_uncached_tokens": int(engine.prefilled),
        }
        return {"loads": [load], "timestamp": datetime.datetime.now(datetime.UTC).isoformat()}

    async def server_info() -> dict[str, Any]:
        await engine.ping()
        return facts["server"] | {"startup_time": engine.started_at}

    async def model_info() -> dict[str, Any]:
        return facts["model"] | {"weight_version": engine.version}

    for path, call in (("/v1/loads", loads), ("/server_info", server_info), ("/model_info", model_info)):
        app.add_api_route(path, call, methods=["GET"])

    async def health_generate() -> Response:
        answer = await engine.generate([0], {"max_new_tokens": 1, "temperature": 0.0, "ignore_eos": True})
        return PlainTextResponse("", 200 if answer.token_ids else 503)

    app.add_api_route("/health_generate", health_generate, methods=["GET"])
    app.add_api_route("/get_server_info", server_info, methods=["GET"])
    app.add_api_route("/get_model_info", model_info, methods=["GET"])


def _post(app: FastAPI, path: str, call: Callable[[dict[str, Any]], Coroutine[Any, Any, Any]]) -> None:
    async def endpoint(request: Request) -> Response:
        text = await request.body()
        try:
            await call(await request.json() if text else {})
        except RefusedError as error:
            return _refused(str(error))
        except KeyError as error:
            return _refused(f"{path} needs the field {error}")
        return JSONResponse({"success": True})

    app.add_api_route(path, endpoint, methods=["POST"])


def _refused(text: str) -> Response:
    return PlainTextResponse(text, 400)


class KeyMiddleware:
    """Rejects every call without the run's key, except those of `OPEN_PATHS`; vLLM's own guards only a part."""

    def __init__(self, app: Any, key: str) -> None:
        self._app = app
        self._expected = f"Bearer {key}".encode()

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """One call."""
        if scope["type"] in ("http", "websocket") and scope["path"] not in OPEN_PATHS:
            given = dict(scope["headers"]).get(b"authorization", b"")
            if not hmac.compare_digest(given, self._expected):
                await JSONResponse({"error": "Unauthorized"}, 401)(scope, receive, send)
                return
        await self._app(scope, receive, send)


def print_flags() -> None:
    """Prints one line."""
    from vllm.entrypoints.openai.cli_args import make_arg_parser
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    actions = make_arg_parser(FlexibleArgumentParser())._actions
    flags = [flag for flag in map(described, actions) if flag is not None]
    sys.stdout.write(f"{MARK}{json.dumps(flags)}\n")


def described(action: argparse.Action) -> dict[str, Any] | None:
    """One flag; None for a positional argument and for --help."""
    names = [name.removeprefix("--") for name in action.option_strings if name.startswith("--")]
    if not names or isinstance(action, argparse._HelpAction):
        return None
    if isinstance(action, argparse.BooleanOptionalAction):
        kind = "optional_switch"
    elif action.nargs == 0:
        kind = "store_true"
    else:
        kind = "store"
    plain = all(isinstance(choice, str | int) for choice in action.choices or ())
    return {
        "names": names,
        "kind": KINDS.get(action.type, "str"),
        "nargs": action.nargs if action.nargs in ("+", "*") or isinstance(action.nargs, int) else None,
        "choices": list(action.choices) if action.choices and plain else None,
        "action": kind,
    }


if __name__ == "__main__":
    if sys.argv[1:] == [PRINT_FLAGS]:
        print_flags()
    else:
        main()
