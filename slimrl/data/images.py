"""Images among the columns of a batch, and the rotary positions of tokens and images.

The samples of a prompt share its images: a batch has each image once, and an index per sample. Positions are those of
Qwen2-VL (arXiv:2409.12191, section 2.1): text counts on in all three of time, height and width; an image starts where
the text before it ends, its tokens have the position of their row and column, and the text after it continues behind
the largest of them.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor

from slimrl.data.image_prompts import GRIDS, PIXELS, RESPONSE_STARTS
from slimrl.models.families.vision import VisionTokens

IN_PROMPT = -1  # of BatchImages.starts


@dataclasses.dataclass(frozen=True)
class BatchImages:
    """The images of `n` samples."""

    pixel_values: Tensor  # float32 [patches, values of a patch] of all images, end to end
    grids: Tensor  # int64 [images, 3]
    index: Tensor  # int64 [sum(counts)]: which images each sample has, in their order
    counts: Tensor  # int64 [n]: how many
    # int64 [sum(counts)]: the response token that each begins with; IN_PROMPT for those of prompts, which come first
    starts: Tensor

    @classmethod
    def of_samples(
        cls, inputs: Sequence[Mapping[str, Any] | None], given: Sequence[Mapping[str, Any] | None] = ()
    ) -> BatchImages | None:
        """Those of each sample's `multimodal_train_inputs`; None if no sample has images.

        Samples that share the object share the images. `given` are each sample's `multimodal_inputs`, which have the
        places of images in its response. Raises ValueError for more places than images.
        """
        numbers: dict[int, range] = {}
        pixels, grids, counts, images = [], [], [], 0
        index: list[int] = []
        for one in inputs:
            if one is None:
                counts.append(0)
                continue
            if id(one) not in numbers:
                pixels.append(torch.as_tensor(one[PIXELS], dtype=torch.float32))
                grids.append(torch.as_tensor(one[GRIDS], dtype=torch.int64))
                numbers[id(one)] = range(images, images := images + len(grids[-1]))
            index += numbers[id(one)]
            counts.append(len(numbers[id(one)]))
        if not images:
            return None
        starts: list[int] = []
        for number, one in enumerate(given or [None] * len(counts)):
            own = (one or {}).get(RESPONSE_STARTS) or ()
            if len(own) > counts[number]:
                raise ValueError(f"row {number} has {counts[number]} images and {len(own)} places in its response")
            starts += [*[IN_PROMPT] * (counts[number] - len(own)), *own]
        return cls(torch.cat(pixels), torch.cat(grids), torch.tensor(index), torch.tensor(counts), torch.tensor(starts))

    def select(self, rows: Tensor) -> BatchImages | None:
        """The images of these samples alone, in their order; None if they have none."""
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
            torch.cat([patches[image] for image in used.tolist()]), self.grids[used], index, counts, places
        )

    def in_order(self) -> tuple[Tensor, Tensor]:
        """Pixel values and grids of all samples' images end to end, an image as often as samples have it."""
        patches = self.pixel_values.split(self.grids.prod(1).tolist())
        return torch.cat([patches[image] for image in self.index.tolist()]), self.grids[self.index]

    def grids_of_samples(self) -> list[Tensor]:
        """int64 [images of the sample, 3] for each sample."""
        return list(self.grids[self.index].split(self.counts.tolist()))

    def starts_of_samples(self) -> list[list[int]]:
        """`starts` for each sample."""
        return [own.tolist() for own in self.starts.split(self.counts.tolist())]

    def digests(self) -> list[bytes]:
        """For each sample 16 bytes of each of its images: of its patches and of their arrangement."""
        patches = self.pixel_values.split(self.grids.prod(1).tolist())
        of_image = [
            xxhash.xxh3_128_digest(repr(grid).encode() + pixels.numpy().tobytes())
            for grid, pixels in zip(self.grids.tolist(), patches, strict=True)
        ]
        return [b"".join(of_image[image] for image in own.tolist()) for own in self.index.split(self.counts.tolist())]

    def tensors(self) -> dict[str, Tensor]:
        """By name, for files."""
        return {f"images.{field.name}": getattr(self, field.name) for field in dataclasses.fields(self)}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> BatchImages | None:
        """The inverse of `tensors`; None if they have no images."""
        names = [field.name for field in dataclasses.fields(cls)]
        if f"images.{names[0]}" not in tensors:
            return None
        return cls(**{name: tensors[f"images.{name}"] for name in names})


def image_rows(
    tokens: Tensor, prompt_length: int, vision: VisionTokens, grids: Tensor | None = None, starts: Sequence[int] = ()
) -> Tensor:
    """Positions of the tokens of images in a sample's `tokens`, int64 [image tokens], in order.

    In the prompt every id of an image is one; in the response, where the model may sample that id as text, those of the
    images of `grids` whose `starts` are there. Raises ValueError if these are other tokens.
    """
    rows = (tokens[:prompt_length] == vision.image_token_id).nonzero().squeeze(1)
    found = [rows]
    for size, start in zip([] if grids is None else grids.prod(1).tolist(), starts, strict=False):
        if start == IN_PROMPT:
            continue
        first, count = prompt_length + start, size // vision.merge_size**2
        own = torch.arange(first, first + count)
        if first + count > len(tokens) or bool((tokens[own] != vision.image_token_id).any()):
            raise ValueError(f"the response tokens from {start} on are not the {count} of one image")
        found.append(own)
    return torch.cat(found)


def mrope_positions(
    tokens: Tensor, prompt_length: int, grids: Tensor | None, vision: VisionTokens, starts: Sequence[int] = ()
) -> Tensor:
    """int64 [3, tokens]: positions in time, height and width of a sample's `tokens` int64 [tokens].

    `grids` int64 [images, 3] are its images, `starts` their places in the response (`BatchImages.starts`); without
    these all are in the prompt. Raises ValueError if the sample has another number of image tokens, or pieces of an
    image apart.
    """
    rows = image_rows(tokens, prompt_length, vision, grids, starts)
    grids = torch.empty(0, 3, dtype=torch.int64) if grids is None else grids
    if bool((grids[:, 0] != 1).any()):
        raise ValueError("an image has several frames: videos are unsupported")
    sizes = [(height // vision.merge_size, width // vision.merge_size) for _, height, width in grids.tolist()]
    expected = sum(height * width for height, width in sizes)
    if len(rows) != expected:
        where = "prompt" if set(starts) <= {IN_PROMPT} else "sample"
        raise ValueError(f"the {where} has {len(rows)} image tokens, and its {len(sizes)} images have {expected}")
    positions = torch.empty(3, len(tokens), dtype=torch.int64)
    done, following, used = 0, 0, 0  # tokens with positions, the next one's, image tokens among them
    for height, width in sizes:
        count = height * width
        start = int(rows[used])
        if int(rows[used + count - 1]) != start + count - 1:
            raise ValueError(f"the image tokens from token {start} on are not the {count} of one image")
        text = start - done
        positions[:, done:start] = following + torch.arange(text)
        axes = torch.meshgrid(torch.arange(1), torch.arange(height), torch.arange(width), indexing="ij")
        positions[:, start : start + count] = following + text + torch.stack(axes).flatten(1)
        following += text + max(height, width)
        done, used = start + count, used + count
    positions[:, done:] = following + torch.arange(len(tokens) - done)
    return positions
