"""Runs vLLM's OpenAI server with the calls of slimrl: `python slimrl_vllm_server.py <flags of vllm serve>`.

Runs in vLLM's environment, which need not have slimrl. The run's key comes from the environment, because every user of
the machine can read a command line.

`python slimrl_vllm_server.py --slimrl-print-flags` prints these flags as JSON instead. Each is {"names", "kind",
"nargs", "choices", "action"}; `kind` is "int", "float" or "str", the last also for values that only vLLM can read.
Importing vllm takes seconds.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import sys
from pathlib import Path
from typing import Any

KEY_VARIABLE = "SLIMRL_SERVER_KEY"
WORKER_EXTENSION = "slimrl_vllm_worker.WorkerExtension"
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
    from slimrl_vllm_engine import Engine
    from vllm.entrypoints.openai import api_server
    from vllm.entrypoints.openai.cli_args import make_arg_parser, validate_parsed_serve_args
    from vllm.entrypoints.serve.utils.api_utils import cli_env_setup
    from vllm.utils.argparse_utils import FlexibleArgumentParser

    cli_env_setup()
    parser = make_arg_parser(FlexibleArgumentParser())
    parser.set_defaults(worker_extension_cls=WORKER_EXTENSION, logprobs_mode="processed_logprobs")
    args = parser.parse_args()
    validate_parsed_serve_args(args)
    _add_calls_to(api_server, key, Engine)
    uvloop.run(api_server.run_server(args))


def _add_calls_to(api_server: Any, key: str | None, engine_type: Any) -> None:
    """Replaces `init_app_state`, the last step before the server listens, by one that also adds slimrl's calls."""
    from slimrl_vllm_calls import KeyMiddleware, add_calls

    build, initialize = api_server.build_app, api_server.init_app_state
    apps: list[Any] = []

    def build_app(*arguments: Any, **options: Any) -> Any:
        apps.append(build(*arguments, **options))
        return apps[-1]

    async def init_app_state(client: Any, state: Any, flags: Any, *others: Any) -> None:
        await initialize(client, state, flags, *others)
        engine = engine_type(client)
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
        "dp_size": parallel.data_parallel_size,
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
