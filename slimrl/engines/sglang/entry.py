"""Runs SGLang's server or its router with the key of the run.

`python -m slimrl.engines.sglang.entry server|router <flags>`

Both take the key as a flag only, which every user of the machine can read in the process list. Here it comes in the
environment. What the packages' own entry points do is otherwise left as it is. Imports what it starts, and no torch.
"""

from __future__ import annotations

import os
import sys
import tempfile
from collections.abc import Sequence
from typing import Any

from slimrl.engines import auth

# where the ranks of a server meet instead of at a port of its own, which torch opens on all addresses and without a key
MEETING_VARIABLE = "SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE"


def run_server(words: Sequence[str]) -> None:
    """What `sglang.launch_server` does."""
    key = auth.taken()
    from sglang.launch_server import run_server
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import prepare_server_args
    from sglang.srt.utils import kill_process_tree

    load_plugins()
    try:
        server_args = prepare_server_args(list(words))
        if key is not None:
            server_args.api_key = key
        if server_args.nnodes == 1:
            meet_in_private(server_args)
        run_server(server_args)
    finally:
        kill_process_tree(os.getpid(), include_parent=False)


def meet_in_private(server_args: Any) -> None:
    """The ranks of a server on one node meet in a file of its own temporary folder."""
    os.environ.setdefault(MEETING_VARIABLE, f"file://{tempfile.mkdtemp(prefix='meeting-')}/store")
    # SGLang names its shared memory for reductions on a CPU by the address that is not used now
    os.environ.setdefault("MASTER_ADDR", server_args.host)
    os.environ.setdefault("MASTER_PORT", str(server_args.nccl_port or server_args.port))


def run_router(words: Sequence[str]) -> None:
    """What `sglang_router.launch_router` does."""
    key = auth.taken()
    from sglang_router.launch_router import launch_router, parse_router_args

    router_args = parse_router_args(list(words))
    if key is not None:
        router_args.api_key = str(key)
    launch_router(router_args)


if __name__ == "__main__":
    {"server": run_server, "router": run_router}[sys.argv[1]](sys.argv[2:])
