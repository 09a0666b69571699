"""Rules about the algorithm: estimator, clipping, KL, off-policy corrections, pairs, trained weights."""

from __future__ import annotations

from collections.abc import Iterator

from slimrl.algorithms.estimators import ESTIMATORS, Objective, Returns
from slimrl.arguments.flag import Problem
from slimrl.arguments.namespace import Arguments, Context
from slimrl.arguments.validation.preference import held_out_problems, unread_flags


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


def entropy_target_has_a_loss(args: Arguments, context: Context) -> Iterator[Problem]:
    """An adaptive coefficient of the entropy bonus belongs to the policy's loss, which has the bonus."""
    flag, target = "--entropy-target", args.entropy_target
    if target is None:
        if "entropy_coef_delta" in context.given:
            yield Problem(
                "--entropy-coef-delta",
                f"--entropy-coef-delta belongs to {flag}: add it, or leave --entropy-coef-delta out.",
            )
        return
    if args.loss_type != "policy_loss":
        yield Problem(flag, f"{flag} {target:g} has no effect with --loss-type {args.loss_type}: leave it out.")
    if args.entropy_coef < 0:
        yield Problem(
            "--entropy-coef",
            f"--entropy-coef {args.entropy_coef:g} is below 0, where {flag} never moves it: give 0 or more.",
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
    """A discount belongs to discounted returns; a switch of the normalization of rewards to a row that has it."""
    estimator = ESTIMATORS.get(args.advantage_estimator)
    if not args.rewards_normalization and estimator is not None and not estimator.is_group_relative:
        relative = ", ".join(name for name, row in ESTIMATORS.items() if row.is_group_relative)
        if not args.is_supervised:
            yield Problem(
                "--disable-rewards-normalization",
                "--disable-rewards-normalization has no effect with --advantage-estimator"
                f" {args.advantage_estimator}, whose rewards are never relative to their group (those that are:"
                f" {relative}): leave it out.",
            )
    divides = estimator is None or estimator.normalizes_by_std
    if not args.grpo_std_normalization and not divides and not args.is_supervised:
        dividing = ", ".join(name for name, row in ESTIMATORS.items() if row.normalizes_by_std)
        yield Problem(
            "--disable-grpo-std-normalization",
            "--disable-grpo-std-normalization has no effect with --advantage-estimator"
            f" {args.advantage_estimator}, which never divides by the standard deviation (those that do: {dividing}):"
            " leave it out.",
        )
    if args.gamma != 1 and estimator is not None and estimator.returns is Returns.BROADCAST:
        discounted = " and ".join(name for name, row in ESTIMATORS.items() if row.returns is not Returns.BROADCAST)
        yield Problem(
            "--gamma",
            f"--gamma {args.gamma:g} discounts the returns of {discounted} and --advantage-estimator is"
            f" {args.advantage_estimator}: leave it out.",
        )


def length_normalization_has_its_divisor(args: Arguments, context: Context) -> Iterator[Problem]:
    """A loss that divides by --rollout-max-response-len has that flag, and nothing else that sets the divisor."""
    estimator = ESTIMATORS.get(args.advantage_estimator)
    if estimator is None or not estimator.divides_by_longest or args.is_supervised:
        return
    which = f"--advantage-estimator {estimator.name} divides the sum of a sample by --rollout-max-response-len"
    other = "leave it out, or use grpo with --disable-grpo-std-normalization"
    reducer = args.custom_pg_loss_reducer_function_path
    for flag, value, given in (
        ("--calculate-per-token-loss", "", args.calculate_per_token_loss),
        ("--custom-pg-loss-reducer-function-path", f" {reducer}", reducer is not None),
        ("--loss-type", " custom_loss", args.loss_type == "custom_loss"),
    ):
        if given:
            yield Problem(flag, f"{flag}{value} sets another divisor of the loss, and {which}: {other}.")
    if args.rollout_max_response_len is None and args.debug_train_only:  # else another rule reports it
        yield Problem("--rollout-max-response-len", f"{which}, which is missing: give that of the rollouts.")


def process_rewards_have_their_model(args: Arguments, context: Context) -> Iterator[Problem]:
    """Rewards of steps have a model of their own, and returns that are sums over tokens."""
    flag, separator = "--rm-step-separator", args.rm_step_separator
    if separator is None:
        for name in sorted({"rm_step_marker", "rm_step_coef"} & context.given):
            other = "--" + name.replace("_", "-")
            yield Problem(other, f"{other} belongs to {flag}: add it, or leave {other} out.")
        return
    if args.has_served_teacher:
        return  # another rule's problem
    if args.rm_model is None:
        yield Problem("--rm-model", f"{flag} {separator!r} needs a process reward model: give its folder, --rm-model.")
    if args.rm_input_template is not None:
        yield Problem(
            "--rm-input-template",
            f"--rm-input-template is a text with a whole response, and {flag} reads its steps: use --rm-input.",
        )
    if args.rm_input == "tokens" and args.rm_step_marker is not None:
        yield Problem(
            "--rm-step-marker",
            f"--rm-step-marker {args.rm_step_marker!r} is not among the policy's tokens, which --rm-input tokens sends:"
            " leave one of them out.",
        )
    users = ["--rm-type"] if args.rm_type == "reward_model" else []
    others = [one for one in args.eval_datasets if one.rm_type == "reward_model" != args.rm_type]
    for where in [*users, *(f"evaluation set {one.name} with rm_type" for one in others)]:
        yield Problem(
            flag,
            f"{flag} {separator!r} makes --rm-model a process reward model, and {where} reward_model would score whole"
            " responses with it: choose another reward; zero for none.",
        )
    estimator = ESTIMATORS.get(args.advantage_estimator)
    if estimator is not None and estimator.returns is Returns.BROADCAST:
        summed = " or ".join(name for name, row in ESTIMATORS.items() if row.returns is not Returns.BROADCAST)
        yield Problem(
            flag,
            f"{flag} {separator!r} rewards steps, and --advantage-estimator {estimator.name} has one reward per"
            f" response: use {summed}.",
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
        ("--tis-batch-normalize", "tis_batch_normalize", "--use-tis", args.use_tis),
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
            f"--rs-level {args.rs_level} is the level of bounds, and none is given (those of --tis-clip are not"
            " taken, as slime does): give --rs-lower-bound or --rs-upper-bound, or leave it out.",
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
        ("--rm-step-separator", args.rm_step_separator is not None),
        ("--dynamic-sampling-filter-path", args.reads_conversations and args.dynamic_sampling_filter_path is not None),
        ("--rm-type", args.reads_conversations and "rm_type" in context.given),
        *unread_flags(args, context.given),
        *(
            ("--" + name.replace("_", "-"), name in context.given)
            for name in ("advantage_estimator", "gamma", "eps_clip", "eps_clip_high", "eps_clip_c")
        ),
    ):
        if given:
            yield Problem(flag, f"{flag} has no effect with --loss-type sft_loss: leave it out.")
    if args.reads_conversations and args.n_samples_per_prompt > 1:
        yield Problem(
            "--n-samples-per-prompt",
            f"--n-samples-per-prompt {args.n_samples_per_prompt} repeats each conversation: give 1, or leave it out.",
        )
    if args.reads_conversations and args.eval_interval is not None:
        yield from held_out_problems(args, context, "conversations")


def likelihoods_of_given_responses_are_not_scaled(args: Arguments, context: Context) -> Iterator[Problem]:
    """Training divides logits by the temperature of sampling; a supervised or preference loss is defined without it."""
    if not (args.loss_type == "sft_loss" or args.trains_on_pairs) or "rollout_temperature" in context.broken:
        return
    if args.rollout_temperature == 1 or args.debug_rollout_only or args.eval_only:
        return
    other = ""
    if not args.reads_conversations and not args.reads_pairs and args.load_debug_rollout_data is None:
        other = (
            "; responses sampled with another temperature are trained on from a file (--save-debug-rollout-data with"
            " --debug-rollout-only, then --load-debug-rollout-data)"
        )
    yield Problem(
        "--rollout-temperature",
        f"--rollout-temperature {args.rollout_temperature:g} also divides the logits of training, which changes the"
        f" loss of --loss-type {args.loss_type}: give 1, or leave it out{other}.",
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
