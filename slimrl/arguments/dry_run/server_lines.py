"""The servers of the plan, group by group, how weights reach them, and the pieces of the plan's text (tables, GPUs).

Of the transports of weight updates to engines on other GPUs, NCCL (gloo without a GPU) moves weights between the
memories of GPUs and needs no further package, but is one group of all ranks: with a lost rank every other one waits for
the engines' own watchdog. Mooncake has a connection for each pair of ranks, and each of the others is told at once; it
needs its wheel, RDMA devices to be fast, and copies through host memory.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from slimrl.arguments.dry_run.plan import Plan, option_words
from slimrl.arguments.engine_groups import DECODE, PREFILL, draft_folder, group_flags
from slimrl.arguments.hf_config import served_models
from slimrl.arguments.namespace import Arguments

LISTED = 4


def table(rows: Sequence[Sequence[object]]) -> list[str]:
    """Columns padded to their widest entry; cells that are no text, or end in a unit, stand right."""
    texts = [[str(cell) for cell in row] for row in rows]
    widths = [max(len(row[column]) for row in texts if column < len(row)) for column in range(max(map(len, texts)))]
    lines = []
    for row, cells in zip(texts, rows, strict=True):
        padded = [
            text.rjust(width) if _is_number(cell) else text.ljust(width)
            for text, width, cell in zip(row, widths, cells, strict=False)
        ]
        lines.append("  ".join(padded).rstrip())
    return lines


def _is_number(cell: object) -> bool:
    return not isinstance(cell, str) or cell.endswith((" GiB", " MiB"))


def where_on(plan: Plan, positions: Sequence[int]) -> str:
    """ "0: 2-3; 1: 0": the GPUs at these positions on each node."""
    parts = []
    for node in plan.placement.nodes_of(positions):
        gpus = [plan.placement.places[i].gpu for i in positions if plan.placement.places[i].node == node]
        parts.append(f"{node}: {span(gpus)}")
    return "; ".join(parts[:LISTED] + ([f"... {parts[-1]}"] if len(parts) > LISTED else []))


def span(numbers: Sequence[int]) -> str:
    """ "2-5" for consecutive numbers, "2" for one."""
    return str(numbers[0]) if len(numbers) == 1 else f"{numbers[0]}-{numbers[-1]}"


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
        if (draft := draft_folder(plan.args.sglang_options)) is not None:
            yield f"in each a draft model, {draft}, which is frozen: weight updates do not reach it"
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
            if draft_folder(group_flags(plan.args, model, group).sglang_options) is not None:
                updates += ", with a frozen draft model"
            role = f" --disaggregation-mode {group.worker_type}" if group.worker_type in (PREFILL, DECODE) else ""
            yield f"{which}: {servers}, {updates}, with: {_flags(group_flags(plan.args, model, group))}{role}"


def _flags(args: Arguments) -> str:
    """The command line of a server with these flags."""
    options = args.engine_options
    size = args.rollout_num_gpus_per_engine // max(int(options.get("pp_size", options.get("data_parallel_size", 1))), 1)
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


_GIGA = 1e9
_SERVERS_OF_ONE_RANK = 32  # that it calls, as long as there are ranks (weights.update.engine_fanout)
_CALL_S = 0.37e-3  # of a training rank for an HTTP call to one of many servers (benchmarks/engine_calls.py)


def weight_transport_rows(plan: Plan) -> Iterator[tuple[str, str]]:
    """One row: what moves, from where to where, and which transport suits the cluster; none without weight updates."""
    args = plan.args
    if args.eval_only or args.debug_train_only or args.debug_rollout_only:
        return
    if args.engines_have_adapters:
        yield _ROW, "the LoRA adapters alone, in one call to each server; the base stays as the servers have loaded it"
        return
    whole = plan.total_parameters * plan.engine_settings.weight_bytes / _GIGA
    sizes = [len(one.gpus) for one in plan.servers if one.place.model.update_weights]
    if args.update_weight_transport == "disk":
        yield _ROW, f"files: {_files(plan, whole, len(sizes))}"
    elif args.colocate:
        some = "; changes of them from the second update on" if args.update_weight_mode == "delta" else ""
        yield _ROW, f"{_on_shared_gpus(plan, whole)}{some}"
    elif args.update_weight_mode == "delta":
        yield _ROW, f"changes: {_changes(plan, whole)}"
    elif args.update_weight_transfer_mode == "p2p" and sizes:
        average = whole * len(sizes) / sum(sizes)
        yield (
            _ROW,
            f"point to point by {_name(plan)}: about {average:.3g} GB into each of {_engine_ranks(sizes)},"
            f" {_shared(plan)}, instead of {whole:.3g} GB by broadcast; {_suits(plan)}",
        )
    else:
        yield _ROW, _broadcast(plan, whole, sizes)


_ROW = "weight transport"


def _engine_ranks(sizes: Sequence[int]) -> str:
    return f"{sum(sizes)} engine {'rank' if sum(sizes) == 1 else 'ranks'}"


def _files(plan: Plan, whole: float, servers: int) -> str:
    """Why files, or what is faster."""
    args, told = plan.args, f"rank 0 writes {whole:.3g} GB, and every server reads them"
    if args.update_weight_mode == "delta":
        return (
            f"rank 0 writes what differs since the last update, compressed, and {whole:.3g} GB in the first update and"
            f" one after a failure; each engine host keeps a checkpoint of {whole:.3g} GB in"
            f" {args.update_weight_local_checkpoint_dir}. They suit shared storage that is slow for whole models"
        )
    if args.rollout_external_engine_addrs or args.custom_update_weight_post_write_path is not None:
        return f"{told}; they suit servers that no process group of the run reaches"
    faster = "memory of the same GPUs, or of the node without a GPU" if args.colocate else f"{_name(plan)}"
    return (
        f"{told} from shared storage ({max(servers, 1) * whole:,.3g} GB); {faster} is faster where trainers and engines"
        " reach each other: leave --update-weight-transport disk out"
    )


def _on_shared_gpus(plan: Plan, whole: float) -> str:
    """Engines on the trainer's GPUs, where nothing crosses a network."""
    way = "CUDA IPC" if _on_gpus(plan) else "shared memory"
    where = "on its own GPU" if _on_gpus(plan) else "on its node"
    return (
        f"{way}: every engine rank reads {whole:.3g} GB / its tensor parallel size in the memory of a training rank"
        f" {where}; it suits --colocate, because no weights cross the network"
    )


def _changes(plan: Plan, whole: float) -> str:
    return (
        f"what differs in bf16 since the last update, as indices and values, broadcast by {_name(plan)}; the first"
        f" update, and one after a failure, sends {whole:.3g} GB. They suit slow networks between trainers and engines;"
        " else a broadcast of all weights or point to point (--update-weight-transfer-mode p2p) is faster"
    )


def _broadcast(plan: Plan, whole: float, sizes: Sequence[int]) -> str:
    told = f"broadcast by {_name(plan)}: rank 0 gathers and sends {whole:.3g} GB into each"
    if not sizes:
        return f"{told} of the external servers' ranks; it suits those that reach the trainer, and files the others"
    average = whole * len(sizes) / sum(sizes)
    told = f"{told} of {_engine_ranks(sizes)};"
    announced = _announced(plan.args, whole, len(sizes))
    if plan.args.uses_vllm:
        return f"{told} it is what vLLM servers take on GPUs of their own{announced}"
    p2p = f"--update-weight-transfer-mode p2p sends about {average:.3g} GB into each, {_shared(plan)}"
    if max(sizes) == 1:
        reason = "a broadcast suits few engines of one rank, which need all weights, and p2p many of them"
    else:
        reason = "p2p suits engines of several ranks, which each need a part"
    return f"{told} {p2p}; {reason}{announced}"


def _announced(args: Arguments, whole: float, servers: int) -> str:
    """The calls that announce a broadcast of `whole` GB, if they take seconds."""
    buckets = math.ceil(whole * _GIGA / args.update_weight_buffer_size)
    callers = max(min(args.actor_num_gpus, -(-servers // _SERVERS_OF_ONE_RANK)), 1)
    seconds = buckets * -(-servers // callers) * _CALL_S
    if seconds < 1:
        return ""
    who = "rank 0 announces" if callers == 1 else f"{callers} training ranks announce"
    return (
        f"; {who} a broadcast in {buckets * servers:,} calls, {buckets} buckets to {servers} servers, which take about"
        f" {seconds:.0f} s, and p2p makes one call to each server"
    )


def _on_gpus(plan: Plan) -> bool:
    """Whether the plan is for GPUs, those of --gpu-memory-gib too, and not for the memory of a CPU machine."""
    return plan.gpu is not None and not plan.gpu.shared


def _name(plan: Plan) -> str:
    if plan.args.update_weight_transport == "mooncake":
        return "Mooncake"
    return "NCCL" if _on_gpus(plan) else "gloo"


def _shared(plan: Plan) -> str:
    ranks = plan.args.actor_num_gpus
    return f"from {ranks} training {'rank' if ranks == 1 else 'ranks'}"


def _suits(plan: Plan) -> str:
    """Which transport suits the cluster, and why."""
    args = plan.args
    mooncake = args.update_weight_transport == "mooncake"
    if not _on_gpus(plan):
        words = "gloo suits machines without a GPU: it needs no further package, and Mooncake's TCP is not faster"
        return words + ("; leave --update-weight-transport mooncake out" if mooncake else "")
    nodes = len(plan.placement.nodes_of(range(len(plan.placement.places))))
    if nodes > 1 and args.use_fault_tolerance:
        words = (
            "Mooncake suits these nodes if they have RDMA devices: engines may be lost (--use-fault-tolerance), and it"
            " has no group of all ranks that a lost one blocks"
        )
        return words + ("" if mooncake else "; add --update-weight-transport mooncake, and install its wheel")
    where = "one node" if nodes == 1 else "engines that stay"
    words = f"NCCL suits {where}: it moves weights from GPU to GPU and needs no further package"
    return words + ("; leave --update-weight-transport mooncake out" if mooncake else "")
