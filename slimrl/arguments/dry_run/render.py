"""The plan as text for a terminal: one section per question, aligned columns, numbers with their arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from slimrl.arguments.dry_run.memory import EngineMemory, EngineSettings, node_resources
from slimrl.arguments.dry_run.plan import Plan, loop_rows
from slimrl.arguments.dry_run.server_lines import LISTED, server_lines, span, table, weight_transport_rows, where_on
from slimrl.arguments.hf_config import served_models, served_role
from slimrl.arguments.layout import data_parallel_sizes, dense_axes, expert_axes, rank_lists
from slimrl.arguments.memory import StageMemory
from slimrl.processes.process_info import gib

# groups are listed rank by rank up to this world size; beyond it the first group of each kind is shown
SMALL_WORLD = 16


def render(plan: Plan) -> str:
    """The whole text."""
    sections = (
        ("What runs", _run(plan)),
        ("GPUs", _gpus(plan)),
        ("Parallel groups of training", _groups(plan)),
        ("One rollout", _batches(plan)),
        ("Model", _model(plan)),
        ("Checkpoints", _checkpoints(plan)),
        ("Hooks", _hooks(plan)),
        ("Servers", server_lines(plan)),
        ("Memory of one GPU", _memory(plan)),
        ("Each node", _node(plan)),
    )
    blocks = [f"Plan of {plan.entry}: nothing is started."]
    for title, lines in sections:
        body = list(lines)
        if body:
            blocks.append("\n".join([title, *(f"  {line}" for line in body)]))
    return "\n\n".join(blocks)


def _run(plan: Plan) -> Iterator[str]:
    args = plan.args
    first = plan.start.first_rollout if plan.start is not None else args.start_rollout_id or 0
    if args.num_rollout is None:
        data = args.prompt_data or args.data_source_path
        data = data if isinstance(data, str) else " ".join(data)
        length = f"{args.num_epoch} passes over {data}, in rollouts of {args.rollout_batch_size} prompts"
    elif args.eval_only:
        length = "one evaluation, no training (--num-rollout 0)"
    elif first >= args.num_rollout:
        length = f"no rollout is left: the next is {first} and --num-rollout is {args.num_rollout}"
    else:
        length = f"rollouts {first} to {args.num_rollout - 1} ({args.num_rollout - first})"
    yield from table([("length", length), *loop_rows(plan), *weight_transport_rows(plan), ("folder", args.run_dir)])


def _gpus(plan: Plan) -> Iterator[str]:
    where = plan.placement
    rows: list[tuple[object, ...]] = [("role", "gpus", "where (node: GPUs on it)")]
    if where.train:
        rows.append(("training", len(where.train), where_on(plan, where.train)))
    if where.critic:
        rows.append(("critic", len(where.critic), where_on(plan, where.critic)))
    if where.engines:
        of_policy = [gpu for gpus in where.engines for gpu in gpus]
        rows.append(("engines", len(of_policy), where_on(plan, of_policy)))
    for model in plan.args.server_models:
        own = [gpu for one in plan.servers if one.place.model is model for gpu in one.gpus]
        if own and not model.update_weights:
            rows.append((model.name, len(own), where_on(plan, own)))
    if where.reward:
        every = range(where.reward[0].start, where.reward[-1].stop)
        rows.append((served_role(plan.args), len(every), where_on(plan, every)))
    yield from table(rows)
    nodes = len(where.nodes_of(range(len(where.places))))
    shared = f", both roles on the same ones, {_turns(plan)}" if plan.colocated else ""
    source = (
        "of the Ray cluster" if plan.surroundings.nodes is not None else f"of {plan.args.num_gpus_per_node} GPUs each"
    )
    yield f"{where.total} GPUs{shared}, on {nodes} {'node' if nodes == 1 else 'nodes'} {source}"


def _turns(plan: Plan) -> str:
    parked, released = plan.args.offload_train, plan.args.offload_rollout
    if parked and released:
        return "each side offloaded while the other works"
    if parked:
        return "training offloaded while engines generate"
    return "engines offloaded while training runs" if released else "nothing offloaded"


def _runs(numbers: Sequence[int]) -> str:
    """ "0-3 and 8-11": where numbers follow each other."""
    starts = [i for i, number in enumerate(numbers) if i == 0 or number != numbers[i - 1] + 1]
    pieces = [numbers[start:end] for start, end in zip(starts, [*starts[1:], len(numbers)], strict=True)]
    return " and ".join(map(span, pieces)) or "none"


def _groups(plan: Plan) -> Iterator[str]:
    if not plan.placement.train:
        return
    groups = plan.groups
    meanings = {
        "TP": "shard each layer's matrices",
        "CP": "shard each sample's tokens",
        "DP": "copies of the model, each with its own samples",
        "PP": "consecutive stages",
        "expert TP": "shard each expert's matrices",
        "EP": "distribute the experts of a layer",
        "expert DP": "copies of the same experts",
    }
    axes = [(dense_axes(groups), name) for name, _ in dense_axes(groups)]
    if plan.spec.experts is not None:
        axes += [(expert_axes(groups), name) for name in ("expert TP", "EP", "expert DP")]
    rows: list[tuple[object, ...]] = [("group", "size", "what its ranks do", f"ranks (of {groups.world})")]
    for sizes, name in axes:
        size = dict(sizes)[name]
        rows.append((name, size, meanings[name], _ranks(rank_lists(sizes, name), groups.world) if size > 1 else "-"))
    yield from table(rows)
    if plan.placement.critic:
        yield f"the critic's {len(plan.placement.critic)} ranks: the same, with DP {data_parallel_sizes(plan.args)[1]}"
    if groups.pipeline > 1:
        layers = ", ".join(f"{number}: {_runs(s.layers)}" for number, s in enumerate(plan.memory.stages))
        yield f"layers of each stage: {layers}"


def _ranks(lists: list[list[int]], world: int) -> str:
    if world <= SMALL_WORLD:
        return " ".join(str(ranks).replace(" ", "") for ranks in lists)
    first = ",".join(map(str, lists[0][:LISTED])) + (",..." if len(lists[0]) > LISTED else "")
    return f"[{first}] and {len(lists) - 1} more" if len(lists) > 1 else f"[{first}]"


def _batches(plan: Plan) -> Iterator[str]:
    args, one = plan.args, plan.batches
    if args.eval_only:
        return
    rows: list[tuple[object, ...]] = [
        ("prompts", one.prompts, "--rollout-batch-size"),
        ("samples", one.samples, f"{one.prompts} x --n-samples-per-prompt {args.n_samples_per_prompt}"),
    ]
    if plan.placement.train:
        rows += [
            ("optimizer steps", one.steps, f"{one.samples} / --global-batch-size {one.samples_per_step}"),
            (
                "samples per step and data parallel rank",
                one.samples_per_rank,
                f"{one.samples_per_step} / {plan.groups.data} ranks",
            ),
            _micro_batches(plan),
        ]
    yield from table(rows)
    if plan.placement.train:
        yield _largest(plan)


def _micro_batches(plan: Plan) -> tuple[object, ...]:
    args, one = plan.args, plan.batches
    if one.micro_batches is not None:
        return (
            "micro-batches of them",
            one.micro_batches,
            f"{one.samples_per_rank} / --micro-batch-size {args.micro_batch_size}",
        )
    assert args.max_tokens_per_gpu is not None
    cap = args.max_tokens_per_gpu * plan.groups.context
    by = f" x {plan.groups.context} context parallel GPUs" if plan.groups.context > 1 else ""
    return (
        "micro-batches of them",
        "by length",
        f"as few as fit --max-tokens-per-gpu {args.max_tokens_per_gpu}{by} = {cap} tokens"
        if by
        else f"as few as fit --max-tokens-per-gpu {cap} tokens",
    )


def _largest(plan: Plan) -> str:
    largest = plan.micro_batch
    alone = ", which goes alone" if largest.alone else ""
    return (
        f"largest micro-batch: {largest.tokens_per_gpu} tokens on a GPU; {largest.basis} has {largest.longest_sample}"
        f" tokens{alone}"
    )


def _model(plan: Plan) -> Iterator[str]:
    rows = [("parameters", f"{plan.total_parameters:,}", billions(plan.total_parameters))]
    if plan.spec.experts is not None:
        rows.append(("of them for one token", f"{plan.active_parameters:,}", billions(plan.active_parameters)))
    for number, stage in enumerate(plan.memory.stages):
        name = "on one training GPU" if len(plan.memory.stages) == 1 else f"on a GPU of stage {number}"
        rows.append((name, f"{stage.parameters:,}", billions(stage.parameters)))
    files = plan.hf_files
    if files is None:
        rows.append(("in the checkpoint", "-", f"{plan.args.hf_checkpoint} holds no safetensors files"))
    else:
        held = f"{files.elements:,}" if files.elements is not None else "packed"
        note = f"{files.tensors} tensors, {files.files} files, {gib(files.bytes)}"
        biases = plan.checkpoint_elements - plan.total_parameters
        if biases:
            note += f"; {biases:,} of the numbers are the routers' biases"
        rows.append(("in the checkpoint", held, note))
    yield from table([(name, number.rjust(max(len(row[1]) for row in rows)), note) for name, number, note in rows])
    if plan.args.debug_rollout_only:
        return  # the servers read the folder, and nothing reads the model flags
    agrees = "" if files is None or files.elements != plan.checkpoint_elements else " and with the files' tensors"
    yield f"the model flags agree with config.json of {plan.args.hf_checkpoint}{agrees}"


def billions(parameters: int) -> str:
    """ "4.02 B", small models in millions."""
    return f"{parameters / 1e9:.2f} B" if parameters >= 1e9 else f"{parameters / 1e6:.2f} M"


def _checkpoints(plan: Plan) -> Iterator[str]:
    start, args = plan.start, plan.args
    if start is None:
        return
    rows = []
    if start.weights is not None:
        rows.append(("weights", start.flag, f"{start.weights.folder} ({start.weights.name})"))
    if start.reference is not None:
        rows.append(("reference", start.reference_flag, f"{start.reference.folder} ({start.reference.name})"))
    if start.teacher is not None and not args.eval_only:
        rows.append(("teacher", "--opd-teacher-load", f"{start.teacher.folder} ({start.teacher.name})"))
    if args.load is not None and start.flag != "--load":
        rows.append(("resume from", "--load", f"{args.load} has no checkpoint yet: a fresh start"))
    if args.eval_only:
        rows.append(("start", "", "evaluation only; no optimizer state is read, and nothing is saved"))
        yield from table(rows)
        return
    state = f"continues with rollout {start.first_rollout}, with the optimizer's state"
    fresh = f"begins at rollout {start.first_rollout} with a fresh optimizer"
    rows.append(("start", "", fresh if not start.resumed or args.no_load_optim else state))
    if args.save is not None:
        when = (
            f"every {args.save_interval} rollouts and after the last"
            if args.save_interval
            else "after the last rollout"
        )
        when += ", while training continues" if args.async_save else ""
        rows.append(("save", "--save", f"{args.save} ({when}; {_kept(plan)})"))
    if args.save_hf is not None:
        rows.append(("export", "--save-hf", f"{args.save_hf} (with each checkpoint; none is deleted)"))
    yield from table(rows)


def _kept(plan: Plan) -> str:
    """Which checkpoints are not deleted."""
    newest, interval = plan.args.save_total_limit, plan.args.save_retain_interval
    if newest is None and interval is None:
        return "all stay"
    parts = ["the newest stays" if newest in (None, 1) else f"the newest {newest} stay"]
    return " and ".join([*parts, *([f"those after every {interval} rollouts"] if interval else [])])


def _hooks(plan: Plan) -> Iterator[str]:
    rows = [
        (hook.flag, hook.function, f"{hook.file}:{hook.line}" if hook.line else f"{hook.file} has no such name")
        for hook in plan.hooks
    ]
    if rows:
        yield from table(rows)


def _memory(plan: Plan) -> Iterator[str]:
    stages = plan.memory.stages + plan.memory.critic
    if stages:
        several = len(plan.memory.stages) > 1
        names = [f"stage {number}" if several else "training" for number in range(len(plan.memory.stages))]
        names += [f"critic {number}" if several else "critic" for number in range(len(plan.memory.critic))]
        rows = [("", *names), *([name, *map(gib, sizes)] for name, sizes in _stage_rows(stages))]
        yield from table([[cell if index == 0 else cell.rjust(10) for index, cell in enumerate(row)] for row in rows])
        if any(stage.host for stage in stages):
            yield f"in host memory, per GPU: {gib(max(stage.host for stage in stages))} ({_host_reason(plan)})"
        if plan.args.offload_train:
            parked = max(stage.weights + stage.optimizer + stage.critic for stage in stages)
            yield f"in host memory while engines generate, per GPU: {gib(parked)} (weights, optimizer state)"
    yield from _engine(plan)
    weights = iter(plan.reward_weights)
    for model in served_models(plan.args):
        size, *_ = (next(weights) for _ in range(model.gpus))  # equal on all of them
        yield f"{model.title(plan.args)}: weights {gib(size)} of each of its GPUs"
    if plan.gpu is None:
        yield "the memory of a GPU is not known here: --gpu-memory-gib compares with it"
    else:
        yield f"a GPU has {gib(plan.gpu.bytes)} ({plan.gpu.source})"
    yield "not counted: what CUDA, NCCL or the processes themselves take; formulas: docs/dry-run.md"


def _node(plan: Plan) -> Iterator[str]:
    if plan.gpu is not None and plan.gpu.shared:
        return  # logical GPUs of a machine without any
    needs = node_resources(plan)
    yield (
        f"{needs.gpus_per_node} GPUs, about {gib(needs.memory_bytes)} of host memory,"
        f" {gib(needs.shared_memory_bytes)} of it in /dev/shm"
    )


def _stage_rows(stages: Sequence[StageMemory]) -> Iterator[tuple[str, list[int]]]:
    yield "weights", [stage.weights for stage in stages]
    yield "gradients", [stage.gradients for stage in stages]
    yield "optimizer state", [stage.optimizer for stage in stages]
    if any(stage.critic for stage in stages):
        yield "critic, with gradients and state", [stage.critic + stage.critic_gradients for stage in stages]
    yield "activations kept", [stage.activations for stage in stages]
    yield "loss, or one layer's backward", [max(stage.loss, stage.backward) for stage in stages]
    yield "at the peak", [stage.total for stage in stages]


def _host_reason(plan: Plan) -> str:
    args, trains = plan.args, not plan.args.eval_only
    reasons = {
        "the reference model": trains and args.use_reference,
        "the teacher": trains and args.has_megatron_teacher,
        "optimizer state and gradients": args.optimizer_cpu_offload,
    }
    return " and ".join(reason for reason, given in reasons.items() if given)


def _engine(plan: Plan) -> Iterator[str]:
    engine = plan.memory.engine
    if engine is None:
        return
    if not plan.group_memory:
        yield f"engine: {_weights_and_cache(engine)}"
        yield from _static(plan, plan.engine_settings)
    for group in plan.group_memory:
        if group.memory is None:
            yield f"{group.name}: not known, its folder holds no safetensors files and config.json another family"
            continue
        unknown = "" if group.has_cache else "; the KV cache of its family is not known here"
        yield f"{group.name}: {_weights_and_cache(group.memory)}{unknown}"
        yield from _static(plan, group.settings)


def _weights_and_cache(engine: EngineMemory) -> str:
    cache = f", KV cache {engine.cache_per_token / 1024:,.1f} KiB per token" if engine.cache_per_token else ""
    if engine.tokens is not None and engine.cache is not None:
        cache += f" x {engine.tokens:,} tokens = {gib(engine.cache)}"
    draft = f" ({gib(engine.draft)} of a draft model)" if engine.draft else ""
    return f"weights {gib(engine.weights)}{draft}{cache}"


def _static(plan: Plan, settings: EngineSettings) -> Iterator[str]:
    if plan.gpu is not None and not plan.gpu.shared:
        fraction, origin = settings.fraction, settings.fraction_from
        yield f"        {origin} {fraction:g} of the GPU = {gib(int(plan.gpu.bytes * fraction))} for both"
