"""The cheap check of every push: what is sent is exactly the model of the table, tensor by tensor.

Names, order, shapes and bytes are compared, not values: that costs microseconds per tensor. Values are compared by
`slimrl.weights.equality`. Called by the weight updater for each bucket.
"""

from __future__ import annotations

import math

from slimrl.weights.buckets import Bucket
from slimrl.weights.families import Family
from slimrl.weights.layout import hf_shapes
from slimrl.weights.shape import ModelShape


class Manifest:
    """All tensors of one push, ticked off bucket by bucket."""

    def __init__(self, family: Family, shape: ModelShape) -> None:
        self._model_type = family.model_type
        self._awaited = iter(
            (part.name, dims)
            for row in family.rows(shape)
            for part, dims in zip(row.hf, hf_shapes(row, shape), strict=True)
        )

    def tick_off(self, bucket: Bucket) -> None:
        """Raises ValueError at the first tensor that is not the next one of the table, or not at its place."""
        place = 0
        for entry in bucket.entries:
            name, dims = next(self._awaited, ("nothing", ()))
            num_bytes = math.prod(dims) * entry.dtype.itemsize
            if (entry.name, entry.shape) != (name, dims) or (entry.start, entry.end) != (place, place + num_bytes):
                raise ValueError(
                    f"a bucket holds {entry.name} {list(entry.shape)} in bytes {entry.start} to {entry.end}, where"
                    f" the table of {self._model_type} has {name} {list(dims)} in {place} to {place + num_bytes}:"
                    " the exporter and the table differ"
                )
            place = entry.end
        if place != bucket.flat.numel():
            raise ValueError(f"a bucket of {bucket.flat.numel()} bytes holds tensors of {place}: it was packed wrongly")

    def close(self) -> None:
        """Raises ValueError where a tensor is missing."""
        missing = next(self._awaited, None)
        if missing is not None:
            raise ValueError(f"{missing[0]} of the table of {self._model_type} was not sent: the exporter left it out")
