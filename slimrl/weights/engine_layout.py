"""How an engine's ranks hold the weights: which Hugging Face tensors it joins, how it divides and pads them.

The facts were read from SGLang 0.5.20. Used by the proof of equality alone: a push sends Hugging Face tensors, and the
engine lays them out.
"""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor

from slimrl.weights.families import Row
from slimrl.weights.families.table import Layout
from slimrl.weights.shape import ModelShape

VOCAB_MULTIPLE = 64  # the engine pads its vocabulary to a multiple of this
HOST_FFN_MULTIPLE = 32  # on the CPU it pads each rank's part of the inner width of every MLP, too
FLOAT32_ROUTERS = ("glm4_moe", "glm4_moe_lite")  # model types whose router the engine keeps in float32
FFN_WIDTHS = ("ffn", "moe_ffn", "shared_ffn")


@dataclasses.dataclass(frozen=True)
class EngineLayout:
    """How many ranks divide an engine's tensors, and whether they lie in host memory."""

    size: int
    on_host: bool


@dataclasses.dataclass(frozen=True)
class EngineTensor:
    """A tensor of the engine: its name, how many rows of the table make it up, whether they are stacked or joined.

    `dtype` None: that of the rows.
    """

    name: str
    rows: int = 1
    stacked: bool = False
    dtype: torch.dtype | None = None

    def join(self, shards: list[Tensor]) -> Tensor:
        """The tensor, from what each of its rows gives."""
        return (torch.stack(shards) if self.stacked else torch.cat(shards)).to(self.dtype or shards[0].dtype)


def engine_tensor(row: Row, shape: ModelShape, model_type: str) -> EngineTensor:
    """Where the engine keeps a row's tensors."""
    name = row.hf[0].name
    if name.endswith(".mlp.gate.weight") and model_type in FLOAT32_ROUTERS:
        return EngineTensor(name, dtype=torch.float32)
    if row.expert is not None:
        module, _, projection = name.partition(f".experts.{row.expert}.")
        matrix = "w2_weight" if projection.startswith("down_proj") else "w13_weight"
        return EngineTensor(f"{module}.experts.{matrix}", shape.num_experts, stacked=True)
    if shape.has("query_latent"):
        for part in (".q_a_proj.", ".kv_a_proj_with_mqa."):
            if part in name:
                return EngineTensor(name.replace(part, ".fused_qkv_a_proj_with_mqa."), rows=2)
    if row.layout is Layout.QKV:
        name = name.replace(".q_proj.", ".qkv_proj.")
    elif row.layout is Layout.GATE_UP:
        name = name.replace(".gate_proj.", ".gate_up_proj.")
    return EngineTensor(name)


def engine_shard(row: Row, parts: list[Tensor], shape: ModelShape, layout: EngineLayout, rank: int) -> Tensor:
    """The row's tensor on engine rank `rank`: its parts one after another, each padded and divided among the ranks.

    Padding is with zeros. Key and value heads are repeated where there are fewer than ranks.
    """
    described = [part.dims for part in row.hf]
    if row.layout is Layout.PACKED_GATE_UP:
        described, parts = [("ffn", *described[0][1:])] * 2, list(parts[0].chunk(2))
    shards = []
    for part, dims in zip(parts, described, strict=True):
        copies = max(1, layout.size // shape.num_query_groups) if dims[0] == "keys" else 1
        for dim, name in enumerate(dims):
            part = _padded(part, dim, _padded_length(name, part.shape[dim], row, shape, layout))
        if row.shard_dim is not None:
            length = part.shape[row.shard_dim] * copies // layout.size
            part = part.narrow(row.shard_dim, rank // copies * length, length)
        shards.append(part)
    return torch.cat(shards)


def _padded_length(dimension: str, length: int, row: Row, shape: ModelShape, layout: EngineLayout) -> int:
    """What the engine makes of a dimension's `length`."""
    if dimension == "vocab":
        padded = _rounded_up(length, VOCAB_MULTIPLE)
        return padded if padded % layout.size == 0 else _rounded_up(length, VOCAB_MULTIPLE * layout.size)
    if dimension not in FFN_WIDTHS or not layout.on_host:
        return length
    multiple = HOST_FFN_MULTIPLE * layout.size
    if ".shared_experts." in row.hf[0].name:
        # so many experts of the routed ones' width, which is rounded up before it is multiplied
        experts = shape.shared_ffn_hidden_size // shape.moe_ffn_hidden_size
        return experts * _rounded_up(shape.moe_ffn_hidden_size, multiple)
    return _rounded_up(length, multiple)


def _rounded_up(length: int, multiple: int) -> int:
    return -(-length // multiple) * multiple


def _padded(tensor: Tensor, dim: int, padded: int) -> Tensor:
    missing = padded - tensor.shape[dim]
    if not missing:
        return tensor
    zeros = tensor.new_zeros([missing if index == dim else length for index, length in enumerate(tensor.shape)])
    return torch.cat([tensor, zeros], dim)
