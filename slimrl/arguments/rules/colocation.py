"""Rules about offloading: who leaves the memory of a slot while the other side works."""

from __future__ import annotations

from collections.abc import Iterator

from slimrl.arguments.namespace import Arguments
from slimrl.arguments.problem import Problem
from slimrl.arguments.rules.context import Context


def offloaded_sides_take_turns(args: Arguments, context: Context) -> Iterator[Problem]:
    """A side can leave its memory only while it has nothing to do."""
    if context.entry != "train_async.py" or args.colocate:  # with --colocate that is the cause
        return
    for flag, on in (("--offload-train", args.offload_train), ("--offload-rollout", args.offload_rollout)):
        if on:
            yield Problem(
                flag,
                f"{flag} lets a side leave its memory while the other works, and with train_async.py both work at once:"
                " leave it out, or start train.py.",
            )
            return


def offload_is_said_once(args: Arguments, context: Context) -> Iterator[Problem]:
    """--offload means both sides."""
    kept = [name for name in ("offload_train", "offload_rollout") if name in context.given and not vars(args)[name]]
    absent = args.debug_train_only or args.debug_rollout_only
    if args.offload and kept and not absent:
        flag = "--no-" + kept[0].replace("_", "-")
        yield Problem("--offload", f"--offload is both sides and {flag} leaves one out: give one of the two flags.")
