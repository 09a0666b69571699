"""The supported model families: one `ModelMapping` each, with tensor names and the mapping of its config.json.

`family_for` picks the family of a Hugging Face config; `stated_flags` gives the model flags that it determines. Adding
a family means adding its `ModelMapping`, in a file of its own or beside the family whose layers it has, and one entry
to `FAMILIES`. Imports neither torch nor transformers, because the flag parser uses it.
"""

from __future__ import annotations

from typing import Any

from slimrl.models.config_rows import Config, FamilyTable
from slimrl.models.families import glm_and_deepseek, llama_and_qwen
from slimrl.models.families.param_mapping import ModelMapping, ParamMapping
from slimrl.models.families.vision import decoder_config

FAMILIES: tuple[ModelMapping, ...] = (
    llama_and_qwen.LLAMA,
    llama_and_qwen.QWEN2,
    llama_and_qwen.QWEN2_5_VL,
    llama_and_qwen.QWEN2_MOE,
    llama_and_qwen.QWEN3,
    llama_and_qwen.QWEN3_VL,
    llama_and_qwen.QWEN3_MOE,
    llama_and_qwen.QWEN3_VL_MOE,
    glm_and_deepseek.GLM4,
    glm_and_deepseek.GLM4_MOE,
    glm_and_deepseek.DEEPSEEK_V3,
    glm_and_deepseek.KIMI_K2,
    glm_and_deepseek.GLM4_MOE_LITE,
    llama_and_qwen.MIMO,
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
