"""Several turns with images: after an answer the environment shows a part of the picture, enlarged, and asks again.

    --custom-generate-function-path examples.look_again.generate --multimodal-keys '{"image": "images"}'
    --custom-rm-path examples.look_again.last_answer_is_right --rm-type math

For a vision-language model with ChatML turns (Qwen2.5-VL, Qwen3-VL). The left half of the prompt's first picture comes
after the first answer, the right half after the second; the third answer ends the sample, and is graded alone. Only the
model's own tokens are trained on.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

from slimrl.arguments import Arguments
from slimrl.data.sample import Sample
from slimrl.engines.protocol import EngineClient
from slimrl.rollout.dataset.images import ImageProcessor, data_uri, images_of
from slimrl.rollout.generation.multi_turn import TURN_STARTS, ToolOutput, multi_turn_generate
from slimrl.rollout.rm_hub import async_rm

END = "<|im_end|>"
TURN = "<|im_start|>assistant\n"
MESSAGE = f"\n<|im_start|>user\n<image>again?{END}\n{TURN}"
LOOKS = 2


async def generate(
    args: Arguments,
    sample: Sample,
    sampling_params: dict[str, Any],
    *,
    engine: EngineClient | None = None,
    tokenizer: Any = None,
    image_processor: ImageProcessor | None = None,
) -> Sample:
    """One sample of up to `LOOKS` + 1 answers. Raises ValueError for a prompt without an image."""
    if image_processor is None or not images_of(sample):
        raise ValueError("examples.look_again needs a vision-language model and prompts with images: --multimodal-keys")
    return await multi_turn_generate(
        sample,
        {**sampling_params, "skip_special_tokens": False},  # the end of a turn is the call of the environment
        engine=engine,
        tokenizer=tokenizer,
        tool=functools.partial(show, sample, image_processor),
        stop=[END],
        max_calls=LOOKS,
        image_processor=image_processor,
    )


async def show(sample: Sample, image_processor: ImageProcessor, answer: str) -> ToolOutput | None:
    """The next half of the picture, in the size of the whole; None after the last."""
    look = len(sample.metadata[TURN_STARTS]) - 1
    if look == LOOKS:
        return None
    picture = image_processor.read(images_of(sample)[0])
    middle = picture.width // 2
    half = picture.crop((look * middle, 0, look * middle + middle, picture.height))
    return ToolOutput(MESSAGE, [data_uri(half.resize(picture.size))])


async def last_answer_is_right(args: Arguments, sample: Sample) -> Any:
    """The reward of the last turn by --rm-type; 0 for a sample that ended before it."""
    last = sample.response.rpartition(TURN)[2]
    if sample.response.count(TURN) < LOOKS or not last.endswith(END):
        return 0.0
    return await async_rm(args, dataclasses.replace(sample, response=last.removesuffix(END)))
