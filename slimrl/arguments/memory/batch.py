"""From prompts to micro-batches: the arithmetic of one rollout.

Pure functions of the flags. Called by the memory estimate (the largest micro-batch) and by the text of the plan.
"""

from __future__ import annotations

import dataclasses

from slimrl.arguments.layout import Groups
from slimrl.arguments.namespace import Arguments


@dataclasses.dataclass(frozen=True)
class Batches:
    """One rollout, step by step; `micro_batches` is None if it depends on the samples' lengths."""

    prompts: int
    samples: int
    steps: int
    samples_per_step: int
    samples_per_rank: int
    micro_batches: int | None


@dataclasses.dataclass(frozen=True)
class MicroBatch:
    """The largest forward pass: tokens on one GPU, and whether a single sample decides it.

    `longest_sample` (tokens) is what the flags allow; `basis` says in words what it counts.
    """

    tokens_per_gpu: int
    longest_sample: int
    basis: str
    alone: bool


def batches(args: Arguments, groups: Groups) -> Batches:
    """The numbers of one rollout, from checked flags."""
    samples = args.prompts_trained_per_rollout * args.n_samples_per_prompt
    per_rank = args.global_batch_size // groups.data
    return Batches(
        prompts=args.rollout_batch_size,
        samples=samples,
        steps=args.num_steps_per_rollout,
        samples_per_step=args.global_batch_size,
        samples_per_rank=per_rank,
        micro_batches=None if args.use_dynamic_batch_size else per_rank // args.micro_batch_size,
    )


def longest_sample(args: Arguments) -> tuple[int, str]:
    """Tokens of the longest sample that the flags allow, and in words what they count."""
    if args.rollout_max_context_len is not None:
        return args.rollout_max_context_len, "the longest sample"
    if args.rollout_max_response_len is None:
        return args.seq_length, "a sample of --seq-length (the flags bound no sample)"
    if args.rollout_max_prompt_len is not None:
        return args.rollout_max_prompt_len + args.rollout_max_response_len, "the longest sample"
    return args.rollout_max_response_len, "the longest response (prompts have no limit)"


def largest_micro_batch(args: Arguments, groups: Groups) -> MicroBatch:
    """The most tokens that one GPU sees in one forward pass.

    With dynamic batches that is --max-tokens-per-gpu, or a longer sample alone; else --micro-batch-size samples.
    Context parallel GPUs share the tokens; a share is padded to a multiple of --data-pad-size-multiplier x TP.
    """
    longest, basis = longest_sample(args)
    if args.use_dynamic_batch_size:
        assert args.max_tokens_per_gpu is not None
        cap = args.max_tokens_per_gpu * groups.context
        tokens, alone = max(cap, longest), longest > cap
    else:
        tokens, alone = longest * args.micro_batch_size, False
    share, unit = -(-tokens // groups.context), args.data_pad_size_multiplier * groups.tensor
    return MicroBatch(-(-share // unit) * unit, longest, basis, alone)
