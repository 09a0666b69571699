"""Models whose head gives scores in place of tokens, of architectures that SGLang 0.5.20 has no such head for.

SGLang finds `EntryClass` by its name, once a server's `SGLANG_EXTERNAL_MODEL_PACKAGE` is this package.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.layers.pooler import Pooler, PoolingType, score_and_pool
from sglang.srt.models.qwen2_rm import Qwen2ForRewardModel
from sglang.srt.models.qwen3_moe import Qwen3MoeForCausalLM
from torch import Tensor, nn


class Qwen2ForProcessRewardModel(Qwen2ForRewardModel):
    """Qwen2.5-Math-PRM (Zhang et al. 2025, arXiv:2501.07301): a score of two linear layers for every token.

    Gives the outputs of the head at the last token of a sequence, `num_labels` of config.json: 2 unless it says so.
    SGLang has this head with one output only.
    """

    def __init__(self, config: Any, quant_config: Any = None, prefix: str = "") -> None:
        super().__init__(config, quant_config, prefix)
        self.num_labels = config.num_labels
        self.score[-1] = nn.Linear(config.hidden_size, config.num_labels)


class Qwen3MoeForSequenceClassification(Qwen3MoeForCausalLM):
    """Reward models on Qwen3 with experts, which slimrl trains and exports; SGLang has this head for dense Qwen3 only.

    Gives the outputs of the head at the last token of a sequence, `num_labels` of config.json.
    """

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


EntryClass = [Qwen2ForProcessRewardModel, Qwen3MoeForSequenceClassification]
