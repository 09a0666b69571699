"""The model families slimrl knows: one `ModelMapping` each, with tensor names and the table of its config.json.

`family_for` picks the family of a Hugging Face config. Adding a family means adding a file with its `ModelMapping` and
one entry to `FAMILIES`. Imports neither torch nor transformers: the flag parser reads these tables.
"""

from __future__ import annotations

from typing import Any

from slimrl.models.families import deepseek_v3, glm4, llama, qwen
from slimrl.models.families.param_mapping import ModelMapping, ParamMapping

FAMILIES: tuple[ModelMapping, ...] = (
    llama.LLAMA,
    qwen.QWEN2,
    qwen.QWEN2_MOE,
    qwen.QWEN3,
    qwen.QWEN3_MOE,
    glm4.GLM4,
    glm4.GLM4_MOE,
    deepseek_v3.DEEPSEEK_V3,
    deepseek_v3.KIMI_K2,
    glm4.GLM4_MOE_LITE,
    qwen.MIMO,
)

__all__ = ["FAMILIES", "ModelMapping", "ParamMapping", "family_for"]


def family_for(hf_config: dict[str, Any]) -> ModelMapping:
    """The table for a config.json, chosen by its `model_type`.

    Raises ValueError naming the known families where there is no table, or where the config asks for a
    variant that its family's table does not describe.
    """
    model_type = hf_config.get("model_type")
    for family in FAMILIES:
        if family.model_type == model_type:
            family.check_config(hf_config)
            return family
    known = ", ".join(family.model_type for family in FAMILIES)
    raise ValueError(
        f"config.json has model_type {model_type!r}, for which there is no table of weights;"
        f" the known ones are {known}: use such a model or add a table under slimrl/models/families"
    )
