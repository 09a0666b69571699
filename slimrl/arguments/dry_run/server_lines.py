"""The servers of the plan: the policy's engines, group by group, frozen models, and the reward model."""

from __future__ import annotations

from collections.abc import Iterator

from slimrl.arguments.dry_run.plan import Plan, option_words
from slimrl.arguments.dry_run.text import LISTED, table, where_on
from slimrl.arguments.engine_groups.config import DECODE, PREFILL
from slimrl.arguments.engine_groups.layout import group_flags
from slimrl.arguments.namespace import Arguments
from slimrl.arguments.served_models import served_models


def server_lines(plan: Plan) -> Iterator[str]:
    """The servers with GPUs, seeds, logs and flags, group by group, and the router."""
    if not plan.servers:
        return
    args = plan.args
    rows: list[tuple[object, ...]] = [("server", "where (node: GPUs on it)", "seed", "log")]
    shown = plan.servers if len(plan.servers) <= 2 * LISTED else [*plan.servers[:LISTED], plan.servers[-1]]
    yield from table([*rows, *((one.name, where_on(plan, one.gpus), one.seed, one.log) for one in shown)])
    if len(shown) < len(plan.servers):
        yield f"{len(plan.servers)} servers in all"
    yield from _flags_of_servers(plan)
    if plan.surroundings.server_words:
        yield f"because there is no GPU here, before that: {' '.join(plan.surroundings.server_words)}"
    router = " ".join(option_words(args.router_options))
    yield (
        "ports: free ones, chosen when they start; in front of them one router"
        f" (--request-timeout-secs {args.sglang_router_request_timeout_secs}{' ' + router if router else ''})"
    )
    yield f"at most {args.sglang_server_concurrency} requests in flight per server (--sglang-server-concurrency)"
    if (most := args.rollout_max_num_gpus) is not None:
        yield f"more join the running job whenever Ray has free GPUs, up to --rollout-max-num-gpus {most} in all"
    yield from _reward_servers(plan)


def _flags_of_servers(plan: Plan) -> Iterator[str]:
    """The flags that all servers have or, with groups, those of each group."""
    if not plan.args.server_models:
        yield f"each with: {_flags(plan.args)}"
        return
    for model in plan.args.server_models:
        for number, group in enumerate(model.groups):
            names = [one.name for one in plan.servers if one.place.model is model and one.place.group_index == number]
            which = f"model {model.name}, group {number} ({group.worker_type}, {group.num_gpus} GPUs)"
            if not names:
                yield f"{which}: no servers"
                continue
            servers = f"server {names[0]}" if len(names) == 1 else f"servers {names[0]} to {names[-1]}"
            updates = "gets the weight updates" if model.update_weights else "frozen, with a router of its own"
            role = f" --disaggregation-mode {group.worker_type}" if group.worker_type in (PREFILL, DECODE) else ""
            yield f"{which}: {servers}, {updates}, with: {_flags(group_flags(plan.args, model, group))}{role}"


def _flags(args: Arguments) -> str:
    """The command line of a server with these flags."""
    size = args.rollout_num_gpus_per_engine // max(int(args.engine_options.get("pp_size", 1)), 1)
    model, tensor_parallel = ("--model", "--tensor-parallel-size") if args.uses_vllm else ("--model-path", "--tp-size")
    words = [model, str(args.hf_checkpoint), tensor_parallel, str(size), *option_words(args.engine_options)]
    return " ".join(words)


def _reward_servers(plan: Plan) -> Iterator[str]:
    args, rest = plan.args, plan.placement.reward
    words = [*([] if args.has_served_teacher else ["--is-embedding"]), *option_words(args.rm_server_options)]
    for model in served_models(args):
        count = -(-model.gpus // model.per_server)
        places, rest = "; ".join(where_on(plan, gpus) for gpus in rest[:count][:LISTED]), rest[count:]
        yield f"{model.title(args)}: {count} {'server' if count == 1 else 'servers'} more, at {places}"
        yield f"with: --model-path {model.folder} --tp-size {model.per_server} {' '.join(words)}".rstrip()
    if plan.placement.reward:
        yield f"at most {args.rm_concurrency} requests in flight per server (--rm-concurrency)"
