"""LoRA adapters of a model (arXiv:2106.09685): which projections have one, their sizes, names, and PEFT's config.

A target is a projection by its Hugging Face name. Its adapter is a pair A [rank, inputs], B [outputs, rank]; the layer
then computes W x + alpha / rank * B A x. Megatron joins several projections in one linear layer: each has a pair of its
own there, under `<layer>.adapters.<projection>`. In files and requests the names are PEFT's: adapter_config.json and
the header of its tensors are compared with the flags before a run. Read by the rules, the plan, the trainer and the
weight updates; imports no torch. In servers of several runs each run's adapters have names of its own.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from slimrl.models.families.param_mapping import HfTensor, Layout, ModelMapping, ParamMapping
from slimrl.models.families.vision import DECODER_IN_FILES, DEEPER_HF_DECODER
from slimrl.models.model_size import Split, Weights
from slimrl.models.model_spec import LatentAttention, ModelSpec

# the projections of Megatron's linear layers, in the order of their rows
PROJECTIONS: dict[str, tuple[str, ...]] = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj"),
    "linear_q_proj": ("q_proj",),
    "linear_q_down_proj": ("q_a_proj",),
    "linear_q_up_proj": ("q_b_proj",),
    "linear_kv_down_proj": ("kv_a_proj_with_mqa",),
    "linear_kv_up_proj": ("kv_b_proj",),
    "linear_proj": ("o_proj",),
    "linear_fc1": ("gate_proj", "up_proj"),
    "linear_fc2": ("down_proj",),
}
_PACKED = {"linear_fc1": "gate_up_proj"}  # where a family has the projections of a layer as one (GLM-4)
EVERY_TARGET: tuple[str, ...] = tuple(
    dict.fromkeys(name for layer, names in PROJECTIONS.items() for name in (*names, _PACKED.get(layer, names[0])))
)
_FEED_FORWARD = ("gate_proj", "up_proj", "down_proj")
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj", *_FEED_FORWARD)  # of a model without latent attention
_LATENTS = ("kv_a_proj_with_mqa", "kv_b_proj", "o_proj", *_FEED_FORWARD)  # of latent attention, besides its queries
ADAPTER_NAME = "policy"  # default of --lora-name, of the trained adapters in the engines
PEFT_PREFIX = "base_model.model."
PART_OF_NAME = ".adapters."  # in the Megatron name of every adapter tensor, and in no other


class LoraFlags(Protocol):
    """The flags of adapters, and those that say which projections the attention has."""

    lora_rank: int | None
    lora_alpha: float | None
    lora_target_modules: list[str] | None
    multi_latent_attention: bool
    q_lora_rank: int | None


class CriticLoraFlags(LoraFlags, Protocol):
    """Those of the critic's adapters too."""

    critic_lora_rank: int | None
    critic_lora_alpha: float | None


@dataclasses.dataclass(frozen=True)
class AdapterConfig:
    """The adapters of a run; `targets` in the order of `EVERY_TARGET`."""

    rank: int
    alpha: float
    targets: tuple[str, ...]

    @classmethod
    def from_args(cls, flags: LoraFlags) -> AdapterConfig | None:
        """None without --lora-rank. The default of alpha is the rank, that of the targets every projection."""
        return cls._of(flags, flags.lora_rank, flags.lora_alpha)

    @classmethod
    def of_critic(cls, flags: CriticLoraFlags) -> AdapterConfig | None:
        """Those of a critic, None without --critic-lora-rank; the targets are those of --lora-target-modules."""
        return cls._of(flags, flags.critic_lora_rank, flags.critic_lora_alpha)

    @classmethod
    def _of(cls, flags: LoraFlags, rank: int | None, alpha: float | None) -> AdapterConfig | None:
        if rank is None:
            return None
        wanted = flags.lora_target_modules or _every_projection(flags)
        targets = tuple(name for name in EVERY_TARGET if name in wanted)
        return cls(rank, float(rank) if alpha is None else alpha, targets)

    @property
    def flags(self) -> str:
        """The settings as flags of the policy's adapters."""
        return f"--lora-rank {self.rank} --lora-alpha {self.alpha:g} --lora-target-modules {' '.join(self.targets)}"

    @property
    def scale(self) -> float:
        """The factor of B A."""
        return self.alpha / self.rank

    def projections(self, layer: str) -> tuple[str, ...]:
        """All projections in a linear layer of Megatron, a key of `PROJECTIONS`, in the order of their rows."""
        packed = _PACKED.get(layer)
        return PROJECTIONS[layer] if packed not in self.targets else (packed,)

    def of_layer(self, layer: str) -> tuple[str, ...]:
        """Those of `projections` with an adapter."""
        return tuple(name for name in self.projections(layer) if name in self.targets)


def _every_projection(flags: LoraFlags) -> tuple[str, ...]:
    if not flags.multi_latent_attention:
        return TARGETS
    return (*(("q_a_proj", "q_b_proj") if flags.q_lora_rank else ("q_proj",)), *_LATENTS)


@dataclasses.dataclass(frozen=True)
class SharedAdapter:
    """The adapters of a run in servers that other runs use, too: one for each weight version, `NAME.OWNER@VERSION`.

    A request that names one is answered by that version, whatever the server loads meanwhile. `name` is --lora-name;
    `owner` is the same when the run resumes, and another in every other run.
    """

    name: str
    owner: str
    config: AdapterConfig

    @property
    def prefix(self) -> str:
        """What the names of all versions begin with, and no name of another run."""
        return f"{self.name}.{self.owner}@"

    def at(self, version: str) -> str:
        """The name of the adapter of one weight version."""
        return f"{self.prefix}{version}"

    def of_others(self, loaded: Iterable[str]) -> list[str]:
        """The loaded adapters that have this name, and are of another run."""
        return sorted(
            found
            for found in loaded
            if (found == self.name or found.startswith(f"{self.name}.")) and not found.startswith(self.prefix)
        )


def adapter_weights(spec: ModelSpec, split: Split, layers: Sequence[int], adapters: AdapterConfig) -> Weights:
    """The adapter tensors of one GPU of a pipeline stage with these layers.

    Of a projection whose outputs are divided, A is whole on every GPU; of one whose inputs are, B is.
    """
    attention = _pairs(adapters, _latent_attention(spec, spec.latent) if spec.latent else _attention(spec), split.tp)
    found = Weights()
    for layer in layers:
        if not spec.moe_layers[layer] or spec.experts is None:
            found += Weights((*attention, *_pairs(adapters, _feed_forward(spec, spec.ffn_hidden_size), split.tp)))
            continue
        dense, shared = attention, spec.experts.shared_ffn_hidden_size
        if shared:
            dense += _pairs(adapters, _feed_forward(spec, shared), split.tp)
        expert = _pairs(adapters, _feed_forward(spec, spec.experts.ffn_hidden_size), split.etp)
        found += Weights(dense, expert * (spec.experts.number // split.ep))
    return found


class _Sides(NamedTuple):
    """Widths of the inputs and outputs of a projection: whole on every GPU, and divided by tensor parallelism."""

    whole: tuple[int, ...]
    divided: tuple[int, ...] = ()


def _attention(spec: ModelSpec) -> dict[str, _Sides]:
    queries, keys = (number * spec.kv_channels for number in (spec.num_attention_heads, spec.num_query_groups))
    widths = {"q_proj": queries, "k_proj": keys, "v_proj": keys, "o_proj": queries}
    return {name: _Sides((spec.hidden_size,), (width,)) for name, width in widths.items()}


def _latent_attention(spec: ModelSpec, latent: LatentAttention) -> dict[str, _Sides]:
    """The projections to the latent vectors are whole on every GPU."""
    hidden, heads, rank = spec.hidden_size, spec.num_attention_heads, latent.q_lora_rank
    keys_and_values = heads * (latent.qk_head_dim + latent.v_head_dim)
    sides = {
        "kv_a_proj_with_mqa": _Sides((hidden, latent.kv_lora_rank + latent.qk_pos_emb_head_dim)),
        "kv_b_proj": _Sides((latent.kv_lora_rank,), (keys_and_values,)),
        "o_proj": _Sides((hidden,), (heads * latent.v_head_dim,)),
    }
    queries = (heads * latent.qk_channels,)
    if rank is None:
        return sides | {"q_proj": _Sides((hidden,), queries)}
    return sides | {"q_a_proj": _Sides((hidden, rank)), "q_b_proj": _Sides((rank,), queries)}


def _feed_forward(spec: ModelSpec, width: int) -> dict[str, _Sides]:
    sides = dict.fromkeys(_FEED_FORWARD, _Sides((spec.hidden_size,), (width,)))
    return sides | {"gate_up_proj": _Sides((spec.hidden_size,), (2 * width,))}


def _pairs(adapters: AdapterConfig, sides: dict[str, _Sides], tp: int) -> tuple[int, ...]:
    """Elements of A and B of the targets in `sides`."""
    found = (one for name, one in sides.items() if name in adapters.targets)
    widths = (width for one in found for width in (*one.whole, *(part // tp for part in one.divided)))
    return tuple(adapters.rank * width for width in widths)


def is_adapter(name: str) -> bool:
    """Whether `name` is the Megatron name of an adapter's tensor."""
    return PART_OF_NAME in name


@dataclasses.dataclass(frozen=True)
class AdapterMapping(ModelMapping):
    """The adapters of a model as rows like those of its weights: two for each target, A then B."""

    adapters: AdapterConfig | None = None

    @classmethod
    def of(cls, family: ModelMapping, adapters: AdapterConfig) -> AdapterMapping:
        """The adapters of a model of `family`."""
        own = {field.name: getattr(family, field.name) for field in dataclasses.fields(ModelMapping)}
        return cls(**own, adapters=adapters)

    def rows(self, spec: ModelSpec) -> Iterator[ParamMapping]:
        """The adapters' rows, in the order of the forward pass."""
        for row in super().rows(spec):
            yield from self._of_row(row)

    def _of_row(self, row: ParamMapping) -> Iterator[ParamMapping]:
        assert self.adapters is not None
        rank = str(self.adapters.rank)
        for projection, part in targets_of(row):
            if projection not in self.adapters.targets:
                continue
            layer, hf = row.megatron[0].removesuffix(".weight"), PEFT_PREFIX + self._module(part)
            for letter, dims, divided in (("A", (rank, part.dims[1]), 1), ("B", (part.dims[0], rank), 0)):
                yield dataclasses.replace(
                    row,
                    megatron=(f"{layer}{PART_OF_NAME}{projection}.lora_{letter}",),
                    hf=(HfTensor(f"{hf}.lora_{letter}.weight", dims),),
                    layout=row.layout if letter == "B" and row.layout is Layout.PACKED_GATE_UP else Layout.PLAIN,
                    shard_dim=divided if row.shard_dim == divided else None,
                    fuse_with_next=False,
                )

    def _module(self, part: HfTensor) -> str:
        """The name in transformers' model, which has a decoder behind a tower one level down, of a weight's layer."""
        name = part.name.removesuffix(".weight")
        return name if self.tower is None else re.sub(DECODER_IN_FILES, DEEPER_HF_DECODER, name)


def targets_of(row: ParamMapping) -> Iterator[tuple[str, HfTensor]]:
    """The projections in `row` that can have an adapter, each with its weight."""
    *_, layer, kind = row.megatron[0].split(".")
    for part in row.hf:
        projection = part.name.split(".")[-2]
        if kind == "weight" and projection in (*PROJECTIONS.get(layer, ()), _PACKED.get(layer)):
            yield projection, part


def targets_in(family: ModelMapping, spec: ModelSpec) -> tuple[str, ...]:
    """The projections of a model that can have adapters, in the order of `EVERY_TARGET`."""
    found = {projection for row in family.rows(spec) for projection, _ in targets_of(row)}
    return tuple(name for name in EVERY_TARGET if name in found)


ADAPTERS_BESIDE = "-adapters"  # after the name of an export of merged weights: the PEFT folder beside it
CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
_LONGEST_HEADER = 100_000_000  # bytes, the limit of the format

# settings that change what an adapter computes, with the only value that is served
_PLAIN: dict[str, Any] = {
    "use_rslora": False,
    "use_dora": False,
    "bias": "none",
    "fan_in_fan_out": False,
    "modules_to_save": None,
    "layers_to_transform": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "trainable_token_indices": None,
    "target_parameters": None,
}


def peft_config(adapters: AdapterConfig, base: str | None = None, *, has_tower: bool = False) -> dict[str, Any]:
    """The adapter_config.json of `adapters`; `base` is the name or folder of the base model.

    With `has_tower`, PEFT must not look for the targets in a vision tower, whose layers may have the same names.
    """
    skipped = {"exclude_modules": r".*\bvisual\..*"} if has_tower else {}
    return (
        _PLAIN
        | skipped
        | {
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": base,
            "inference_mode": True,
            "r": adapters.rank,
            "lora_alpha": adapters.alpha,
            "lora_dropout": 0.0,
            "target_modules": list(adapters.targets),
        }
    )


def problem_with_shapes(folder: Path, expected: Mapping[str, tuple[int, ...]]) -> str | None:
    """The first tensor in which the folder differs from `expected`, as the end of a sentence; None if none does.

    Reads the header of the file, as the safetensors format defines it: its length in 8 bytes, then JSON.
    """
    with (folder / WEIGHTS_NAME).open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(min(length, _LONGEST_HEADER)))
        except ValueError:
            return f"has a damaged {WEIGHTS_NAME}: copy or download it again"
    stored = {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    for name in sorted(expected.keys() | stored.keys()):
        if name not in stored:
            return f"lacks {name}: give the adapter of this model"
        if name not in expected:
            return f"has {name}, which the flags do not describe: give the adapter of this model"
        if stored[name] != expected[name]:
            return (
                f"has {name} of shape {list(stored[name])} and the flags describe {list(expected[name])}: give the"
                " adapter of this model"
            )
    return None


def problem_with(folder: Path, adapters: AdapterConfig) -> str | None:
    """Why `folder` cannot be loaded as these adapters, as the end of a sentence; None if it can."""
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        if not (folder / name).is_file():
            return f"has no {name}: give the folder of a PEFT adapter"
    try:
        found = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        return f"has a damaged {CONFIG_NAME} ({error}): copy or download it again"
    if found.get("peft_type") != "LORA":
        return f"is of peft_type {found.get('peft_type')!r}, and only 'LORA' is supported: give another folder"
    for key, value in _PLAIN.items():
        if (found.get(key) or value) != value:
            return f"has {key} {found[key]!r} in {CONFIG_NAME}, and only {value!r} is supported: give another folder"
    if found.get("r") != adapters.rank:
        return f"has rank {found.get('r')} (r) and --lora-rank is {adapters.rank}: make them equal"
    if found.get("lora_alpha") != adapters.alpha:
        return f"has lora_alpha {found.get('lora_alpha')} and --lora-alpha is {adapters.alpha:g}: make them equal"
    targets = found.get("target_modules")
    if not isinstance(targets, list) or set(targets) != set(adapters.targets):
        own = " ".join(adapters.targets)
        return f"has target_modules {targets} and --lora-target-modules is {own}: make them equal"
    return None
