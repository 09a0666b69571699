"""Runs SGLang's server or its router with the run's API key.

`python -m slimrl.engines.sglang.entry server|router <flags>`

SGLang accepts the key only as a flag, which every user of the machine can read in the process list. This entry point
reads it from the environment and otherwise does the same as the packages' own. Does not import torch itself.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import types
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slimrl.engines.http import pop_key_from_environment
from slimrl.processes.child_process import uncollected

# replaces the ranks' rendezvous port, which torch would open on all addresses without authentication
INIT_METHOD_VARIABLE = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"

BATCH_INVARIANT = "--batch-invariant"  # of this entry point itself: the operators of --true-on-policy-mode
DETERMINISTIC = "--enable-deterministic-inference"  # SGLang's flag, with which requests have seeds


def run_server(words: Sequence[str]) -> None:
    """Runs the server as `sglang.launch_server` does; `BATCH_INVARIANT` is for the processes that it starts."""
    words = [word for word in words if word != BATCH_INVARIANT]
    key = pop_key_from_environment()
    with uncollected():
        from sglang.launch_server import run_server
        from sglang.srt.plugins import load_plugins
        from sglang.srt.server_args import prepare_server_args
        from sglang.srt.utils import kill_process_tree

        from slimrl.engines.sglang.inputs import videos
        from slimrl.engines.sglang.server_args import sees_images

        load_plugins()
        import sglang.srt.entrypoints.http_server as http_server  # `run_server` imports it otherwise
    try:
        server_args = prepare_server_args(words)
        if key is not None:
            server_args.api_key = key
        if server_args.nnodes == 1:
            use_file_rendezvous(server_args)
        if server_args.enable_lora:
            serve_adapters(http_server)
        if sees_images(Path(server_args.model_path)):
            videos.install(server_args.model_path)
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def use_batch_invariant_operators() -> None:
    """In a process that SGLang has started, with the operators of --true-on-policy-mode."""
    with uncollected():
        from slimrl.engines.sglang.operators import batch_invariant

        batch_invariant.install_on_gpu()
    logging.getLogger(__name__).info("layers compute with batch-invariant operators")


def use_seeded_sampling() -> None:
    """In a process that SGLang has started, whose requests have seeds."""
    with uncollected():
        from sglang.srt.layers import sampler

        from slimrl.engines.sglang.operators import seeded_sampling

        seeded_sampling.install(sampler)


def use_file_rendezvous(server_args: Any) -> None:
    """Makes the ranks of a single-node server use a file in its temporary folder as rendezvous."""
    os.environ.setdefault(INIT_METHOD_VARIABLE, f"file://{tempfile.mkdtemp(prefix='rendezvous-')}/store")
    # SGLang derives the name of its shared memory for CPU reductions from the now unused address
    os.environ.setdefault("MASTER_ADDR", server_args.host)
    os.environ.setdefault("MASTER_PORT", str(server_args.nccl_port or server_args.port))


def serve_adapters(http_server: Any) -> None:
    """Corrects SGLang's count of the requests of each LoRA adapter, and adds calls about them."""
    from sglang.srt.managers.tokenizer_manager import TokenizerManager

    from slimrl.engines.sglang import adapters

    adapters.install(TokenizerManager, http_server.app, lambda: http_server.get_global_state().tokenizer_manager)


def run_router(words: Sequence[str]) -> None:
    """Runs the router as `sglang_router.launch_router` does."""
    key = pop_key_from_environment()
    hide_python_router()
    from sglang_router.launch_router import launch_router, parse_router_args

    router_args = parse_router_args(list(words))
    if key is not None:
        router_args.api_key = str(key)
    launch_router(router_args)


def hide_python_router() -> None:
    """Keeps the router's package from importing sglang, and with it torch.

    Its load balancer in Python needs them, which slimrl never runs (--router-mini-lb is reserved); the router itself is
    a compiled library.
    """
    sys.modules.setdefault("sglang_router.mini_lb", types.SimpleNamespace(MiniLoadBalancer=None))  # type: ignore[arg-type]


# SGLang starts its processes on GPUs by "spawn", in which Python imports the main module again, with this name
if __name__ == "__mp_main__":
    if BATCH_INVARIANT in sys.argv:
        use_batch_invariant_operators()
    if DETERMINISTIC in sys.argv:
        use_seeded_sampling()

if __name__ == "__main__":
    {"server": run_server, "router": run_router}[sys.argv[1]](sys.argv[2:])
