"""Rules about the algorithm: estimator, clipping, KL, off-policy corrections, pairs, trained weights."""

from __future__ import annotations

from collections.abc import Iterator

from slimrl.algorithms.estimators import ESTIMATORS, Objective, Returns
from slimrl.algorithms.preference_losses import PAIR, PREFERENCE_LOSSES
from slimrl.arguments.flag import Problem, flag_specs
from slimrl.arguments.flags.algorithm import PreferenceArguments
from slimrl.arguments.flags.rollout import PREFERENCE_ROLLOUT_FUNCTION
from slimrl.arguments.namespace import Arguments
from slimrl.arguments.validation.rule import Context


def kl_is_counted_once(args: Arguments, context: Context) -> Iterator[Problem]:
    """The KL penalty and the KL loss exclude each other; --kl-loss-coef needs --use-kl-loss."""
    if args.kl_coef != 0 and args.kl_loss_coef != 0:
        yield Problem(
            "--kl-coef",
            f"--kl-coef {args.kl_coef:g} and --kl-loss-coef {args.kl_loss_coef:g} would count the KL twice:"
            " set one of them to 0.",
        )
    if args.kl_loss_coef != 0 and not args.use_kl_loss:
        yield Problem(
            "--kl-loss-coef",
            f"--kl-loss-coef {args.kl_loss_coef:g} is the weight of a loss that is off: add --use-kl-loss, or leave it"
            " out.",
        )


def kl_target_has_a_coefficient(args: Arguments, context: Context) -> Iterator[Problem]:
    """An adaptive coefficient starts above 0, stays there, and reaches the advantages."""
    target = args.kl_target
    if target is None:
        if "kl_horizon" in context.given:
            yield Problem("--kl-horizon", "--kl-horizon belongs to --kl-target: add it, or leave --kl-horizon out.")
        return
    if args.kl_coef <= 0:
        yield Problem(
            "--kl-target",
            f"--kl-target {target:g} has no coefficient to move: give --kl-coef above 0, its first value.",
        )
    samples = (args.rollout_batch_size or 0) * (args.n_samples_per_prompt or 0)
    if args.kl_horizon < samples:
        yield Problem(
            "--kl-horizon",
            f"--kl-horizon {args.kl_horizon:g} is below the {samples} samples of a rollout, and --kl-coef would jump:"
            " raise it.",
        )
    if not args.compute_advantages_and_returns:
        yield Problem(
            "--kl-target",
            f"--kl-target {target:g} moves a penalty of advantages, which this --loss-type {args.loss_type} does not"
            " have: leave it out.",
        )
    if args.custom_advantage_function_path is not None:
        yield Problem(
            "--kl-target",
            f"--kl-target {target:g} moves the penalty of the built-in advantages, and --custom-advantage-function-path"
            f" {args.custom_advantage_function_path} replaces them: leave it out.",
        )


def clip_range_is_ordered(args: Arguments, context: Context) -> Iterator[Problem]:
    """The dual clip bounds the ratio beyond the ordinary upper clip."""
    if args.eps_clip_c is None or args.eps_clip_high is None:
        return
    estimator = ESTIMATORS.get(args.advantage_estimator)
    if estimator is not None and estimator.objective is Objective.CISPO:
        yield Problem(
            "--eps-clip-c",
            f"--eps-clip-c {args.eps_clip_c:g} bounds a loss that --advantage-estimator {estimator.name} does not have"
            " (--eps-clip-high already bounds its weights): leave it out.",
        )
    elif args.eps_clip_c <= 1 + args.eps_clip_high:
        yield Problem(
            "--eps-clip-c",
            f"--eps-clip-c {args.eps_clip_c:g} is not above 1 + --eps-clip-high = {1 + args.eps_clip_high:g}:"
            " raise it, or leave it out.",
        )


def estimator_has_what_it_needs(args: Arguments, context: Context) -> Iterator[Problem]:
    """A discount belongs to the estimators with discounted returns."""
    estimator = ESTIMATORS.get(args.advantage_estimator)
    if args.gamma != 1 and estimator is not None and estimator.returns is Returns.BROADCAST:
        discounted = " and ".join(name for name, row in ESTIMATORS.items() if row.returns is not Returns.BROADCAST)
        yield Problem(
            "--gamma",
            f"--gamma {args.gamma:g} discounts the returns of {discounted} and --advantage-estimator is"
            f" {args.advantage_estimator}: leave it out.",
        )


def off_policy_corrections_are_consistent(args: Arguments, context: Context) -> Iterator[Problem]:
    """Importance weights have ordered bounds and are applied once; bounds need their switch."""
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
        ("--tis-level", "tis_level", "--use-tis", args.use_tis),
        ("--tis-mode", "tis_mode", "--use-tis", args.use_tis),
        (
            "--positive-example-reward",
            "positive_example_reward",
            "--positive-example-loss-coef",
            args.positive_example_loss_coef != 0,
        ),
        ("--rs-level", "rs_level", "--use-rs", args.use_rs),
        ("--rs-lower-bound", "rs_lower_bound", "--use-rs", args.use_rs),
        ("--rs-upper-bound", "rs_upper_bound", "--use-rs", args.use_rs),
        ("--rs-veto-threshold", "rs_veto_threshold", "--use-rs", args.use_rs),
        ("--opsm-delta", "opsm_delta", "--use-opsm", args.use_opsm),
        ("--use-unbiased-kl", "use_unbiased_kl", "--use-kl-loss", args.use_kl_loss),
    ):
        if name in context.given and not on:
            yield Problem(flag, f"{flag} belongs to {switch}: add it, or leave {flag} out.")


def rejection_has_bounds(args: Arguments, context: Context) -> Iterator[Problem]:
    """--use-rs has a bound or a veto, and its bounds are ordered; a custom correction may read them as it likes."""
    if not args.use_rs or args.custom_tis_function_path is not None:
        return
    low, high, veto = args.rs_lower_bound, args.rs_upper_bound, args.rs_veto_threshold
    if low is None and high is None and veto is None:
        yield Problem(
            "--use-rs",
            "--use-rs has no bound and rejects nothing: give --rs-lower-bound, --rs-upper-bound or"
            " --rs-veto-threshold.",
        )
    if low is None and high is None and "rs_level" in context.given:
        yield Problem(
            "--rs-level",
            f"--rs-level {args.rs_level} is the level of bounds, and none is given: give --rs-lower-bound or"
            " --rs-upper-bound, or leave it out.",
        )
    if low is not None and high is not None and low >= high:
        yield Problem("--rs-lower-bound", f"--rs-lower-bound {low:g} is not below --rs-upper-bound {high:g}: lower it.")


def overlong_penalty_is_complete(args: Arguments, context: Context) -> Iterator[Problem]:
    """The penalty of long responses has a buffer within the longest one; it and their mask reach the training data."""
    convert = args.custom_convert_samples_to_train_data_path
    if args.mask_truncated_samples and convert is not None:
        yield Problem(
            "--mask-truncated-samples",
            "--mask-truncated-samples has no effect, because --custom-convert-samples-to-train-data-path"
            f" {convert} makes the loss masks: leave it out, and mask them there.",
        )
    buffer, longest = args.overlong_buffer_len, args.rollout_max_response_len
    if buffer is None:
        if "overlong_penalty_factor" in context.given:
            yield Problem(
                "--overlong-penalty-factor",
                "--overlong-penalty-factor belongs to --overlong-buffer-len: add it, or leave"
                " --overlong-penalty-factor out.",
            )
        return
    if longest is not None and buffer > longest:
        yield Problem(
            "--overlong-buffer-len",
            f"--overlong-buffer-len {buffer} is above --rollout-max-response-len {longest}: lower it.",
        )
    for flag, path in (
        ("--custom-reward-post-process-path", args.custom_reward_post_process_path),
        ("--custom-convert-samples-to-train-data-path", args.custom_convert_samples_to_train_data_path),
    ):
        if path is not None:
            yield Problem(
                "--overlong-buffer-len",
                f"--overlong-buffer-len {buffer} has no effect, because {flag} {path} makes the training rewards: leave"
                " it out, and subtract the penalty there.",
            )


def log_prob_passes_have_a_use(args: Arguments, context: Context) -> Iterator[Problem]:
    """A forced pass belongs to a loss that compares policies; a rarer reference pass to a KL that is only logged."""
    if args.compute_old_log_probs == "always" and not args.compute_advantages_and_returns:
        yield Problem(
            "--compute-old-log-probs",
            f"--compute-old-log-probs always computes what --loss-type {args.loss_type} without advantages does not"
            " read: leave it out.",
        )
    if "ref_kl_metric_interval" not in context.given:
        return
    flag = f"--ref-kl-metric-interval {args.ref_kl_metric_interval}"
    for name, value in (("--kl-coef", args.kl_coef), ("--kl-loss-coef", args.kl_loss_coef)):
        if value != 0:
            yield Problem(
                "--ref-kl-metric-interval",
                f"{flag} is not used: {name} {value:g} needs the reference for every rollout. Leave it out.",
            )
    if args.kl_coef == 0 and not args.use_kl_loss:
        yield Problem(
            "--ref-kl-metric-interval", f"{flag} belongs to --use-kl-loss: add it, or leave the interval out."
        )
    for name, path in (
        ("--custom-loss-function-path", args.custom_loss_function_path),
        ("--custom-advantage-function-path", args.custom_advantage_function_path),
        ("--rollout-data-postprocess-path", args.rollout_data_postprocess_path),
    ):
        if path is not None and args.ref_kl_metric_interval > 1:
            yield Problem(
                "--ref-kl-metric-interval",
                f"{flag} leaves out log-probabilities that {name} {path} may read: leave the interval out.",
            )


def supervised_training_is_consistent(args: Arguments, context: Context) -> Iterator[Problem]:
    """Supervised training has no advantages, KL or corrections."""
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
        ("--use-rs", args.use_rs),
        ("--positive-example-loss-coef", args.positive_example_loss_coef != 0),
        ("--use-opsm", args.use_opsm),
        ("--use-rollout-logprobs", args.use_rollout_logprobs),
        ("--normalize-advantages", args.normalize_advantages),
        ("--rollout-max-prompt-len", args.rollout_max_prompt_len is not None),
        ("--overlong-buffer-len", args.overlong_buffer_len is not None),
        ("--mask-truncated-samples", args.mask_truncated_samples),
    ):
        if given:
            yield Problem(flag, f"{flag} has no effect with --loss-type sft_loss: leave it out.")


def preference_flags_have_their_loss(args: Arguments, context: Context) -> Iterator[Problem]:
    """Flags of pairs need a loss of pairs, and that loss flags that it reads."""
    for spec in flag_specs(PreferenceArguments):
        if spec.dest in context.given and not args.trains_on_pairs:
            flag = "--" + spec.dest.replace("_", "-")
            yield Problem(flag, f"{flag} belongs to --loss-type preference_loss: add it, or leave {flag} out.")
    for flag, name in (("--chosen-key", "chosen_key"), ("--rejected-key", "rejected_key")):
        if name in context.given and not args.reads_pairs:
            yield Problem(
                flag,
                f"{flag} belongs to --rollout-function-path {PREFERENCE_ROLLOUT_FUNCTION}: add it, or leave {flag}"
                " out.",
            )
    row = PREFERENCE_LOSSES.get(args.preference_loss)
    if not args.trains_on_pairs or row is None:
        return
    for flag, given, is_read in (
        ("--simpo-gamma", "simpo_gamma" in context.given, row.has_margin),
        ("--preference-label-smoothing", args.preference_label_smoothing != 0, row.smooths),
        ("--preference-reference-free", args.preference_reference_free, row.has_reference),
    ):
        if given and not is_read:
            yield Problem(flag, f"{flag} has no effect with --preference-loss {row.name}: leave it out.")
    if args.preference_label_smoothing >= 0.5:
        yield Problem(
            "--preference-label-smoothing",
            f"--preference-label-smoothing {args.preference_label_smoothing:g} says that most pairs are exchanged:"
            " give less than 0.5, or exchange the columns.",
        )


def preference_training_is_consistent(args: Arguments, context: Context) -> Iterator[Problem]:
    """Training on pairs has no advantages, KL, corrections or rewards, and its samples come in pairs."""
    flag, path = "--rollout-function-path", args.rollout_function_path
    if not args.trains_on_pairs:
        if args.reads_pairs:
            yield Problem(
                flag,
                f"{flag} {path} makes pairs of a preferred and a rejected answer, and --loss-type {args.loss_type}"
                " trains on single samples: give --loss-type preference_loss.",
            )
        return
    for flag, given in _without_effect_on_pairs(args, context):
        if given:
            yield Problem(flag, f"{flag} has no effect with --loss-type preference_loss: leave it out.")
    if not args.has_custom_rollout_function and args.load_debug_rollout_data is None:
        yield Problem(
            "--rollout-function-path",
            "--loss-type preference_loss needs pairs, and the built-in rollout samples single responses: give"
            f" --rollout-function-path {PREFERENCE_ROLLOUT_FUNCTION}, or a function that returns groups of the"
            " preferred and the rejected response.",
        )
    if args.reads_pairs and args.eval_interval is not None:
        yield from _held_out_problems(args, context)


_OF_EVAL_SAMPLES = (
    "n_samples_per_eval_prompt",
    "eval_temperature",
    "eval_top_p",
    "eval_top_k",
    "eval_max_response_len",
    "eval_max_prompt_len",
    "eval_max_context_len",
    "eval_min_new_tokens",
    "eval_function_path",
)


def _held_out_problems(args: Arguments, context: Context) -> Iterator[Problem]:
    """Training evaluates held-out pairs if no engine runs, and samples nothing."""
    if not args.debug_train_only:
        if args.eval_function_path is None:
            yield Problem(
                "--eval-interval",
                f"--eval-interval {args.eval_interval} evaluates held-out pairs in training, which needs"
                " --debug-train-only: add it, or give --eval-function-path for an evaluation by engines.",
            )
        return
    for name in _OF_EVAL_SAMPLES:
        if name in context.given:
            flag = "--" + name.replace("_", "-")
            yield Problem(flag, f"{flag} has no effect on the evaluation of held-out pairs: leave it out.")


def _without_effect_on_pairs(args: Arguments, context: Context) -> list[tuple[str, bool]]:
    """Flags that training on pairs does not read, and whether each is set."""
    switches = (
        ("--use-kl-loss", args.use_kl_loss),
        ("--kl-coef", args.kl_coef != 0),
        ("--entropy-coef", args.entropy_coef != 0),
        ("--use-tis", args.use_tis),
        ("--use-rs", args.use_rs),
        ("--positive-example-loss-coef", args.positive_example_loss_coef != 0),
        ("--use-opsm", args.use_opsm),
        ("--use-rollout-logprobs", args.use_rollout_logprobs),
        ("--get-mismatch-metrics", args.get_mismatch_metrics),
        ("--use-rollout-entropy", args.use_rollout_entropy),
        ("--normalize-advantages", args.normalize_advantages),
        ("--calculate-per-token-loss", args.calculate_per_token_loss),
        ("--rollout-max-prompt-len", args.rollout_max_prompt_len is not None and args.reads_pairs),
        ("--overlong-buffer-len", args.overlong_buffer_len is not None),
        ("--mask-truncated-samples", args.mask_truncated_samples),
    )
    named = ("advantage_estimator", "gamma", "eps_clip", "eps_clip_high", "eps_clip_c")
    return [*switches, *(("--" + name.replace("_", "-"), name in context.given) for name in named)]


def pairs_are_whole(args: Arguments, context: Context) -> Iterator[Problem]:
    """A pair is one group of samples, and stays in one optimizer step, on one rank, in one forward pass."""
    sizes = {"n_samples_per_prompt", "rollout_batch_size", "global_batch_size", "num_steps_per_rollout"}
    if not args.trains_on_pairs or (sizes | {"micro_batch_size"}) & context.broken:
        return
    if args.n_samples_per_prompt != PAIR:
        yield Problem(
            "--n-samples-per-prompt",
            f"--n-samples-per-prompt {args.n_samples_per_prompt} is not 2, the responses of a pair: give 2.",
        )
        return
    if not args.use_dynamic_batch_size and args.micro_batch_size % PAIR:
        yield Problem(
            "--micro-batch-size",
            f"--micro-batch-size {args.micro_batch_size} divides pairs, whose two samples are in one forward pass: give"
            " an even number, or --use-dynamic-batch-size.",
        )
    unit = PAIR * args.data_parallel_size
    samples = args.global_batch_size
    if samples and samples % args.data_parallel_size == 0 and samples % unit:
        yield Problem(
            "--global-batch-size",
            f"--global-batch-size {samples} does not give every one of {args.data_parallel_size} data-parallel ranks"
            f" whole pairs: choose a multiple of {unit}.",
        )


def trained_weights_have_one_list(args: Arguments, context: Context) -> Iterator[Problem]:
    """Only one of the two lists is given, and it is not empty."""
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
