"""A Megatron model's tensors by their global names, whichever pipeline stage and experts this process holds.

Works on any module that is built like megatron-core's GPTModel; imports nothing of it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence

from torch import Tensor, nn

from slimrl.weights.families import Row

_LAYERS = "decoder.layers."
# an expert's number within its process: in a list of modules, or at the end of a grouped weight's name
_EXPERT = re.compile(r"(.*\.experts\.(?:local_experts\.|linear_fc[12]\.weight))(\d+)(.*)")
_TRAINED_BUFFER = "router.expert_bias"  # weights that no gradient moves: they belong to the checkpoint all the same


def global_tensors(model: nn.Module | Sequence[nn.Module]) -> dict[str, Tensor]:
    """Name to parameter (or the router's bias, a buffer), of one model or of all chunks of an interleaved stage.

    Layers and experts carry their numbers in the whole model, counted from 0.
    """
    tensors: dict[str, Tensor] = {}
    for chunk in (model,) if isinstance(model, nn.Module) else model:
        biases = ((name, buffer) for name, buffer in chunk.named_buffers() if name.endswith(_TRAINED_BUFFER))
        for name, tensor in (*chunk.named_parameters(), *biases):
            tensors[_global_name(chunk, name)] = tensor
    return tensors


def find(row: Row, tensors: Mapping[str, object]) -> str | None:
    """The spelling of the row that `tensors` has, None where it has none."""
    return next((name for name in row.megatron if name in tensors), None)


def _global_name(model: nn.Module, name: str) -> str:
    if not name.startswith(_LAYERS):
        return name
    local, _, rest = name.removeprefix(_LAYERS).partition(".")
    if match := _EXPERT.fullmatch(rest):
        before, expert, after = match.groups()
        moe_layer = model.get_submodule(f"{_LAYERS}{local}.{rest.partition('.experts.')[0]}")
        rest = f"{before}{moe_layer.local_expert_indices[int(expert)]}{after}"
    return f"{_LAYERS}{model.get_submodule(_LAYERS + local).layer_number - 1}.{rest}"
