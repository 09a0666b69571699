"""SGLang's custom weight loader for changed elements of weights (`weights.update.transport_delta`).

A tensor in Hugging Face's layout is rebuilt with NaN in place of elements that were not sent, and goes through the
model's own loader, which shards, fuses and pads it. Every copy into a parameter then leaves the elements in which the
source is NaN. So every family that SGLang loads is updated, without knowledge of its layout.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import xxhash
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode


class _CopySent(TorchDispatchMode):
    """Within it, `copy_` leaves the elements in which its source is NaN."""

    def __torch_dispatch__(
        self, function: Any, types: Any, inputs: Sequence[Any] = (), options: Mapping[str, Any] | None = None
    ) -> Any:
        if function is torch.ops.aten.copy_.default and inputs[1].is_floating_point():
            into, source = inputs[0], inputs[1].to(inputs[0].device)
            return into.copy_(torch.where(source.isnan(), into, source.to(into.dtype)))
        return function(*inputs, **(options or {}))


def load(model: Any, named_tensors: Sequence[tuple[str, Tensor]]) -> None:
    """Applies the changes to the parameters of `model`.

    Raises ValueError if the bytes differ from those that were sent, or if the model's loader does not copy.
    """
    parts = {name: tensor[:-1] for name, tensor in named_tensors}  # without the byte that keeps them from being empty
    described = json.loads(parts["described"].cpu().numpy().tobytes())
    checksum = xxhash.xxh3_128_hexdigest(b"".join(parts[name].cpu().numpy().tobytes() for name in ("gaps", "values")))
    if checksum != described["checksum"]:
        raise ValueError(f"the changes of weights arrived with checksum {checksum} instead of {described['checksum']}")
    with torch.no_grad(), _CopySent():
        model.load_weights(_rebuilt(described["tensors"], parts["gaps"], parts["values"]))
    for name, parameter in model.named_parameters():
        if parameter.is_floating_point() and bool(parameter.isnan().any()):
            raise ValueError(f"{name} has NaN after the changes were loaded: the model does not support delta updates")


def _rebuilt(tensors: Sequence[Mapping[str, Any]], gaps: Tensor, values: Tensor) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor with NaN where nothing was sent) of each tensor."""
    for one in tensors:
        dtype, sent = getattr(torch, one["dtype"]), one["sent"]
        own_gaps, gaps = gaps[: 2 * sent], gaps[2 * sent :]
        own_values, values = values[: dtype.itemsize * sent], values[dtype.itemsize * sent :]
        tensor = torch.full(one["shape"], torch.nan, dtype=dtype, device=values.device)
        if sent:
            distances = (own_gaps.clone().view(torch.int16).to(torch.int64) & 0xFFFF) + 1
            tensor.view(-1)[distances.cumsum(0) - 1] = own_values.clone().view(dtype)
        yield one["name"], tensor
