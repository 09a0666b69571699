"""Supervised fine-tuning (SFT) as a rollout function: the conversations of --prompt-data are the samples.

    --rollout-function-path slimrl.rollout.sft_rollout.generate_rollout --loss-type sft_loss --debug-train-only

`--input-key` names the column of messages, `--tool-key` that of tool schemas. A sample's prompt ends before the
assistant's first turn. In the rest, the assistant's turns are trained on, including the end-of-turn marker;
`--loss-mask-type` selects the template's markers. A conversation is tokenized once as a whole, so that its tokens are
the same as in generation, with one mask entry per token. `--rollout-max-context-len` cuts longer ones at their end
(metric rollout/truncated_ratio). With --loss-type reward_model_loss --reward-model-loss mse
the label of a conversation is its score.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from slimrl.arguments.eval_datasets import eval_prompt_format
from slimrl.arguments.namespace import EvalDataset, PromptArguments
from slimrl.data.sample import Sample, SampleStatus
from slimrl.hooks.base import RunArguments
from slimrl.rollout.dataset.data_source import RolloutDataSource
from slimrl.rollout.dataset.prompt_dataset import TOOLS_KEY, load_prompts
from slimrl.rollout.rollout_function import RolloutOutput

if TYPE_CHECKING:
    from slimrl.data.train_batch import RolloutBatch


@dataclasses.dataclass(frozen=True)
class TurnMarks:
    """The chat template's markers before and after an assistant turn; the one after is trained on too."""

    before: str
    after: str


_CHATML = TurnMarks("<|im_start|>assistant\n", "<|im_end|>")
# --loss-mask-type -> the markers of that family's chat template
TURN_MARKS: dict[str, TurnMarks] = {
    "qwen": _CHATML,
    "qwen3": _CHATML,
    "qwen3_5": _CHATML,
    "distill_qwen": TurnMarks("<｜Assistant｜>", "<｜end▁of▁sentence｜>"),
}


def assistant_spans(text: str, marks: TurnMarks) -> list[tuple[int, int]]:
    """Character ranges of the assistant turns in a rendered conversation; the last turn may lack its end marker."""
    spans = []
    position = text.find(marks.before)
    while position >= 0:
        start = position + len(marks.before)
        end = text.find(marks.after, start)
        end = len(text) if end < 0 else end + len(marks.after)
        spans.append((start, end))
        position = text.find(marks.before, end)
    return spans


def trained_turns(messages: Sequence[dict[str, Any]]) -> list[bool]:
    """For each assistant message, whether it is trained on: `step_loss_mask` 0 excludes it."""
    return [bool(message.get("step_loss_mask", 1)) for message in messages if message.get("role") == "assistant"]


def conversation_mask(
    offsets: Sequence[tuple[int, int]], spans: Sequence[tuple[int, int]], trained: Sequence[bool]
) -> list[int]:
    """1 for each token that begins within a trained span; `offsets` are the tokens' character ranges.

    Raises ValueError if the template rendered a different number of assistant turns.
    """
    if len(spans) != len(trained):
        raise ValueError(
            f"the chat template rendered {len(spans)} assistant turns but the conversation has {len(trained)}:"
            " choose the --loss-mask-type of the model's family"
        )
    chosen = [span for span, is_trained in zip(spans, trained, strict=True) if is_trained]
    return [int(any(start <= begin < end for start, end in chosen)) for begin, _ in offsets]


def generate_rollout(
    args: RunArguments,
    rollout_id: int,
    data_source: RolloutDataSource,
    *,
    evaluation: bool = False,
    tokenizer: Any = None,
) -> RolloutOutput:
    """The next `--rollout-batch-size` conversations, each tokenized as a whole, with their loss masks.

    `tokenizer` is the run's, a fast one. Raises ValueError if called for an evaluation, and for a conversation that
    cannot be trained on.
    """
    if evaluation:
        raise ValueError("training evaluates held-out conversations itself, with --debug-train-only")
    groups = data_source.get_samples(args.rollout_batch_size)
    for sample in (sample for group in groups for sample in group):
        fill_conversation(
            sample,
            tokenizer,
            TURN_MARKS[args.loss_mask_type],
            args.apply_chat_template_kwargs,
            max_tokens=args.rollout_max_context_len,
        )
        if args.trains_reward_model:
            sample.reward = float(sample.label)  # a number, as `validate_row` has checked
    return RolloutOutput(groups, {})


def held_out_conversations(args: PromptArguments, dataset: EvalDataset, tokenizer: Any) -> RolloutBatch:
    """All conversations of an evaluation set, without a schedule; for a reward model with their scores as rewards.

    Raises InvalidRowsError with every bad row, ValueError for a conversation without a message to score.
    """
    import torch  # not in the driver, which only looks for `generate_rollout`

    from slimrl.data.train_batch import batch_from_samples

    prompts = load_prompts(dataset.path, eval_prompt_format(args, dataset), tokenizer).prompts
    samples = [prompt.sample(group_index=number, index=number) for number, prompt in enumerate(prompts)]
    for sample in samples:
        name = f"evaluation set {dataset.name}"
        fill_conversation(
            sample,
            tokenizer,
            TURN_MARKS[args.loss_mask_type],
            dataset.apply_chat_template_kwargs,
            flag=name,
            max_tokens=dataset.max_context_len,
        )
        if args.trains_reward_model:
            sample.reward = float(sample.label)
    rewards = torch.tensor([sample.reward_value() for sample in samples])
    return batch_from_samples(samples, rewards, rewards)


def fill_conversation(
    sample: Sample,
    tokenizer: Any,
    marks: TurnMarks,
    template_options: dict[str, Any],
    flag: str = "--prompt-data",
    max_tokens: int | None = None,
) -> None:
    """Tokenizes the messages in `sample.prompt` and fills in response and loss mask; reward 0.

    `template_options` are keyword arguments of the chat template. Tokens after `max_tokens` are cut off. Raises
    ValueError, which names the sample, if there is nothing to train on.
    """
    name = f"{flag}, sample {sample.index}"
    messages = sample.prompt
    if not isinstance(messages, list):
        raise ValueError(
            f"{name} is text, not a list of messages: leave --apply-chat-template out, and set --input-key to the"
            " column of messages"
        )
    text = tokenizer.apply_chat_template(
        messages, tools=sample.metadata.get(TOOLS_KEY), tokenize=False, **template_options
    )
    encoded = tokenizer(text, add_special_tokens=False, return_offsets_mapping=True)
    try:
        spans = assistant_spans(text, marks)
        mask = conversation_mask(encoded["offset_mapping"], spans, trained_turns(messages))
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    if 1 not in mask:
        raise ValueError(f"{name} has no assistant message to train on: remove it from the data")
    first, length = mask.index(1), kept_tokens(name, mask.index(1), len(mask), max_tokens)
    sample.tokens = list(encoded["input_ids"][:length])
    sample.response_length = length - first
    sample.loss_mask = mask[first:length]
    sample.response = text[encoded["offset_mapping"][first][0] : encoded["offset_mapping"][length - 1][1]]
    sample.rollout_log_probs = [0.0] * sample.response_length  # not sampled, and no SFT loss reads them
    sample.reward = 0.0
    sample.status = SampleStatus.COMPLETED if length == len(mask) else SampleStatus.TRUNCATED


def kept_tokens(name: str, prompt: int, tokens: int, max_tokens: int | None) -> int:
    """How many of the `tokens` of a sample `max_tokens` leaves; ValueError if its `prompt` alone has as many."""
    if max_tokens is not None and prompt >= max_tokens:
        raise ValueError(
            f"{name} has {prompt} tokens before the first one to train on, and --rollout-max-context-len {max_tokens}"
            " cuts off the rest: raise it, or remove the row"
        )
    return tokens if max_tokens is None else min(tokens, max_tokens)
