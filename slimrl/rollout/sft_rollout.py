"""Supervised fine-tuning (SFT) as a rollout function: the conversations of --prompt-data are the samples.

    --rollout-function-path slimrl.rollout.sft_rollout.generate_rollout --loss-type sft_loss --debug-train-only

`--input-key` names the column of messages, `--tool-key` that of tool schemas. A sample's prompt ends before the
assistant's first turn. In the rest, the assistant's turns are trained on, including the end-of-turn marker;
`--loss-mask-type` tells how they are found (`slimrl.data.loss_mask`). A conversation is tokenized once as a whole, so
that its tokens are the same as in generation, with one mask entry per token. `--rollout-max-context-len` cuts longer
ones at their end (metric rollout/truncated_ratio). Images of --multimodal-keys have all of their tokens, none of which
is trained on; a cut drops images that it does not leave whole. With --loss-type reward_model_loss --reward-model-loss
mse the label of a conversation is its score.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from slimrl.arguments.eval_datasets import eval_prompt_format
from slimrl.arguments.namespace import EvalDataset, PromptArguments
from slimrl.data.images import IMAGES, RESPONSE_STARTS, VIDEO_RESPONSE_STARTS, VIDEOS, with_images
from slimrl.data.images.batch import GRIDS
from slimrl.data.loss_mask import MaskedConversation, masked_conversation
from slimrl.data.prompt_format import PLACE_KEY
from slimrl.data.sample import Sample, SampleStatus
from slimrl.hooks.contracts import RunArguments
from slimrl.rollout.dataset.data_source import RolloutDataSource
from slimrl.rollout.dataset.images import ImageProcessor, images_of, training_inputs
from slimrl.rollout.dataset.prompt_dataset import TOOLS_KEY, load_prompts
from slimrl.rollout.dataset.videos import videos_of
from slimrl.rollout.rollout_function import RolloutOutput

if TYPE_CHECKING:
    from slimrl.data.train_batch import RolloutBatch


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
    processor = image_processor(args.vision_folder if args.multimodal_keys else None)
    for sample in (sample for group in groups for sample in group):
        fill_conversation(
            sample,
            tokenizer,
            args.loss_mask_type,
            args.apply_chat_template_kwargs,
            max_tokens=args.rollout_max_context_len,
            processor=processor,
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
    processor = image_processor(args.vision_folder if dataset.multimodal_keys else None)
    for sample in samples:
        name = f"evaluation set {dataset.name}"
        fill_conversation(
            sample,
            tokenizer,
            args.loss_mask_type,
            dataset.apply_chat_template_kwargs,
            flag=name,
            max_tokens=dataset.max_context_len,
            processor=processor,
        )
        if args.trains_reward_model:
            sample.reward = float(sample.label)
    rewards = torch.tensor([sample.reward_value() for sample in samples])
    return batch_from_samples(samples, rewards, rewards, training_inputs(samples, args.vision_folder))


def image_processor(folder: str | None) -> ImageProcessor | None:
    """That of the model in `folder`; None without a folder."""
    return None if folder is None else ImageProcessor(folder)


def fill_conversation(
    sample: Sample,
    tokenizer: Any,
    mask_type: str,
    template_options: dict[str, Any],
    flag: str = "--prompt-data",
    max_tokens: int | None = None,
    processor: ImageProcessor | None = None,
) -> None:
    """Tokenizes the messages in `sample.prompt` and fills in response and loss mask; reward 0.

    `mask_type` is a --loss-mask-type, `template_options` are keyword arguments of the chat template. Tokens after
    `max_tokens` are cut off. `processor` is that of the sample's images. Raises ValueError, which names the row, or the
    sample of a custom data source, if there is nothing to train on.
    """
    name = f"{flag}, {sample.metadata.pop(PLACE_KEY, f'sample {sample.index}')}"
    messages = sample.prompt
    if not isinstance(messages, list):
        raise ValueError(f"{name} is text, not a list of messages: set --input-key to the column of messages")
    if processor is not None:
        messages = with_images(messages)
    try:
        conversation = masked_conversation(
            tokenizer, messages, mask_type, tools=sample.metadata.get(TOOLS_KEY), template_options=template_options
        )
        images = None if processor is None else _ImagesOf(sample, processor, conversation, tokenizer)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None
    conversation = conversation if images is None else images.conversation
    mask, offsets = conversation.mask, conversation.offsets
    if 1 not in mask:
        raise ValueError(f"{name} has no assistant message to train on: remove it from the data")
    first, length = mask.index(1), kept_tokens(name, mask.index(1), len(mask), max_tokens)
    if images is not None:
        length = images.keep(sample, first, length)
    sample.tokens = conversation.ids[:length]
    sample.response_length = length - first
    sample.loss_mask = mask[first:length]
    if offsets is None:
        sample.response = tokenizer.decode(sample.tokens[first:])
    else:
        sample.response = conversation.text[offsets[first][0] : offsets[length - 1][1]]
    sample.rollout_log_probs = [0.0] * sample.response_length  # not sampled, and no SFT loss reads them
    sample.reward = 0.0
    sample.status = SampleStatus.COMPLETED if length == len(mask) else SampleStatus.TRUNCATED


class _ImagesOf:
    """The images and videos of a conversation: `conversation` has all of their tokens."""

    def __init__(
        self, sample: Sample, processor: ImageProcessor, conversation: MaskedConversation, tokenizer: Any
    ) -> None:
        """Raises ValueError unless the rendered conversation has one token for each of the sample's images."""
        self._uris, self._videos = images_of(sample), videos_of(sample.multimodal_inputs)
        self._processor = processor
        counts = []
        if self._uris or self._videos:
            inputs = processor.train_inputs(self._uris, self._videos)
            sizes = inputs[GRIDS].prod(1).tolist() if self._uris else []
            counts = [size // processor.tokens.merge_size**2 for size in sizes]
        of_videos = [processor.videos.token_ids(video, tokenizer) for video in self._videos]
        ids, places = processor.expanded(conversation.ids, counts, of_videos)
        self.conversation = MaskedConversation(
            conversation.text,
            ids,
            [conversation.mask[place] for place in places],
            None if conversation.offsets is None else [conversation.offsets[place] for place in places],
        )
        kinds = {processor.tokens.image_token_id: IMAGES, processor.tokens.video_token_id: VIDEOS}
        first = {place: at for at, place in reversed(list(enumerate(places)))}
        last = {place: at for at, place in enumerate(places)}
        # (kind, first token, end) of each, in the order of the conversation
        self._extents = [
            (kinds[token], first[place], last[place] + 1)
            for place, token in enumerate(conversation.ids)
            if token in kinds
        ]
        video = processor.tokens.video_token_id
        self._video_runs = [at for at, token in enumerate(ids) if token == video and (at == 0 or ids[at - 1] != video)]

    def keep(self, sample: Sample, first: int, length: int) -> int:
        """Leaves the sample what its `length` tokens have whole; the response begins with token `first`.

        Returns the number of tokens before an image or a video that is not whole.
        """
        whole = sum(end <= length for _, _, end in self._extents)
        if whole < len(self._extents):
            length = min(length, self._extents[whole][1])
        kept = self._extents[:whole]
        images = [start for kind, start, _ in kept if kind == IMAGES]
        videos = self._videos[: len(kept) - len(images)]
        given: dict[str, Any] = {}
        if images:
            starts = [start - first for start in images if start >= first]
            given |= {IMAGES: list(self._uris[: len(images)]), RESPONSE_STARTS: starts}
        if videos:
            runs = [start - first for start in self._video_runs if first <= start < length]
            given |= {VIDEOS: [video.stored() for video in videos], VIDEO_RESPONSE_STARTS: runs}
        sample.multimodal_inputs = given or None
        uris = self._uris[: len(images)]
        sample.multimodal_train_inputs = self._processor.train_inputs(uris, videos) if given else None
        return length


def kept_tokens(name: str, prompt: int, tokens: int, max_tokens: int | None) -> int:
    """How many of the `tokens` of a sample `max_tokens` leaves; ValueError if its `prompt` alone has as many."""
    if max_tokens is not None and prompt >= max_tokens:
        raise ValueError(
            f"{name} has {prompt} tokens before the first one to train on, and --rollout-max-context-len {max_tokens}"
            " cuts off the rest: raise it, or remove the row"
        )
    return tokens if max_tokens is None else min(tokens, max_tokens)
