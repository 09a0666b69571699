"""Replaces SGLang's choice of experts and their sums, which are those of the trainer's layers.

As in megatron-core, an expert's weight multiplies the input of its second product, and the outputs of a token's experts
are added in the order of the experts.
"""

from __future__ import annotations

from typing import Any

import torch

from slimrl.algorithms.batch_invariant import operators


def install() -> None:
    """Applies the replacements to SGLang's modules."""
    from sglang.srt.layers.moe import fused_moe_native, topk

    topk.fused_topk_native = choose
    fused_moe_native.moe_forward_native = compute


def choose(
    hidden_states: torch.Tensor,
    gating_output: torch.Tensor,
    topk: int,
    renormalize: bool,
    correction_bias: torch.Tensor | None = None,
    scoring_func: str = "softmax",
) -> tuple[torch.Tensor, torch.Tensor]:
    """`fused_topk_native`: weights [tokens, topk] and experts; raises NotImplementedError for scores of other kinds."""
    if correction_bias is not None or scoring_func != "softmax":
        raise NotImplementedError(f"--true-on-policy-mode: a router with a bias, or with {scoring_func} scores")
    return operators.route(gating_output.float(), topk, over_all=not renormalize)


def compute(layer: Any, x: torch.Tensor, topk_output: Any, moe_runner_config: Any) -> torch.Tensor:
    """`moe_forward_native`: the sums [tokens, hidden] of the experts' outputs."""
    others = (moe_runner_config.gemm1_alpha, moe_runner_config.gemm1_clamp_limit)
    if moe_runner_config.activation != "silu" or any(value is not None for value in others):
        raise NotImplementedError("--true-on-policy-mode: experts with another activation than SwiGLU")
    weights, ids, _ = topk_output
    outputs, places = [], []
    for expert in range(layer.num_experts):
        rows, column = (ids == expert).nonzero(as_tuple=True)
        if len(rows):
            gate, up = operators.linear(x[rows], layer.w13_weight[expert]).chunk(2, dim=-1)
            inner = operators.silu(gate) * up * weights[rows, column, None]
            outputs.append(operators.linear(inner, layer.w2_weight[expert]))
            places.append(rows)
    return operators.sum_rows(torch.cat(outputs), torch.cat(places), len(x)) if outputs else torch.zeros_like(x)
