"""`--dry-run`: looks at what the plan is made for, and prints it. Starts no Ray, no model and no server."""

from __future__ import annotations

import os

from slimrl.arguments import Arguments
from slimrl.arguments.plan import Surroundings, print_plan, this_machine
from slimrl.sglang.cpu_defaults import with_defaults


def dry_run(args: Arguments, entry: str) -> int:
    """Prints the plan; returns the exit code, 2 where it is refused."""
    machine = this_machine()
    model = f"--model-path={args.hf_checkpoint}"
    # a slot of another size is a slot of another machine, and those are planned with GPUs
    on_cpu = not machine.gpus and args.slot_memory_gib is None
    words = [word for word in with_defaults([model]) if word != model] if on_cpu else []
    return print_plan(args, entry, Surroundings(machine, _slots_of_nodes(), words))


def _slots_of_nodes() -> list[int] | None:
    """GPU slots of each node of the cluster this job runs in, most first; None outside of one."""
    if not os.environ.get("RAY_ADDRESS"):
        return None
    import ray

    ray.init(log_to_driver=False, logging_level="error")
    try:
        nodes = [node for node in ray.nodes() if node["Alive"]]
    finally:
        ray.shutdown()
    return sorted((int(node["Resources"].get("GPU", 0)) for node in nodes), reverse=True)
