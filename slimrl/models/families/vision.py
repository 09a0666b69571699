"""The vision tower of a family: its tensors, their sizes, and the token ids that stand for images.

All of it is read from config.json, because no flag describes a tower. Megatron keeps the tower as the module
`vision_model`, whole on every tensor-parallel rank of the first pipeline stage, with the parameter names of
transformers' class. Published files call it `visual`. Imports neither torch nor transformers.
"""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from slimrl.models.config_rows import Config, settings
from slimrl.models.families.param_mapping import HfTensor, ParamMapping

MEGATRON_TOWER = "vision_model."
HF_TOWER = "visual."
DEEPER_HF_TOWER = "model.visual."  # where the decoder is one level down, too
DEEPER_HF_DECODER = "model.language_model."
DECODER_IN_FILES = r"^model\.(?!language_model\.)"  # of some families only transformers' modules are one level down
DECODER_CONFIG = "text_config"
TOWER_CONFIG = "vision_config"
SERVED_LEVELS = 3  # of deepstack, that SGLang adds to the layers of a decoder with experts


def decoder_config(config: Config) -> Config:
    """The entries of the decoder: published files have them at the top, files that transformers writes one level down.

    Entries at the top, such as model_type, take precedence.
    """
    nested = config.get(DECODER_CONFIG)
    return {**nested, **config} if isinstance(nested, dict) else config


def mrope_section(config: Config) -> list[int] | None:
    """Pairs of rotary channels that time, height and width have in a head; None without multimodal positions."""
    section = settings(config).get("mrope_section")
    return None if section is None else list(section)


@dataclasses.dataclass(frozen=True)
class VisionTokens:
    """How images and videos appear among the tokens.

    An image of t x h x w patches becomes t * h * w / `merge_size` ** 2 tokens `image_token_id`, a video as many
    `video_token_id`. `tokens_per_second`: positions in time between frames one second apart, if no text tells the time.
    """

    image_token_id: int
    video_token_id: int
    merge_size: int
    tokens_per_second: int = 4

    @classmethod
    def of(cls, config: Config) -> VisionTokens | None:
        """Those of a config.json; None for a model without a tower."""
        tower = config.get(TOWER_CONFIG)
        if not isinstance(tower, dict):
            return None
        return cls(
            config["image_token_id"],
            config["video_token_id"],
            tower.get("spatial_merge_size", 2),
            tower.get("tokens_per_second", cls.tokens_per_second),
        )


def _row(name: str, *dims: int, hf: str = HF_TOWER) -> ParamMapping:
    return ParamMapping((MEGATRON_TOWER + name,), (HfTensor(hf + name, tuple(map(str, dims))),))


def _linear(name: str, rows: int, columns: int, hf: str = HF_TOWER) -> Iterator[ParamMapping]:
    yield _row(f"{name}.weight", rows, columns, hf=hf)
    yield _row(f"{name}.bias", rows, hf=hf)


def qwen2_5_vl_tower(config: Config) -> tuple[ParamMapping, ...]:
    """The tower of Qwen2.5-VL (arXiv:2502.13923, section 2.1), in the order of its forward pass.

    Missing entries have the defaults of transformers' Qwen2_5_VLVisionConfig.
    """
    tower = config[TOWER_CONFIG]
    width, inner = tower.get("hidden_size", 3584), tower.get("intermediate_size", 3420)
    patch, merged = tower.get("patch_size", 14), width * tower.get("spatial_merge_size", 2) ** 2
    rows = [
        _row(
            "patch_embed.proj.weight",
            width,
            tower.get("in_channels", tower.get("in_chans", 3)),
            tower.get("temporal_patch_size", 2),
            patch,
            patch,
        )
    ]
    for block in range(tower.get("depth", 32)):
        at = f"blocks.{block}."
        rows += [_row(f"{at}norm1.weight", width), _row(f"{at}norm2.weight", width)]
        rows += [*_linear(f"{at}attn.qkv", 3 * width, width), *_linear(f"{at}attn.proj", width, width)]
        rows += [*_linear(f"{at}mlp.gate_proj", inner, width), *_linear(f"{at}mlp.up_proj", inner, width)]
        rows += _linear(f"{at}mlp.down_proj", width, inner)
    rows.append(_row("merger.ln_q.weight", width))
    rows += _linear("merger.mlp.0", merged, merged)
    rows += _linear("merger.mlp.2", tower.get("out_hidden_size", 3584), merged)
    return tuple(rows)


def qwen3_vl_tower(config: Config) -> tuple[ParamMapping, ...]:
    """The tower of Qwen3-VL, in the order of its forward pass, with a merger for each level of deepstack.

    Missing entries have the defaults of transformers' Qwen3VLVisionConfig.
    """
    tower, hf = config[TOWER_CONFIG], DEEPER_HF_TOWER
    width, inner = tower.get("hidden_size", 1152), tower.get("intermediate_size", 4304)
    patch, merged = tower.get("patch_size", 16), width * tower.get("spatial_merge_size", 2) ** 2
    out = tower.get("out_hidden_size", 3584)
    dims = width, tower.get("in_channels", 3), tower.get("temporal_patch_size", 2), patch, patch
    rows = [_row("patch_embed.proj.weight", *dims, hf=hf), _row("patch_embed.proj.bias", width, hf=hf)]
    rows.append(_row("pos_embed.weight", tower.get("num_position_embeddings", 2304), width, hf=hf))

    def norm(name: str, size: int) -> list[ParamMapping]:
        return [_row(f"{name}.weight", size, hf=hf), _row(f"{name}.bias", size, hf=hf)]

    for block in range(tower.get("depth", 27)):
        at = f"blocks.{block}."
        rows += norm(f"{at}norm1", width) + norm(f"{at}norm2", width)
        rows += [*_linear(f"{at}attn.qkv", 3 * width, width, hf), *_linear(f"{at}attn.proj", width, width, hf)]
        rows += [*_linear(f"{at}mlp.linear_fc1", inner, width, hf), *_linear(f"{at}mlp.linear_fc2", width, inner, hf)]
    levels = [f"deepstack_merger_list.{level}" for level in range(len(tower["deepstack_visual_indexes"]))]
    for merger in ("merger", *levels):
        rows += norm(f"{merger}.norm", width if merger == "merger" else merged)
        rows += _linear(f"{merger}.linear_fc1", merged, merged, hf)
        rows += _linear(f"{merger}.linear_fc2", out, merged, hf)
    return tuple(rows)


def deeper(row: ParamMapping) -> ParamMapping:
    """A decoder's row whose Hugging Face tensors are one level down, in `model.language_model`."""
    parts = [dataclasses.replace(part, name=re.sub(DECODER_IN_FILES, DEEPER_HF_DECODER, part.name)) for part in row.hf]
    return dataclasses.replace(row, hf=tuple(parts))


@dataclasses.dataclass(frozen=True)
class VisionTower:
    """The tower of a family: `rows` gives its tensors from config.json, `architecture` is its class in transformers.

    `interleaves_positions`: the rotary channels of time, height and width alternate, instead of three runs.
    `has_timestamps`: the frames of a video stand apart among the tokens, with the time of each in text.
    """

    rows: Callable[[Config], tuple[ParamMapping, ...]]
    architecture: str  # "module.Class"
    interleaves_positions: bool = False
    has_timestamps: bool = False
    feed_forward_results: int = 4  # of the inner width, kept for the backward pass: gate, up, silu and product


QWEN2_5_VL = VisionTower(
    qwen2_5_vl_tower, "transformers.models.qwen2_5_vl.modeling_qwen2_5_vl.Qwen2_5_VisionTransformerPretrainedModel"
)


QWEN3_VL = VisionTower(
    qwen3_vl_tower,
    "transformers.models.qwen3_vl.modeling_qwen3_vl.Qwen3VLVisionModel",
    interleaves_positions=True,
    has_timestamps=True,
    feed_forward_results=2,  # before and after the activation
)
QWEN3_VL_MOE = dataclasses.replace(
    QWEN3_VL, architecture="transformers.models.qwen3_vl_moe.modeling_qwen3_vl_moe.Qwen3VLMoeVisionModel"
)

TowerWeights = tuple[tuple[str, int], ...]  # Megatron's name and the elements of each tensor of a tower


def tower_weights(rows: Iterable[ParamMapping]) -> TowerWeights:
    """The tensors of the tower."""
    return tuple((row.megatron[0], math.prod(map(int, row.hf[0].dims))) for row in rows)


def kept_elements(tower: VisionTower, config: Config) -> int:
    """Elements that the backward pass of a trained tower reads, for each token of an image.

    Of each patch: its values; in each block the input and the result of two norms, queries, keys, values, the result
    of attention, and the results in the feed-forward block; in each merger the input and the result of its norm, and
    those before and after its activation.
    """
    settings: dict[str, Any] = config[TOWER_CONFIG]
    rows = {row.megatron[0].removeprefix(MEGATRON_TOWER): row.hf[0].dims for row in tower.rows(config)}
    width, *patch = map(int, rows["patch_embed.proj.weight"])
    inner = next(
        int(dims[0]) for name, dims in rows.items() if re.match(r"blocks\.0\.mlp\.(gate_proj|linear_fc1)", name)
    )
    blocks = sum(name.endswith(".attn.proj.bias") for name in rows)
    mergers = 1 + len(settings.get("deepstack_visual_indexes", ()))
    kept = math.prod(patch) + blocks * (8 * width + tower.feed_forward_results * inner) + mergers * 4 * width
    merge: int = settings.get("spatial_merge_size", 2)
    return merge**2 * kept
