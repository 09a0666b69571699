"""`ParamMapping` maps a Megatron tensor to its Hugging Face tensors; `ModelMapping` describes a model family.

A mapping is data only; the arithmetic is in `slimrl.weights.reshard`. Loader, exporter, converters and checks all use
it. This file also has the rows that families share: dense layers, experts, latent attention.

Experts: rows have one Hugging Face tensor per expert and projection, also where files stack those of a layer
(`slimrl.weights.hf_checkpoint`); megatron-core keeps experts one by one (SequentialMLP) or grouped (Transformer
Engine). Latent attention: config.json says whether queries have a latent. Down-projections are
replicated over tensor-parallel ranks, up-projections are sharded by heads. Rotary channels keep the stored order
(adjacent pairs), as megatron-core expects. Engines fuse both down-projections and need them in one request.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from enum import Enum
from itertools import groupby
from typing import TYPE_CHECKING, Any

from slimrl.models.config_rows import Config, FamilyTable

if TYPE_CHECKING:
    from slimrl.models.families.config_mapping import ToyConfig
    from slimrl.models.families.vision import VisionTower
    from slimrl.models.model_spec import ModelSpec


# buffers that some exporters write next to the weights; they are computed from the config, so readers skip them
NON_PARAMETER_SUFFIXES = ("rotary_emb.inv_freq", "rotary_emb.cos_cached", "rotary_emb.sin_cached")


class Layout(Enum):
    """How the Hugging Face tensors of a row form its Megatron tensor."""

    PLAIN = "plain"  # one part, unchanged
    QKV = "qkv"  # three parts; per key-value group: its query heads, then its key head, then its value head
    GATE_UP = "gate_up"  # two parts; per tensor-parallel shard: its gate rows, then its up rows
    PACKED_GATE_UP = "packed_gate_up"  # one part whose first half is the gate; on Megatron's side as GATE_UP


class Layers(Enum):
    """Which layers have the tensor of a row."""

    ALL = "all"
    DENSE = "dense"  # the layers without experts; every layer of a model without experts
    MOE = "moe"  # the layers with experts


@dataclasses.dataclass(frozen=True)
class HfTensor:
    """One Hugging Face tensor: its name and its dimensions in terms of `ModelSpec.dimension`."""

    name: str
    dims: tuple[str, ...]


@dataclasses.dataclass(frozen=True)
class ParamMapping:
    """One Megatron tensor and the Hugging Face tensors it holds.

    `megatron` lists the possible names of the tensor (layer specs differ in the module of a norm or an expert); exactly
    one of them exists in a model. `{layer}` is the global layer number and `{expert}` the global expert number, both
    counted from 0. `layers` says which layers have it; `when` is the property of the model (`ModelSpec.has`) that the
    tensor requires. `shard_dim` is the dimension that tensor parallelism (for an expert: expert tensor parallelism)
    shards, None for replicated tensors. `fuse_with_next`: the engines load its tensor only together with that of the
    next row, so both are sent in one bucket. A first dimension called "vocab" is padded with zero rows in Megatron.
    """

    megatron: tuple[str, ...]
    hf: tuple[HfTensor, ...]
    layout: Layout = Layout.PLAIN
    shard_dim: int | None = None
    layers: Layers = Layers.ALL
    when: str | None = None
    fuse_with_next: bool = False
    expert: int | None = None  # the expert's number, set by `at`

    @property
    def per_layer(self) -> bool:
        """Whether the row describes one tensor per layer."""
        return "{layer}" in self.megatron[0]

    @property
    def per_expert(self) -> bool:
        """Whether the row describes one tensor per expert."""
        return "{expert}" in self.megatron[0]

    @property
    def padded_vocab(self) -> bool:
        """Whether the Megatron tensor has zero rows after the unpadded vocabulary."""
        return self.hf[0].dims[0] == "vocab"

    def at(self, layer: int, expert: int | None = None) -> ParamMapping:
        """The row for one layer (and one expert), with its names filled in."""
        return dataclasses.replace(
            self,
            megatron=tuple(name.format(layer=layer, expert=expert) for name in self.megatron),
            hf=tuple(HfTensor(part.name.format(layer=layer, expert=expert), part.dims) for part in self.hf),
            expert=expert,
        )


@dataclasses.dataclass(frozen=True)
class MTPLayers:
    """Multi-token prediction (MTP) layers of a checkpoint, which slimrl does not train.

    `prefix` is the prefix of their tensors' names; `{layer}` counts from the number of decoder layers if
    `after_decoder`, else from 0. `count_key` is the key of config.json with their number.
    """

    prefix: str
    after_decoder: bool
    count_key: str = "num_nextn_predict_layers"


@dataclasses.dataclass(frozen=True)
class ModelMapping:
    """A family: its tensors before the layers, of each layer, after the layers, and the untied head; its config.json.

    `config` maps keys of config.json to model flags. `float32_router`: engines keep the router's weight in float32,
    regardless of the model's dtype. `toys` are toy-sized models of the family, by name. `tower` is their
    vision tower, whose rows `for_config` puts into `tower_rows`. `stacked_experts`: files stack those of a layer.
    """

    model_type: str
    config: FamilyTable
    embedding: ParamMapping
    layer: tuple[ParamMapping, ...]
    final_norm: ParamMapping
    head: ParamMapping
    extra_layers: MTPLayers | None = None
    float32_router: bool = False
    # config entries that must have this value (or be absent), because the mapping has no rows for other values
    fixed_config: tuple[tuple[str, Any], ...] = ()
    toys: Mapping[str, ToyConfig] = dataclasses.field(default_factory=dict)
    tower: VisionTower | None = None
    tower_rows: tuple[ParamMapping, ...] = ()
    stacked_experts: bool = False

    def for_config(self, hf_config: Config) -> ModelMapping:
        """The mapping of the model of this config.json, with the rows of its vision tower."""
        return self if self.tower is None else dataclasses.replace(self, tower_rows=self.tower.rows(hf_config))

    def check_config(self, hf_config: dict[str, Any]) -> None:
        """Raises ValueError if the config describes tensors that this mapping has no rows for."""
        for key, value in self.fixed_config:
            if key in hf_config and hf_config[key] != value:
                raise ValueError(
                    f"config.json of model_type {self.model_type} has {key} = {hf_config[key]!r};"
                    f" the parameter mapping supports only {key} = {value!r}: use such a model or extend the mapping"
                )

    def rows(self, spec: ModelSpec) -> Iterator[ParamMapping]:
        """Every row of a whole model with names filled in, in the order of the forward pass.

        Experts come one after another, each with all of its rows.
        """
        yield from self.tower_rows
        yield self.embedding
        present = [row for row in self.layer if row.when is None or spec.has(row.when)]
        kinds = {
            moe: [row for row in present if row.layers in (Layers.ALL, Layers.MOE if moe else Layers.DENSE)]
            for moe in (False, True)
        }
        for layer in range(spec.num_layers):
            for per_expert, group in groupby(kinds[spec.moe_layers[layer]], key=lambda row: row.per_expert):
                rows = tuple(group)
                for expert in range(spec.num_experts) if per_expert else (None,):
                    for row in rows:
                        yield row.at(layer, expert)
        yield self.final_norm
        if not spec.tied:
            yield self.head

    def hf_names(self, spec: ModelSpec) -> list[str]:
        """The name of every Hugging Face tensor that a checkpoint must have, each once."""
        return [part.name for row in self.rows(spec) for part in row.hf]

    def names_with_next(self, spec: ModelSpec) -> frozenset[str]:
        """The Hugging Face tensors that an engine must receive in one request with the next tensor."""
        return frozenset(row.hf[0].name for row in self.rows(spec) if row.fuse_with_next)

    def carried_prefixes(self, hf_config: dict[str, Any]) -> tuple[str, ...]:
        """Name prefixes of tensors that are neither loaded nor trained, but kept for the export.

        The exporter of a Hugging Face folder copies them from the folder that training started from.
        """
        extra = self.extra_layers
        if extra is None:
            return ()
        first = hf_config["num_hidden_layers"] if extra.after_decoder else 0
        count = hf_config.get(extra.count_key) or 0
        return tuple(extra.prefix.format(layer=first + number) for number in range(count))


VALUE_HEAD = "value_head.weight"  # of a critic, in place of OUTPUT_LAYER
OUTPUT_LAYER = "output_layer.weight"
CLASSIFIER_HEAD = "score.weight"  # of Hugging Face's classifiers, in place of the output layer
# of no family's table: a checkpoint has either it or an output layer
VALUE_HEAD_ROW = ParamMapping(megatron=(VALUE_HEAD,), hf=(HfTensor(CLASSIFIER_HEAD, ("one", "hidden")),))
HF_LAYER = "model.layers.{layer}."
MEGATRON_LAYER = "decoder.layers.{layer}."

EMBEDDING = ParamMapping(
    megatron=("embedding.word_embeddings.weight",),
    hf=(HfTensor("model.embed_tokens.weight", ("vocab", "hidden")),),
    shard_dim=0,
)
ATTENTION_NORM = ParamMapping(
    # the second spelling is that of specs which fuse the norm into the following linear layer
    megatron=(
        MEGATRON_LAYER + "input_layernorm.weight",
        MEGATRON_LAYER + "self_attention.linear_qkv.layer_norm_weight",
    ),
    hf=(HfTensor(HF_LAYER + "input_layernorm.weight", ("hidden",)),),
)
QKV = ParamMapping(
    megatron=(MEGATRON_LAYER + "self_attention.linear_qkv.weight",),
    hf=(
        HfTensor(HF_LAYER + "self_attn.q_proj.weight", ("queries", "hidden")),
        HfTensor(HF_LAYER + "self_attn.k_proj.weight", ("keys", "hidden")),
        HfTensor(HF_LAYER + "self_attn.v_proj.weight", ("keys", "hidden")),
    ),
    layout=Layout.QKV,
    shard_dim=0,
)
QKV_BIAS = ParamMapping(
    megatron=(MEGATRON_LAYER + "self_attention.linear_qkv.bias",),
    hf=(
        HfTensor(HF_LAYER + "self_attn.q_proj.bias", ("queries",)),
        HfTensor(HF_LAYER + "self_attn.k_proj.bias", ("keys",)),
        HfTensor(HF_LAYER + "self_attn.v_proj.bias", ("keys",)),
    ),
    layout=Layout.QKV,
    shard_dim=0,
    when="qkv_bias",
)
QUERY_NORM = ParamMapping(
    megatron=(MEGATRON_LAYER + "self_attention.q_layernorm.weight",),
    hf=(HfTensor(HF_LAYER + "self_attn.q_norm.weight", ("head",)),),
    when="qk_layernorm",
)
KEY_NORM = ParamMapping(
    megatron=(MEGATRON_LAYER + "self_attention.k_layernorm.weight",),
    hf=(HfTensor(HF_LAYER + "self_attn.k_norm.weight", ("head",)),),
    when="qk_layernorm",
)
ATTENTION_OUTPUT = ParamMapping(
    megatron=(MEGATRON_LAYER + "self_attention.linear_proj.weight",),
    hf=(HfTensor(HF_LAYER + "self_attn.o_proj.weight", ("hidden", "queries")),),
    shard_dim=1,
)
MLP_NORM = ParamMapping(
    megatron=(
        MEGATRON_LAYER + "pre_mlp_layernorm.weight",
        MEGATRON_LAYER + "mlp.linear_fc1.layer_norm_weight",
    ),
    hf=(HfTensor(HF_LAYER + "post_attention_layernorm.weight", ("hidden",)),),
)
GATE_UP = ParamMapping(
    megatron=(MEGATRON_LAYER + "mlp.linear_fc1.weight",),
    hf=(
        HfTensor(HF_LAYER + "mlp.gate_proj.weight", ("ffn", "hidden")),
        HfTensor(HF_LAYER + "mlp.up_proj.weight", ("ffn", "hidden")),
    ),
    layout=Layout.GATE_UP,
    shard_dim=0,
    layers=Layers.DENSE,
)
DOWN = ParamMapping(
    megatron=(MEGATRON_LAYER + "mlp.linear_fc2.weight",),
    hf=(HfTensor(HF_LAYER + "mlp.down_proj.weight", ("hidden", "ffn")),),
    shard_dim=1,
    layers=Layers.DENSE,
)
FINAL_NORM = ParamMapping(
    megatron=("decoder.final_layernorm.weight",),
    hf=(HfTensor("model.norm.weight", ("hidden",)),),
)
HEAD = ParamMapping(
    megatron=(OUTPUT_LAYER,),
    hf=(HfTensor("lm_head.weight", ("vocab", "hidden")),),
    shard_dim=0,
)


ROUTER = ParamMapping(
    megatron=(MEGATRON_LAYER + "mlp.router.weight",),
    hf=(HfTensor(HF_LAYER + "mlp.gate.weight", ("experts", "hidden")),),
    layers=Layers.MOE,
)
# a buffer on both sides: it affects the choice of experts and has no gradient
EXPERT_BIAS = ParamMapping(
    megatron=(MEGATRON_LAYER + "mlp.router.expert_bias",),
    hf=(HfTensor(HF_LAYER + "mlp.gate.e_score_correction_bias", ("experts",)),),
    layers=Layers.MOE,
    when="expert_bias",
)
EXPERT_GATE_UP = ParamMapping(
    megatron=(
        MEGATRON_LAYER + "mlp.experts.local_experts.{expert}.linear_fc1.weight",
        MEGATRON_LAYER + "mlp.experts.linear_fc1.weight{expert}",
    ),
    hf=(
        HfTensor(HF_LAYER + "mlp.experts.{expert}.gate_proj.weight", ("moe_ffn", "hidden")),
        HfTensor(HF_LAYER + "mlp.experts.{expert}.up_proj.weight", ("moe_ffn", "hidden")),
    ),
    layout=Layout.GATE_UP,
    shard_dim=0,
    layers=Layers.MOE,
)
EXPERT_DOWN = ParamMapping(
    megatron=(
        MEGATRON_LAYER + "mlp.experts.local_experts.{expert}.linear_fc2.weight",
        MEGATRON_LAYER + "mlp.experts.linear_fc2.weight{expert}",
    ),
    hf=(HfTensor(HF_LAYER + "mlp.experts.{expert}.down_proj.weight", ("hidden", "moe_ffn")),),
    shard_dim=1,
    layers=Layers.MOE,
)
SHARED_EXPERT_GATE = ParamMapping(
    megatron=(MEGATRON_LAYER + "mlp.shared_experts.gate_weight",),
    hf=(HfTensor(HF_LAYER + "mlp.shared_expert_gate.weight", ("one", "hidden")),),
    layers=Layers.MOE,
    when="shared_expert_gate",
)


def shared_experts(module: str) -> tuple[ParamMapping, ParamMapping]:
    """The rows of the shared experts (one block for all of them) under the Hugging Face name `module`."""
    return (
        ParamMapping(
            megatron=(MEGATRON_LAYER + "mlp.shared_experts.linear_fc1.weight",),
            hf=(
                HfTensor(f"{HF_LAYER}mlp.{module}.gate_proj.weight", ("shared_ffn", "hidden")),
                HfTensor(f"{HF_LAYER}mlp.{module}.up_proj.weight", ("shared_ffn", "hidden")),
            ),
            layout=Layout.GATE_UP,
            shard_dim=0,
            layers=Layers.MOE,
            when="shared_experts",
        ),
        ParamMapping(
            megatron=(MEGATRON_LAYER + "mlp.shared_experts.linear_fc2.weight",),
            hf=(HfTensor(f"{HF_LAYER}mlp.{module}.down_proj.weight", ("hidden", "shared_ffn")),),
            shard_dim=1,
            layers=Layers.MOE,
            when="shared_experts",
        ),
    )


_MEGATRON = MEGATRON_LAYER + "self_attention."
_HF = HF_LAYER + "self_attn."

LATENT_ATTENTION: tuple[ParamMapping, ...] = (
    ParamMapping(
        megatron=(_MEGATRON + "linear_q_proj.weight",),
        hf=(HfTensor(_HF + "q_proj.weight", ("latent_queries", "hidden")),),
        shard_dim=0,
        when="no_query_latent",
    ),
    ParamMapping(
        megatron=(_MEGATRON + "linear_q_down_proj.weight",),
        hf=(HfTensor(_HF + "q_a_proj.weight", ("q_latent", "hidden")),),
        when="query_latent",
        fuse_with_next=True,
    ),
    ParamMapping(
        megatron=(_MEGATRON + "linear_kv_down_proj.weight",),
        hf=(HfTensor(_HF + "kv_a_proj_with_mqa.weight", ("kv_latent_and_rope", "hidden")),),
    ),
    ParamMapping(
        # the second spelling is that of specs which fuse the norm into the following linear layer
        megatron=(_MEGATRON + "q_layernorm.weight", _MEGATRON + "linear_q_up_proj.layer_norm_weight"),
        hf=(HfTensor(_HF + "q_a_layernorm.weight", ("q_latent",)),),
        when="query_latent",
    ),
    ParamMapping(
        megatron=(_MEGATRON + "linear_q_up_proj.weight",),
        hf=(HfTensor(_HF + "q_b_proj.weight", ("latent_queries", "q_latent")),),
        shard_dim=0,
        when="query_latent",
    ),
    ParamMapping(
        megatron=(_MEGATRON + "kv_layernorm.weight", _MEGATRON + "linear_kv_up_proj.layer_norm_weight"),
        hf=(HfTensor(_HF + "kv_a_layernorm.weight", ("kv_latent",)),),
    ),
    ParamMapping(
        megatron=(_MEGATRON + "linear_kv_up_proj.weight",),
        hf=(HfTensor(_HF + "kv_b_proj.weight", ("latent_keys_values", "kv_latent")),),
        shard_dim=0,
    ),
    ParamMapping(
        megatron=(_MEGATRON + "linear_proj.weight",),
        hf=(HfTensor(_HF + "o_proj.weight", ("hidden", "latent_values")),),
        shard_dim=1,
    ),
)
