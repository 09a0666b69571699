"""Rules about groups of engines (--sglang-config).

The rules about one engine (its parallel sizes, nodes, options) are applied to each group with the flags of that group.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from slimrl.arguments.engine_groups import (
    FLAG,
    POLICY_NAMES,
    PREFILL_FLAG,
    ServerModel,
    flag_of_groups,
    group_flags,
    kv_transfers,
    policy_places,
    served_by_engines,
)
from slimrl.arguments.flag import Problem, ended
from slimrl.arguments.namespace import Arguments, Context, Rule, absent
from slimrl.arguments.validation import rollout, vision
from slimrl.arguments.validation.adapters import lora
from slimrl.arguments.validation.engines import drafts, engine, servers
from slimrl.arguments.validation.numerics import exactness
from slimrl.models.hf_folder import weights_fault

OF_ONE_ENGINE: tuple[Rule, ...] = (
    servers.engine_sizes_are_counts,
    servers.engines_fill_whole_nodes,
    servers.engine_stages_divide,
    servers.engine_stages_can_be_updated,
    servers.engine_layout_can_be_checked,
    servers.engine_weights_are_those_of_training,
    servers.engine_collectives_agree,
    servers.engine_attention_copies_divide,
    servers.engine_experts_divide,
    servers.engine_context_holds_a_sample,
    engine.p2p_knows_the_layout_of_engines,
    exactness.true_on_policy_adds_in_one_order,
    exactness.true_on_policy_engines_compute_alike,
    exactness.on_policy_target_belongs_to_the_mode,
    lora.engines_can_load_adapters,
    lora.engine_lora_options_follow_the_adapters,
    vision.vision_model_can_be_served,
    rollout.in_flight_updates_are_supported,
    drafts.draft_models_can_be_served,
    drafts.drafts_are_accepted_by_their_probability,
)
_OF_FROZEN = (
    servers.engine_sizes_are_counts,
    servers.engines_fill_whole_nodes,
    servers.engine_stages_divide,
    servers.engine_attention_copies_divide,
    servers.engine_experts_divide,
    drafts.draft_models_can_be_served,
)


def _said(args: Arguments, complaint: str) -> Problem:
    flag, value = flag_of_groups(args)
    return Problem(flag, ended(f"{flag} {value}: {complaint}"))


def groups_have_engines_of_the_run(args: Arguments, context: Context) -> Iterator[Problem]:
    """Groups are of SGLang servers that the run starts."""
    if args.sglang_config is None and args.prefill_num_servers is None:
        return
    flag = flag_of_groups(args)[0]
    if args.sglang_config is not None and args.prefill_num_servers is not None:
        sentence = f"{PREFILL_FLAG} splits the policy's engines, and {FLAG} lists the groups: give one of the two."
        yield Problem(PREFILL_FLAG, sentence)
    for given, other, reason in (
        (args.uses_vllm, "--rollout-engine vllm", "has no groups of servers"),
        (args.rollout_external_engine_addrs, "--rollout-external-engine-addrs", "names servers that others start"),
        (args.rollout_max_num_gpus is not None, "--rollout-max-num-gpus", "adds servers that are all alike"),
    ):
        if given:
            yield Problem(flag, f"{other} {reason}, and {flag} describes those of the run: leave one of the two out.")


def prefill_leaves_gpus_to_decode(args: Arguments, context: Context) -> Iterator[Problem]:
    """--prefill-num-servers leaves at least one engine."""
    if args.prefill_num_servers is None or args.rollout_num_gpus is None or "rollout_num_gpus" in context.broken:
        return
    size = args.rollout_num_gpus_per_engine
    if args.prefill_num_servers * size >= args.rollout_num_gpus and not args.debug_train_only:
        yield Problem(
            PREFILL_FLAG,
            f"{PREFILL_FLAG} {args.prefill_num_servers} leaves no engine to decode: --rollout-num-gpus"
            f" {args.rollout_num_gpus} are {args.rollout_num_gpus // size} engines of {size}; give fewer.",
        )


def caches_are_sent_by_one_backend(args: Arguments, context: Context) -> Iterator[Problem]:
    """Prefill and decode servers have one transfer backend, and the router of the run."""
    found = kv_transfers(args)
    if len(found) > 1:
        yield _said(
            args, f"its groups have the disaggregation_transfer_backend {' and '.join(found)}: give all of them one"
        )
    if (
        found
        and args.sglang_router_ip is not None
        and any(m.update_weights and m.disaggregated for m in args.server_models)
    ):
        yield _said(
            args,
            f"the policy has prefill and decode servers, and only a router that the run starts sends requests to both:"
            f" leave out --sglang-router-ip {args.sglang_router_ip}",
        )


def caches_are_of_the_current_weights(args: Arguments, context: Context) -> Iterator[Problem]:
    """No request is between a prefill and a decode server during a weight update.

    Its cache would be of the old weights, and its response of the new ones.
    """
    if args.update_weights_in_flight and any(
        model.update_weights and model.disaggregated for model in args.server_models
    ):
        yield _said(
            args,
            "prefill servers send KV caches to others, and a cache on its way during a weight update would be of the"
            " old weights: add --no-update-weights-in-flight",
        )


def groups_fill_the_rollout_gpus(args: Arguments, context: Context) -> Iterator[Problem]:
    """The groups have exactly the rollout GPUs."""
    if args.rollout_num_gpus is None or "rollout_num_gpus" in context.broken or args.rollout_external_engine_addrs:
        return
    total = sum(model.num_gpus for model in args.server_models)
    if args.server_models and total != args.rollout_num_gpus and not args.debug_train_only:
        shared = args.colocate and not args.debug_rollout_only
        cause = " (the training GPUs, by --colocate)" if shared else ""
        yield _said(
            args,
            f"its groups have {total} GPUs and --rollout-num-gpus is {args.rollout_num_gpus}{cause}: make them equal;"
            " a group of worker_type placeholder leaves GPUs free",
        )


def one_model_is_the_policy(args: Arguments, context: Context) -> Iterator[Problem]:
    """One model gets the weight updates, starts from --hf-checkpoint and has servers; the others are not called so."""
    models = args.server_models
    if not models:
        return
    updated = [model.name for model in models if model.update_weights]
    if len(updated) > 1:
        names = " and ".join(updated)
        yield _said(args, f"models {names} get the weight updates, and a run trains one: give all but one false")
    if not updated:
        names = ", ".join(model.name for model in models)
        yield _said(
            args, f"no model ({names}) gets the weight updates: give the policy update_weights: true, or no model_path"
        )
    for model in models:
        if not model.update_weights and model.name in POLICY_NAMES:
            yield _said(
                args,
                f"model {model.name} is frozen (update_weights: false, or another model_path), and custom code asks for"
                f" the policy by the name {model.name}: rename it, or give it update_weights: true",
            )
        if not model.update_weights and model.name == "policy":
            yield _said(args, "model policy is frozen, and the policy is the model that is trained: rename it")
        if model.update_weights and _other_path(args, model):
            yield _said(
                args,
                f"model {model.name} has model_path {model.model_path} and gets the weight updates, and the policy's"
                f" servers start from --hf-checkpoint {args.hf_checkpoint}: leave model_path out",
            )
        if not any(group.servers for group in model.groups):
            yield _said(args, f"model {model.name} has no servers: give it another group than placeholders")


def deterministic_groups_get_seeds(args: Arguments, context: Context) -> Iterator[Problem]:
    """Without a seed a deterministic server returns the same response to all samples of a prompt.

    Requests have seeds by the flag, which other groups may turn off: their servers ignore a seed.
    """
    name, flag = "enable_deterministic_inference", "--sglang-enable-deterministic-inference"
    if args.sglang_options.get(name):
        return
    for model in args.server_models:
        for number, group in enumerate(model.groups):
            if model.update_weights and group.servers and group.overrides.get(name):
                yield _said(
                    args,
                    f"model {model.name}, group {number} has {name}, and requests have the seeds that its servers need"
                    f" only with {flag}: give that, and {name}: false to groups without it",
                )


def _other_path(args: Arguments, model: ServerModel) -> bool:
    if model.model_path is None or args.hf_checkpoint is None:
        return False
    return Path(model.model_path).absolute().resolve() != Path(args.hf_checkpoint).absolute().resolve()


def frozen_models_have_folders(args: Arguments, context: Context) -> Iterator[Problem]:
    """The folder of a frozen model exists, and has weights."""
    for model in args.server_models:
        if model.update_weights or model.model_path is None:
            continue
        folder = Path(model.model_path)
        if not folder.is_dir():
            yield _said(args, f"model_path {folder} of model {model.name} {absent(folder)}: check the path")
        elif not (folder / "config.json").is_file():
            yield _said(
                args, f"model_path {folder} of model {model.name} has no config.json: give a Hugging Face folder"
            )
        elif not (args.dry_run or args.debug_train_only or _has_made_up_weights(args, model)) and (
            fault := weights_fault(folder)
        ):
            yield _said(args, f"model_path {folder} of model {model.name} {fault}")


def _has_made_up_weights(args: Arguments, model: ServerModel) -> bool:
    """Whether all servers of the model take `load_format: dummy`."""
    groups = [group_flags(args, model, group) for group in model.groups if group.servers]
    return all(flags.sglang_options.get("load_format") == "dummy" for flags in groups)


def groups_keep_the_rules_of_engines(args: Arguments, context: Context) -> Iterator[Problem]:
    """Each group's sizes and options are those that engines can have."""
    if not args.server_models:
        return
    for model in served_by_engines(args):
        for number, group in enumerate(model.groups):
            if not group.servers:
                continue
            flags = group_flags(args, model, group)
            for rule in OF_ONE_ENGINE if model.update_weights else _OF_FROZEN:
                known = {problem.sentence for problem in rule(args, context)}
                for problem in rule(flags, context):
                    if problem.sentence not in known:
                        sentence = problem.sentence.removesuffix(".")
                        yield _said(args, f"model {model.name}, group {number}: {sentence}")


def groups_end_where_the_policy_ends(args: Arguments, context: Context) -> Iterator[Problem]:
    """No engine has GPUs of the policy and of a critic of its own, which get weights in different ways.

    Engines on the critic's GPUs get a broadcast, which pipeline stages do not take.
    """
    if not args.server_models or not args.critic_num_gpus or not args.colocate or args.debug_train_only:
        return
    policy = args.actor_num_gpus
    for place in policy_places(args, 0):
        if place.gpus.start < policy < place.gpus.stop:
            yield _said(
                args,
                f"model {place.model.name}, group {place.group_index} has an engine on GPUs {place.gpus.start} to"
                f" {place.gpus.stop - 1}, of which the first {policy - place.gpus.start} train the policy and the"
                " others the critic: let an engine end where the policy's GPUs end",
            )
        flags = group_flags(args, place.model, place.group)
        if place.gpus.start >= policy and (stages := flags.sglang_options.get("pp_size", 1)) > 1:
            yield _said(
                args,
                f"model {place.model.name}, group {place.group_index} has pp_size {stages} and an engine on GPUs"
                f" {place.gpus.start} to {place.gpus.stop - 1}, which train the critic: pipeline stages take weights"
                " only from trainers of the policy on their own GPUs; give the group the policy's GPUs, or no stages",
            )
