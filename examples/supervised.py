"""Supervised fine-tuning as a rollout function: each prompt's label is the answer to learn.

--rollout-function-path examples.supervised.generate_rollout --loss-type sft_loss --debug-train-only
--label-key answer --n-samples-per-prompt 1

No engine is used. For multi-turn conversations use `slimrl.rollout.sft_rollout.generate_rollout`.
"""

from __future__ import annotations

from typing import Any

from slimrl.arguments import Arguments
from slimrl.data.sample import Sample, SampleStatus
from slimrl.hooks import DataSource


def generate_rollout(
    args: Arguments, rollout_id: int, data_source: DataSource, *, evaluation: bool, tokenizer: Any
) -> list[list[Sample]]:
    """The next `--rollout-batch-size` prompts, each answered by its label."""
    if evaluation:
        raise ValueError("this rollout function has no evaluation: leave --eval-interval out")
    groups = data_source.get_samples(args.rollout_batch_size)
    for sample in (sample for group in groups for sample in group):
        answer(sample, tokenizer)
    return groups


def answer(sample: Sample, tokenizer: Any) -> None:
    """Appends the label and the end-of-turn token to the prompt's tokens."""
    ids = tokenizer(sample.label, add_special_tokens=False)["input_ids"] + [tokenizer.eos_token_id]
    sample.tokens = sample.tokens + ids
    sample.response, sample.response_length = sample.label, len(ids)
    sample.loss_mask = [1] * len(ids)
    sample.rollout_log_probs = [0.0] * len(ids)  # not sampled, and the SFT loss does not use them
    sample.reward, sample.status = 0.0, SampleStatus.COMPLETED
