"""The router of a layer with experts: megatron-core's, but blind to padding where it counts tokens.

The counts steer the bias that keeps experts equally busy. Padding tokens are all alike, go to the same few experts,
and would have real tokens pushed away from them. Used by the layer spec.
"""

from __future__ import annotations

from megatron.core.transformer.moe.router import TopKRouter
from torch import Tensor


class Router(TopKRouter):
    """Chooses the experts of each token; `padding_mask` [tokens, 1] is true where a token is padding."""

    _padding: Tensor | None = None  # of the micro-batch that is being routed

    def routing(self, logits: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Probabilities and choices, [tokens, experts] each; losses for balance are taken over all tokens."""
        self._padding = padding_mask
        return super().routing(logits)

    def _apply_expert_bias(self, routing_map: Tensor, padding_mask: Tensor | None = None) -> None:
        if self._padding is not None:  # 0.16.1 would combine [tokens, experts] with [tokens]
            routing_map = routing_map & ~self._padding.reshape(-1, 1)
        super()._apply_expert_bias(routing_map)
