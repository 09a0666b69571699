"""How generation, training and pushes of weights take turns, as rows of the plan; what is under way at most."""

from __future__ import annotations

from collections.abc import Iterator

from slimrl.arguments.namespace import Arguments
from slimrl.arguments.plan.plan import Plan


def loop_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    """From checked flags; none where nothing is trained."""
    args = plan.args
    if args.only_evaluates:
        return
    if plan.entry != "train_async.py":
        yield "loop", "generates, trains, in turns"
        return
    bound = args.max_weight_staleness
    if bound is None or args.debug_train_only:
        yield "loop", "generates one rollout ahead of training"
    else:
        yield "loop", "generates without end, beside training and across pushes of weights"
        yield (
            "staleness",
            f"no token is trained whose weights are more than {bound} rollouts older than those it trains"
            " (--max-weight-staleness)",
        )
        yield "under way", _under_way(plan, bound)
    if not args.debug_train_only and not args.debug_rollout_only:
        yield "pushes", _pushes(args)


def _under_way(plan: Plan, bound: int) -> str:
    """Groups that can still be trained in time, and what the servers take at once."""
    args, size = plan.args, plan.args.n_samples_per_prompt
    groups = (bound + 1) * args.rollout_batch_size
    servers = len(args.rollout_external_engine_addrs or plan.servers)
    return (
        f"at most {groups * size} samples begun and not yet trained: {bound} + 1 rollouts of"
        f" {args.rollout_batch_size} prompts x {size}; groups begin while fewer than"
        f" {servers * args.sglang_server_concurrency} requests run ({servers} x --sglang-server-concurrency"
        f" {args.sglang_server_concurrency})"
    )


def _pushes(args: Arguments) -> str:
    """After which rollouts, and what happens to requests that run then."""
    interval = args.update_weights_interval
    when = "after every rollout" if interval == 1 else f"after every {interval} rollouts and the last"
    how = "requests that run go on with the new weights" if args.update_weights_in_flight else "no request runs then"
    return f"{when}; {how}"
