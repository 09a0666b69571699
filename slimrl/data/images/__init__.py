"""Images and videos in a row of prompt data.

They are the columns of `--multimodal-keys`, with places in the messages: `<image>` or `<video>` in the text of a
message, as in slime's data, or a part `{"type": "image"}` or `{"type": "video"}` of its content. The items of a column
belong to its places in order. An item is a path, a URL, a data URI, bytes, or an object with "bytes" (bytes, or base64
text in a .jsonl file) or "path", as Hugging Face datasets store images. `slimrl.rollout.dataset.images` and `videos`
open them. The flags' rules check rows too, so this imports no torch.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

IMAGE, VIDEO = "image", "video"  # keys of --multimodal-keys, and types of the parts of a message
PLACEHOLDER = "<image>"
PLACEHOLDERS = {IMAGE: PLACEHOLDER, VIDEO: "<video>"}
_PLACES = re.compile("(<image>|<video>)")
# keys of Sample.multimodal_inputs: the images, and the response tokens that the last of them begin with
IMAGES, RESPONSE_STARTS = "images", "response_starts"
# the same of videos: {"frames": [data URI, ...], "fps": of these frames}; one start for each run of their tokens
VIDEOS, VIDEO_RESPONSE_STARTS = "videos", "video_response_starts"
URL = ("http://", "https://")
DATA_URI = re.compile(r"data:(image|video)/[\w.+-]+;base64,")
_SHOWN = 60


@dataclasses.dataclass(frozen=True)
class ImageColumn:
    """The columns with the images and the videos, and the folder of the model whose processors read them."""

    key: str | None
    folder: str
    video_key: str | None = None

    @property
    def keys(self) -> dict[str, str]:
        """The columns that there are, by the kind of their items."""
        return {kind: key for kind, key in ((IMAGE, self.key), (VIDEO, self.video_key)) if key is not None}


def image_items(row: Mapping[str, Any], column: ImageColumn, kind: str = IMAGE) -> list[Any]:
    """The images (or videos) of a row: a list, a single one, or none."""
    key = column.keys.get(kind)
    found = None if key is None else row.get(key)
    if found is None:
        return []
    return list(found) if isinstance(found, list | tuple) else [found]


def with_images(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with a part `{"type": "image"}` for each `<image>` of their texts, and so for each `<video>`.

    Raises ValueError for a part of another kind than these and text, and for an image outside of the column.
    """
    return [{**message, "content": _parts(message.get("content"))} for message in messages]


def _parts(content: Any) -> Any:
    if isinstance(content, str):
        return _split(content) if _PLACES.search(content) else content
    if not isinstance(content, list):
        return content
    parts: list[dict[str, Any]] = []
    for part in content:
        kind = part.get("type") if isinstance(part, dict) else None
        if kind in PLACEHOLDERS and set(part) == {"type"}:
            parts.append(part)
        elif kind in PLACEHOLDERS:
            raise ValueError(
                f"a message has its {kind} inside: put it into the column of --multimodal-keys, and leave"
                f' {{"type": "{kind}"}} in its place'
            )
        elif kind == "text" and isinstance(part.get("text"), str):
            parts += _split(part["text"])
        else:
            raise ValueError(f"a message has a part of type {kind!r}: text, image and video are supported")
    return parts


def _split(text: str) -> list[dict[str, Any]]:
    """The text with the parts between its places of images and videos."""
    kinds = {place: kind for kind, place in PLACEHOLDERS.items()}
    pieces = [piece for piece in _PLACES.split(text) if piece]
    return [{"type": kinds[piece]} if piece in kinds else {"type": "text", "text": piece} for piece in pieces]


def _places(messages: list[dict[str, Any]]) -> list[str]:
    """The kind of each place in `with_images` messages."""
    contents = [message["content"] for message in messages if isinstance(message["content"], list)]
    return [part["type"] for content in contents for part in content if part["type"] in PLACEHOLDERS]


def check_images(row: dict[str, Any], messages: list[dict[str, Any]], column: ImageColumn | None) -> None:
    """Raises ValueError if a row's images or videos are bad, as far as can be told without opening them."""
    if column is None:
        return
    kinds = _places(with_images(messages))
    for kind, place in PLACEHOLDERS.items():
        items, places, key = image_items(row, column, kind), kinds.count(kind), column.keys.get(kind)
        if places and key is None:
            raise ValueError(
                f"the messages have {places} places for {kind}s ({place}) and --multimodal-keys names no column of"
                f' {kind}s: add it, as in {{"{kind}": "{kind}s"}}'
            )
        if places != len(items):
            raise ValueError(
                f"the messages have {places} places for {kind}s ({place}) and column {key!r}"
                f" (--multimodal-keys) has {len(items)} {kind}s"
            )
        for number, item in enumerate(items):
            if (fault := item_fault(item)) is not None:
                raise ValueError(f"{key}[{number}] (--multimodal-keys) {fault}")


def check_turns(conversation: list[dict[str, Any]]) -> None:
    """Raises ValueError if an assistant's turn has an image or a video: its tokens cannot be trained."""
    for number, message in enumerate(with_images(conversation)):
        if message.get("role") == "assistant" and (kinds := _places([message])):
            raise ValueError(
                f"message {number} is the assistant's and has {_named(kinds[0])}, whose tokens cannot be trained: put"
                f" the {kinds[0]} into a message of another role"
            )


def _named(kind: str) -> str:
    return {IMAGE: "an image", VIDEO: "a video"}[kind]


def check_pair_images(
    row: dict[str, Any], prompt: str | list[dict[str, Any]], answers: list[Any], column: ImageColumn | None
) -> None:
    """Raises ValueError unless all images and videos of a row of preferences are in the messages of its prompt."""
    if column is None:
        return
    if isinstance(prompt, str):
        if given := [kind for kind in PLACEHOLDERS if image_items(row, column, kind)]:
            raise ValueError(f"a prompt with {given[0]}s must be messages: the chat template puts their tokens into it")
        return
    check_images(row, prompt, column)
    check_turns(prompt)
    if kinds := _places(with_images([message for answer in answers for message in answer])):
        raise ValueError(f"an answer has {_named(kinds[0])}: put it into the prompt")


def item_fault(item: Any) -> str | None:
    """Why an item cannot be one, as far as can be told without opening it, worded to follow its name; else None."""
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
    """The bytes of an item of a valid row; None for a URL. Raises OSError for a file that cannot be read."""
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
