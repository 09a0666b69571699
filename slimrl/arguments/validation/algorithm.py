"""Rules about the learning algorithm, precision, the learning rate schedule, and which weights are trained."""

from __future__ import annotations

from collections.abc import Iterator

from slimrl.algorithms.estimators import ESTIMATORS, Objective, Returns
from slimrl.arguments.flag import Problem
from slimrl.arguments.flags.rollout import DEFAULT_ROLLOUT_FUNCTION
from slimrl.arguments.namespace import Arguments
from slimrl.arguments.validation.rule import Context


def kl_is_counted_once(args: Arguments, context: Context) -> Iterator[Problem]:
    """The penalty in the advantage and the loss exclude each other; the loss's weight needs the loss."""
    if args.kl_coef != 0 and args.kl_loss_coef != 0:
        yield Problem(
            "--kl-coef",
            f"--kl-coef {args.kl_coef:g} and --kl-loss-coef {args.kl_loss_coef:g} would count the KL twice:"
            " set one of them to 0.",
        )
    if args.kl_loss_coef != 0 and not args.use_kl_loss:
        yield Problem(
            "--kl-loss-coef",
            f"--kl-loss-coef {args.kl_loss_coef:g} weighs a loss that is off: add --use-kl-loss, or leave it out.",
        )


def groups_can_be_compared(args: Arguments, context: Context) -> Iterator[Problem]:
    """With one response per prompt, every group-normalised reward is zero."""
    if args.custom_reward_post_process_path is not None or "n_samples_per_prompt" in context.broken:
        return
    if args.custom_advantage_function_path is not None:  # it has the raw rewards too
        return
    if args.loss_type == "sft_loss" or args.only_evaluates or args.debug_rollout_only:
        return
    estimator = ESTIMATORS.get(args.advantage_estimator)
    if estimator is None or not estimator.compares_a_group or not args.rewards_normalization:
        return
    if args.n_samples_per_prompt == 1:
        yield Problem(
            "--n-samples-per-prompt",
            f"--n-samples-per-prompt 1 leaves {args.advantage_estimator} nothing to compare and every advantage would"
            " be 0: give at least 2, or add --disable-rewards-normalization.",
        )


def reward_is_given(args: Arguments, context: Context) -> Iterator[Problem]:
    """Something must judge the responses, unless a function of the user's own makes the samples."""
    own_samples = (
        args.custom_generate_function_path is not None
        or args.rollout_function_path != DEFAULT_ROLLOUT_FUNCTION
        or args.debug_train_only
    )
    if own_samples or {"rm_type", "custom_rm_path"} & context.broken:
        return
    if args.rm_type is None and args.custom_rm_path is None:
        yield Problem("--rm-type", "nothing judges the responses: give --rm-type or --custom-rm-path.")


def clip_range_is_ordered(args: Arguments, context: Context) -> Iterator[Problem]:
    """The dual clip bounds the ratio beyond the ordinary upper clip."""
    if args.eps_clip_c is None or args.eps_clip_high is None:
        return
    estimator = ESTIMATORS.get(args.advantage_estimator)
    if estimator is not None and estimator.objective is Objective.CLIPPED_WEIGHT:
        yield Problem(
            "--eps-clip-c",
            f"--eps-clip-c {args.eps_clip_c:g} bounds a loss that --advantage-estimator {estimator.name} does not have"
            " (its weights are bounded by --eps-clip-high already): leave it out.",
        )
    elif args.eps_clip_c <= 1 + args.eps_clip_high:
        yield Problem(
            "--eps-clip-c",
            f"--eps-clip-c {args.eps_clip_c:g} is not above 1 + --eps-clip-high = {1 + args.eps_clip_high:g}:"
            " raise it, or leave it out.",
        )


def precision_is_single(args: Arguments, context: Context) -> Iterator[Problem]:
    """bf16 or fp16."""
    if args.bf16 and args.fp16:
        yield Problem("--bf16", "--bf16 and --fp16 exclude each other: give one, or neither for fp32.")


def schedule_is_complete(args: Arguments, context: Context) -> Iterator[Problem]:
    """A learning rate schedule that the scheduler can follow."""
    if args.min_lr > args.lr:
        yield Problem("--min-lr", f"--min-lr {args.min_lr:g} is above --lr {args.lr:g}: lower it.")
    if args.lr_warmup_init > args.lr:
        yield Problem(
            "--lr-warmup-init", f"--lr-warmup-init {args.lr_warmup_init:g} is above --lr {args.lr:g}: lower it."
        )
    if args.lr_warmup_fraction is not None and args.lr_warmup_iters:
        yield Problem(
            "--lr-warmup-fraction",
            f"--lr-warmup-fraction {args.lr_warmup_fraction:g} and --lr-warmup-iters {args.lr_warmup_iters} both set"
            " the warm-up: give one.",
        )
    if args.lr_decay_iters is not None and args.lr_warmup_iters >= args.lr_decay_iters:
        yield Problem(
            "--lr-warmup-iters",
            f"--lr-warmup-iters {args.lr_warmup_iters} is not below --lr-decay-iters {args.lr_decay_iters}: the decay"
            " begins after the warm-up.",
        )
    wsd = args.lr_decay_style == "WSD"
    if wsd and args.lr_wsd_decay_iters is None and "lr_wsd_decay_iters" not in context.broken:
        yield Problem(
            "--lr-wsd-decay-iters",
            "--lr-decay-style WSD needs --lr-wsd-decay-iters: give the optimizer steps of the decay at the end.",
        )
    for name, needed, given in (
        ("lr_wsd_decay_iters", "--lr-decay-style WSD", wsd),
        ("lr_wsd_decay_style", "--lr-decay-style WSD", wsd),
        ("decoupled_min_lr", "--decoupled-lr", args.decoupled_lr is not None),
    ):
        if name in context.given and not given:
            flag = "--" + name.replace("_", "-")
            yield Problem(flag, f"{flag} {vars(args)[name]} belongs to {needed}: add it, or leave {flag} out.")


def estimator_has_what_it_needs(args: Arguments, context: Context) -> Iterator[Problem]:
    """A discount belongs to the estimators with discounted returns."""
    estimator = ESTIMATORS.get(args.advantage_estimator)
    if args.gamma != 1 and estimator is not None and estimator.returns is not Returns.DISCOUNTED:
        discounted = " and ".join(name for name, row in ESTIMATORS.items() if row.returns is Returns.DISCOUNTED)
        yield Problem(
            "--gamma",
            f"--gamma {args.gamma:g} discounts the returns of {discounted} and --advantage-estimator is"
            f" {args.advantage_estimator}: leave it out.",
        )


def off_policy_corrections_are_consistent(args: Arguments, context: Context) -> Iterator[Problem]:
    """Importance weights are bounded in order and not taken twice; bounds without their switch are a slip."""
    if args.use_tis and args.use_rollout_logprobs:
        yield Problem(
            "--use-tis",
            "--use-tis and --use-rollout-logprobs would correct the same difference twice: give one.",
        )
    if args.use_tis and args.tis_clip_low >= args.tis_clip:
        yield Problem(
            "--tis-clip-low",
            f"--tis-clip-low {args.tis_clip_low:g} is not below --tis-clip {args.tis_clip:g}: lower it.",
        )
    for flag, name, switch, on in (
        ("--tis-clip", "tis_clip", "--use-tis", args.use_tis),
        ("--tis-clip-low", "tis_clip_low", "--use-tis", args.use_tis),
        ("--opsm-delta", "opsm_delta", "--use-opsm", args.use_opsm),
        ("--use-unbiased-kl", "use_unbiased_kl", "--use-kl-loss", args.use_kl_loss),
    ):
        if name in context.given and not on:
            yield Problem(flag, f"{flag} belongs to {switch}: add it, or leave {flag} out.")


def supervised_training_is_consistent(args: Arguments, context: Context) -> Iterator[Problem]:
    """Likelihood of given answers: no advantages, no KL, no corrections."""
    if args.loss_type != "sft_loss":
        if "compute_advantages_and_returns" in context.given and args.loss_type != "custom_loss":
            yield Problem(
                "--disable-compute-advantages-and-returns",
                f"--disable-compute-advantages-and-returns leaves --loss-type {args.loss_type} without advantages:"
                " leave it out.",
            )
        return
    for flag, given in (
        ("--use-kl-loss", args.use_kl_loss),
        ("--kl-coef", args.kl_coef != 0),
        ("--entropy-coef", args.entropy_coef != 0),
        ("--use-tis", args.use_tis),
        ("--use-opsm", args.use_opsm),
        ("--use-rollout-logprobs", args.use_rollout_logprobs),
        ("--normalize-advantages", args.normalize_advantages),
        ("--rollout-max-prompt-len", args.rollout_max_prompt_len is not None),
    ):
        if given:
            yield Problem(flag, f"{flag} is no part of --loss-type sft_loss: leave it out.")


def trained_weights_have_one_list(args: Arguments, context: Context) -> Iterator[Problem]:
    """One list says it: what is trained, or what is not; an empty list says nothing."""
    only, frozen = args.only_train_params_name_list, args.freeze_params_name_list
    for flag, patterns in (("--only-train-params-name-list", only), ("--freeze-params-name-list", frozen)):
        if patterns == []:
            yield Problem(flag, f"{flag} is given without a regular expression: give at least one, or leave it out.")
    if only and frozen:
        yield Problem(
            "--freeze-params-name-list",
            f"--only-train-params-name-list {' '.join(only)} and --freeze-params-name-list {' '.join(frozen)} exclude"
            " each other: give one.",
        )
