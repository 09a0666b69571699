"""Supervised training as a rollout function: the conversations of --prompt-data are the samples, nothing is generated.

    --rollout-function-path slimrl.rollout.sft_rollout.generate_rollout --loss-type sft_loss --debug-train-only

`--input-key` names the column of messages, `--tool-key` that of tool schemas. A sample's prompt is what stands before
the assistant's first word; of the rest those tokens are trained on that `--loss-mask-type` says the assistant writes.
"""

from __future__ import annotations

from typing import Any

from slimrl.arguments import Arguments
from slimrl.data.loss_mask import TURN_MARKS, assistant_spans, conversation_mask, trained_turns
from slimrl.data.sample import Sample, SampleStatus
from slimrl.rollout.data_source import RolloutDataSource
from slimrl.rollout.output import RolloutOutput
from slimrl.rollout.prompts import TOOLS_KEY


def generate_rollout(
    args: Arguments,
    rollout_id: int,
    data_source: RolloutDataSource,
    *,
    evaluation: bool = False,
    tokenizer: Any = None,
) -> RolloutOutput:
    """The next `--rollout-batch-size` conversations, tokenised whole, with their loss masks.

    `tokenizer` is the run's, a fast one. Raises ValueError where it is asked to evaluate, and for a conversation that
    cannot be trained on, naming it.
    """
    if evaluation:
        raise ValueError("supervised training has no evaluation of its own: leave --eval-interval out")
    groups = data_source.get_samples(args.rollout_batch_size)
    for sample in (sample for group in groups for sample in group):
        _fill(sample, tokenizer, args)
    return RolloutOutput(groups, {})


def _fill(sample: Sample, tokenizer: Any, args: Arguments) -> None:
    name = f"--prompt-data, sample {sample.index}"
    messages = sample.prompt
    if not isinstance(messages, list):
        raise ValueError(
            f"{name} is text and not a list of messages: leave --apply-chat-template out, and name their column with"
            " --input-key"
        )
    text = tokenizer.apply_chat_template(
        messages, tools=sample.metadata.get(TOOLS_KEY), tokenize=False, **args.apply_chat_template_kwargs
    )
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    try:
        spans = assistant_spans(text, TURN_MARKS[args.loss_mask_type])
        mask = conversation_mask(encoded["offset_mapping"], spans, trained_turns(messages))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if 1 not in mask:
        raise ValueError(f"{name} has no message of the assistant to train on: take it out of the data")
    first = mask.index(1)
    sample.tokens = list(encoded["input_ids"])
    sample.response_length = len(mask) - first
    sample.loss_mask = mask[first:]
    sample.response = text[encoded["offset_mapping"][first][0] :]
    sample.rollout_log_probs = [0.0] * sample.response_length  # nobody sampled them, and no loss here reads them
    sample.reward = 0.0
    sample.status = SampleStatus.COMPLETED
