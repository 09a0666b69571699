"""The supported model families: one `ModelMapping` each, with tensor names and the mapping of its config.json.

`family_for` picks the family of a Hugging Face config; `stated_flags` gives the model flags that it determines. Adding
a family means adding a file with its `ModelMapping` and one entry to `FAMILIES`. Imports neither torch nor
transformers, because the flag parser uses it.
"""

from __future__ import annotations

from typing import Any

from slimrl.models.config_rows import Config, FamilyTable
from slimrl.models.families import deepseek_v3, glm4, llama, qwen
from slimrl.models.families.param_mapping import ModelMapping, ParamMapping
from slimrl.models.families.vision import decoder_config

FAMILIES: tuple[ModelMapping, ...] = (
    llama.LLAMA,
    qwen.QWEN2,
    qwen.QWEN2_5_VL,
    qwen.QWEN2_MOE,
    qwen.QWEN3,
    qwen.QWEN3_VL,
    qwen.QWEN3_MOE,
    qwen.QWEN3_VL_MOE,
    glm4.GLM4,
    glm4.GLM4_MOE,
    deepseek_v3.DEEPSEEK_V3,
    deepseek_v3.KIMI_K2,
    glm4.GLM4_MOE_LITE,
    qwen.MIMO,
)

TABLES: dict[str, FamilyTable] = {family.model_type: family.config for family in FAMILIES}
MODEL_TYPES = tuple(TABLES)

__all__ = [
    "FAMILIES",
    "MODEL_TYPES",
    "TABLES",
    "ModelMapping",
    "ParamMapping",
    "family_for",
    "stacks_experts",
    "stated_flags",
]


def family_for(hf_config: dict[str, Any]) -> ModelMapping:
    """The mapping for a config.json, selected by its `model_type`, with the rows of its vision tower.

    Raises ValueError naming the supported families if there is no mapping, or if the config describes a variant that
    its family's mapping does not support.
    """
    model_type = hf_config.get("model_type")
    for family in FAMILIES:
        if family.model_type == model_type:
            family.check_config(hf_config)
            return family.for_config(hf_config)
    known = ", ".join(family.model_type for family in FAMILIES)
    raise ValueError(
        f"config.json has model_type {model_type!r}, for which there is no parameter mapping;"
        f" supported are {known}: use such a model or add a mapping under slimrl/models/families"
    )


def stacks_experts(config: Config) -> bool:
    """Whether files of this config.json's family have all experts of a layer in one tensor per projection."""
    return any(family.stacked_experts for family in FAMILIES if family.model_type == config.get("model_type"))


def stated_flags(config: Config) -> dict[str, Any]:
    """Field of `Arguments` to its value in config.json, or None if config.json does not determine the flag.

    Raises KeyError for a model_type without a table.
    """
    table, config = TABLES[config["model_type"]], decoder_config(config)
    return {field: row.stated(config) for field, row in table.rows.items()}
