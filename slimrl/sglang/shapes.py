"""The form that answers of servers and routers have to have: checked once, so that what is amiss is a sentence.

Called where an answer is read, with a msgspec struct of the fields that are needed; an answer may have more.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from slimrl.sglang.calls import SHOWN_CHARS
from slimrl.sglang.errors import EngineAnswerError

Shape = TypeVar("Shape")


def shaped(answer: Any, shape: type[Shape], url: str) -> Shape:
    """`answer`, which came from `url`, as `shape`. Raises EngineAnswerError that names the field and what came."""
    try:
        return msgspec.convert(answer, shape)
    except msgspec.ValidationError as error:
        shown = repr(answer)
        shown = shown if len(shown) <= SHOWN_CHARS else f"{shown[:SHOWN_CHARS]}..."
        raise EngineAnswerError(f"{url} did not answer as SGLang does: {error}; it answered {shown}") from error
