"""Rules about training on preferences: losses of pairs, reward models; their flags, data and whole groups."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

from slimrl.algorithms.preference_losses import PAIR, PREFERENCE_LOSSES, REWARD_MODEL_LOSSES
from slimrl.arguments.checkpoints import find_corruption, forward_settings, updated_reference
from slimrl.arguments.flag import Problem, flag_specs
from slimrl.arguments.flags.algorithm import PreferenceArguments
from slimrl.arguments.flags.rollout import PREFERENCE_ROLLOUT_FUNCTION, SFT_ROLLOUT_FUNCTION
from slimrl.arguments.namespace import Arguments, Context, absent
from slimrl.hooks import own_path

_PRECOMPUTE = "--precompute-ref-log-probs"
_REWARD_MODEL = "--loss-type reward_model_loss"
_LABEL_LOSSES = [name for name, row in PREFERENCE_LOSSES.items() if not row.compares]


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
    for flag, name in (("--chosen-key", "chosen_key"), ("--rejected-key", "rejected_key")):
        if name in context.given and args.reads_labelled_answers:
            yield Problem(
                flag,
                f"{flag} belongs to pairs, and with --n-samples-per-prompt 1 a row is an answer with its label: leave"
                f" {flag} out, or give --n-samples-per-prompt 2.",
            )
    if "completion_key" in context.given and not args.reads_labelled_answers:
        yield Problem(
            "--completion-key",
            f"--completion-key belongs to --preference-loss {' or '.join(_LABEL_LOSSES)} with --n-samples-per-prompt 1:"
            " add them, or leave --completion-key out.",
        )
    row = PREFERENCE_LOSSES.get(args.preference_loss)
    if not args.trains_on_pairs or row is None:
        return
    for flag, given, is_read in (
        ("--simpo-gamma", "simpo_gamma" in context.given, row.has_margin),
        ("--preference-label-smoothing", args.preference_label_smoothing != 0, row.smooths),
        ("--preference-reference-free", args.preference_reference_free, row.has_reference and row.compares),
        ("--preference-nll-coef", args.preference_nll_coef != 0, row.compares),
        ("--desirable-weight", "desirable_weight" in context.given, not row.compares),
        ("--undesirable-weight", "undesirable_weight" in context.given, not row.compares),
    ):
        if given and not is_read:
            yield Problem(flag, f"{flag} has no effect with --preference-loss {row.name}: leave it out.")
    if args.preference_label_smoothing >= 0.5:
        yield Problem(
            "--preference-label-smoothing",
            f"--preference-label-smoothing {args.preference_label_smoothing:g} says that half of the pairs or more"
            " are exchanged: give less than 0.5, or exchange the columns.",
        )
    if not row.compares and args.desirable_weight == args.undesirable_weight == 0:
        yield Problem(
            "--desirable-weight", "--desirable-weight and --undesirable-weight are both 0: give one of them above 0."
        )


def precomputed_reference_is_usable(args: Arguments, context: Context) -> Iterator[Problem]:
    """A loss reads the stored log-probabilities, which depend on the sample alone and are those of this run."""
    flag, value, row = _PRECOMPUTE, args.precompute_ref_log_probs, PREFERENCE_LOSSES.get(args.preference_loss)
    if value is None or row is None or not args.trains_on_pairs:
        return
    given = f"{flag} {value}"
    if not row.has_reference:
        yield Problem(
            flag, f"{given} has no effect with --preference-loss {row.name}, which has no reference: leave it out."
        )
    elif args.preference_reference_free:
        yield Problem(flag, f"{given} has no effect with --preference-reference-free: leave one of them out.")
    elif row.has_kl:
        yield Problem(
            flag,
            f"{given} is unsupported with --preference-loss {row.name}, whose KL estimate needs the reference on"
            " prompts with the answers of others, which change with the order of the data: leave it out.",
        )
    elif args.moe_expert_capacity_factor is not None:
        yield Problem(
            flag,
            f"{given} is unsupported with --moe-expert-capacity-factor {args.moe_expert_capacity_factor:g}, by which"
            " the log-probabilities of a sample depend on the others of its micro-batch: leave one of them out.",
        )
    elif args.moe_input_jitter_eps:
        yield Problem(
            flag,
            f"{given} is unsupported with --moe-input-jitter-eps {args.moe_input_jitter_eps:g}, by which every pass has"
            " other noise: leave one of them out.",
        )
    elif not args.debug_rollout_only:
        yield from _folder_problems(Path(value), given, args)


def reference_updates_are_usable(args: Arguments, context: Context) -> Iterator[Problem]:
    """A reference that takes the trained weights is one of its own, and a resumed run finds it in a checkpoint."""
    flag, interval = "--ref-update-interval", args.ref_update_interval
    if interval is None:
        return
    given, lacks = f"{flag} {interval}", "needs the checkpoints that have the reference"
    if not args.has_reference_pass:
        yield Problem(flag, f"{given} has no effect without a reference model: leave it out.")
    if args.save is not None and args.save_interval is None:
        yield Problem(flag, f"{given} {lacks}: add --save-interval {interval}.")
    for other, used, why in (
        (f"--lora-rank {args.lora_rank}", args.lora_rank, "whose reference is the model without adapters"),
        (f"{_PRECOMPUTE} {args.precompute_ref_log_probs}", args.precompute_ref_log_probs, "of one reference"),
        (f"--start-rollout-id {args.start_rollout_id}", args.start_rollout_id is not None, "which renumbers rollouts"),
    ):
        if used:
            yield Problem(flag, f"{given} excludes {other}, {why}: leave one of them out.")
    saves = {"--save-interval": args.save_interval, "--save-retain-interval": args.save_retain_interval}
    for other, every in saves.items():
        if every is not None and interval % every != 0:
            yield Problem(
                flag,
                f"{given} is not a multiple of {other} {every}: a resumed run would lack the checkpoint that has the"
                f" reference. Give {interval - interval % every + every}.",
            )
    if args.save_total_limit is not None and args.save_retain_interval is None:
        deletes = f"--save-total-limit {args.save_total_limit} deletes them: add --save-retain-interval {interval}."
        yield Problem(flag, f"{given} {lacks}, and {deletes}")


def updated_reference_exists(args: Arguments, context: Context) -> Iterator[Problem]:
    """--load, where it continues a run after an update of the reference, has the checkpoint with its weights."""
    if args.load is None or context.broken or args.debug_rollout_only or (place := updated_reference(args)) is None:
        return
    given = f"--load {args.load} continues with the reference in {place}"
    if fault := find_corruption(place) if place.is_dir() else f"which {absent(place)}":
        yield Problem("--load", f"{given}, {fault}: copy that checkpoint there.")
    if args.save is not None and Path(args.save).absolute() != place.parent.absolute():
        yield Problem("--save", f"{given}, and later starts look for it in --save {args.save}: give its folder.")


def _folder_problems(folder: Path, given: str, args: Arguments) -> Iterator[Problem]:
    from slimrl.data.reference_log_probs import folder_fault  # imports numpy

    place = next(path for path in (folder.absolute(), *folder.absolute().parents) if path.exists())
    if not place.is_dir():
        return  # `outputs_can_be_written` reports it
    if not os.access(place, os.R_OK | os.W_OK | os.X_OK):
        what = "it" if place == folder.absolute() else f"{place}, where it would be created,"
        yield Problem(_PRECOMPUTE, f"{given} cannot be used, {what} is not writable: give another folder.")
    elif fault := folder_fault(folder, forward_settings(args)):
        yield Problem(_PRECOMPUTE, f"{given} {fault}.")


def preference_training_is_consistent(args: Arguments, context: Context) -> Iterator[Problem]:
    """Training on pairs has no advantages, KL, corrections or rewards, and its samples come in pairs."""
    flag, path = "--rollout-function-path", args.rollout_function_path
    if not args.trains_on_pairs:
        if args.reads_pairs and not args.trains_reward_model:
            yield Problem(
                flag,
                f"{flag} {path} makes pairs of a preferred and a rejected answer, and --loss-type {args.loss_type}"
                " trains on single samples: give --loss-type preference_loss or reward_model_loss.",
            )
        return
    for flag, given in _without_effect(args, context):
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
        yield from held_out_problems(args, context)


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


def held_out_problems(args: Arguments, context: Context, what: str = "pairs") -> Iterator[Problem]:
    """Training evaluates held-out data if no engine runs, and samples nothing."""
    if not args.debug_train_only:
        if args.eval_function_path is None:
            yield Problem(
                "--eval-interval",
                f"--eval-interval {args.eval_interval} evaluates held-out {what} in training, which needs"
                " --debug-train-only: add it, or give --eval-function-path for an evaluation by engines.",
            )
        return
    for name in _OF_EVAL_SAMPLES:
        if name in context.given:
            flag = "--" + name.replace("_", "-")
            yield Problem(flag, f"{flag} has no effect on the evaluation of held-out {what}: leave it out.")


def unread_flags(args: Arguments, given: frozenset[str]) -> list[tuple[str, bool]]:
    """Flags that supervised, preference and reward-model training do not read, and whether each is set.

    Those of sampling and of rewards are read unless a rollout function reads the responses from a file; some of them
    are also read by an evaluation with engines. `given` are the fields that the command line sets.
    """
    is_read = args.reads_pairs or args.reads_conversations
    is_sampled = not is_read or (args.eval_interval is not None and not args.debug_train_only)
    return [
        ("--disable-rewards-normalization", not args.rewards_normalization),
        ("--disable-grpo-std-normalization", not args.grpo_std_normalization),
        ("--kl-loss-type", "kl_loss_type" in given),
        ("--get-mismatch-metrics", args.get_mismatch_metrics),
        ("--use-rollout-entropy", args.use_rollout_entropy),
        ("--check-weight-update-equal", args.check_weight_update_equal and args.debug_train_only),
        ("--partial-rollout", is_read and args.partial_rollout),
        ("--over-sampling-batch-size", is_read and "over_sampling_batch_size" in given),
        ("--buffer-filter-path", is_read and args.buffer_filter_path is not None),
        ("--log-passrate", is_read and args.log_passrate),
        ("--group-rm", not is_sampled and args.group_rm),
        ("--reward-key", not is_sampled and args.reward_key is not None),
        ("--rm-num-graders", not is_sampled and args.rm_num_graders is not None),
        ("--rollout-top-p", not is_sampled and args.rollout_top_p != 1),
        ("--rollout-top-k", not is_sampled and args.rollout_top_k != -1),
        ("--rollout-stop", not is_sampled and args.rollout_stop is not None),
    ]


def _without_effect(args: Arguments, context: Context) -> list[tuple[str, bool]]:
    """Flags that training on given responses does not read, and whether each is set."""
    switches = (
        ("--use-kl-loss", args.use_kl_loss),
        ("--kl-coef", args.kl_coef != 0),
        ("--entropy-coef", args.entropy_coef != 0),
        ("--use-tis", args.use_tis),
        ("--use-rs", args.use_rs),
        ("--positive-example-loss-coef", args.positive_example_loss_coef != 0),
        ("--use-opsm", args.use_opsm),
        ("--use-rollout-logprobs", args.use_rollout_logprobs),
        ("--normalize-advantages", args.normalize_advantages),
        ("--calculate-per-token-loss", args.calculate_per_token_loss),
        ("--rollout-max-prompt-len", args.rollout_max_prompt_len is not None and args.reads_pairs),
        ("--overlong-buffer-len", args.overlong_buffer_len is not None),
        ("--mask-truncated-samples", args.mask_truncated_samples),
        ("--dynamic-sampling-filter-path", args.dynamic_sampling_filter_path is not None),
    )
    named = ("advantage_estimator", "gamma", "eps_clip", "eps_clip_high", "eps_clip_c", "rm_type")
    shared = unread_flags(args, context.given)
    return [*switches, *shared, *(("--" + name.replace("_", "-"), name in context.given) for name in named)]


def pairs_are_whole(args: Arguments, context: Context) -> Iterator[Problem]:
    """A pair is one group of samples, and stays in one optimizer step, on one rank, in one forward pass."""
    if not args.trains_on_pairs or args.trains_on_labels:
        return
    if args.n_samples_per_prompt < PAIR:
        if "n_samples_per_prompt" not in context.broken:
            yield Problem(
                "--n-samples-per-prompt",
                f"--n-samples-per-prompt {args.n_samples_per_prompt} leaves no rejected answer: give 2, or 1 and the"
                " number of rejected answers of a row.",
            )
        return
    yield from _groups_are_whole(args, context)


def kl_estimate_has_another_prompt(args: Arguments, context: Context) -> Iterator[Problem]:
    """KTO's KL estimate has a response to another prompt in every optimizer step."""
    if not args.trains_on_labels:
        return
    loss, size = f"--preference-loss {args.preference_loss}", args.n_samples_per_prompt
    sizes = {"n_samples_per_prompt", "rollout_batch_size", "global_batch_size", "num_steps_per_rollout"}
    samples = args.global_batch_size
    if not PREFERENCE_LOSSES[args.preference_loss].has_kl or not samples or sizes & context.broken:
        return
    if samples % size or samples < 2 * size:
        yield Problem(
            "--global-batch-size",
            f"--global-batch-size {samples} does not give every optimizer step at least two whole groups of"
            f" --n-samples-per-prompt {size}, and the KL estimate of {loss} follows each prompt by the response of"
            f" another group: choose a multiple of {size}, at least {2 * size}.",
        )


def _groups_are_whole(args: Arguments, context: Context) -> Iterator[Problem]:
    """A group of --n-samples-per-prompt samples is never divided."""
    sizes = {"n_samples_per_prompt", "rollout_batch_size", "global_batch_size", "num_steps_per_rollout"}
    if (sizes | {"micro_batch_size"}) & context.broken:
        return
    size = args.n_samples_per_prompt
    of_group, number = ("pairs", "an even number") if size == PAIR else (f"groups of {size}", f"a multiple of {size}")
    if not args.use_dynamic_batch_size and args.micro_batch_size % size:
        count = "two" if size == PAIR else size
        yield Problem(
            "--micro-batch-size",
            f"--micro-batch-size {args.micro_batch_size} divides {of_group}, whose {count} samples are in one forward"
            f" pass: give {number}, or --use-dynamic-batch-size.",
        )
    unit = size * args.data_parallel_size
    samples = args.global_batch_size
    if samples and samples % args.data_parallel_size == 0 and samples % unit:
        yield Problem(
            "--global-batch-size",
            f"--global-batch-size {samples} does not give every one of {args.data_parallel_size} data-parallel ranks"
            f" whole {of_group}: choose a multiple of {unit}.",
        )


def reward_model_flags_have_their_loss(args: Arguments, context: Context) -> Iterator[Problem]:
    """Flags of reward models need that loss, and a margin needs pairs."""
    row = REWARD_MODEL_LOSSES.get(args.reward_model_loss)
    if not args.trains_reward_model:
        for name in ("reward_model_loss", "margin_key"):
            if name in context.given:
                flag = "--" + name.replace("_", "-")
                yield Problem(flag, f"{flag} belongs to {_REWARD_MODEL}: add it, or leave {flag} out.")
    elif row is not None and not row.compares and "margin_key" in context.given:
        yield Problem("--margin-key", f"--margin-key has no effect with --reward-model-loss {row.name}: leave it out.")


def reward_model_training_is_consistent(args: Arguments, context: Context) -> Iterator[Problem]:
    """A reward model gives no tokens: no engine serves it in training, and flags of a policy's loss are left out."""
    if not args.trains_reward_model:
        return
    of_policy = (("--rollout-temperature", args.rollout_temperature != 1), ("--keep-logits", args.keep_logits))
    for flag, given in [*_without_effect(args, context), *of_policy]:
        if given:
            yield Problem(flag, f"{flag} has no effect with {_REWARD_MODEL}: leave it out.")
    if not args.debug_train_only:
        yield Problem(
            "--debug-train-only",
            f"{_REWARD_MODEL} trains a model that engines cannot generate with: add --debug-train-only. The trained"
            " model is served with --rm-model after tools/convert_torch_dist_to_hf.py.",
        )
    for flag, value in (
        ("--custom-model-provider-path", args.custom_model_provider_path),
        ("--spec", None if args.spec is None else " ".join(args.spec)),
    ):
        if value is not None:
            how = "a reward model is slimrl's own model with a reward head"
            yield Problem(flag, f"{flag} {value} is unsupported with {_REWARD_MODEL}: leave it out; {how}.")
    if args.mtp_num_layers:
        yield Problem(
            "--mtp-num-layers",
            f"--mtp-num-layers {args.mtp_num_layers} predicts tokens, which a reward model does not: leave it out.",
        )


def reward_model_data_is_of_its_loss(args: Arguments, context: Context) -> Iterator[Problem]:
    """Comparisons come from pairs, scores from the labels of conversations."""
    row = REWARD_MODEL_LOSSES.get(args.reward_model_loss)
    if not args.trains_reward_model or row is None or {"n_samples_per_prompt"} & context.broken:
        return
    path = own_path(args.rollout_function_path)
    wanted = PREFERENCE_ROLLOUT_FUNCTION if row.compares else SFT_ROLLOUT_FUNCTION
    other = SFT_ROLLOUT_FUNCTION if row.compares else PREFERENCE_ROLLOUT_FUNCTION
    own = args.has_custom_rollout_function and path not in (wanted, other)
    if args.load_debug_rollout_data is None and not own and path != wanted:
        what = "a preferred and rejected answers" if row.compares else "a conversation and its score"
        yield Problem(
            "--rollout-function-path",
            f"--reward-model-loss {row.name} needs rows of {what}: give --rollout-function-path {wanted}, or a function"
            " of your own.",
        )
    if row.compares and args.n_samples_per_prompt < 2:
        yield Problem(
            "--n-samples-per-prompt",
            f"--n-samples-per-prompt {args.n_samples_per_prompt} leaves no rejected answer: give 1 and the number of"
            " rejected answers of a row.",
        )
    if row.compares and args.n_samples_per_prompt >= 2:
        yield from _groups_are_whole(args, context)
    if not row.compares and args.n_samples_per_prompt != 1:
        yield Problem(
            "--n-samples-per-prompt",
            f"--n-samples-per-prompt {args.n_samples_per_prompt} repeats each scored conversation: give 1.",
        )
    if not row.compares and args.label_key is None and not own:
        yield Problem(
            "--label-key", f"--reward-model-loss {row.name} needs the column of the scores: give --label-key."
        )
    if row.compares and args.reads_pairs and args.eval_interval is not None:
        yield from held_out_problems(args, context)
    if not row.compares and args.reads_conversations and args.eval_interval is not None:
        yield from held_out_problems(args, context, "scores")
