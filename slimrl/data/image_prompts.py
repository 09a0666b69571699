"""Images in a row of prompt data: the column of `--multimodal-keys`, and their places in the messages.

A place is `<image>` in the text of a message, as in slime's data, or a part `{"type": "image"}` of its content. The
images of the column belong to them in order. An image is a path, a URL, a data URI, bytes, or an object with "bytes"
(bytes, or base64 text in a .jsonl file) or "path", as Hugging Face datasets store images. Opens no image.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import re
from pathlib import Path
from typing import Any

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
