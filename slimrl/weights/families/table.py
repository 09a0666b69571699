"""What a family's table is made of: `Row` (one Megatron tensor and its Hugging Face parts) and `Family`.

A table is data only; `slimrl.weights.layout` holds the arithmetic that moves a row in either direction. Called by
the loader, the exporter, the converters and the checks, so that they cannot disagree about a name.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from enum import Enum
from itertools import groupby
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from slimrl.weights.shape import ModelShape

# buffers that some exporters write next to the weights; they follow from the config, so readers skip them
NON_PARAMETER_SUFFIXES = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


class Layout(Enum):
    """How the Hugging Face parts of a row make up its Megatron tensor."""

    PLAIN = "plain"  # one part, taken as it is
    QKV = "qkv"  # three parts; per key-value group: its query heads, then its key head, then its value head
    GATE_UP = "gate_up"  # two parts; per tensor-parallel shard: its gate rows, then its up rows
    PACKED_GATE_UP = "packed_gate_up"  # one part whose first half is the gate; Megatron's side is that of GATE_UP


class Layers(Enum):
    """Which layers have the tensor of a row."""

    ALL = "all"
    DENSE = "dense"  # the layers without experts; every layer of a model without experts
    MOE = "moe"  # the layers with experts


@dataclasses.dataclass(frozen=True)
class HfTensor:
    """One Hugging Face tensor: its name and its dimensions in terms of `ModelShape.dimension`."""

    name: str
    dims: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class Row:
    """One Megatron tensor and the Hugging Face tensors it holds.

    `megatron` lists the spellings of the same tensor (layer specs differ in where a norm or an expert lives);
    exactly one of them exists in a model. `{layer}` stands for the global layer number and `{expert}` for the global
    expert number, both counted from 0. `layers` says which layers have it, `when` names the property of the model
    (`ModelShape.has`) without which there is no such tensor. `shard_dim` is the dimension that tensor parallelism
    (for an expert: expert tensor parallelism) divides, None for replicated tensors. `with_next`: the engines only take
    its tensor together with that of the following row, so both travel in one piece.
    A first dimension called "vocab" is padded with zero rows on the Megatron side.
    """

    megatron: tuple[str, ...]
    hf: tuple[HfTensor, ...]
    layout: Layout = Layout.PLAIN
    shard_dim: int | None = None
    layers: Layers = Layers.ALL
    when: str | None = None
    with_next: bool = False
    expert: int | None = None  # the expert's number, once `at` has filled it in

    @property
    def per_layer(self) -> bool:
        """Whether the row stands for one tensor in each layer."""
        return "{layer}" in self.megatron[0]

    @property
    def per_expert(self) -> bool:
        """Whether the row stands for one tensor in each expert."""
        return "{expert}" in self.megatron[0]

    @property
    def padded_vocab(self) -> bool:
        """Whether the Megatron tensor has zero rows after the true vocabulary."""
        return self.hf[0].dims[0] == "vocab"

    def at(self, layer: int, expert: int | None = None) -> Row:
        """The row of one layer (and one expert), its names filled in."""
        return dataclasses.replace(
            self,
            megatron=tuple(name.format(layer=layer, expert=expert) for name in self.megatron),
            hf=tuple(HfTensor(part.name.format(layer=layer, expert=expert), part.dims) for part in self.hf),
            expert=expert,
        )


@dataclasses.dataclass(frozen=True)
class ExtraLayers:
    """Layers of a checkpoint that predict further tokens (MTP), which are not trained here.

    `prefix` begins their tensors' names; `{layer}` counts from the number of decoder layers where
    `after_decoder`, else from 0. config.json gives their number under `count_key`.
    """

    prefix: str
    after_decoder: bool
    count_key: str = "num_nextn_predict_layers"


@dataclasses.dataclass(frozen=True)
class Family:
    """A family's table: the rows before the layers, of each layer, after the layers, and the untied head."""

    model_type: str
    embedding: Row
    layer: tuple[Row, ...]
    final_norm: Row
    head: Row
    extra_layers: ExtraLayers | None = None
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

    def rows(self, shape: ModelShape) -> Iterator[Row]:
        """Every row of a whole model, names filled in, in the order of the forward pass.

        Experts come one after another, each with all of its rows.
        """
        yield self.embedding
        present = [row for row in self.layer if row.when is None or shape.has(row.when)]
        kinds = {
            moe: [row for row in present if row.layers in (Layers.ALL, Layers.MOE if moe else Layers.DENSE)]
            for moe in (False, True)
        }
        for layer in range(shape.num_layers):
            for per_expert, group in groupby(kinds[shape.is_moe_layer(layer)], key=lambda row: row.per_expert):
                rows = tuple(group)
                for expert in range(shape.num_experts) if per_expert else (None,):
                    for row in rows:
                        yield row.at(layer, expert)
        yield self.final_norm
        if not shape.tied:
            yield self.head

    def hf_names(self, shape: ModelShape) -> list[str]:
        """The name of every Hugging Face tensor that a checkpoint must have, each once."""
        return [part.name for row in self.rows(shape) for part in row.hf]

    def names_with_next(self, shape: ModelShape) -> frozenset[str]:
        """The Hugging Face tensors that must reach an engine in one piece with the one after them."""
        return frozenset(row.hf[0].name for row in self.rows(shape) if row.with_next)

    def carried_prefixes(self, hf_config: dict[str, Any]) -> tuple[str, ...]:
        """How the names begin of tensors that are neither loaded nor trained, but kept for the way back.

        Whoever writes a Hugging Face folder copies them from the folder that training started from.
        """
        extra = self.extra_layers
        if extra is None:
            return ()
        first = hf_config["num_hidden_layers"] if extra.after_decoder else 0
        count = hf_config.get(extra.count_key) or 0
        return tuple(extra.prefix.format(layer=first + number) for number in range(count))
