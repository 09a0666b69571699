"""Images of samples on their way to the engines: of the built-in generation, and of custom generate functions."""

from __future__ import annotations

import functools
from typing import Any

from slimrl.data.sample import Sample
from slimrl.engines.protocol import EngineClient, Generation, PromptImages, with_images
from slimrl.rollout.dataset.images import ImageProcessor, image_token_id, images_of, prompt_images


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
