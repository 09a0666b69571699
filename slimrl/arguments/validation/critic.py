"""Rules about the critic of --advantage-estimator ppo: its flags, the model that it can be, its checkpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from slimrl.arguments.checkpoints import critic_start, is_hf_model, start_of
from slimrl.arguments.flag import Problem
from slimrl.arguments.flags.algorithm import WITH_CRITIC
from slimrl.arguments.namespace import Arguments, Context, absent
from slimrl.arguments.validation.checkpoint import checkpoint_problems, is_fresh

_FLAGS = (
    "lambd",
    "value_clip",
    "normalize_values",
    "num_critic_only_steps",
    "critic_lr",
    "critic_lr_warmup_iters",
    "critic_load",
    "critic_save",
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
    for name in _FLAGS:
        if name in context.given:
            flag = "--" + name.replace("_", "-")
            yield Problem(
                flag,
                f"{flag} {vars(args)[name]} belongs to a critic and --advantage-estimator is"
                f" {args.advantage_estimator}: give --advantage-estimator {estimators}, or leave {flag} out.",
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


def critic_schedule_is_complete(args: Arguments, context: Context) -> Iterator[Problem]:
    """The flags of the schedule fit the critic's own learning rate and warm-up, too."""
    if not args.use_critic or args.critic_lr is None:
        return
    for flag, value, given in (
        ("--min-lr", args.min_lr, args.min_lr > args.critic_lr and args.min_lr <= args.lr),
        (
            "--lr-warmup-init",
            args.lr_warmup_init,
            args.lr_warmup_init > args.critic_lr and args.lr_warmup_init <= args.lr,
        ),
    ):
        if given:
            yield Problem(flag, f"{flag} {value:g} is above --critic-lr {args.critic_lr:g}: lower it.")
    warmup = args.critic_lr_warmup_iters
    if warmup is not None and args.lr_decay_iters is not None and warmup >= args.lr_decay_iters:
        yield Problem(
            "--critic-lr-warmup-iters",
            f"--critic-lr-warmup-iters {warmup} is not below --lr-decay-iters {args.lr_decay_iters}: the decay begins"
            " after the warm-up.",
        )
    if args.num_rollout is not None and 0 < args.num_rollout <= args.num_critic_only_steps:
        yield Problem(
            "--num-critic-only-steps",
            f"--num-critic-only-steps {args.num_critic_only_steps} is not below --num-rollout {args.num_rollout}: the"
            " policy would never be trained.",
        )
