"""`--dry-run`: inspects the machine or cluster and prints the plan. Starts no Ray, no model and no server."""

from __future__ import annotations

import os
import socket
import sys

from slimrl.arguments import Arguments
from slimrl.arguments.dry_run import EXIT_REFUSED, PlanContext, print_plan, this_machine
from slimrl.engines.backend import backend

ANSWER_TIMEOUT_S = 3.0


class ClusterAbsentError(ConnectionError):
    """RAY_ADDRESS names a cluster that does not answer."""


def dry_run(args: Arguments, entry: str) -> int:
    """Prints the plan; returns the exit code, 2 if the plan is invalid."""
    machine = this_machine()
    model = f"--model-path={args.hf_checkpoint}"
    # with --gpu-memory-gib the plan is for another machine, which has GPUs
    on_cpu = not machine.gpus and args.gpu_memory_gib is None
    words = [word for word in backend(args.rollout_engine).cpu_options([model]) if word != model] if on_cpu else []
    try:
        nodes = gpus_of_nodes(os.environ.get("RAY_ADDRESS"))
    except ClusterAbsentError as error:
        print(f"{entry}: {error}", file=sys.stderr)
        return EXIT_REFUSED
    return print_plan(args, entry, PlanContext(machine, nodes, words))


def gpus_of_nodes(address: str | None) -> list[int] | None:
    """Numbers of GPUs of the nodes of the cluster at `address` (RAY_ADDRESS), descending; None without an address.

    Raises ClusterAbsentError if nothing responds there; Ray itself would retry for minutes.
    """
    if not address:
        return None
    _check_answers(address)
    import ray

    ray.init(address, log_to_driver=False, logging_level="error")
    try:
        nodes = [node for node in ray.nodes() if node["Alive"]]
    finally:
        ray.shutdown()
    return sorted((int(node["Resources"].get("GPU", 0)) for node in nodes), reverse=True)


def _check_answers(address: str) -> None:
    host, _, port = address.removeprefix("ray://").rpartition(":")
    if not port.isdigit():
        return  # "auto": Ray looks for a cluster on this machine
    try:
        socket.create_connection((host, int(port)), ANSWER_TIMEOUT_S).close()
    except OSError as error:
        raise ClusterAbsentError(
            f"the Ray cluster at RAY_ADDRESS={address} does not answer ({error}): start it, or unset RAY_ADDRESS to"
            " plan without a cluster."
        ) from error
