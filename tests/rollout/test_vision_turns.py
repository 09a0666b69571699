"""Several turns with images of a tool: what engine and sample get, and what is refused by name."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from slimrl.data.sample import Sample, SampleStatus
from slimrl.engines.protocol import Generation, PromptImages
from slimrl.rollout.dataset.images import ImageProcessor, SampleImages, data_uri, images_of, training_inputs
from slimrl.rollout.dataset.prompt_dataset import PromptTokenizer
from slimrl.rollout.generation.multi_turn import ToolOutput, multi_turn_generate
from slimrl.tiny.models import IMAGE_PAD, VIDEO_PAD
from tests.rollout.test_image_prompts import QUESTION, folder, form, picture, tokenizer, uri  # noqa: F401

PARAMS = {"stop": None, "max_new_tokens": 200, "skip_special_tokens": False, "spaces_between_special_tokens": False}
SECOND = data_uri(picture(56, 56, seed=1))  # 2 x 2 tokens
ASK = ToolOutput("\nand<image>now?", [SECOND])


class Engine:
    """Answers each request with the next of `answers`; keeps what it was asked."""

    def __init__(self, *answers: list[int]) -> None:
        self.answers = list(answers)
        self.finish_reason = "stop"
        self.asked: list[tuple[list[int], PromptImages | None]] = []

    async def generate(
        self, input_ids: list[int], params: dict[str, Any], session_id: Any = None, images: PromptImages | None = None
    ) -> Generation:
        self.asked.append((list(input_ids), images))
        ids = self.answers.pop(0)
        return Generation(ids, [-1.0] * len(ids), self.finish_reason, "1", "")

    async def ask(self, path: str, payload: dict[str, Any], session_id: str | None = None) -> Any:
        return {"asked": path}


@pytest.fixture
def sample(folder: Path, tokenizer: Any) -> Sample:  # noqa: F811
    row = {"prompt": [{"role": "user", "content": QUESTION}], "images": [uri(picture(84, 56))]}
    (made,) = PromptTokenizer(form(folder), tokenizer).make([row], ["rows.jsonl:1"])
    return made.sample(group_index=0, index=0)


def play(
    sample: Sample,
    engine: Engine,
    tokenizer: Any,  # noqa: F811
    folder: Path,  # noqa: F811
    *outputs: Any,
    with_processor: bool = True,
    **changes: Any,
) -> Sample:
    """The sample after turns that end with "=", and these outputs of the tool."""
    left = list(outputs)

    async def tool(call: str) -> Any:
        return left.pop(0) if left else None

    return asyncio.run(
        multi_turn_generate(
            sample,
            PARAMS | changes,
            engine=SampleImages(str(folder)).engine_of(engine, sample),
            tokenizer=tokenizer,
            tool=tool,
            stop=["="],
            max_calls=5,
            image_processor=ImageProcessor(str(folder)) if with_processor else None,
        )
    )


def test_next_request_has_the_earlier_tokens_and_all_images(sample, folder, tokenizer):  # noqa: F811
    prompt, first = list(sample.tokens), images_of(sample)
    odd = tokenizer("=", add_special_tokens=False)["input_ids"]
    answer = [*tokenizer("1", add_special_tokens=False)["input_ids"], *odd]
    engine = Engine(answer, answer, answer)
    play(sample, engine, tokenizer, folder, ASK, "plain")
    image = tokenizer.convert_tokens_to_ids(IMAGE_PAD)
    shown = tokenizer("\nand<|vision_start|>" + IMAGE_PAD * 4 + "<|vision_end|>now?", add_special_tokens=False)
    plain = tokenizer("plain", add_special_tokens=False)["input_ids"]
    second = [*prompt, *answer, *shown["input_ids"]]
    assert [ids for ids, _ in engine.asked] == [prompt, second, [*second, *answer, *plain]]
    assert [seen.data for _, seen in engine.asked] == [first, (*first, SECOND), (*first, SECOND)]
    one_each = engine.asked[1][1].one_each(engine.asked[1][0])
    assert one_each.count(image) == 2
    response = sample.tokens[sample.prompt_length :]
    assert sample.multimodal_inputs["response_starts"] == [response.index(image)]
    assert [token for token, trained in zip(response, sample.loss_mask, strict=True) if trained] == answer * 3
    assert Sample.from_dict(sample.to_dict()).multimodal_inputs == sample.multimodal_inputs


def test_output_with_an_image_that_does_not_fit_is_left_out(sample, folder, tokenizer):  # noqa: F811
    answer = tokenizer("1=", add_special_tokens=False)["input_ids"]
    play(sample, Engine(answer), tokenizer, folder, ASK, max_new_tokens=len(answer) + 10)
    assert sample.status is SampleStatus.TRUNCATED and sample.tokens[sample.prompt_length :] == answer
    assert len(images_of(sample)) == 1


def test_sample_aborted_after_an_image_continues_with_all_images(sample, folder, tokenizer):  # noqa: F811
    answer, half = (tokenizer(text, add_special_tokens=False)["input_ids"] for text in ("1=", "1"))
    play(sample, Engine(answer, answer), tokenizer, folder, ASK)
    aborted = Engine(half)
    aborted.finish_reason = "abort"
    play(sample, aborted, tokenizer, folder)
    assert sample.status is SampleStatus.ABORTED
    tokens, given = list(sample.tokens), dict(sample.multimodal_inputs)
    later, engine = Sample.from_dict(sample.to_dict()), Engine(answer)  # as from the buffer
    play(later, engine, tokenizer, folder)
    ((asked, seen),) = engine.asked
    assert asked == tokens and seen.data == (*images_of(sample)[:1], SECOND)
    assert later.multimodal_inputs == given and later.status is SampleStatus.COMPLETED


@pytest.mark.parametrize("token", [IMAGE_PAD, VIDEO_PAD])
def test_sampled_token_of_an_image_or_a_video_ends_the_sample(token, sample, folder, tokenizer):  # noqa: F811
    answer = tokenizer(f"{token}=", add_special_tokens=False)["input_ids"]
    engine = Engine(answer)
    play(sample, engine, tokenizer, folder, ASK)
    assert sample.status is SampleStatus.COMPLETED and len(engine.asked) == 1 and len(images_of(sample)) == 1


@pytest.mark.parametrize(
    ("output", "fault"),
    [
        (ToolOutput("no place", [SECOND]), "its text has 0 places for images (<image>) and 1 images"),
        (ToolOutput("<image>", ["nowhere.png"]), "its image 0 is 'nowhere.png', which is no existing file"),
        (ToolOutput("<image>", [3]), "its image 0 is of type int"),
        (ToolOutput("<image>", ["data:image/png;base64,AAAA"]), "its image 0 cannot be read as an image"),
        (ToolOutput(f"<image>{IMAGE_PAD}", [SECOND]), "has 2 image tokens"),
    ],
    ids=str,
)
def test_bad_images_of_a_tool_are_named(output, fault, sample, folder, tokenizer):  # noqa: F811
    answer = tokenizer("1=", add_special_tokens=False)["input_ids"]
    with pytest.raises(ValueError) as error:
        play(sample, Engine(answer), tokenizer, folder, output)
    assert str(error.value).startswith("the tool's output cannot be appended: ") and fault in str(error.value)


def test_sample_whose_tokens_have_other_images_is_named(sample, folder, tokenizer):  # noqa: F811
    answer = tokenizer("1=", add_special_tokens=False)["input_ids"]
    play(sample, Engine(answer, answer), tokenizer, folder, ASK)
    (made,) = training_inputs([sample], str(folder))
    assert made is not None and made["image_grid_thw"].tolist() == [[1, 4, 6], [1, 4, 4]]
    sample.multimodal_inputs["response_starts"][0] += 1
    with pytest.raises(ValueError, match="sample 0: the response tokens from 8 on are not the 4 of one image; append"):
        training_inputs([sample], str(folder))
    sample.multimodal_inputs = {"images": list(images_of(sample))}
    with pytest.raises(ValueError, match="sample 0: the prompt has 6 image tokens, and its 2 images have 10; append"):
        training_inputs([sample], str(folder))


def test_images_without_a_processor_are_refused(sample, folder, tokenizer):  # noqa: F811
    answer = tokenizer("1=", add_special_tokens=False)["input_ids"]
    with pytest.raises(ValueError, match="the tool's output has images: give multi_turn_generate the image_processor"):
        play(sample, Engine(answer), tokenizer, folder, ASK, with_processor=False)


def test_raw_request_that_would_leave_out_images_is_refused(sample, folder):  # noqa: F811
    engine = SampleImages(str(folder)).engine_of(Engine(), sample)
    with pytest.raises(ValueError, match="a request to /generate would leave out the sample's images: call engine"):
        asyncio.run(engine.ask("/generate", {}))
    text = Sample("p", tokens=[1, 2])
    assert asyncio.run(SampleImages(str(folder)).engine_of(Engine(), text).ask("/generate", {})) == {
        "asked": "/generate"
    }
