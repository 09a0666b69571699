"""Images of a sample: in a row of prompt data, in the columns of a batch, and the rotary positions of their tokens.

In a row they are the column of `--multimodal-keys`, with places in the messages: `<image>` in the text of a message, as
in slime's data, or a part `{"type": "image"}` of its content. The images of the column belong to them in order. An
image is a path, a URL, a data URI, bytes, or an object with "bytes" (bytes, or base64 text in a .jsonl file) or "path",
as Hugging Face datasets store images. `slimrl.rollout.dataset.images` opens them. The flags' rules check rows too, so
torch is imported only where a batch is made.

The samples of a prompt share its images: a batch has each image once, and an index per sample. Positions are those of
Qwen2-VL (arXiv:2409.12191, section 2.1): text counts on in all three of time, height and width; an image starts where
the text before it ends, its tokens have the position of their row and column, and the text after it continues behind
the largest of them.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimrl.models.families.vision import VisionTokens

if TYPE_CHECKING:
    from torch import Tensor

PLACEHOLDER = "<image>"
# keys of Sample.multimodal_inputs: the images, and the response tokens that the last of them begin with
IMAGES, RESPONSE_STARTS = "images", "response_starts"
# what transformers' processor makes of the images of a sample
PIXELS = "pixel_values"  # float32 [patches, values of a patch]
GRIDS = "image_grid_thw"  # int64 [images, 3]: patches in time, height and width
URL = ("http://", "https://")
DATA_URI = re.compile(r"data:image/[\w.+-]+;base64,")
_SHOWN = 60


@dataclasses.dataclass(frozen=True)
class ImageColumn:
    """The column with the images, and the folder of the model whose processor reads them."""

    key: str
    folder: str


def image_items(row: dict[str, Any], column: ImageColumn) -> list[Any]:
    """The images of a row: a list, a single one, or none."""
    found = row.get(column.key)
    if found is None:
        return []
    return list(found) if isinstance(found, list | tuple) else [found]


def with_images(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with a part `{"type": "image"}` for each `<image>` of their texts.

    Raises ValueError for a part of another kind than text or image, and for an image outside of the column.
    """
    return [{**message, "content": _parts(message.get("content"))} for message in messages]


def _parts(content: Any) -> Any:
    if isinstance(content, str):
        return _split(content) if PLACEHOLDER in content else content
    if not isinstance(content, list):
        return content
    parts: list[dict[str, Any]] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind == "image" and set(part) == {"type"}:
            parts.append(part)
        elif kind == "image":
            raise ValueError(
                "a message has its image inside: put it into the column of --multimodal-keys, and leave"
                ' {"type": "image"} in its place'
            )
        elif kind == "text" and isinstance(part.get("text"), str):
            parts += _split(part["text"])
        else:
            raise ValueError(f"a message has a part of type {kind!r}: text and image are supported")
    return parts


def _split(text: str) -> list[dict[str, Any]]:
    """The text with the parts between its places of images."""
    parts: list[dict[str, Any]] = []
    for number, piece in enumerate(text.split(PLACEHOLDER)):
        parts += [{"type": "image"}] * (number > 0)
        parts += [{"type": "text", "text": piece}] if piece else []
    return parts


def check_images(row: dict[str, Any], messages: list[dict[str, Any]], column: ImageColumn | None) -> None:
    """Raises ValueError if a row's images are bad, as far as can be told without opening them."""
    if column is None:
        return
    parts = [message["content"] for message in with_images(messages)]
    places = sum(part["type"] == "image" for content in parts if isinstance(content, list) for part in content)
    items = image_items(row, column)
    if places != len(items):
        raise ValueError(
            f"the messages have {places} places for images ({PLACEHOLDER}) and column {column.key!r}"
            f" (--multimodal-keys) has {len(items)} images"
        )
    for number, item in enumerate(items):
        if (fault := item_fault(item)) is not None:
            raise ValueError(f"{column.key}[{number}] (--multimodal-keys) {fault}")


def check_turns(conversation: list[dict[str, Any]]) -> None:
    """Raises ValueError if an assistant's turn has an image: its tokens cannot be trained."""
    for number, message in enumerate(with_images(conversation)):
        parts = message["content"] if isinstance(message["content"], list) else []
        if message.get("role") == "assistant" and any(part["type"] == "image" for part in parts):
            raise ValueError(
                f"message {number} is the assistant's and has an image, whose tokens cannot be trained: put the image"
                " into a message of another role"
            )


def check_pair_images(
    row: dict[str, Any], prompt: str | list[dict[str, Any]], answers: list[Any], column: ImageColumn | None
) -> None:
    """Raises ValueError unless all images of a row of preferences are in the messages of its prompt."""
    if column is None:
        return
    if isinstance(prompt, str):
        if image_items(row, column):
            raise ValueError("a prompt with images must be messages: the chat template puts their tokens into it")
        return
    check_images(row, prompt, column)
    check_turns(prompt)
    for message in with_images([message for answer in answers for message in answer]):
        if isinstance(message["content"], list) and any(part["type"] == "image" for part in message["content"]):
            raise ValueError("an answer has an image: put it into the prompt")


def item_fault(item: Any) -> str | None:
    """Why an image cannot be one, as far as can be told without opening it, worded to follow its name; else None."""
    if isinstance(item, dict):
        stored, path = item.get("bytes"), item.get("path")
        if stored is None and path is None:
            return 'is an object without "bytes" and "path"'
        if isinstance(stored, str):
            return None if _from_base64(stored) is not None else "has bytes that are no base64 text"
        return item_fault(path if stored is None else stored)
    if isinstance(item, bytes):
        return None
    if not isinstance(item, str):
        return f"is of type {type(item).__name__}: give a path, a URL, a data URI or bytes"
    if item.startswith("data:"):
        match = DATA_URI.match(item)
        return None if match and _from_base64(item[match.end() :]) is not None else "is a data URI without base64 bytes"
    if item.startswith(URL) or _is_file(item):
        return None
    return (
        f"is {item[:_SHOWN]!r}, which is no existing file: give a path from the working directory, or an absolute one"
    )


def _is_file(path: str) -> bool:
    try:
        return Path(path).is_file()
    except (OSError, ValueError):  # too long, or with a null character
        return False


def _from_base64(text: str) -> bytes | None:
    try:
        return base64.b64decode(text, validate=True)
    except (binascii.Error, ValueError):
        return None


def stored_bytes(item: Any) -> bytes | None:
    """The bytes of an image of a valid row; None for a URL. Raises OSError for a file that cannot be read."""
    if isinstance(item, dict):
        stored = item.get("bytes")
        if isinstance(stored, str):
            return _from_base64(stored)
        item = item["path"] if stored is None else stored
    if isinstance(item, bytes):
        return item
    if match := DATA_URI.match(item):
        return _from_base64(item[match.end() :])
    return None if item.startswith(URL) else Path(item).read_bytes()


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
        import torch

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
            torch.cat([patches[image] for image in used.tolist()]), self.grids[used], index, counts, places
        )

    def in_order(self) -> tuple[Tensor, Tensor]:
        """Pixel values and grids of all samples' images end to end, an image as often as samples have it."""
        import torch

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
        import xxhash

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
    import torch

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
    import torch

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
