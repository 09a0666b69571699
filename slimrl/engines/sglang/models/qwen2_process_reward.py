"""Qwen2 with a score of two linear layers for every token: Qwen2.5-Math-PRM (Zhang et al. 2025, arXiv:2501.07301).

SGLang 0.5.20 has this head with one output only (`Qwen2ForRewardModel`); it finds `EntryClass` by its name.
"""

from __future__ import annotations

from typing import Any

from sglang.srt.models.qwen2_rm import Qwen2ForRewardModel
from torch import nn


class Qwen2ForProcessRewardModel(Qwen2ForRewardModel):
    """The outputs of the head at the last token of a sequence, `num_labels` of config.json: 2 unless it says so."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__(config, quant_config, prefix)
        self.num_labels = config.num_labels
        self.score[-1] = nn.Linear(config.hidden_size, config.num_labels)


EntryClass = Qwen2ForProcessRewardModel
