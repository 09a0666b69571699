"""Errors of a whole plan: missing GPUs, memory, files of another model."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from slimrl.arguments.dry_run.advice import less_training, more_cache, more_room
from slimrl.arguments.dry_run.memory import EngineMemory, GroupMemory
from slimrl.arguments.dry_run.plan import Plan
from slimrl.arguments.engine_groups import FLAG, draft_folder, flag_of_groups, group_flags
from slimrl.arguments.flag import Problem
from slimrl.arguments.hf_config import served_role
from slimrl.arguments.memory import StageMemory
from slimrl.arguments.namespace import Arguments
from slimrl.models.hf_folder import weights_fault
from slimrl.processes.process_info import gib


def plan_errors(plan: Plan) -> list[Problem]:
    """Every problem of the plan, as sentences with the arithmetic and the fix."""
    return [*_gpus(plan), *_checkpoint_files(plan), *_memory(plan)]


def _gpus(plan: Plan) -> Iterator[Problem]:
    where, nodes, gpus = plan.placement, plan.surroundings.nodes, plan.surroundings.machine.gpus
    present = sum(nodes) if nodes is not None else len(gpus) if gpus and plan.args.gpu_memory_gib is None else None
    if present is not None and present < where.total:
        who = "the Ray cluster has" if nodes is not None else "outside a Ray cluster this machine has"
        yield Problem(
            "--actor-num-gpus-per-node",
            f"the flags ask for {where.total} GPUs ({_roles(plan)}) and {who} {present}: start Ray with more, or lower"
            " --actor-num-nodes, --actor-num-gpus-per-node or --rollout-num-gpus"
            + (", or --critic-num-gpus-per-node" if where.critic else "")
            + (", or --rm-num-gpus." if where.reward else "."),
        )
        return
    yield from _groups_on_one_node(plan)


def _roles(plan: Plan) -> str:
    train, engines = len(plan.placement.train), sum(map(len, plan.placement.engines))
    reward = sum(map(len, plan.placement.reward))
    own = f", {reward} for the {served_role(plan.args)}" if reward and not plan.args.rm_colocate else ""
    critic = f" and {len(plan.placement.critic)} for the critic" if plan.placement.critic else ""
    return f"{train} for training{critic}, {engines} for engines" + (", the same ones" if plan.colocated else "") + own


def _groups_on_one_node(plan: Plan) -> Iterator[Problem]:
    where, tp = plan.placement, plan.groups.tensor
    per_node = (
        "as the cluster has it" if plan.surroundings.nodes else f"by --num-gpus-per-node {plan.args.num_gpus_per_node}"
    )
    flag = FLAG if plan.args.server_models else "--rollout-num-gpus-per-engine"
    engines = [(f"engine {index}", flag, gpus) for index, gpus in enumerate(where.engines)]
    engines += [(f"server {index} of the frozen models", FLAG, gpus) for index, gpus in enumerate(where.frozen)]
    engines += [
        (f"server {index} of the {served_role(plan.args)}", "--rm-num-gpus-per-engine", gpus)
        for index, gpus in enumerate(where.reward)
    ]
    for name, flag, gpus in engines:
        shares = where.shares(gpus)
        if len(shares) > 1 and (
            len(set(shares.values())) > 1 or any(n != where.on_node(at) for at, n in shares.items())
        ):
            listed = ", ".join(f"{n} of the {where.on_node(at)} on node {at}" for at, n in shares.items())
            yield Problem(
                flag,
                f"{name} would get the GPUs {gpus[0]} to {gpus[-1]}: {listed} ({per_node}), and an engine"
                f" is on one node or fills whole nodes alike: choose training GPUs and {flag}"
                " so that engines end where nodes do.",
            )
            return
    per_role = ((where.train, plan.args.actor_num_gpus_per_node), (where.critic, plan.args.critic_num_gpus_per_node))
    for first, most in ((first, most) for ranks, most in per_role for first in ranks[::tp]):
        nodes = where.nodes_of(range(first, first + tp))
        if len(nodes) > 1 and most is not None and tp <= most:  # larger groups have no choice
            yield Problem(
                "--tensor-model-parallel-size",
                f"the training GPUs {first} to {first + tp - 1} share layers (--tensor-model-parallel-size {tp}) and"
                f" are on nodes {nodes[0]} and {nodes[-1]} {per_node}: choose a size that divides the GPUs of a node.",
            )
            return


def _checkpoint_files(plan: Plan) -> Iterator[Problem]:
    files, folder = plan.hf_files, plan.args.hf_checkpoint
    if files is None:
        return
    if files.missing:
        yield Problem(
            "--hf-checkpoint",
            f"--hf-checkpoint {folder} is not complete, its index names {files.missing[0]}"
            + (f" and {len(files.missing) - 1} more files" if len(files.missing) > 1 else "")
            + " that are not there: copy the model again.",
        )
    elif files.elements not in (None, plan.checkpoint_elements) and not plan.args.debug_rollout_only:
        yield Problem(
            "--hf-checkpoint",
            f"the model flags describe {plan.checkpoint_elements:,} weights and the files of --hf-checkpoint {folder}"
            f" hold {files.elements:,}, {abs(files.elements - plan.checkpoint_elements):,}"
            f" {'more' if files.elements > plan.checkpoint_elements else 'less'}: give the flags of this model, or"
            " the files of the model that the flags describe.",
        )


def _memory(plan: Plan) -> Iterator[Problem]:
    if plan.gpu is None:
        return
    if plan.gpu.shared:
        shortage = _shortage(plan) if plan.surroundings.nodes is not None else None
        if shortage is not None:
            yield Problem("--gpu-memory-gib", f"{shortage}: start a smaller model, or on machines with GPUs.")
        return
    stage, engine, gpu = plan.memory.largest_stage, plan.memory.engine, plan.gpu
    have = f"{gib(gpu.bytes)} ({gpu.source})"
    training_fits = stage is None or stage.total <= gpu.bytes
    if stage is not None and not training_fits:
        yield Problem(
            "--tensor-model-parallel-size",
            f"training needs {gib(stage.total)} of a GPU that has {have}: {stage_sum(stage)}; {less_training(plan)}.",
        )
    critic = max(plan.memory.critic, key=lambda part: part.total, default=None)
    critic_fits = critic is None or critic.total <= gpu.bytes
    if critic is not None and not critic_fits:
        yield Problem(
            "--critic-num-gpus-per-node",
            f"the critic needs {gib(critic.total)} of a GPU that has {have}: {stage_sum(critic)}; give it more GPUs"
            " (--critic-num-nodes), or raise --tensor-model-parallel-size or --pipeline-model-parallel-size of both.",
        )
    reward, per_server = max(plan.reward_weights, default=0), "--rm-num-gpus-per-engine"
    if plan.args.opd_teacher_num_gpus_per_engine:
        per_server = "--opd-teacher-num-gpus-per-engine"
    if reward > gpu.bytes:
        yield Problem(
            per_server,
            f"the {served_role(plan.args)}'s weights take {gib(reward)} of a GPU that has {have}: raise {per_server}.",
        )
    largest = max(stage.total if stage is not None else 0, critic.total if critic is not None else 0)
    beside = largest if stage is not None and training_fits and critic_fits else 0
    for group in plan.group_memory:
        yield from _group(plan, group, beside)
    if engine is not None and not plan.group_memory:
        yield from _engine(plan, engine, beside)


def _engine(plan: Plan, engine: EngineMemory, training: int) -> Iterator[Problem]:
    """Engines that are alike have room for weights and samples, beside `training` on shared GPUs."""
    assert plan.gpu is not None
    gpu, have = plan.gpu, f"{gib(plan.gpu.bytes)} ({plan.gpu.source})"
    fraction, reward = plan.engine_settings.fraction, max(plan.reward_weights, default=0)
    static = int(gpu.bytes * fraction)
    if plan.args.rm_colocate and static + reward > gpu.bytes:
        yield Problem(
            "--sglang-mem-fraction-static",
            f"an engine's GPU has {fraction:g} x {have} = {gib(static)} for the engine, and the"
            f" {served_role(plan.args)} of --rm-colocate has weights of {gib(reward)} on it: lower"
            " --sglang-mem-fraction-static.",
        )
    if engine.tokens is not None and engine.tokens < plan.micro_batch.longest_sample:
        yield Problem(
            "--rollout-num-gpus-per-engine",
            f"an engine's GPU has {fraction:g} x {have} = {gib(static)} for weights of {gib(engine.weights)} and a KV"
            f" cache, which leaves room for {engine.tokens:,} tokens; the longest sample has"
            f" {plan.micro_batch.longest_sample:,}: {more_cache(plan)}.",
        )
    elif training and plan.colocated and not plan.takes_turns and training + static > gpu.bytes:
        most = (gpu.bytes - training) / gpu.bytes
        yield Problem(
            "--sglang-mem-fraction-static",
            f"a GPU has {have}, training takes {gib(training)} of it and the engine beside it {fraction:g} x that ="
            f" {gib(static)}, together {gib(training + static)}: give --sglang-mem-fraction-static"
            f" {max(int(most * 100) / 100, 0.01):g} or less, offload both (leave {_kept_by(plan.args)} out), or use"
            " separate GPUs with --rollout-num-gpus.",
        )


def _group(plan: Plan, group: GroupMemory, training: int) -> Iterator[Problem]:
    """One group of --sglang-config has room for weights and samples, beside `training` on shared GPUs."""
    assert plan.gpu is not None
    gpu, static, memory = plan.gpu, group.static(plan.gpu.bytes), group.memory
    if memory is None:
        return
    flag, value = flag_of_groups(plan.args)
    where, part = f"{flag} {value}: {group.name}", f"{group.settings.fraction:g} x {gib(gpu.bytes)}"
    need = 1 if group.frozen else plan.micro_batch.longest_sample  # what a frozen model is asked is not known
    if memory.weights > static:
        yield Problem(
            flag,
            f"{where} has {part} ({gpu.source}) = {gib(static)} of a GPU for each server, and weights of"
            f" {gib(memory.weights)} there: {more_room(group, need, gpu.bytes)}.",
        )
    elif not group.frozen and memory.tokens is not None and memory.tokens < need:
        yield Problem(
            flag,
            f"{where} has {part} ({gpu.source}) = {gib(static)} of a GPU for weights of {gib(memory.weights)} and a KV"
            f" cache, which leaves room for {memory.tokens:,} tokens; the longest sample has {need:,}:"
            f" {more_room(group, need, gpu.bytes)}.",
        )
    elif plan.args.rm_colocate and static + (reward := max(plan.reward_weights, default=0)) > gpu.bytes:
        yield Problem(
            flag,
            f"{where} has {part} ({gpu.source}) = {gib(static)} of a GPU on which the {served_role(plan.args)} of"
            f" --rm-colocate has weights of {gib(reward)}: lower its mem_fraction_static.",
        )
    elif training and plan.colocated and not plan.takes_turns and training + static > gpu.bytes:
        yield Problem(
            flag,
            f"{where} has {part} ({gpu.source}) = {gib(static)} of a GPU on which training takes {gib(training)},"
            f" together {gib(training + static)}: lower its mem_fraction_static, or offload both (leave"
            f" {_kept_by(plan.args)} out).",
        )


def _kept_by(args: Arguments) -> str:
    """The flags that keep a side on the device."""
    sides = (("--no-offload-train", args.offload_train), ("--no-offload-rollout", args.offload_rollout))
    return " and ".join(flag for flag, leaves in sides if not leaves)


def warnings(plan: Plan) -> list[str]:
    """Notes that do not reject a plan: missing weights, a machine that is too small for it."""
    return [*_no_weights(plan), *_small_machine(plan)]


def _no_weights(plan: Plan) -> list[str]:
    folder = Path(plan.args.hf_checkpoint)
    fault = weights_fault(folder) if plan.hf_files is None and plan.placement.engines else None
    faults = [] if fault is None else [f"--hf-checkpoint {folder} {fault}. Without them only this plan can be made."]
    for model in plan.args.server_models:
        if model.model_path is not None and (fault := weights_fault(Path(model.model_path))) is not None:
            told = f"model_path {model.model_path} of model {model.name} {fault}"
            faults.append(f"{FLAG} {plan.args.sglang_config}: {told}. Without them only this plan can be made.")
    flags = [group_flags(plan.args, one.place.model, one.place.group) for one in plan.servers]
    for draft in sorted({path for one in flags if (path := draft_folder(one.sglang_options)) is not None}):
        if (fault := weights_fault(Path(draft))) is not None:
            faults.append(f"the draft model {draft} {fault}. Without them only this plan can be made.")
    return faults


def _small_machine(plan: Plan) -> list[str]:
    """This machine is too small for the plan, which may be meant for other machines."""
    if plan.gpu is None or not plan.gpu.shared or plan.surroundings.nodes is not None:
        return []
    shortage = _shortage(plan)
    if shortage is None:
        return []
    return [f"{shortage}. To check the plan for other machines, give --gpu-memory-gib, the memory of one GPU there."]


def _shortage(plan: Plan) -> str | None:
    """Why the logical GPUs of a machine without GPUs exceed its memory, which they share; None if they fit."""
    engine = plan.memory.engine
    stages = plan.memory.stages
    train = sum((stage.total + stage.host) * (len(plan.placement.train) // len(stages)) for stage in stages)
    of_critic = plan.memory.critic
    train += sum((part.total + part.host) * (len(plan.placement.critic) // len(of_critic)) for part in of_critic)
    rollout = engine.total * sum(map(len, plan.placement.engines)) if engine is not None else 0
    if plan.group_memory:
        rollout = sum(group.memory.total * group.gpus for group in plan.group_memory if group.memory is not None)
    reward = sum(plan.reward_weights)
    nodes = len({place.node for place in plan.placement.places}) if plan.surroundings.nodes is not None else 1
    need, host = (train + rollout + reward) // nodes, plan.surroundings.machine.host
    if host is None or need <= host:
        return None
    return (
        f"this machine has no GPU and {gib(host)} of memory;"
        f" {len(plan.placement.train) + len(plan.placement.critic)} training GPUs take {gib(train)} and"
        f" {len(plan.servers)} engines {gib(rollout)}"
        + (f", the {served_role(plan.args)} {gib(reward)}" if reward else "")
        + f", per machine {gib(need)}"
    )


def stage_sum(stage: StageMemory) -> str:
    """The parts of a GPU's memory in words."""
    parts = {
        "weights": stage.weights,
        "gradients": stage.gradients,
        "optimizer": stage.optimizer,
        "critic": stage.critic + stage.critic_gradients,
        "activations": stage.activations,
        "loss and backward": max(stage.loss, stage.backward),
    }
    return " + ".join(f"{name} {gib(size)}" for name, size in parts.items() if size)
