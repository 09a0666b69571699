"""The changes to megatron-core with --true-on-policy-mode: its products and the sums over experts in a fixed order.

Only functions inside `megatron.core` change; `slimrl.megatron.patches` calls `apply`.
"""

from __future__ import annotations

import importlib
from typing import Any

import torch
from torch import Tensor

from slimrl.algorithms.batch_invariant import operators
from slimrl.megatron.cpu_patches import Placeholder


def apply() -> None:
    """Apply the changes; repeated calls change nothing more."""
    fix_products()
    fix_routing()
    fix_sums_over_experts()


def fix_products() -> None:
    """The forward products of the parallel linear layers, which are their calls of `torch.matmul`.

    Their backward passes use methods of tensors.
    """
    layers: Any = importlib.import_module("megatron.core.tensor_parallel.layers")
    if layers.torch.matmul is not _product:
        layers.torch = Placeholder(layers.torch, matmul=_product)


def _product(x: Tensor, right: Tensor, **options: Any) -> Tensor:
    if options:  # the gradient of a weight, written to its buffer
        return torch.matmul(x, right, **options)
    return operators.linear(x, right.t())


def fix_routing() -> None:
    """The router's logits, and the weights of the experts of a token."""
    router: Any = importlib.import_module("megatron.core.transformer.moe.router")
    router.router_gating_linear = _router_logits
    router.topk_routing_with_score_function = _route


def _router_logits(x: Tensor, weight: Tensor, bias: Tensor | None, dtype: torch.dtype) -> Tensor:
    logits = operators.product(x, weight)
    return logits if bias is None else logits + bias


def _route(logits: Tensor, topk: int, use_pre_softmax: bool, **_: Any) -> tuple[Tensor, Tensor]:
    """Probabilities and the map of the chosen experts, [tokens, experts] each; a rule rejects other routers."""
    weights, ids = operators.route(logits, topk, over_all=use_pre_softmax)
    nothing = torch.zeros_like(logits)
    return nothing.scatter(1, ids, weights), torch.zeros_like(logits, dtype=torch.bool).scatter(1, ids, True)


def fix_sums_over_experts() -> None:
    """The sum of the outputs of a token's experts, which the dispatcher has in the order of the experts."""
    dispatcher: Any = importlib.import_module("megatron.core.transformer.moe.token_dispatcher")
    dispatcher.unpermute = _summed


def _summed(tokens: Tensor, places: Tensor, restore_shape: torch.Size, **_: Any) -> Tensor:
    return operators.sum_rows(tokens, places, restore_shape[0])
