"""One declarative table per model_type: which key of config.json states which flag. Nothing heavy is imported."""

from __future__ import annotations

from typing import Any

from slimrl.arguments.hf_config import decoder, experts
from slimrl.arguments.hf_config.row import Config, FamilyTable

TABLES: dict[str, FamilyTable] = {
    table.model_type: table
    for table in (
        decoder.LLAMA,
        decoder.QWEN2,
        experts.QWEN2_MOE,
        decoder.QWEN3,
        experts.QWEN3_MOE,
        decoder.GLM4,
        experts.GLM4_MOE,
        experts.DEEPSEEK_V3,
        experts.KIMI_K2,
        experts.GLM4_MOE_LITE,
        decoder.MIMO,
    )
}
MODEL_TYPES = tuple(TABLES)


def stated_flags(config: Config) -> dict[str, Any]:
    """Field of `Arguments` to the value that config.json states, None where it leaves the flag open.

    Raises KeyError for a model_type without a table.
    """
    table = TABLES[config["model_type"]]
    return {field: row.stated(config) for field, row in table.rows.items()}
