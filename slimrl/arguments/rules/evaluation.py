"""Rules about evaluation and prompt lengths."""

from __future__ import annotations

from collections.abc import Iterator

from slimrl.arguments.groups.reward import RM_TYPES
from slimrl.arguments.groups.rollout import DEFAULT_ROLLOUT_FUNCTION
from slimrl.arguments.namespace import Arguments
from slimrl.arguments.problem import Problem
from slimrl.arguments.rules.context import Context


def evaluation_has_data(args: Arguments, context: Context) -> Iterator[Problem]:
    """--eval-interval without a set would evaluate nothing."""
    sources = {"eval_prompt_data", "eval_config"}
    if args.eval_interval is not None and not sources & (context.given | context.broken):
        yield Problem(
            "--eval-interval",
            f"--eval-interval {args.eval_interval} has nothing to evaluate on: give --eval-prompt-data or"
            " --eval-config.",
        )


def evaluation_alone_evaluates(args: Arguments, context: Context) -> Iterator[Problem]:
    """--num-rollout 0 trains nothing: the evaluation before the first rollout is all there is."""
    if not args.only_evaluates or {"num_rollout", "eval_interval"} & context.broken:
        return
    if args.eval_interval is None:
        yield Problem(
            "--num-rollout",
            "--num-rollout 0 trains nothing and nothing is evaluated: give --eval-interval 1 (and sets), or rollouts.",
        )
    for flag, given in (
        ("--skip-eval-before-train", args.skip_eval_before_train),
        ("--debug-train-only", args.debug_train_only),
    ):
        if given:
            yield Problem(flag, f"{flag} leaves out the one evaluation of --num-rollout 0: leave one of them out.")


def evaluation_sets_are_judged(args: Arguments, context: Context) -> Iterator[Problem]:
    """Each set has a reward, unless the user's own function makes its samples."""
    if args.rollout_function_path != DEFAULT_ROLLOUT_FUNCTION or {"rm_type", "custom_rm_path"} & context.broken:
        return
    flag = "--eval-prompt-data" if args.eval_config is None else "--eval-config"
    for dataset in args.eval_datasets:
        # the run's own --rm-type is another rule's business
        if dataset.rm_type not in (None, args.rm_type, *RM_TYPES):
            known = ", ".join(RM_TYPES)
            yield Problem(flag, f"{flag}: set {dataset.name} has rm_type {dataset.rm_type!r}: give one of {known}.")
        judged = dataset.rm_type or dataset.custom_rm_path or dataset.custom_generate_function_path
        if not judged and args.eval_config is not None:
            yield Problem(flag, f"{flag}: nothing judges set {dataset.name}: give it rm_type or custom_rm_path.")


def lengths_fit_the_context(args: Arguments, context: Context) -> Iterator[Problem]:
    """A prompt leaves room for at least one token of response."""
    limit, prompt = args.rollout_max_context_len, args.rollout_max_prompt_len
    if limit is not None and prompt is not None and prompt > limit - 1:
        yield Problem(
            "--rollout-max-prompt-len",
            f"--rollout-max-prompt-len {prompt} leaves no response within --rollout-max-context-len {limit}:"
            f" give at most {limit - 1}.",
        )
