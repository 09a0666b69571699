"""`--dry-run`: the plan of a run as text, without starting anything.

Imports nothing heavy and reads only small files: headers, not tensors. `estimate` is the memory of a GPU as a pure
function of the flags. Called by `slimrl.cluster.command_line`.
"""

from __future__ import annotations

import sys
from pathlib import Path

from slimrl.arguments.dry_run.errors import plan_errors, warnings
from slimrl.arguments.dry_run.memory import NodeResources, node_resources
from slimrl.arguments.dry_run.plan import MemoryPlan, Plan, PlanContext, estimate, make_plan
from slimrl.arguments.dry_run.render import render
from slimrl.arguments.flag import Problem, report
from slimrl.arguments.memory import StageMemory
from slimrl.arguments.namespace import Arguments
from slimrl.models.hf_folder import UnreadableFileError
from slimrl.processes.process_info import Machine, this_machine

__all__ = [
    "Machine",
    "MemoryPlan",
    "Plan",
    "StageMemory",
    "PlanContext",
    "estimate",
    "make_plan",
    "node_resources",
    "NodeResources",
    "print_plan",
    "plan_errors",
    "warnings",
    "this_machine",
]

EXIT_REFUSED = 2


def print_plan(args: Arguments, entry: str, surroundings: PlanContext) -> int:
    """Prints the plan of a checked command line, and its problems to stderr; returns the exit code."""
    try:
        plan = make_plan(args, entry, surroundings)
    except UnreadableFileError as error:
        problems = [Problem("--hf-checkpoint", f"--hf-checkpoint: {error}.")]
    else:
        print(render(plan), flush=True)
        for warning in warnings(plan):
            print(f"\nNote: {warning}", flush=True)
        problems = plan_errors(plan)
        if args.dry_run_resources and not problems:
            try:
                node_resources(plan).write(Path(args.dry_run_resources))
            except OSError as error:
                problems = [Problem("--dry-run-resources", f"--dry-run-resources cannot be written: {error}.")]
    if problems:
        print(report(problems, entry), file=sys.stderr)
        return EXIT_REFUSED
    return 0
