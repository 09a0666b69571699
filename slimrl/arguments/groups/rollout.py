"""Flags of generation: how many samples, how they are drawn, by which functions."""

from __future__ import annotations

import dataclasses

from slimrl.arguments.flag import flag

DEFAULT_ROLLOUT_FUNCTION = "slimrl.rollout.sglang_rollout.generate_rollout"


@dataclasses.dataclass
class RolloutArguments:
    """Sampling and the functions that do it."""

    num_rollout: int | None = flag(None, "rollouts of the whole run (count); or give --num-epoch", at_least=0)
    num_epoch: int | None = flag(
        None,
        "passes over --prompt-data (count), each of size // --rollout-batch-size rollouts; --num-rollout wins",
        at_least=1,
    )
    start_rollout_id: int | None = flag(None, "number of the first rollout (the checkpoint's next, or 0)", at_least=0)
    rollout_batch_size: int | None = flag(None, "prompts per rollout (count, required)", at_least=1)
    n_samples_per_prompt: int = flag(1, "responses per prompt (count): the size of a group", at_least=1)
    over_sampling_batch_size: int | None = flag(
        None, "prompts sent out at a time while a rollout fills (count; --rollout-batch-size)", at_least=1
    )
    rollout_temperature: float = flag(
        1.0, "sampling temperature, above 0; training divides its logits by it too", above=0
    )
    rollout_top_p: float = flag(
        1.0, "keep the smallest set of tokens with this probability (1: all)", above=0, at_most=1
    )
    rollout_top_k: int = flag(-1, "keep that many of the likeliest tokens (-1: all)", at_least=-1)
    rollout_max_response_len: int | None = flag(None, "longest response (tokens, required)", at_least=1)
    rollout_max_prompt_len: int | None = flag(
        None, "leave out prompts longer than this (tokens; --rollout-max-context-len less 1, else no limit)", at_least=1
    )
    rollout_max_context_len: int | None = flag(
        None, "longest prompt and response together (tokens; no limit)", at_least=2
    )
    rollout_stop: list[str] | None = flag(None, "strings that end a response", nargs="+")
    rollout_stop_token_ids: list[int] | None = flag(None, "token ids that end a response", nargs="+")
    rollout_skip_special_tokens: bool = flag(False, "leave special tokens out of the response text")
    rollout_shuffle: bool = flag(False, "shuffle the prompts anew in each epoch, by --rollout-seed + epoch")
    rollout_seed: int = flag(42, "seed of the prompt order and of deterministic sampling")
    rollout_function_path: str = flag(
        DEFAULT_ROLLOUT_FUNCTION, "function that makes a whole rollout (dotted import path)"
    )
    custom_generate_function_path: str | None = flag(
        None, "function that generates one sample (dotted import path; the built-in one)"
    )
    dynamic_sampling_filter_path: str | None = flag(
        None, "function that keeps or drops a finished group (dotted import path; keep all)"
    )
