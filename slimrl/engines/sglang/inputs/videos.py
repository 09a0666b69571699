"""Videos in requests to SGLang servers, as the trainer sees them.

SGLang reads a video file itself, with frames and sizes of its own choice, and computes other positions than
transformers. `payload` sends the chosen frames instead, with the tokens, their places and positions; SGLang calls that
the output of a processor, and takes it over HTTP only without tensors. `install` runs inside the server
(`engines.sglang.entry`) and makes the tensors of the frames, with the trainer's own code.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from typing import Any

from slimrl.engines.prompt_images import PromptImages

IMAGES, VIDEOS = "slimrl_images", "slimrl_videos"  # keys of an item: what is seen, without tensors


def payload(input_ids: list[int], images: PromptImages) -> dict[str, Any]:
    """The entries of a request to `/generate` with these tokens and images."""
    if images.videos is None:
        return {"input_ids": images.one_each(input_ids), "image_data": images.data}
    following = max(axis[-1] for axis in images.videos.positions) + 1
    common = {
        "format": "processor_output",
        "mrope_positions": images.videos.positions,
        "mrope_position_delta": following - len(input_ids),
    }
    videos = {**common, VIDEOS: images.videos.data, "offsets": images.videos.video_runs}
    found: dict[str, Any] = {"input_ids": input_ids, "video_data": [videos]}
    if images.data:
        found["image_data"] = [{**common, IMAGES: images.data, "offsets": images.videos.image_runs}]
    return found


def install(folder: str) -> None:
    """Makes this server, of the model in `folder`, take the items of `payload`."""
    from sglang.srt.multimodal.processors.base_processor import BaseMultimodalProcessor

    from slimrl.rollout.dataset.images import ImageProcessor

    processor = functools.cache(lambda: ImageProcessor(folder))
    collect = BaseMultimodalProcessor.collect_mm_items_from_processor_output

    def with_tensors(self: Any, item: Mapping[str, Any], modality: Any = None) -> Any:
        return collect(self, tensors(processor(), item) if {IMAGES, VIDEOS} & set(item) else item, modality)

    BaseMultimodalProcessor.collect_mm_items_from_processor_output = with_tensors


def tensors(processor: Any, item: Mapping[str, Any]) -> dict[str, Any]:
    """An item of `payload` with the tensors of transformers' model in the place of images and videos.

    SGLang's tower of Qwen2.5-VL attends to all frames of a video at once in its blocks without windows, where
    transformers' (and the trainer's) attends to each patch in time alone: it gets these as images of their own.
    """
    from slimrl.data.images.batch import SECONDS, VIDEO_GRIDS, by_frames
    from slimrl.rollout.dataset.videos import Video

    inputs = processor.train_inputs(tuple(item.get(IMAGES) or ()), tuple(map(Video.of, item.get(VIDEOS) or ())))
    if SECONDS in inputs:
        inputs = {**inputs, VIDEO_GRIDS: by_frames(inputs[VIDEO_GRIDS])}
    inputs = {name: value for name, value in inputs.items() if name != SECONDS}  # the positions are given
    return {"format": item["format"], "offsets": item["offsets"], **inputs}
