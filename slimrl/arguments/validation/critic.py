"""Rules about the critic of --advantage-estimator ppo: its flags, the model that it can be, its checkpoints."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from pathlib import Path

from slimrl.arguments.checkpoints import critic_start, is_hf_model, start_of
from slimrl.arguments.flag import Problem
from slimrl.arguments.flags.algorithm import WITH_CRITIC
from slimrl.arguments.hf_config import disagreements
from slimrl.arguments.layout import critic_groups, critic_layout
from slimrl.arguments.namespace import Arguments, Context, absent
from slimrl.arguments.validation.checkpoint import checkpoint_problems, is_fresh
from slimrl.arguments.validation.data import how_batch_misses
from slimrl.arguments.validation.optimizer import other_owner
from slimrl.arguments.validation.parallel import gradients_can_be_sharded, sizes_that_do_not_divide

_FLAGS = (
    "lambd",
    "critic_lambd",
    "length_adaptive_gae_alpha",
    "value_clip",
    "normalize_values",
    "num_critic_only_steps",
    "critic_lr",
    "critic_lr_warmup_iters",
    "critic_load",
    "critic_save",
    "critic_lora_rank",
    "critic_lora_alpha",
    "critic_num_nodes",
    "critic_num_gpus_per_node",
)


def critic_flags_have_a_critic(args: Arguments, context: Context) -> Iterator[Problem]:
    """Flags of the critic need an estimator with one, and a critic needs the policy's rewards."""
    if args.use_critic:
        return
    estimators = " or ".join(WITH_CRITIC)
    if args.advantage_estimator in WITH_CRITIC:
        yield Problem(
            "--advantage-estimator",
            f"--advantage-estimator {args.advantage_estimator} trains a critic, and --loss-type {args.loss_type}"
            " without advantages has no use for one: leave it out.",
        )
        return
    if args.critic_overrides:
        names = ", ".join(args.critic_overrides)
        yield Problem(
            "--megatron-config-path",
            f"--megatron-config-path {args.megatron_config_path}: {names} differ for a critic and --advantage-estimator"
            f" is {args.advantage_estimator}: give --advantage-estimator {estimators}, or change them for the policy.",
        )
    for name in _FLAGS:
        if name in context.given:
            flag = "--" + name.replace("_", "-")
            yield Problem(
                flag,
                f"{flag} {vars(args)[name]} belongs to a critic and --advantage-estimator is"
                f" {args.advantage_estimator}: give --advantage-estimator {estimators}, or leave {flag} out.",
            )


def critic_alpha_has_a_rank(args: Arguments, context: Context) -> Iterator[Problem]:
    """Without --critic-lora-rank a critic has no adapters."""
    if (
        args.critic_lora_alpha is not None
        and args.critic_lora_rank is None
        and "critic_lora_rank" not in context.broken
    ):
        yield Problem(
            "--critic-lora-alpha",
            "--critic-lora-alpha belongs to --critic-lora-rank: add it, or leave --critic-lora-alpha out.",
        )


def advantages_have_one_lambda(args: Arguments, context: Context) -> Iterator[Problem]:
    """--length-adaptive-gae-alpha gives every response a lambda in place of --lambd, in the built-in advantages."""
    if not args.use_critic or args.length_adaptive_gae_alpha is None:
        return
    if args.custom_advantage_function_path is not None:
        yield Problem(
            "--length-adaptive-gae-alpha",
            f"--length-adaptive-gae-alpha {args.length_adaptive_gae_alpha:g} is for the built-in advantages, and"
            f" --custom-advantage-function-path {args.custom_advantage_function_path} replaces them: leave it out.",
        )
    if "lambd" in context.given:
        yield Problem(
            "--length-adaptive-gae-alpha",
            f"--length-adaptive-gae-alpha {args.length_adaptive_gae_alpha:g} gives the advantages of each response a"
            f" lambda by its length, and --lambd {args.lambd:g} one for all: leave one of them out (the critic's lambda"
            " is --critic-lambd).",
        )


def critic_can_be_built(args: Arguments, context: Context) -> Iterator[Problem]:
    """The critic is slimrl's own model with a value head."""
    if not args.use_critic:
        return
    for flag, value in (
        ("--custom-model-provider-path", args.custom_model_provider_path),
        ("--spec", None if args.spec is None else " ".join(args.spec)),
    ):
        if value is not None:
            yield Problem(
                flag,
                f"{flag} {value} builds the policy, and the critic of --advantage-estimator"
                f" {args.advantage_estimator} would have other layers: leave it out, or use an estimator without a"
                " critic.",
            )


def critic_has_weights(args: Arguments, context: Context) -> Iterator[Problem]:
    """--critic-load is a checkpoint or a model; a resumed run finds the critic of the same rollout."""
    if not args.use_critic or args.debug_rollout_only or args.eval_only or context.broken:
        return
    if args.critic_load is not None and not (args.critic_load == args.critic_save and is_fresh(Path(args.critic_load))):
        folder = Path(args.critic_load)
        if not folder.is_dir():
            yield Problem(
                "--critic-load",
                f"--critic-load {folder} {absent(folder)}: give the folder of a critic's checkpoints or of a model.",
            )
            return
        problems = list(checkpoint_problems("--critic-load", folder, "--critic-load", None))
        if problems:
            yield from problems
            return
    try:
        start = start_of(args)
        if start.weights is not None:  # else another rule reports it
            critic_start(args, start.weights.iteration if start.resumed else None)
    except FileNotFoundError as error:
        yield Problem("--critic-load", f"{error}.")


def critic_model_has_its_shape(args: Arguments, context: Context) -> Iterator[Problem]:
    """A Hugging Face folder of the critic has the policy's network, and a head of one value if it has one."""
    folder = args.critic_load
    if not args.use_critic or folder is None or args.debug_rollout_only or not is_hf_model(Path(folder)):
        return
    try:
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        yield Problem(
            "--critic-load", f"--critic-load {folder}/config.json is not JSON ({error}): copy the model again."
        )
        return
    if found := disagreements(args, config):
        what = "; ".join(problem.sentence.partition(": ")[0] for problem in found)
        yield Problem(
            "--critic-load",
            f"--critic-load {folder} has another network than the policy ({what}), and the critic has the policy's:"
            " give the folder of a model of that shape.",
        )
    is_classifier = any("Classification" in str(name) for name in config.get("architectures") or ())
    labels = len(config["id2label"]) if isinstance(config.get("id2label"), dict) else config.get("num_labels", 2)
    if is_classifier and labels != 1:
        yield Problem(
            "--critic-load",
            f"--critic-load {folder} is a classifier with {labels} outputs (id2label in its config.json), and a critic"
            " has one value: give a reward model with one output.",
        )


def critic_is_saved_apart(args: Arguments, context: Context) -> Iterator[Problem]:
    """The critic's checkpoints are written with the policy's, into a folder of their own."""
    if not args.use_critic or args.critic_save is None:
        return
    folder = Path(args.critic_save)
    if args.save is None:
        yield Problem(
            "--critic-save",
            f"--critic-save {folder} is written whenever --save is, which is missing: give --save, or leave it out.",
        )
    elif folder.resolve() == Path(args.save).resolve():
        yield Problem(
            "--critic-save",
            f"--critic-save {folder} is also --save, where the policy's checkpoints have the same names: give another"
            " folder, or leave it out for the folder critic in it.",
        )
    elif is_hf_model(folder):
        yield Problem("--critic-save", f"--critic-save {folder} is a Hugging Face model: give another folder.")
    for flag, value in (("--ref-load", args.ref_load), ("--opd-teacher-load", args.opd_teacher_load)):
        if value is not None and folder.resolve() in (Path(value).resolve(), *Path(value).resolve().parents):
            yield Problem(
                "--critic-save",
                f"--critic-save {folder} holds {flag} {value}: give another folder, or leave it out for the folder"
                " critic in --save.",
            )


def critic_overrides_have_an_effect(args: Arguments, context: Context) -> Iterator[Problem]:
    """What --megatron-config-path sets for the critic's optimizer is read by that optimizer and its schedule."""
    where = f"--megatron-config-path {args.megatron_config_path}"
    for name, value in args.critic_overrides.items() if args.use_critic else ():
        flag = "--" + name.replace("_", "-")
        owner = other_owner(name, args.optimizer)
        if owner is not None:
            yield Problem(
                "--megatron-config-path",
                f"{where}: {name} {value} of one role belongs to --optimizer {owner} and --optimizer is"
                f" {args.optimizer}: leave it out.",
            )
        if name == "weight_decay" and args.start_weight_decay is not None:
            yield Problem(
                "--megatron-config-path",
                f"{where}: weight_decay {value} of one role has no effect beside --start-weight-decay, which takes the"
                f" place of {flag} for both: leave one of them out.",
            )


def critic_schedule_is_complete(args: Arguments, context: Context) -> Iterator[Problem]:
    """The flags of the schedule fit the critic's own learning rate and warm-up, too."""
    if not args.use_critic or args.critic_lr is None:
        return
    for flag, name in (("--min-lr", "min_lr"), ("--lr-warmup-init", "lr_warmup_init")):
        of_policy = vars(args)[name]
        value = args.critic_overrides.get(name, of_policy)
        if value > args.critic_lr and (value != of_policy or value <= args.lr):  # else another rule reports it
            yield Problem(flag, f"{flag} {value:g} is above --critic-lr {args.critic_lr:g}: lower it.")
    warmup = args.critic_lr_warmup_iters
    if warmup is not None and args.lr_decay_iters is not None and warmup >= args.lr_decay_iters:
        yield Problem(
            "--critic-lr-warmup-iters",
            f"--critic-lr-warmup-iters {warmup} is not below --lr-decay-iters {args.lr_decay_iters}: the decay begins"
            " after the warm-up.",
        )
    if args.num_rollout is not None and 0 < args.num_rollout < args.num_critic_only_steps:
        yield Problem(
            "--num-critic-only-steps",
            f"--num-critic-only-steps {args.num_critic_only_steps} is above --num-rollout {args.num_rollout}: lower it,"
            " or give the same number, which trains the critic alone.",
        )


_NODES, _PER_NODE = "--critic-num-nodes", "--critic-num-gpus-per-node"
_LAYOUT = {
    "critic_num_nodes",
    "critic_num_gpus_per_node",
    "num_gpus_per_node",
    "actor_num_nodes",
    "actor_num_gpus_per_node",
    "tensor_model_parallel_size",
    "pipeline_model_parallel_size",
    "context_parallel_size",
    "expert_model_parallel_size",
    "expert_tensor_parallel_size",
    "global_batch_size",
    "micro_batch_size",
}


def critic_fits_its_gpus(args: Arguments, context: Context) -> Iterator[Problem]:
    """A critic on GPUs of its own fits their nodes, and has whole copies of the model, each with whole batches."""
    if not args.critic_num_gpus or context.broken & _LAYOUT:
        return
    nodes, per_node = args.critic_num_nodes, args.critic_num_gpus_per_node
    assert per_node is not None  # as `critic_num_gpus`
    if per_node > args.num_gpus_per_node:
        yield Problem(
            _PER_NODE,
            f"{_PER_NODE} {per_node} is more than the --num-gpus-per-node {args.num_gpus_per_node} of a node: lower it,"
            " or raise --num-gpus-per-node.",
        )
    own = critic_layout(args)
    for used, shown in sizes_that_do_not_divide(own):
        yield Problem(
            _PER_NODE,
            f"{_NODES} {nodes} x {_PER_NODE} {per_node} = {args.critic_num_gpus} GPUs of the critic do not divide"
            f" by {shown}, which also applies to the critic: give a multiple of {math.prod(used.values())} GPUs.",
        )
        return
    yield from gradients_can_be_sharded(own, " of the critic")
    batch = args.global_batch_size
    missed = how_batch_misses(args, critic_groups(args).data) if batch else None
    if missed is not None:
        yield Problem(
            _PER_NODE,
            f"{_PER_NODE} {per_node} gives the critic {args.critic_num_gpus} GPUs, on which --global-batch-size {batch}"
            f" {missed}, or another number of GPUs.",
        )


def critic_shares_gpus_with_engines(args: Arguments, context: Context) -> Iterator[Problem]:
    """With --colocate engines also run on the critic's GPUs, where they get the weights by a broadcast."""
    if not args.critic_num_gpus or not args.colocate or args.debug_train_only or context.broken & _LAYOUT:
        return
    if args.server_models:
        return  # engines.groups has the rule for groups
    size, policy = args.rollout_num_gpus_per_engine, args.actor_num_gpus
    if policy % size:
        yield Problem(
            "--rollout-num-gpus-per-engine",
            f"--rollout-num-gpus-per-engine {size} does not divide the {policy} GPUs of the policy, and one engine"
            " would be on GPUs of policy and critic: with --colocate and a critic on GPUs of its own choose a divisor.",
        )
    stages = args.sglang_options.get("pp_size", 1)
    if stages > 1:
        yield Problem(
            "--sglang-pp-size",
            f"--sglang-pp-size {stages}: engines with pipeline stages take weights only from trainers on their own"
            f" GPUs, and with --colocate some are on the critic's: leave it out, or {_NODES} and {_PER_NODE}.",
        )
