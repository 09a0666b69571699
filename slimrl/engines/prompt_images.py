"""The images and videos of a request to an engine (`slimrl.engines.protocol.EngineClient`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True)
class PromptVideos:
    """The videos of a prompt, and where everything that is seen stands in it.

    Each of `data` has "frames" (data URIs), "fps" and "seconds"; `positions` are the rotary ones [3, tokens]. A run is
    the first and the last token of an image, or of a video or a part of it.
    """

    data: tuple[Mapping[str, Any], ...]
    positions: list[list[int]]
    image_runs: Sequence[tuple[int, int]]
    video_runs: Sequence[tuple[int, int]]


@dataclasses.dataclass(frozen=True)
class PromptImages:
    """The images of a prompt as data URIs, and the id of their tokens, of which the prompt has all; and its videos."""

    data: tuple[str, ...]
    token_id: int
    videos: PromptVideos | None = None

    def one_each(self, input_ids: list[int]) -> list[int]:
        """`input_ids` with one token for each image.

        Raises ValueError unless there are as many runs of that token as images.
        """
        before = [None, *input_ids[:-1]]
        kept = [
            (one, one == self.token_id)
            for one, other in zip(input_ids, before, strict=True)
            if one != self.token_id or other != self.token_id
        ]
        if (runs := sum(image for _, image in kept)) != len(self.data):
            raise ValueError(
                f"the tokens have {runs} images (runs of token {self.token_id}) and the prompt {len(self.data)}: a"
                " response with that token cannot be continued"
            )
        return [one for one, _ in kept]


def with_images(images: PromptImages | None) -> dict[str, PromptImages]:
    """The keyword of `generate`; none without images, because custom clients may lack it."""
    return {} if images is None else {"images": images}
