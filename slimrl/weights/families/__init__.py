"""The model families slimrl knows: one declarative table each.

`family_for` picks the table of a Hugging Face config. Adding a family means adding a file with its
table and one entry to `FAMILIES`.
"""

from __future__ import annotations

from typing import Any

from slimrl.weights.families import deepseek_v3, glm4, glm4_moe, glm4_moe_lite, kimi_k2, llama, mimo, qwen2, qwen3
from slimrl.weights.families.table import Family, Row

FAMILIES: tuple[Family, ...] = (
    llama.FAMILY,
    qwen2.FAMILY,
    qwen2.MOE_FAMILY,
    qwen3.FAMILY,
    qwen3.MOE_FAMILY,
    glm4.FAMILY,
    glm4_moe.FAMILY,
    deepseek_v3.FAMILY,
    kimi_k2.FAMILY,
    glm4_moe_lite.FAMILY,
    mimo.FAMILY,
)

__all__ = ["FAMILIES", "Family", "Row", "family_for"]


def family_for(hf_config: dict[str, Any]) -> Family:
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
        f" the known ones are {known}: use such a model or add a table under slimrl/weights/families"
    )
