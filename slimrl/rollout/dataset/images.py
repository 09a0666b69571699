"""Reads the images of prompts with transformers' image processor, for training, and sends them to the engines.

An image is decoded once; engines get its pixels as a PNG in a data URI, and training the tensors that the model's own
processor makes of the same pixels. A prompt has one token per image until `expand` repeats it for every merged patch.

`SampleImages` adds the images of samples to the requests of the built-in generation and of custom generate functions.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import io
import json
import urllib.error
import urllib.request
import warnings
from array import array
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimrl.data.images import (
    GRIDS,
    IMAGES,
    IN_PROMPT,
    PIXELS,
    PLACEHOLDER,
    RESPONSE_STARTS,
    item_fault,
    mrope_positions,
    stored_bytes,
)
from slimrl.data.sample import Sample
from slimrl.engines.protocol import EngineClient, Generation, PromptImages, with_images
from slimrl.models.families.vision import VisionTokens

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_PIXELS = 100_000_000  # of a stored image; the processor scales it down to far fewer
MAX_BYTES = 256 << 20  # of a downloaded one
DOWNLOAD_TIMEOUT_S = 30.0
_PREFIX = "data:image/png;base64,"


@dataclasses.dataclass(frozen=True)
class SeenText:
    """Tokens of a text with all of its images' tokens, the first token of each image, and the images as data URIs."""

    token_ids: list[int]
    starts: list[int]
    images: tuple[str, ...]


class ImageProcessor:
    """The image processor of the model in `folder`."""

    def __init__(self, folder: str) -> None:
        """Raises OSError if the folder has no preprocessor_config.json, ValueError for a model without images."""
        # imported here: slow, and only vision-language models need it
        from transformers.models.auto.image_processing_auto import AutoImageProcessor

        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        vision = VisionTokens.of(config)
        if vision is None:
            raise ValueError(f"{folder} has no vision_config in config.json: give a vision-language model")
        self.tokens = vision
        self._around = config["vision_start_token_id"], config["vision_end_token_id"]
        self._processor = AutoImageProcessor.from_pretrained(folder, backend="pil")  # as the servers
        self._last: tuple[tuple[str, ...], dict[str, Any]] = ((), {})  # of `train_inputs`: answers share their images

    def read(self, item: Any) -> Image:
        """The image of a column's item, decoded, in RGB. Raises ValueError, worded to follow its name."""
        import PIL.Image

        try:
            data = stored_bytes(item)
            data = _downloaded(item) if data is None else data
            with warnings.catch_warnings():
                warnings.simplefilter("ignore", PIL.Image.DecompressionBombWarning)  # the limit below is closer
                image = PIL.Image.open(io.BytesIO(data))
            if image.width * image.height > MAX_PIXELS:
                raise ValueError(f"has {image.width} x {image.height} pixels, more than {MAX_PIXELS}: scale it down")
            image.load()
            return image if image.mode == "RGB" else image.convert("RGB")
        except (OSError, SyntaxError, PIL.Image.DecompressionBombError) as error:
            raise ValueError(f"cannot be read as an image ({type(error).__name__}: {error})") from error

    def count(self, image: Image) -> int:
        """The number of its tokens. Raises ValueError for a shape that the model does not take."""
        patches: int = self._processor.get_number_of_image_patches(image.height, image.width, {})
        return patches // self.tokens.merge_size**2

    def expand(self, token_ids: Sequence[int], counts: Sequence[int]) -> array[int]:
        """The tokens with that of each image as often as it has tokens. Raises ValueError unless each has one."""
        return array("I", [token_ids[place] for place in self.expanded_places(token_ids, counts)])

    def expanded_places(self, token_ids: Sequence[int], counts: Sequence[int]) -> list[int]:
        """For each token of `expand` its place in `token_ids`."""
        places = [place for place, token in enumerate(token_ids) if token == self.tokens.image_token_id]
        if len(places) != len(counts):
            raise ValueError(
                f"the rendered prompt has {len(places)} image tokens ({self.tokens.image_token_id}) for {len(counts)}"
                " images: the chat template of a vision-language model gives each one"
            )
        repeats = dict(zip(places, counts, strict=True))
        return [place for place in range(len(token_ids)) for _ in range(repeats.get(place, 1))]

    def image_starts(self, token_ids: Sequence[int], places: Sequence[int]) -> list[int]:
        """The first token of each image; `token_ids` are expanded, and `places` those of `expanded_places`."""
        begins = [at == 0 or places[at - 1] != place for at, place in enumerate(places)]
        return [at for at, token in enumerate(token_ids) if token == self.tokens.image_token_id and begins[at]]

    def tokenize(self, tokenizer: Any, text: str, items: Sequence[Any]) -> SeenText:
        """A message of a tool: `text` with a place `<image>` for each of `items`, which are as in prompt data.

        Raises ValueError for another number of places, and for an image that cannot be read.
        """
        pieces = text.split(PLACEHOLDER)
        if len(pieces) - 1 != len(items):
            raise ValueError(
                f"its text has {len(pieces) - 1} places for images ({PLACEHOLDER}) and {len(items)} images"
            )
        counts, uris = [], []
        for number, item in enumerate(items):
            try:
                if (fault := item_fault(item)) is not None:
                    raise ValueError(fault)
                image = self.read(item)
                counts.append(self.count(image))
            except ValueError as error:
                raise ValueError(f"its image {number} {error}") from error
            uris.append(data_uri(image))
        start, end = self._around
        place = "".join(tokenizer.convert_ids_to_tokens([start, self.tokens.image_token_id, end]))
        ids = tokenizer(place.join(pieces), add_special_tokens=False)["input_ids"]
        places = self.expanded_places(ids, counts)
        ids = [ids[place] for place in places]
        return SeenText(ids, self.image_starts(ids, places), tuple(uris))

    def train_inputs(self, uris: Sequence[str]) -> dict[str, Any]:
        """What transformers' model takes: `pixel_values` and `image_grid_thw` of all images end to end."""
        if tuple(uris) != self._last[0]:
            found = self._processor(images=[self.read(uri) for uri in uris], return_tensors="pt")
            self._last = tuple(uris), {PIXELS: found[PIXELS], GRIDS: found[GRIDS]}
        return self._last[1]


def data_uri(image: Image) -> str:
    """The image, pixel by pixel, as a data URI."""
    buffer = io.BytesIO()
    image.save(buffer, "PNG", compress_level=1)
    return _PREFIX + base64.b64encode(buffer.getvalue()).decode("ascii")


def _downloaded(url: str) -> bytes:
    """Raises ValueError for a failed or too large download."""
    try:
        with urllib.request.urlopen(url, timeout=DOWNLOAD_TIMEOUT_S) as response:
            data: bytes = response.read(MAX_BYTES + 1)
    except (urllib.error.URLError, TimeoutError, ValueError) as error:
        raise ValueError(f"cannot be downloaded from {url} ({error})") from error
    if len(data) > MAX_BYTES:
        raise ValueError(f"has more than {MAX_BYTES} bytes at {url}: use a smaller image")
    return data


def training_inputs(samples: Sequence[Sample], folder: str | None) -> list[Mapping[str, Any] | None]:
    """The tensors of each sample's images for training, None for one without; samples with equal images share them.

    `folder` has the model's processor. Raises ValueError for a sample with images and a model of text, and for one with
    other images in its tokens, as a custom function may return.
    """
    processor: ImageProcessor | None = None
    made: dict[tuple[str, ...], Mapping[str, Any]] = {}
    found: list[Mapping[str, Any] | None] = []
    for sample in samples:
        uris = images_of(sample)
        if sample.multimodal_train_inputs is not None or not uris:
            found.append(sample.multimodal_train_inputs)
            continue
        if folder is None:
            raise ValueError(f"sample {sample.index} has images, and --hf-checkpoint is no vision-language model")
        processor = processor or ImageProcessor(folder)
        if uris not in made:
            made[uris] = processor.train_inputs(uris)
        _check_places(sample, made[uris][GRIDS], processor.tokens)
        found.append(made[uris])
    return found


def _check_places(sample: Sample, grids: Any, vision: VisionTokens) -> None:
    import torch  # not in the driver

    starts = (sample.multimodal_inputs or {}).get(RESPONSE_STARTS) or []
    places = [*[IN_PROMPT] * (len(grids) - len(starts)), *starts]
    try:
        mrope_positions(torch.tensor(sample.tokens), sample.prompt_length, grids, vision, places)
    except ValueError as error:
        raise ValueError(
            f"sample {sample.index}: {error}; append images with multi_turn_generate or append_seen_text"
        ) from error


def image_token_id(folder: str | None) -> int | None:
    """The id of images' tokens of the model in `folder`; None for a model of text."""
    if folder is None:
        return None
    vision = VisionTokens.of(json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")))
    return None if vision is None else vision.image_token_id


def prompt_images(sample: Sample, token_id: int | None) -> PromptImages | None:
    """A sample's images for an engine. Raises ValueError for images and a model of text, without a `token_id`."""
    if not (uris := images_of(sample)):
        return None
    if token_id is None:
        raise ValueError("the sample has images, and --hf-checkpoint is no vision-language model")
    return PromptImages(uris, token_id)


def images_of(sample: Sample) -> tuple[str, ...]:
    """The data URIs of a sample's images."""
    return tuple((sample.multimodal_inputs or {}).get(IMAGES) or ())


class SampleImages:
    """The images that requests have, and what custom functions get, of the model in `folder`; None: a model of text."""

    def __init__(self, folder: str | None) -> None:
        self._folder = folder
        self._token_id = image_token_id(folder)

    def of(self, sample: Sample) -> dict[str, PromptImages]:
        """The keyword of `EngineClient.generate`. Raises ValueError for images and a model of text."""
        return with_images(prompt_images(sample, self._token_id))

    def engine_of(self, engine: EngineClient, sample: Sample) -> EngineClient:
        """The engine of a custom function that generates `sample`."""
        return engine if self._token_id is None else EngineOfSample(engine, sample, self._token_id)

    @functools.cached_property
    def processor(self) -> ImageProcessor | None:
        """For `multi_turn_generate`."""
        return None if self._folder is None else ImageProcessor(self._folder)


class EngineOfSample:
    """An `EngineClient` whose requests have the images of `sample`: those of the prompt, and those appended since."""

    def __init__(self, engine: EngineClient, sample: Sample, image_token_id: int) -> None:
        self._engine, self._sample, self._token_id = engine, sample, image_token_id

    async def generate(
        self,
        input_ids: list[int],
        sampling_params: dict[str, Any],
        session_id: str | None = None,
        images: PromptImages | None = None,
    ) -> Generation:
        """See `EngineClient`. Raises ValueError if `input_ids` have another number of images."""
        own = images or prompt_images(self._sample, self._token_id)
        return await self._engine.generate(input_ids, sampling_params, session_id, **with_images(own))

    async def ask(self, path: str, payload: dict[str, Any], session_id: str | None = None) -> Any:
        """See `EngineClient`. Raises ValueError for a sample with images."""
        if images_of(self._sample):
            raise ValueError(
                f"a request to {path} would leave out the sample's images: call engine.generate (`engine` is a keyword"
                " of the function), which adds them"
            )
        return await self._engine.ask(path, payload, session_id)

    async def abort_all(self) -> None:
        """See `EngineClient`."""
        await self._engine.abort_all()
