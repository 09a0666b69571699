"""Reads the images of prompts with transformers' image processor, for training, and sends them to the engines.

An image is decoded and resized once, in another process (`image_decoder`); engines get its pixels as a PNG in a data
URI, and training the tensors that the model's own processor makes of the same pixels. A prompt has one token per image
or video until `expanded` gives each all of its own (`videos` has what differs of videos).

`SampleImages` adds the images of samples to the requests of the built-in generation and of custom generate functions.
"""

from __future__ import annotations

import base64
import dataclasses
import functools
import http.client
import json
import os
import time
import urllib.request
from array import array
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimrl.data.images import IMAGES, PLACEHOLDER, VIDEO, ImageColumn, image_items, item_fault, stored_bytes
from slimrl.data.images.batch import GRIDS, PIXELS, VIDEO_PIXELS, BatchImages, image_runs, mrope_positions
from slimrl.data.sample import Sample
from slimrl.engines.prompt_images import PromptImages, PromptVideos, with_images
from slimrl.engines.protocol import EngineClient, Generation
from slimrl.models.families.vision import VisionTokens
from slimrl.rollout.dataset.image_decoder import ImageDecoders, ImageSize, open_image, png_of
from slimrl.rollout.dataset.videos import Video, VideoProcessor, videos_of

if TYPE_CHECKING:
    from PIL.Image import Image

MAX_BYTES = 256 << 20  # of a downloaded one, and of a video
DOWNLOAD_TIMEOUT_S = 30.0  # without an answer, and without the next bytes of it
DOWNLOAD_LIMIT_S = 120.0  # for all of them
MAX_DECODERS = 8  # processes that decode at once
_PART_BYTES = 1 << 20  # of a download
_REMEMBERED_PROMPTS = 64
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
        self._folder = folder
        # of `train_inputs`: answers share their images
        self._last: tuple[tuple[tuple[str, ...], tuple[Video, ...]], dict[str, Any]] = (((), ()), {})

    @functools.cached_property
    def videos(self) -> VideoProcessor:
        """The model's video processor."""
        return VideoProcessor(self._folder)

    def read_video(self, item: Any) -> Video:
        """The video of a column's item. Raises ValueError, worded to follow its name."""
        try:
            data = stored_bytes(item)
        except OSError as error:
            raise ValueError(f"cannot be read ({type(error).__name__}: {error})") from error
        data = _downloaded(item) if data is None else data
        if len(data) > MAX_BYTES:
            raise ValueError(f"has {len(data)} bytes, more than {MAX_BYTES}: cut it, or scale it down")
        return self.videos.read(data)

    def read(self, item: Any) -> Image:
        """The image of an item, decoded in this process, in RGB. Raises ValueError, worded to follow its name."""
        return open_image(_stored(item))

    def decoded(self, item: Any) -> tuple[str, int]:
        """A column's item, decoded and resized in another process: a data URI of it, and the number of tokens.

        Raises ValueError, worded to follow its name.
        """
        found = self._decoders.decode(_stored(item))
        return _uri(found.png), self.count(found.height, found.width)

    @functools.cached_property
    def _decoders(self) -> ImageDecoders:
        own, size = self._processor, None
        if own.do_resize:
            limits = own.size["shortest_edge"], own.size["longest_edge"]
            size = ImageSize(own.patch_size * own.merge_size, *limits, int(own.resample))
        return ImageDecoders(_at_once(), size=size)

    def of_row(
        self, row: Mapping[str, Any], column: ImageColumn
    ) -> tuple[list[int], tuple[str, ...], tuple[Video, ...]]:
        """The number of tokens of each image of a row, the images, and the videos. Raises ValueError for a bad one."""
        counts, uris, videos = [], [], []
        for kind, key in column.keys.items():
            for number, item in enumerate(image_items(row, column, kind)):
                try:
                    if kind == VIDEO:
                        videos.append(self.read_video(item))
                        continue
                    uri, count = self.decoded(item)
                except ValueError as error:
                    raise ValueError(f"{key}[{number}] (--multimodal-keys) {error}") from error
                uris.append(uri)
                counts.append(count)
        return counts, tuple(uris), tuple(videos)

    def of_rows(
        self, rows: Sequence[Any], column: ImageColumn
    ) -> list[Callable[[], tuple[list[int], tuple[str, ...], tuple[Video, ...]]] | None]:
        """For each row what returns or raises as `of_row`; None for a row that is no dict.

        Images and videos of several rows are decoded at once.
        """
        own = [row if isinstance(row, dict) else None for row in rows]
        with ThreadPoolExecutor(_at_once()) as pool:
            return [None if row is None else pool.submit(self.of_row, row, column).result for row in own]

    def count(self, height: int, width: int) -> int:
        """The number of an image's tokens. Raises ValueError for a shape that the model does not take."""
        patches: int = self._processor.get_number_of_image_patches(height, width, {})
        return patches // self.tokens.merge_size**2

    def expanded(
        self, token_ids: Sequence[int], counts: Sequence[int], videos: Sequence[Sequence[int]] = ()
    ) -> tuple[list[int], list[int]]:
        """The tokens with those of each image, `counts` of them, and of each video; and their places in `token_ids`.

        Raises ValueError unless there is one token for each image and each video.
        """
        own: list[Sequence[int]] = [[self.tokens.image_token_id] * count for count in counts]
        by_place: dict[int, Sequence[int]] = {}
        for kind, token_id, tokens in (
            ("image", self.tokens.image_token_id, own),
            ("video", self.tokens.video_token_id, list(videos)),
        ):
            places = [place for place, token in enumerate(token_ids) if token == token_id]
            if len(places) != len(tokens):
                raise ValueError(
                    f"the rendered prompt has {len(places)} {kind} tokens ({token_id}) for {len(tokens)}"
                    f" {kind}s: the chat template of a vision-language model gives each one"
                )
            by_place |= zip(places, tokens, strict=True)
        pairs = [(new, place) for place, token in enumerate(token_ids) for new in by_place.get(place, (token,))]
        return [token for token, _ in pairs], [place for _, place in pairs]

    def expand(
        self, token_ids: Sequence[int], counts: Sequence[int], videos: Sequence[Sequence[int]] = ()
    ) -> array[int]:
        """The tokens of `expanded`."""
        return array("I", self.expanded(token_ids, counts, videos)[0])

    def expand_all(
        self, token_ids: Sequence[int], counts: Sequence[int], videos: Sequence[Video], tokenizer: Any
    ) -> array[int]:
        """`expand` with the tokens of these videos."""
        return self.expand(token_ids, counts, [self.videos.token_ids(video, tokenizer) for video in videos])

    def image_starts(self, token_ids: Sequence[int], places: Sequence[int]) -> list[int]:
        """The first token of each image; `token_ids` are expanded, and `places` those of `expanded`."""
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
                uri, count = self.decoded(item)
            except ValueError as error:
                raise ValueError(f"its image {number} {error}") from error
            uris.append(uri)
            counts.append(count)
        start, end = self._around
        place = "".join(tokenizer.convert_ids_to_tokens([start, self.tokens.image_token_id, end]))
        ids = tokenizer(place.join(pieces), add_special_tokens=False)["input_ids"]
        ids, places = self.expanded(ids, counts)
        return SeenText(ids, self.image_starts(ids, places), tuple(uris))

    def train_inputs(self, uris: Sequence[str], videos: Sequence[Video] = ()) -> dict[str, Any]:
        """What transformers' model takes: the pixel values and grids of all images end to end, and of all videos."""
        key, last = (tuple(uris), tuple(videos)), self._last
        if key == last[0]:
            return last[1]
        inputs: dict[str, Any] = {}
        if uris:
            found = self._processor(images=[self.read(uri) for uri in uris], return_tensors="pt")
            inputs |= {PIXELS: found[PIXELS], GRIDS: found[GRIDS]}
        inputs |= self.videos.train_inputs(videos) if videos else {}
        self._last = key, inputs  # an engine's server calls this in several threads
        return inputs


def data_uri(image: Image) -> str:
    """The image, pixel by pixel, as a data URI."""
    return _uri(png_of(image))


def _uri(png: bytes) -> str:
    return _PREFIX + base64.b64encode(png).decode("ascii")


def _at_once() -> int:
    return min(MAX_DECODERS, len(os.sched_getaffinity(0)))


def _stored(item: Any) -> bytes:
    """The file of a column's image. Raises ValueError, worded to follow its name."""
    try:
        data = stored_bytes(item)
    except OSError as error:
        raise ValueError(f"cannot be read as an image ({type(error).__name__}: {error})") from error
    return _downloaded(item) if data is None else data


def _downloaded(url: str) -> bytes:
    """Raises ValueError for a download that fails, is too large or takes too long."""
    data, latest = bytearray(), time.monotonic() + DOWNLOAD_LIMIT_S
    try:
        with urllib.request.urlopen(url, timeout=DOWNLOAD_TIMEOUT_S) as response:
            while part := response.read1(_PART_BYTES):
                data += part
                if len(data) > MAX_BYTES:
                    raise ValueError(f"more than {MAX_BYTES} bytes: use a smaller one")
                if time.monotonic() > latest:
                    raise TimeoutError(f"{len(data)} bytes in {DOWNLOAD_LIMIT_S:g} s")
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise ValueError(f"cannot be downloaded from {url} ({error})") from error
    return bytes(data)


def training_inputs(samples: Sequence[Sample], folder: str | None) -> list[Mapping[str, Any] | None]:
    """The tensors of each sample's images for training, None for one without; samples with equal images share them.

    `folder` has the model's processor. Raises ValueError for a sample with images and a model of text, and for one with
    other images in its tokens, as a custom function may return.
    """
    processor: ImageProcessor | None = None
    made: dict[tuple[tuple[str, ...], tuple[Video, ...]], Mapping[str, Any]] = {}
    found: list[Mapping[str, Any] | None] = []
    for sample in samples:
        key = images_of(sample), videos_of(sample.multimodal_inputs)
        if sample.multimodal_train_inputs is not None or not any(key):
            found.append(sample.multimodal_train_inputs)
            continue
        if folder is None:
            raise ValueError(f"sample {sample.index} has images, and --hf-checkpoint is no vision-language model")
        processor = processor or ImageProcessor(folder)
        if key not in made:
            made[key] = processor.train_inputs(*key)
        _positions(sample, sample.tokens, made[key], processor.tokens)
        found.append(made[key])
    return found


def _positions(
    sample: Sample, token_ids: Sequence[int], inputs: Mapping[str, Any], vision: VisionTokens
) -> tuple[Any, BatchImages]:
    """The rotary positions of a sample's tokens, and its images. Raises ValueError for other images in the tokens."""
    import torch  # not in the driver

    try:
        images = BatchImages.of_samples([inputs], [sample.multimodal_inputs])
        assert images is not None  # the caller has looked
        return mrope_positions(
            torch.tensor(token_ids),
            sample.prompt_length,
            images.grids,
            vision,
            images.starts.tolist(),
            images.seconds_of_samples()[0],
        ), images
    except ValueError as error:
        raise ValueError(
            f"sample {sample.index}: {error}; append images with multi_turn_generate or append_seen_text"
        ) from error


def images_of(sample: Sample) -> tuple[str, ...]:
    """The data URIs of a sample's images."""
    return tuple((sample.multimodal_inputs or {}).get(IMAGES) or ())


class SampleImages:
    """The images that requests have, and what custom functions get, of the model in `folder`; None: a model of text."""

    def __init__(self, folder: str | None) -> None:
        self._folder = folder
        vision = None
        if folder is not None:
            vision = VisionTokens.of(json.loads((Path(folder) / "config.json").read_text(encoding="utf-8")))
        self._tokens = vision
        # the samples of a prompt have the same
        self._grids = functools.lru_cache(maxsize=_REMEMBERED_PROMPTS)(self._without_pixels)

    def _without_pixels(self, uris: tuple[str, ...], videos: tuple[Video, ...]) -> dict[str, Any]:
        """`ImageProcessor.train_inputs` without the values of patches, which are the work."""
        import torch

        assert self.processor is not None
        grids = {GRIDS: self.processor.train_inputs(uris)[GRIDS], PIXELS: torch.empty(0, 1)} if uris else {}
        return {**grids, **self.processor.videos.grids(videos), VIDEO_PIXELS: torch.empty(0, 1)}

    def of(self, sample: Sample, input_ids: Sequence[int] | None = None) -> dict[str, PromptImages]:
        """The keyword of `EngineClient.generate`, whose tokens are `input_ids`, or those of the sample.

        Raises ValueError for images and a model of text.
        """
        uris, videos = images_of(sample), videos_of(sample.multimodal_inputs)
        if not uris and not videos:
            return {}
        if self._tokens is None:
            raise ValueError("the sample has images, and --hf-checkpoint is no vision-language model")
        if not videos:
            return with_images(PromptImages(uris, self._tokens.image_token_id))
        ids = sample.tokens if input_ids is None else input_ids
        return with_images(PromptImages(uris, self._tokens.image_token_id, self._placed(sample, ids, uris, videos)))

    def _placed(
        self, sample: Sample, input_ids: Sequence[int], uris: tuple[str, ...], videos: tuple[Video, ...]
    ) -> PromptVideos:
        """The videos with the places of everything that is seen: an engine would compute other ones."""
        assert self._tokens is not None and self.processor is not None
        positions, images = _positions(sample, input_ids, self._grids(uris, videos), self._tokens)
        runs = image_runs(positions.new_tensor(input_ids), sample.prompt_length, images, self._tokens)
        return PromptVideos(
            tuple(video.stored() for video in videos), positions.tolist(), image_runs=runs[0], video_runs=runs[1]
        )

    def engine_of(self, engine: EngineClient, sample: Sample) -> EngineClient:
        """The engine of a custom function that generates `sample`."""
        return engine if self._tokens is None else EngineOfSample(engine, sample, self)

    @functools.cached_property
    def processor(self) -> ImageProcessor | None:
        """For `multi_turn_generate`."""
        return None if self._folder is None else ImageProcessor(self._folder)


class EngineOfSample:
    """An `EngineClient` whose requests have the images of `sample`: those of the prompt, and those appended since."""

    def __init__(self, engine: EngineClient, sample: Sample, images: SampleImages) -> None:
        self._engine, self._sample, self._images = engine, sample, images

    async def generate(
        self,
        input_ids: list[int],
        sampling_params: dict[str, Any],
        session_id: str | None = None,
        images: PromptImages | None = None,
    ) -> Generation:
        """See `EngineClient`. Raises ValueError if `input_ids` have another number of images."""
        own = self._images.of(self._sample, input_ids) if images is None else with_images(images)
        return await self._engine.generate(input_ids, sampling_params, session_id, **own)

    async def ask(self, path: str, payload: dict[str, Any], session_id: str | None = None) -> Any:
        """See `EngineClient`. Raises ValueError for a sample with images."""
        if images_of(self._sample) or videos_of(self._sample.multimodal_inputs):
            raise ValueError(
                f"a request to {path} would leave out the sample's images: call engine.generate (`engine` is a keyword"
                " of the function), which adds them"
            )
        return await self._engine.ask(path, payload, session_id)

    async def abort_all(self) -> None:
        """See `EngineClient`."""
        await self._engine.abort_all()
