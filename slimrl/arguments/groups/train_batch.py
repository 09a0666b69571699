"""Flags that cut a rollout into optimizer steps and micro-batches."""

from __future__ import annotations

import dataclasses

from slimrl.arguments.flag import flag


@dataclasses.dataclass
class TrainBatchArguments:
    """Batches; rollout batch x samples per prompt = global batch x steps per rollout."""

    global_batch_size: int | None = flag(
        None, "samples per optimizer step (count; from --num-steps-per-rollout)", at_least=1
    )
    num_steps_per_rollout: int | None = flag(
        None, "optimizer steps per rollout (count; from --global-batch-size, 1 where neither is given)", at_least=1
    )
    micro_batch_size: int = flag(
        1, "samples per forward pass (count); refused with --use-dynamic-batch-size", at_least=1
    )
    use_dynamic_batch_size: bool = flag(False, "fill each forward pass up to --max-tokens-per-gpu tokens")
    max_tokens_per_gpu: int | None = flag(
        None, "tokens of one forward pass with --use-dynamic-batch-size (count); a longer sample goes alone", at_least=1
    )
    balance_data: bool = flag(False, "spread samples over data parallel ranks so that each computes about as much")
    data_pad_size_multiplier: int = flag(
        128, "packed tokens are padded to a multiple of this x tensor parallel size (tokens)", at_least=1
    )
    log_probs_chunk_size: int = flag(
        -1,
        "log-probabilities take the memory of this many tokens' logits at a time (-1: of 1/16 of all)",
        at_least=-1,
        other_than=0,
    )
    keep_logits: bool = flag(
        False,
        "keep the logits for the backward pass: faster by a quarter of the output layer's time, for their memory (on"
        " with --loss-type custom_loss)",
    )
