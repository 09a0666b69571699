"""Which key of config.json states which model flag, by model_type: the tables of all families, and `stated_flags`.

Imports neither torch nor transformers.
"""

from __future__ import annotations

from typing import Any

from slimrl.models.config_rows import Config, FamilyTable
from slimrl.models.families import FAMILIES

TABLES: dict[str, FamilyTable] = {family.model_type: family.config for family in FAMILIES}
MODEL_TYPES = tuple(TABLES)


def stated_flags(config: Config) -> dict[str, Any]:
    """Field of `Arguments` to the value that config.json states, None where it leaves the flag open.

    Raises KeyError for a model_type without a table.
    """
    table = TABLES[config["model_type"]]
    return {field: row.stated(config) for field, row in table.rows.items()}
