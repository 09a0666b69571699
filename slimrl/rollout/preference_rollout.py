"""Preferences as a rollout function: each row of --prompt-data is a group of samples, its answers.

    --rollout-function-path slimrl.rollout.preference_rollout.generate_rollout --loss-type preference_loss
    --n-samples-per-prompt 2 --debug-train-only

or with --loss-type reward_model_loss; with --n-samples-per-prompt 4 a row has three rejected answers; and with

    --preference-loss kto --n-samples-per-prompt 1 --label-key label

a row has one answer and its label.

A row has a prompt (`--input-key`), a preferred and a rejected answer (`--chosen-key`, `--rejected-key`), or an answer
(`--completion-key`) and whether it is desirable; see `slimrl.data.preference_pairs`. Messages are rendered with the
chat template once as a whole, prompt and answer, as in supervised training, and the assistant's turns of the answer are
trained on, including the end-of-turn marker. Plain text is tokenized as prompt and answer, the answer with the
tokenizer's end token. Images of --multimodal-keys are in the messages of the prompt. `--rollout-max-context-len` cuts
longer answers at their end (metric rollout/truncated_ratio).

The first sample of a group is the preferred answer (reward 1; for a reward model the margin of the row), the others are
the rejected ones (reward 0). A labelled answer has reward 1 if it is desirable, else 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slimrl.arguments.eval_datasets import eval_prompt_format
from slimrl.arguments.namespace import EvalDataset, PromptArguments
from slimrl.data.preference_pairs import PAIR_KEY, SIDES, answers_of
from slimrl.data.prompt_format import PLACE_KEY
from slimrl.data.sample import Sample, SampleStatus
from slimrl.hooks.contracts import RunArguments
from slimrl.rollout.dataset.data_source import RolloutDataSource
from slimrl.rollout.dataset.images import ImageProcessor, training_inputs
from slimrl.rollout.dataset.prompt_dataset import load_prompts
from slimrl.rollout.rollout_function import RolloutOutput
from slimrl.rollout.sft_rollout import fill_conversation, image_processor, kept_tokens

if TYPE_CHECKING:
    from slimrl.data.train_batch import RolloutBatch

SIDE_KEY = "preference"  # of Sample.metadata: the side of its pair


def generate_rollout(
    args: RunArguments,
    rollout_id: int,
    data_source: RolloutDataSource,
    *,
    evaluation: bool = False,
    tokenizer: Any = None,
) -> RolloutOutput:
    """The next `--rollout-batch-size` pairs, tokenized, with their loss masks.

    `tokenizer` is the run's, a fast one. Raises ValueError if called for an evaluation, and for a pair that cannot be
    trained on.
    """
    if evaluation:
        raise ValueError("training evaluates held-out pairs itself, with --debug-train-only")
    groups = data_source.get_samples(args.rollout_batch_size)
    processor = image_processor(args.vision_folder if args.multimodal_keys else None)
    for group in groups:
        _fill_pair(
            group,
            tokenizer,
            args.loss_mask_type,
            args.apply_chat_template_kwargs,
            reward=0.0 if args.trains_reward_model else 1.0,
            max_tokens=args.rollout_max_context_len,
            processor=processor,
        )
    return RolloutOutput(groups, {})


def held_out_pairs(args: PromptArguments, dataset: EvalDataset, tokenizer: Any) -> RolloutBatch:
    """All rows of an evaluation set, a sample for each answer, without a schedule.

    Raises InvalidRowsError with every bad row, ValueError for a pair that cannot be scored.
    """
    import torch  # not in the driver, which only looks for `generate_rollout`

    from slimrl.data.train_batch import batch_from_samples

    form = eval_prompt_format(args, dataset)
    options = dataset.apply_chat_template_kwargs
    processor = image_processor(args.vision_folder if dataset.multimodal_keys else None)
    samples: list[Sample] = []
    for number, prompt in enumerate(load_prompts(dataset.path, form, tokenizer).prompts):
        places = range(len(samples), len(samples) + args.n_samples_per_prompt)
        group = [prompt.sample(group_index=number, index=place) for place in places]
        _fill_pair(
            group,
            tokenizer,
            args.loss_mask_type,
            options,
            flag=f"evaluation set {dataset.name}",
            max_tokens=dataset.max_context_len,
            processor=processor,
        )
        samples += group
    rewards = torch.tensor([sample.reward_value() for sample in samples])
    return batch_from_samples(samples, rewards, rewards, training_inputs(samples, args.vision_folder))


def _fill_pair(
    group: list[Sample],
    tokenizer: Any,
    mask_type: str,
    template_options: dict[str, Any],
    flag: str = "--prompt-data",
    reward: float = 1.0,
    max_tokens: int | None = None,
    processor: ImageProcessor | None = None,
) -> None:
    """Tokenizes a group; `reward` is that of the preferred answer in a row without a margin.

    Errors name the row, or the group of a custom data source. Tokens after `max_tokens` of a sample are cut off.
    `processor` is that of the images, which are in the prompt.
    """
    row, *_ = [sample.metadata.pop(PLACE_KEY, f"group {sample.group_index}") for sample in group]
    name = f"{flag}, {row}"
    if any(PAIR_KEY not in sample.metadata for sample in group):
        raise ValueError(
            f"{name} is not a pair: in a custom --data-source-path put both answers into metadata[{PAIR_KEY!r}]"
        )
    for place, sample in enumerate(group):
        pair = sample.metadata.pop(PAIR_KEY)
        try:
            answer = answers_of(pair, len(group))[place]
        except ValueError as error:
            raise ValueError(f"{name}: {error}") from None
        if isinstance(answer, str):
            _fill_text(sample, answer, tokenizer, name, max_tokens)
        else:
            sample.prompt = [_not_trained(message) for message in sample.prompt] + answer
            fill_conversation(sample, tokenizer, mask_type, template_options, name, max_tokens, processor)
        preferred = place == 0 and pair.get("label", True)
        sample.reward = float(pair.get("margin", reward)) if preferred else 0.0
        sample.metadata[SIDE_KEY] = SIDES[0 if preferred else 1]
    first, *others = group
    for second in others:
        if second.multimodal_inputs == first.multimodal_inputs:  # the batch has the images once
            second.multimodal_train_inputs = first.multimodal_train_inputs
        if first.tokens == second.tokens:
            cut = "" if max_tokens is None else f" (of the first {max_tokens}, by --rollout-max-context-len)"
            raise ValueError(f"{name}: two of its answers have the same tokens{cut}: remove it from the data")
        if first.tokens[: first.prompt_length] != second.tokens[: second.prompt_length]:
            raise ValueError(f"{name}: the chat template renders its prompt differently before its answers: remove it")


def _not_trained(message: Any) -> dict[str, Any]:
    """A message of the prompt: an earlier turn of the assistant is not trained on."""
    return {**message, "step_loss_mask": 0} if message["role"] == "assistant" else message


def _fill_text(sample: Sample, answer: str, tokenizer: Any, name: str, max_tokens: int | None) -> None:
    """Prompt and answer are tokenized apart, as in generation; the answer ends with the end token."""
    ids = tokenizer([sample.prompt, answer], add_special_tokens=False)["input_ids"]
    end = tokenizer.eos_token_id
    if not ids[0]:
        raise ValueError(f"{name}: its prompt has no token")
    if end is not None and ids[1][-1:] != [end]:
        ids[1].append(end)
    length = kept_tokens(name, len(ids[0]), len(ids[0]) + len(ids[1]), max_tokens)
    sample.status = SampleStatus.COMPLETED if length == len(ids[0]) + len(ids[1]) else SampleStatus.TRUNCATED
    ids[1] = ids[1][: length - len(ids[0])]
    sample.tokens = ids[0] + ids[1]
    sample.response_length = len(ids[1])
    sample.loss_mask = [1] * len(ids[1])
    sample.response = answer if sample.status is SampleStatus.COMPLETED else tokenizer.decode(ids[1])
    sample.rollout_log_probs = [0.0] * len(ids[1])  # not sampled, and no preference loss reads them
