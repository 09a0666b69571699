"""Decodes a video in a process of its own: a bad file costs this process and not the run.

`decode` gives the process the file and what to take from it, and gets the chosen frames, resized. Time, memory and the
number of frames are bounded. The program itself imports av, numpy and PIL alone.
"""

from __future__ import annotations

import dataclasses
import io
import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

TIME_LIMIT_S = 120.0
MEMORY_LIMIT_BYTES = 8 << 30  # of addresses, most of which are never used
MAX_STORED_FRAMES = 200_000  # of a video; the processor chooses far fewer
MAX_STORED_PIXELS = 40_000_000  # of one of its frames
MAX_CHOSEN_BYTES = 1 << 30  # of all chosen frames after resizing
_SHARE_DECODED = 0.95  # of the frames that the file declares; with fewer it is cut off


class VideoError(ValueError):
    """A video cannot be used; worded to follow its name."""


@dataclasses.dataclass(frozen=True)
class FrameSettings:
    """Which frames of a video are chosen, and their size: the settings of transformers' video processor of the model.

    `by_timestamps`: as Qwen3-VL's, with limits of pixels for all frames together; else as Qwen2.5-VL's, with limits for
    each frame.
    """

    fps: float
    min_frames: int
    max_frames: int
    patch_size: int
    temporal_patch_size: int
    merge_size: int
    min_pixels: int
    max_pixels: int
    by_timestamps: bool

    def indices(self, total: int, fps: float) -> list[int]:
        """The chosen ones of `total` frames, of which there are `fps` in a second. Raises VideoError for too few."""
        import numpy as np

        if total < self.temporal_patch_size:
            raise VideoError(f"has {total} frames: give at least {self.temporal_patch_size}")
        if self.by_timestamps:
            count = min(max(int(total / fps * self.fps), self.min_frames), self.max_frames, total)
            return np.linspace(0, total - 1, count).round().astype(int).tolist()
        step = self.temporal_patch_size
        most = min(self.max_frames, total) // step * step
        count = math.floor(min(max(total / fps * self.fps, self.min_frames), most, total) / step) * step
        # as torch.arange, in single precision
        return np.arange(0, total, total / count).astype(np.float32).astype(int).tolist()

    def size(self, frames: int, height: int, width: int) -> tuple[int, int]:
        """Height and width of the chosen frames. Raises VideoError for a shape that the model does not take."""
        factor = self.patch_size * self.merge_size
        if self.by_timestamps and min(height, width) < factor:
            raise VideoError(f"has frames of {width} x {height} pixels: give at least {factor} each way")
        if max(height, width) / min(height, width) > 200:
            raise VideoError(f"has frames of {width} x {height} pixels: the aspect ratio must be at most 200")
        least = 0 if self.by_timestamps else factor
        sides = [max(least, round(side / factor) * factor) for side in (height, width)]
        # the limits of Qwen3-VL are for all frames, rounded up to whole patches in time where sizes are compared
        step = self.temporal_patch_size
        counted, rounded = (frames, math.ceil(frames / step) * step) if self.by_timestamps else (1, 1)
        if rounded * math.prod(sides) > self.max_pixels:
            scale = math.sqrt(counted * height * width / self.max_pixels)
            sides = [max(factor, math.floor(side / scale / factor) * factor) for side in (height, width)]
        elif rounded * math.prod(sides) < self.min_pixels:
            scale = math.sqrt(self.min_pixels / (counted * height * width))
            sides = [math.ceil(side * scale / factor) * factor for side in (height, width)]
        return sides[0], sides[1]


@dataclasses.dataclass(frozen=True)
class DecodedVideo:
    """The chosen frames: `pixels` are uint8 [frames, height, width, 3] in RGB, as bytes.

    `indices` are their numbers among `total` frames, of which there are `fps` in a second.
    """

    pixels: bytes
    height: int
    width: int
    indices: tuple[int, ...]
    total: int
    fps: float


def decode(data: bytes, settings: FrameSettings, time_limit_s: float = TIME_LIMIT_S) -> DecodedVideo:
    """The chosen frames of a video file. Raises VideoError, worded to follow its name."""
    request = json.dumps(dataclasses.asdict(settings)).encode() + b"\n" + data
    try:
        # -P keeps this folder out of the import path: its modules would shadow others
        process = subprocess.run(
            [sys.executable, "-P", str(Path(__file__))],
            input=request,
            capture_output=True,
            timeout=time_limit_s,
            check=False,
        )
    except subprocess.TimeoutExpired:
        raise VideoError(f"takes more than {time_limit_s:g} s to decode: cut it, or scale it down") from None
    head, _, pixels = process.stdout.partition(b"\n")
    if process.returncode != 0 or not head:
        last = process.stderr.decode(errors="replace").strip().splitlines()[-1:]
        why = last[0] if last else f"its process ended with code {process.returncode}"
        raise VideoError(f"cannot be decoded as a video ({why[:300]})")
    answer: dict[str, Any] = json.loads(head)
    if "fault" in answer:
        raise VideoError(answer["fault"])
    return DecodedVideo(pixels=pixels, **answer | {"indices": tuple(answer["indices"])})


def main() -> None:
    """Reads settings and a file from stdin; writes a line of JSON, and the pixels, to stdout."""
    import resource

    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_LIMIT_BYTES, MEMORY_LIMIT_BYTES))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    settings = FrameSettings(**json.loads(sys.stdin.buffer.readline()))
    try:
        head, pixels = _decoded(sys.stdin.buffer.read(), settings)
    except ModuleNotFoundError as error:
        head, pixels = {"fault": f"needs the package {error.name}: pip install av"}, []
    except VideoError as error:
        head, pixels = {"fault": str(error)}, []
    except (OSError, ValueError, ArithmeticError, LookupError, MemoryError, RuntimeError) as error:  # av's are of these
        head, pixels = {"fault": f"cannot be decoded as a video ({type(error).__name__}: {str(error)[:200]})"}, []
    sys.stdout.buffer.write(json.dumps(head).encode() + b"\n")
    for frame in pixels:
        sys.stdout.buffer.write(frame)


def _decoded(data: bytes, settings: FrameSettings) -> tuple[dict[str, Any], list[bytes]]:
    """What `DecodedVideo` has, and the pixels of each chosen frame."""
    total, fps, height, width = _measured(data)
    indices = settings.indices(total, fps)
    pixels, found = _chosen(data, indices, settings.size(len(indices), height, width))
    if found is not None:  # the file has fewer frames than it declares
        if found < _SHARE_DECODED * total:
            raise VideoError(f"cannot be decoded as a video (it ends after {found} of its {total} frames)")
        total, indices = found, settings.indices(found, fps)
        pixels, _ = _chosen(data, indices, settings.size(len(indices), height, width))
    height, width = settings.size(len(indices), height, width)
    return {"height": height, "width": width, "indices": indices, "total": total, "fps": fps}, pixels


def _measured(data: bytes) -> tuple[int, float, int, int]:
    """Frames, frames per second, height and width of the first video stream. Raises VideoError for a bad one."""
    import av

    with av.open(io.BytesIO(data), "r") as container:
        if not container.streams.video:
            raise VideoError("cannot be decoded as a video (it has no video stream)")
        stream = container.streams.video[0]
        total, rate = stream.frames, stream.average_rate
        if not rate:
            raise VideoError("has no frame rate: write it with one")
        height, width = stream.height, stream.width
        if height * width > MAX_STORED_PIXELS:
            raise VideoError(f"has frames of {width} x {height} pixels, more than {MAX_STORED_PIXELS}: scale it down")
        if not total:
            total = sum(bool(packet.size) for packet in container.demux(stream))
        if total > MAX_STORED_FRAMES:
            raise VideoError(f"has {total} frames, more than {MAX_STORED_FRAMES}: cut it")
        return total, float(rate), height, width


def _chosen(data: bytes, indices: list[int], size: tuple[int, int]) -> tuple[list[bytes], int | None]:
    """The pixels of these frames; with the number of frames if the file ends before them."""
    import numpy as np
    import PIL.Image

    height, width = size
    if len(indices) * height * width * 3 > MAX_CHOSEN_BYTES:
        raise VideoError(
            f"gives {len(indices)} frames of {width} x {height} pixels, more than {MAX_CHOSEN_BYTES} bytes: lower"
            " max_frames or the size in video_preprocessor_config.json of the model, or cut the video"
        )
    pixels: list[bytes] = []
    left = iter(indices)
    wanted, number = next(left), 0
    for number, frame in enumerate(_frames(data), start=1):
        while number - 1 == wanted:  # small videos repeat frames
            array = frame.to_ndarray(format="rgb24")
            if array.shape[:2] != size:
                resized = PIL.Image.fromarray(array).resize((width, height), PIL.Image.Resampling.BICUBIC)
                array = np.asarray(resized)
            pixels.append(array.tobytes())
            wanted = next(left, -1)
        if wanted < 0:
            return pixels, None
    return pixels, number


def _frames(data: bytes) -> Iterator[Any]:
    """All frames in the order of time."""
    import av

    with av.open(io.BytesIO(data), "r") as container:
        yield from container.decode(video=0)


if __name__ == "__main__":
    main()
