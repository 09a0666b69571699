"""A Megatron model's parameters by their global names, whichever pipeline stage this process holds.

Works on any module that is built like megatron-core's GPTModel; imports nothing of it.
"""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn

from slimrl.weights.families import Row

_LAYERS = "decoder.layers."


def global_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    """Name to parameter; layers carry their number in the whole model, counted from 0."""
    parameters = {}
    for name, parameter in model.named_parameters():
        if name.startswith(_LAYERS):
            local, _, rest = name.removeprefix(_LAYERS).partition(".")
            name = f"{_LAYERS}{model.get_submodule(_LAYERS + local).layer_number - 1}.{rest}"
        parameters[name] = parameter
    return parameters


def find(row: Row, tensors: Mapping[str, object]) -> str | None:
    """The spelling of the row that `tensors` has, None where it has none."""
    return next((name for name in row.megatron if name in tensors), None)
