"""What a family's table is made of: `Row` (one Megatron tensor and its Hugging Face parts) and `Family`.

A table is data only; `slimrl.weights.layout` holds the arithmetic that moves a row in either direction.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from enum import Enum
from typing import Any

# buffers that some exporters write next to the weights; they follow from the config, so readers skip them
NON_PARAMETER_SUFFIXES = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


class Layout(Enum):
    """How the Hugging Face parts of a row make up its Megatron tensor."""

    PLAIN = "plain"  # one part, taken as it is
    QKV = "qkv"  # three parts; per key-value group: its query heads, then its key head, then its value head
    GATE_UP = "gate_up"  # two parts; per tensor-parallel shard: its gate rows, then its up rows


@dataclasses.dataclass(frozen=True)
class HfTensor:
    """One Hugging Face tensor: its name and its dimensions in terms of `ModelShape.dimension`."""

    name: str
    dims: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Row:
    """One Megatron tensor and the Hugging Face tensors it holds.

    `megatron` lists the spellings of the same tensor (layer specs differ in where a norm lives); exactly
    one of them exists in a model. `{layer}` stands for the global layer number, counted from 0.
    `shard_dim` is the dimension that tensor parallelism divides, None for replicated tensors.
    A first dimension called "vocab" is padded with zero rows on the Megatron side.
    """

    megatron: tuple[str, ...]
    hf: tuple[HfTensor, ...]
    layout: Layout = Layout.PLAIN
    shard_dim: int | None = None

    @property
    def per_layer(self) -> bool:
        """Whether the row stands for one tensor in each layer."""
        return "{layer}" in self.megatron[0]

    @property
    def padded_vocab(self) -> bool:
        """Whether the Megatron tensor has zero rows after the true vocabulary."""
        return self.hf[0].dims[0] == "vocab"

    def at(self, layer: int) -> Row:
        """The row of one layer, its names filled in."""
        return dataclasses.replace(
            self,
            megatron=tuple(name.format(layer=layer) for name in self.megatron),
            hf=tuple(HfTensor(part.name.format(layer=layer), part.dims) for part in self.hf),
        )


@dataclasses.dataclass(frozen=True)
class Family:
    """A family's table: the rows before the layers, of each layer, after the layers, and the untied head."""

    model_type: str
    qk_layernorm: bool
    qkv_bias: bool
    embedding: Row
    layer: tuple[Row, ...]
    final_norm: Row
    head: Row
    head_dim: int | None = None  # what an absent head_dim means; None: hidden size / heads
    # config entries that must have this value (or be absent), because the table has no rows for others
    fixed_config: tuple[tuple[str, Any], ...] = ()

    def check_config(self, hf_config: dict[str, Any]) -> None:
        """Raises ValueError where the config asks for tensors that this table has no rows for."""
        for key, value in self.fixed_config:
            if key in hf_config and hf_config[key] != value:
                raise ValueError(
                    f"config.json of model_type {self.model_type} has {key} = {hf_config[key]!r};"
                    f" the table of weights describes only {key} = {value!r}: use such a model or extend the table"
                )

    def rows(self, num_layers: int, *, tied: bool) -> Iterator[Row]:
        """Every row of a whole model, names filled in, in the order of the forward pass."""
        yield self.embedding
        for layer in range(num_layers):
            for row in self.layer:
                yield row.at(layer)
        yield self.final_norm
        if not tied:
            yield self.head

    def hf_names(self, num_layers: int, *, tied: bool) -> list[str]:
        """The name of every Hugging Face tensor that a checkpoint must have, each once."""
        return [part.name for row in self.rows(num_layers, tied=tied) for part in row.hf]
