"""Qwen3 with experts and one output in place of the vocabulary: reward models that slimrl trains and exports.

SGLang 0.5.20 has this head for dense Qwen3 only; it finds `EntryClass` by its name.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.pooler import Pooler, PoolingType, score_and_pool
from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM
from torch import Tensor, nn


class Qwen3MoeForSequenceClassification(Qwen3MoeForCausalLM):
    """The outputs of the head at the last token of a sequence, `num_labels` of config.json."""

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__(config, quant_config, prefix)
        del self.lm_head
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.pooler = Pooler(pooling_type=PoolingType.LAST, normalize=False)

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        forward_batch: Any,
        input_embeds: Tensor | None = None,
        get_embedding: bool = True,
    ) -> Any:
        """An `EmbeddingPoolerOutput` with [sequences, num_labels]."""
        hidden = self.model(input_ids, positions, forward_batch, input_embeds)
        return score_and_pool(self.score, self.pooler, hidden, forward_batch, input_ids)


EntryClass = Qwen3MoeForSequenceClassification
