"""GLM-4.7-Flash: GLM-4.5's experts with DeepSeek-V3's latent attention, which together are DeepSeek-V3's tensors."""

from __future__ import annotations

import dataclasses

from slimrl.weights.families import deepseek_v3
from slimrl.weights.families.table import Family

FAMILY: Family = dataclasses.replace(deepseek_v3.FAMILY, model_type="glm4_moe_lite")
