"""Reads the videos of prompts as transformers' video processor of the model does, for training and for the engines.

A video is decoded once (`video_decoder`); its chosen frames, resized, are PNGs in data URIs from then on. Training and
the engines make the same patches of them. transformers' own class is not used: it needs torchvision.
"""

from __future__ import annotations

import base64
import dataclasses
import io
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimrl.data.images import VIDEOS
from slimrl.data.images.batch import SECONDS, VIDEO_GRIDS, VIDEO_PIXELS
from slimrl.models.families import family_for
from slimrl.models.families.vision import VisionTokens
from slimrl.rollout.dataset.video_decoder import FrameSettings, decode

if TYPE_CHECKING:
    from torch import Tensor

# where transformers looks for the settings of a video processor, the first one first
PROCESSOR, OWN, OF_IMAGES = "processor_config.json", "video_preprocessor_config.json", "preprocessor_config.json"
SAMPLED_FPS = 2.0
# the class attributes of transformers' video processors, without and with timestamps
_FRAMES = {"fps": SAMPLED_FPS, "min_frames": 4, "max_frames": 768, "temporal_patch_size": 2, "merge_size": 2}
_DEFAULTS: dict[bool, dict[str, Any]] = {
    False: _FRAMES
    | {
        "patch_size": 14,
        "size": {"shortest_edge": 128 * 28 * 28, "longest_edge": 768 * 28 * 28},
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
        "rescale_factor": 1 / 255,
    },
    True: _FRAMES
    | {
        "patch_size": 16,
        "size": {"shortest_edge": 128 * 32 * 32, "longest_edge": 768 * 32 * 32},
        "image_mean": [0.5] * 3,
        "image_std": [0.5] * 3,
        "rescale_factor": 1 / 255,
    },
}


@dataclasses.dataclass(frozen=True)
class Video:
    """The chosen frames of a video as data URIs, `fps` of them in a second, with the `seconds` at which each stands."""

    frames: tuple[str, ...]
    fps: float
    seconds: tuple[float, ...]

    def stored(self) -> dict[str, Any]:
        """As plain data, in `Sample.multimodal_inputs`."""
        return {"frames": list(self.frames), "fps": self.fps, "seconds": list(self.seconds)}

    @classmethod
    def of(cls, stored: Mapping[str, Any]) -> Video:
        """The inverse of `stored`."""
        return cls(tuple(stored["frames"]), float(stored["fps"]), tuple(stored["seconds"]))


def videos_of(given: Mapping[str, Any] | None) -> tuple[Video, ...]:
    """The videos of a sample's `multimodal_inputs`."""
    return tuple(map(Video.of, (given or {}).get(VIDEOS) or ()))


class VideoProcessor:
    """The video processor of the model in `folder`."""

    def __init__(self, folder: str) -> None:
        """Raises OSError if the folder has no settings of a processor."""
        config = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
        tower, tokens = family_for(config).tower, VisionTokens.of(config)
        assert tower is not None and tokens is not None  # a vision-language model, as `ImageProcessor` has checked
        self._tokens, self.by_timestamps = tokens, tower.has_timestamps
        self._around = config["vision_start_token_id"], config["vision_end_token_id"]
        given = _settings(Path(folder))
        chosen = _DEFAULTS[tower.has_timestamps] | {name: value for name, value in given.items() if value is not None}
        limits = dict(chosen["size"])
        if not tower.has_timestamps:  # Qwen3VLVideoProcessor has no such settings
            limits["shortest_edge"] = given.get("min_pixels") or limits["shortest_edge"]
            limits["longest_edge"] = given.get("max_pixels") or limits["longest_edge"]
        self.frames = FrameSettings(
            **{name: chosen[name] for name in (*_FRAMES, "patch_size")},
            min_pixels=limits["shortest_edge"],
            max_pixels=limits["longest_edge"],
            by_timestamps=tower.has_timestamps,
        )
        self._mean, self._std, self._scale = chosen["image_mean"], chosen["image_std"], chosen["rescale_factor"]

    def read(self, data: bytes) -> Video:
        """The chosen frames of a video file. Raises ValueError, worded to follow its name."""
        import numpy as np
        import PIL.Image

        from slimrl.rollout.dataset.images import data_uri

        found = decode(data, self.frames)
        shape = len(found.indices), found.height, found.width, 3
        pixels = np.frombuffer(found.pixels, np.uint8).reshape(shape)
        return Video(
            tuple(data_uri(PIL.Image.fromarray(frame)) for frame in pixels),
            fps=len(found.indices) / found.total * found.fps,
            seconds=tuple(index / found.fps for index in found.indices),
        )

    def token_ids(self, video: Video, tokenizer: Any) -> list[int]:
        """The tokens that stand for the video, instead of the one that the chat template gives it.

        Qwen3-VL has the time of each patch of frames in text, and the patch's tokens between a start and an end.
        """
        groups, height, width = self._grid(video)
        of_patch = [self._tokens.video_token_id] * (height * width // self._tokens.merge_size**2)
        if not self.by_timestamps:
            return of_patch * groups
        start, end = self._around
        step = self.frames.temporal_patch_size
        seconds = [*video.seconds, *[video.seconds[-1]] * (-len(video.seconds) % step)]
        ids: list[int] = []
        for first in range(0, len(seconds), step):
            time = (seconds[first] + seconds[first + step - 1]) / 2
            text = tokenizer(f"<{time:.1f} seconds>", add_special_tokens=False)["input_ids"]
            ids += [*text, start, *of_patch, end]
        return ids

    def train_inputs(self, videos: Sequence[Video]) -> dict[str, Any]:
        """What transformers' model takes: patches and grids of all videos end to end, and their seconds if it needs."""
        import torch

        return {VIDEO_PIXELS: torch.cat(list(map(self._patches, videos))), **self.grids(videos)}

    def grids(self, videos: Sequence[Video]) -> dict[str, Any]:
        """`train_inputs` without the patches."""
        import torch

        found = {VIDEO_GRIDS: torch.tensor(list(map(self._grid, videos)))}
        if not self.by_timestamps:
            found[SECONDS] = torch.tensor([self.frames.temporal_patch_size / video.fps for video in videos])
        return found

    def _grid(self, video: Video) -> tuple[int, int, int]:
        """Patches in time, height and width."""
        image, patch = _opened(video.frames[0]), self.frames.patch_size
        frames = -(-len(video.frames) // self.frames.temporal_patch_size)
        return frames, image.height // patch, image.width // patch

    def _patches(self, video: Video) -> Tensor:
        """float32 [patches, values].

        Patches that are merged are next to each other. The last frame is repeated where it is alone in a patch.
        """
        import numpy as np
        import torch

        frames = torch.from_numpy(np.stack([np.asarray(_opened(uri)) for uri in video.frames]))
        mean, std = (torch.tensor(values) * (1.0 / self._scale) for values in (self._mean, self._std))
        values = ((frames.to(torch.float32) - mean) / std).permute(0, 3, 1, 2)
        step, patch, merge = self.frames.temporal_patch_size, self.frames.patch_size, self._tokens.merge_size
        values = torch.cat([values, values[-1:].expand(-len(values) % step, -1, -1, -1)])
        channels = values.shape[1]
        count, height, width = self._grid(video)
        parts = values.view(*(count, step, channels), *(height // merge, merge, patch), *(width // merge, merge, patch))
        return parts.permute(0, 3, 6, 4, 7, 2, 1, 5, 8).reshape(-1, channels * step * patch**2)


def _settings(folder: Path) -> dict[str, Any]:
    """The video processor's settings, from the file that transformers reads. Raises OSError without any."""
    if (whole := folder / PROCESSOR).is_file():
        nested = json.loads(whole.read_text(encoding="utf-8")).get("video_processor")
        if isinstance(nested, dict):
            return nested
    own = folder / OWN
    found: dict[str, Any] = json.loads((own if own.is_file() else folder / OF_IMAGES).read_text(encoding="utf-8"))
    return found


def _opened(uri: str) -> Any:
    import PIL.Image

    return PIL.Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2])))
