"""Rules about numbers of samples: what generation produces is what training consumes, and it divides evenly."""

from __future__ import annotations

from collections.abc import Iterator

from slimrl.arguments.namespace import Arguments
from slimrl.arguments.problem import Problem
from slimrl.arguments.rules.context import Context

_BATCH_FIELDS = {"rollout_batch_size", "n_samples_per_prompt", "global_batch_size", "num_steps_per_rollout"}


def produced_equals_consumed(args: Arguments, context: Context) -> Iterator[Problem]:
    """rollout batch x samples per prompt = global batch x steps per rollout."""
    if args.rollout_batch_size is None or context.broken & _BATCH_FIELDS:
        return
    produced = args.prompts_trained_per_rollout * args.n_samples_per_prompt
    consumed = args.global_batch_size * args.num_steps_per_rollout
    if produced == consumed:
        return
    part = args.load_debug_rollout_data_subsample
    of_them = "" if part is None else f" x --load-debug-rollout-data-subsample {part:g}"
    made = (
        f"--rollout-batch-size {args.rollout_batch_size}{of_them} x --n-samples-per-prompt {args.n_samples_per_prompt}"
        f" = {produced} samples"
    )
    if "global_batch_size" not in context.given:
        yield Problem(
            "--num-steps-per-rollout",
            f"{made}, which --num-steps-per-rollout {args.num_steps_per_rollout} does not divide: choose a divisor.",
        )
    elif "num_steps_per_rollout" not in context.given:
        yield Problem(
            "--global-batch-size",
            f"{made}, which --global-batch-size {args.global_batch_size} does not divide: choose a divisor.",
        )
    else:
        yield Problem(
            "--global-batch-size",
            f"{made}, but training takes --global-batch-size {args.global_batch_size} x --num-steps-per-rollout"
            f" {args.num_steps_per_rollout} = {consumed}: make the two products equal.",
        )


def global_batch_divides_over_slots(args: Arguments, context: Context) -> Iterator[Problem]:
    """Every data parallel rank gets whole micro-batches (whole samples with dynamic batches)."""
    if any(produced_equals_consumed(args, context)):
        return  # the global batch itself is in doubt
    relevant = _BATCH_FIELDS | {"micro_batch_size", "actor_num_nodes", "actor_num_gpus_per_node"}
    if not args.global_batch_size or context.broken & relevant or args.debug_rollout_only:
        return
    dp, micro = args.data_parallel_size, args.micro_batch_size
    unit = dp if args.use_dynamic_batch_size else dp * micro
    if args.global_batch_size % unit:
        parts = f"data parallel size {dp}"
        if not args.use_dynamic_batch_size:
            parts += f" x --micro-batch-size {micro} = {unit}"
        yield Problem(
            "--global-batch-size",
            f"--global-batch-size {args.global_batch_size} does not divide by {parts}: choose a multiple of {unit}.",
        )


def dynamic_batches_have_a_cap(args: Arguments, context: Context) -> Iterator[Problem]:
    """--use-dynamic-batch-size fills up to --max-tokens-per-gpu, and only it does."""
    if args.use_dynamic_batch_size and args.max_tokens_per_gpu is None and "max_tokens_per_gpu" not in context.broken:
        yield Problem(
            "--max-tokens-per-gpu",
            "--use-dynamic-batch-size needs --max-tokens-per-gpu: give the tokens one forward pass may hold.",
        )
    if args.max_tokens_per_gpu is not None and not args.use_dynamic_batch_size:
        yield Problem(
            "--max-tokens-per-gpu",
            f"--max-tokens-per-gpu {args.max_tokens_per_gpu} caps dynamic batches only: add --use-dynamic-batch-size,"
            " or leave it out.",
        )


def dynamic_batches_have_no_fixed_size(args: Arguments, context: Context) -> Iterator[Problem]:
    """--use-dynamic-batch-size decides by tokens how many samples a forward pass has."""
    if args.use_dynamic_batch_size and "micro_batch_size" in context.given:
        yield Problem(
            "--micro-batch-size",
            f"--micro-batch-size {args.micro_batch_size} is a fixed number of samples and --use-dynamic-batch-size"
            " fills each forward pass by --max-tokens-per-gpu: leave one of the two out.",
        )


def over_sampling_reaches_the_batch(args: Arguments, context: Context) -> Iterator[Problem]:
    """A wave of prompts is at least one rollout batch."""
    over, batch = args.over_sampling_batch_size, args.rollout_batch_size
    if over is not None and batch is not None and over < batch:
        yield Problem(
            "--over-sampling-batch-size",
            f"--over-sampling-batch-size {over} is smaller than --rollout-batch-size {batch}: give at least {batch}.",
        )


def cut_off_groups_have_one_fate(args: Arguments, context: Context) -> Iterator[Problem]:
    """What --partial-rollout keeps can be masked; it cannot be discarded too."""
    if args.mask_offpolicy_in_partial_rollout and not args.partial_rollout:
        yield Problem(
            "--mask-offpolicy-in-partial-rollout",
            "--mask-offpolicy-in-partial-rollout masks what --partial-rollout continues: give that too, or leave it"
            " out.",
        )
    if args.discard_surplus_groups and args.partial_rollout:
        yield Problem(
            "--discard-surplus-groups",
            "--discard-surplus-groups generates finished groups anew and --partial-rollout keeps even unfinished ones:"
            " give one of the two.",
        )
