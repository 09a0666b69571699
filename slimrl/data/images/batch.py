"""Images and videos as columns of a batch, and the rotary positions of their tokens.

The samples of a prompt share its images: a batch has each image once, and an index per sample. A video is one image of
several frames, or, where timestamps stand between its frames (Qwen3-VL), one for each of them; the images of a sample
come before its videos. Positions are those of Qwen2-VL (arXiv:2409.12191, section 2.1), as transformers computes them:
text counts on in all three of time, height and width; an image starts where the text before it ends, its tokens have
the position of their row and column, and the text after it continues behind the largest of these. A later frame of a
video is later in time by `VisionTokens.tokens_per_second` for each whole second (Qwen2.5-VL).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from slimrl.data.images import RESPONSE_STARTS, VIDEO_RESPONSE_STARTS
from slimrl.models.families.vision import VisionTokens

if TYPE_CHECKING:
    from torch import Tensor

# what transformers' processors make of the images and videos of a sample
PIXELS = "pixel_values"  # float32 [patches, values of a patch]
GRIDS = "image_grid_thw"  # int64 [images, 3]: patches in time, height and width
VIDEO_PIXELS, VIDEO_GRIDS = "pixel_values_videos", "video_grid_thw"  # like these
SECONDS = "second_per_grid_ts"  # [videos]: between two patches in time; absent where timestamps are text

IN_PROMPT = -1  # of BatchImages.starts
NO_VIDEO = -1.0  # of BatchImages.seconds


@dataclasses.dataclass(frozen=True)
class BatchImages:
    """The images of `n` samples; of each sample first its images, then its videos, or their frames."""

    pixel_values: Tensor  # float32 [patches, values of a patch] of all images, end to end
    grids: Tensor  # int64 [images, 3]
    index: Tensor  # int64 [sum(counts)]: which images each sample has, in their order
    counts: Tensor  # int64 [n]: how many
    # int64 [sum(counts)]: the response token that each begins with; IN_PROMPT for those of prompts, which come first
    # among the images, and among the videos
    starts: Tensor
    # float32 [images]: of a video, between two of its patches in time; NO_VIDEO of an image. None: there are no videos
    seconds: Tensor | None = None

    @classmethod
    def of_samples(
        cls, inputs: Sequence[Mapping[str, Any] | None], given: Sequence[Mapping[str, Any] | None] = ()
    ) -> BatchImages | None:
        """Those of each sample's `multimodal_train_inputs`; None if no sample has images.

        Samples that share the object share the images. `given` are each sample's `multimodal_inputs`, which have the
        places of images in its response. Raises ValueError for more places than images.
        """
        import torch

        numbers: dict[int, tuple[range, int]] = {}  # of the images, and how many of them are no videos
        pixels, grids, seconds, counts, images = [], [], [], [], 0
        index: list[int] = []
        starts: list[int] = []
        for number, one in enumerate(inputs):
            if one is None:
                counts.append(0)
                continue
            if id(one) not in numbers:
                found = _arranged(one)
                pixels.append(found[0])
                grids.append(found[1])
                seconds.append(found[2])
                still = int((found[2] == NO_VIDEO).sum())
                numbers[id(one)] = range(images, images := images + len(found[1])), still
            own, still = numbers[id(one)]
            index += own
            counts.append(len(own))
            for kind, key, count in (
                ("images", RESPONSE_STARTS, still),
                ("videos", VIDEO_RESPONSE_STARTS, len(own) - still),
            ):
                places = ((given[number] if given else None) or {}).get(key) or ()
                if len(places) > count:
                    raise ValueError(f"row {number} has {count} {kind} and {len(places)} places in its response")
                starts += [*[IN_PROMPT] * (count - len(places)), *places]
        if not images:
            return None
        every = torch.cat(seconds)
        return cls(
            torch.cat(pixels),
            torch.cat(grids),
            torch.tensor(index),
            torch.tensor(counts),
            torch.tensor(starts),
            every if bool((every != NO_VIDEO).any()) else None,
        )

    def select(self, rows: Tensor) -> BatchImages | None:
        """The images of these samples alone, in their order; None if they have none."""
        import torch

        starts = self.counts.cumsum(0) - self.counts
        counts = self.counts[rows]
        chosen = [
            slice(start, start + count) for start, count in zip(starts[rows].tolist(), counts.tolist(), strict=True)
        ]
        index = torch.cat([self.index[own] for own in chosen]) if chosen else self.index[:0]
        if not index.numel():
            return None
        places = torch.cat([self.starts[own] for own in chosen])
        used, index = index.unique(return_inverse=True)
        patches = self.pixel_values.split(self.grids.prod(1).tolist())
        return BatchImages(
            torch.cat([patches[image] for image in used.tolist()]),
            self.grids[used],
            index,
            counts,
            places,
            None if self.seconds is None else self.seconds[used],
        )

    def in_order(self) -> tuple[Tensor, Tensor]:
        """Pixel values and grids of all samples' images end to end, an image as often as samples have it."""
        import torch

        patches = self.pixel_values.split(self.grids.prod(1).tolist())
        return torch.cat([patches[image] for image in self.index.tolist()]), self.grids[self.index]

    def grids_of_samples(self) -> list[Tensor]:
        """int64 [images of the sample, 3] for each sample."""
        return list(self.grids[self.index].split(self.counts.tolist()))

    def patches_of_samples(self) -> list[int]:
        """How many patches the images of each sample have."""
        return [int(grids.prod(1).sum()) for grids in self.grids_of_samples()]

    def starts_of_samples(self) -> list[list[int]]:
        """`starts` for each sample."""
        return [own.tolist() for own in self.starts.split(self.counts.tolist())]

    def seconds_of_samples(self) -> list[list[float]]:
        """`seconds` for each sample; empty without videos."""
        if self.seconds is None:
            return [[] for _ in self.counts]
        return [own.tolist() for own in self.seconds[self.index].split(self.counts.tolist())]

    def digests(self) -> list[bytes]:
        """For each sample 16 bytes of each of its images: of its patches, of their arrangement and their seconds."""
        import xxhash

        patches = self.pixel_values.split(self.grids.prod(1).tolist())
        seconds = [NO_VIDEO] * len(patches) if self.seconds is None else self.seconds.tolist()
        of_image = [
            xxhash.xxh3_128_digest(
                (repr(grid) if time == NO_VIDEO else repr((grid, time))).encode() + pixels.numpy().tobytes()
            )
            for grid, time, pixels in zip(self.grids.tolist(), seconds, patches, strict=True)
        ]
        return [b"".join(of_image[image] for image in own.tolist()) for own in self.index.split(self.counts.tolist())]

    def tensors(self) -> dict[str, Tensor]:
        """By name, for files."""
        values = {f"images.{field.name}": getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in values.items() if value is not None}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> BatchImages | None:
        """The inverse of `tensors`; None if they have no images."""
        names = [field.name for field in dataclasses.fields(cls)]
        if f"images.{names[0]}" not in tensors:
            return None
        return cls(**{name: tensors[f"images.{name}"] for name in names if f"images.{name}" in tensors})


def _arranged(inputs: Mapping[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Pixel values, grids and seconds of a sample's images and videos; the latter frame by frame without `SECONDS`."""
    import torch

    pixels, grids, seconds = [], [], []
    if PIXELS in inputs:
        pixels.append(torch.as_tensor(inputs[PIXELS], dtype=torch.float32))
        grids.append(torch.as_tensor(inputs[GRIDS], dtype=torch.int64))
        seconds.append(torch.full((len(grids[0]),), NO_VIDEO))
    if VIDEO_PIXELS in inputs:
        videos = torch.as_tensor(inputs[VIDEO_GRIDS], dtype=torch.int64)
        times = torch.as_tensor(inputs.get(SECONDS, [0.0] * len(videos)), dtype=torch.float32)
        if SECONDS not in inputs:
            times = times.repeat_interleave(videos[:, 0])
            videos = by_frames(videos)
        pixels.append(torch.as_tensor(inputs[VIDEO_PIXELS], dtype=torch.float32))
        grids.append(videos)
        seconds.append(times)
    return torch.cat(pixels), torch.cat(grids), torch.cat(seconds)


def by_frames(grids: Tensor) -> Tensor:
    """Grids int64 [videos, 3] with one of each patch in time: [patches in time of all videos, 3]."""
    apart = grids.repeat_interleave(grids[:, 0], dim=0)
    apart[:, 0] = 1
    return apart


def _runs(
    tokens: Tensor,
    prompt_length: int,
    vision: VisionTokens,
    sizes: Sequence[int],
    starts: Sequence[int],
    seconds: Sequence[float],
) -> tuple[Tensor, list[Tensor]]:
    """All tokens of images, then of videos; and those of each image and video, which need not be their number.

    Raises ValueError if the tokens at a start in the response are other ones.
    """
    import torch

    all_rows, runs = [], []
    for kind, token_id in (("image", vision.image_token_id), ("video", vision.video_token_id)):
        own = [at for at in range(len(sizes)) if (seconds[at] != NO_VIDEO if seconds else False) is (kind == "video")]
        found = [(tokens[:prompt_length] == token_id).nonzero().squeeze(1)]
        for at in own:
            if not starts or starts[at] == IN_PROMPT:
                continue
            first, count = prompt_length + starts[at], sizes[at] // vision.merge_size**2
            placed = torch.arange(first, first + count)
            if first + count > len(tokens) or bool((tokens[placed] != token_id).any()):
                raise ValueError(f"the response tokens from {starts[at]} on are not the {count} of one {kind}")
            found.append(placed)
        rows = torch.cat(found)
        lengths = [sizes[at] // vision.merge_size**2 for at in own]
        if len(rows) == sum(lengths):
            runs += list(rows.split(lengths))
        all_rows.append(rows)
    return torch.cat(all_rows), runs


def image_rows(
    tokens: Tensor,
    prompt_length: int,
    vision: VisionTokens,
    grids: Tensor | None = None,
    starts: Sequence[int] = (),
    seconds: Sequence[float] = (),
) -> Tensor:
    """Positions of the tokens of images in a sample's `tokens`, int64 [image tokens], in the order of the images.

    In the prompt every id of an image is one; in the response, where the model may sample that id as text, those of the
    images of `grids` whose `starts` are there. `seconds` tell which of them are videos (`BatchImages.seconds`). Raises
    ValueError if these are other tokens.
    """
    sizes = [] if grids is None else grids.prod(1).tolist()
    return _runs(tokens, prompt_length, vision, sizes, starts, seconds)[0]


def mrope_positions(
    tokens: Tensor,
    prompt_length: int,
    grids: Tensor | None,
    vision: VisionTokens,
    starts: Sequence[int] = (),
    seconds: Sequence[float] = (),
) -> Tensor:
    """int64 [3, tokens]: positions in time, height and width of a sample's `tokens` int64 [tokens].

    `grids` int64 [images, 3] are its images and videos, `starts` their places in the response (`BatchImages.starts`),
    without which all are in the prompt, and `seconds` those of videos. Raises ValueError if the sample has another
    number of tokens of images or of videos, or pieces of one apart.
    """
    import torch

    listed = [] if grids is None else grids.tolist()
    times = list(seconds) or [NO_VIDEO] * len(listed)
    sizes = [time * height * width for time, height, width in listed]
    rows, runs = _runs(tokens, prompt_length, vision, sizes, starts, times)
    _check_numbers(tokens[rows], [size // vision.merge_size**2 for size in sizes], starts, times, vision)
    positions = torch.empty(3, len(tokens), dtype=torch.int64)
    done, following = 0, 0  # tokens with positions, the next one's
    for run, (frames, *sides), time in sorted(zip(runs, listed, times, strict=True), key=lambda one: int(one[0][0])):
        start, count = int(run[0]), len(run)
        if int(run[-1]) != start + count - 1:
            kind = "image" if time == NO_VIDEO else "video"
            raise ValueError(f"the {kind} tokens from token {start} on are not the {count} of one {kind}")
        height, width = (side // vision.merge_size for side in sides)
        text = start - done
        positions[:, done:start] = following + torch.arange(text)
        moments = torch.arange(frames) * (1 if time == NO_VIDEO else vision.tokens_per_second * int(time))
        axes = torch.meshgrid(moments, torch.arange(height), torch.arange(width), indexing="ij")
        positions[:, start : start + count] = following + text + torch.stack(axes).flatten(1)
        following += text + max(height, width)
        done = start + count
    positions[:, done:] = following + torch.arange(len(tokens) - done)
    return positions


def image_runs(
    tokens: Tensor, prompt_length: int, images: BatchImages, vision: VisionTokens
) -> tuple[list[tuple[int, int]], list[tuple[int, int]]]:
    """The first and the last token of each image, and of each video, of the one sample of `images`.

    The caller has checked the tokens (`mrope_positions`).
    """
    sizes, seconds = images.grids.prod(1).tolist(), images.seconds_of_samples()[0]
    _, runs = _runs(tokens, prompt_length, vision, sizes, images.starts.tolist(), seconds)
    ends = [(int(run[0]), int(run[-1])) for run in runs]
    still = sum(time == NO_VIDEO for time in seconds) if seconds else len(ends)
    return ends[:still], ends[still:]


def _check_numbers(
    found: Tensor, sizes: Sequence[int], starts: Sequence[int], seconds: Sequence[float], vision: VisionTokens
) -> None:
    """Raises ValueError unless the ids `found` are those of images and videos of these numbers of tokens."""
    where = "prompt" if set(starts) <= {IN_PROMPT} else "sample"
    for kind, token_id in (("image", vision.image_token_id), ("video", vision.video_token_id)):
        own = [size for size, time in zip(sizes, seconds, strict=True) if (time != NO_VIDEO) is (kind == "video")]
        if (count := int((found == token_id).sum())) != sum(own):
            raise ValueError(f"the {where} has {count} {kind} tokens, and its {len(own)} {kind}s have {sum(own)}")
