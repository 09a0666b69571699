"""Kimi-K2: DeepSeek-V3's architecture under a model_type of its own."""

from __future__ import annotations

import dataclasses

from slimrl.weights.families import deepseek_v3
from slimrl.weights.families.table import Family

FAMILY: Family = dataclasses.replace(deepseek_v3.FAMILY, model_type="kimi_k2")
