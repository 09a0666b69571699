"""The experts that an engine chose for the tokens of a sample, for routing replay (--use-rollout-routing-replay).

Of a sample they are a NumPy array int16 [tokens, layers, experts per token], one row for each token that an engine has
processed: all but the last one, and those that a tool appended after it. In a batch they are a tensor int16 [tokens of
all samples, layers, experts per token], -1 where the engine chose none: training then takes its own choice.
"""

from __future__ import annotations

import base64
import binascii
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:  # imported where it is needed: parsing flags must not import it
    import numpy as np

UNKNOWN = -1
_LARGEST_EXPERT = 2**15 - 1  # of an int16
_FIELD = "rollout_routed_experts"

Routes: TypeAlias = "np.ndarray[Any, Any]"


@dataclasses.dataclass(frozen=True)
class RoutingShape:
    """What a model's routers choose: `topk` of `experts` experts in each of its `layers`; dense layers count, too."""

    layers: int
    topk: int
    experts: int

    def decoded(self, text: str) -> Routes:
        """The array of an engine's base64 of int32 [tokens, layers, topk]. Raises ValueError if it is none."""
        import numpy as np

        try:
            numbers = np.frombuffer(base64.b64decode(text, validate=True), np.int32)
        except (binascii.Error, ValueError) as error:
            raise ValueError(f"its routed_experts are not base64 of int32 numbers: {error}") from error
        if numbers.size % (self.layers * self.topk):
            raise ValueError(
                f"its routed_experts are {numbers.size} numbers, which are no whole tokens of {self.layers} layers with"
                f" {self.topk} experts each"
            )
        return self.checked(numbers.reshape(-1, self.layers, self.topk))

    def checked(self, routes: Any) -> Routes:
        """`routes` as int16. Raises ValueError for another shape, or for experts that the model does not have."""
        import numpy as np

        array = np.asarray(routes)
        if array.ndim != 3 or array.shape[1:] != (self.layers, self.topk):
            raise ValueError(
                f"its routed experts have the shape {list(array.shape)}: the model has {self.layers} layers with"
                f" {self.topk} experts per token, so give [tokens - 1, {self.layers}, {self.topk}]"
            )
        if array.size and not UNKNOWN <= array.min() <= array.max() < min(self.experts, _LARGEST_EXPERT + 1):
            raise ValueError(
                f"its routed experts are {array.min()} to {array.max()}: the model has experts 0 to {self.experts - 1}"
            )
        return array.astype(np.int16)


def continued(known: Routes | None, tokens: int, answered: Routes) -> Routes:
    """The rows of a sample that had `tokens` tokens and the rows `known`, after the engine `answered` all its rows.

    A row that is known stays: the engine may have computed the token again, with newer weights.
    """
    import numpy as np

    kept = answered[:0] if known is None else known[: max(tokens - 1, 0)]
    return np.concatenate([kept, answered[len(kept) :]])


def joined(columns: Sequence[Routes | None], lengths: Sequence[int], shape: RoutingShape) -> Routes:
    """The rows of samples with `lengths` tokens, end to end, int16 [sum(lengths), layers, topk]; None has no row."""
    import numpy as np

    values = np.full((sum(lengths), shape.layers, shape.topk), UNKNOWN, np.int16)
    start = 0
    for routes, length in zip(columns, lengths, strict=True):
        if routes is not None:
            rows = routes[: length - 1]  # a stop string may have cut tokens off
            values[start : start + len(rows)] = rows
        start += length
    return values


def as_plain(fields: dict[str, Any]) -> dict[str, Any]:
    """The `fields` of a sample with its array as JSON data, in place."""
    import numpy as np

    if isinstance(routes := fields.get(_FIELD), np.ndarray):
        data = base64.b64encode(routes.astype(np.int16).tobytes()).decode()
        fields[_FIELD] = {"shape": list(routes.shape), "int16": data}
    return fields


def from_plain(fields: dict[str, Any]) -> dict[str, Any]:
    """The inverse of `as_plain`; `fields` stay as they are."""
    import numpy as np

    if not isinstance(routes := fields.get(_FIELD), dict):
        return fields
    values = np.frombuffer(base64.b64decode(routes["int16"]), np.int16)
    return {**fields, _FIELD: values.reshape(routes["shape"])}
