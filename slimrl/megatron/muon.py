"""Muon for weight matrices, chained with Adam for all other weights.

Muon (Jordan et al. 2024, https://kellerjordan.github.io/posts/muon/) replaces the momentum of a weight matrix by a
matrix with the same singular vectors and singular values near 1. megatron-core 0.16.1 has the flags, the division of
the weights and the tensor-parallel modes, and imports the optimizer from a package that no index offers; this is that
optimizer, with the same update:

    M <- momentum M + (1 - momentum) G,   W <- (1 - lr decay) W - lr scale NS(M)

G is the clipped gradient; with Nesterov momentum NS is taken of momentum M + (1 - momentum) G after the update of M.
NS is the Newton-Schulz iteration below. `scale` of a matrix with m rows and n columns is sqrt(max(m, n)) (`spectral`),
sqrt(m / n) (`unit_rms_norm`) or sqrt(max(1, m / n)) (`shape_scaling`), times --muon-extra-scale-factor.

The fused weight of queries, keys and values is three matrices (one with --muon-no-split-qkv), the fused weight of a
gated feed-forward block one matrix, and each expert's weights are matrices of their own, as in Megatron-LM.
"""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.optimizer import (
    ChainedOptimizer,
    FP32Optimizer,
    MegatronOptimizer,
    OptimizerConfig,
    _get_param_groups,
    get_megatron_optimizer,
)
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor, nn

# Each step maps a singular value s to a s + b s^3 + c s^5. Five steps take values above 0.002 or so to about 1; from
# https://leloykun.github.io/ponder/muon-opt-coeffs and the record runs of modded-nanogpt: Megatron-LM's "quintic".
COEFFICIENTS = (
    (4.0848, -6.8946, 2.9270),
    (3.9505, -6.3029, 2.6377),
    (3.7418, -5.5913, 2.3037),
    (2.8769, -3.1427, 1.2046),
    (2.8366, -3.0525, 1.2012),
)
_LEAST_NORM = 1e-7  # of a matrix of zeros


def newton_schulz(
    matrix: Tensor,
    steps: int,
    *,
    bfloat16: bool = False,
    transposed: bool | None = None,
    group: dist.ProcessGroup | None = None,
) -> Tensor:
    """`matrix` [m, n] with its singular values near 1; `bfloat16` is the dtype of the products.

    The Gram matrix is [m, m], or [n, n] if `transposed`, by default the smaller one. With `group` its ranks hold parts
    of the long side of one matrix, that is columns, or rows if `transposed`; collective over it.
    """
    rows, columns = matrix.shape
    if transposed is None:
        transposed = rows > columns
    found = matrix.mT if transposed else matrix
    squares = found.square().sum()
    if group is not None:
        dist.all_reduce(squares, group=group)
    found = found / squares.sqrt().clamp(min=_LEAST_NORM)
    if bfloat16:
        found = found.bfloat16()
    for step in range(steps):
        a, b, c = COEFFICIENTS[step % len(COEFFICIENTS)]
        gram = found @ found.mT
        if group is not None:
            dist.all_reduce(gram, group=group)
        found = torch.addmm(found, torch.addmm(gram, gram, gram, beta=b, alpha=c), found, beta=a)
    found = found.to(matrix.dtype)
    return found.mT if transposed else found


def scale(rows: int, columns: int, mode: str) -> float:
    """The factor of an orthogonal matrix of this size; `mode` is that of --muon-scale-mode."""
    if mode == "spectral":  # Liu et al. 2025, arXiv:2502.16982
        return math.sqrt(max(rows, columns))
    ratio = rows / columns  # Pethick et al. 2025, arXiv:2502.07529; Jordan et al. 2024
    return math.sqrt(ratio if mode == "unit_rms_norm" else max(1.0, ratio))


class Muon(torch.optim.Optimizer):
    """Muon over two-dimensional weights and their tensor-parallel shards.

    Of a weight it reads Megatron's attributes: `partition_dim`, `expert_tp`, `is_qkv`. The groups have learning rate
    and weight decay; all else is in `config`.
    """

    def __init__(self, groups: Sequence[dict[str, Any]], config: OptimizerConfig, qkv_rows: Sequence[int]):
        """`qkv_rows`: rows of the queries, keys and values of one query group in the fused weight."""
        super().__init__(groups, {"lr": config.lr, "weight_decay": config.weight_decay})
        self._settings, self._qkv_rows = config, list(qkv_rows)

    def create_state(self) -> None:
        """Create the momenta that the first step would create: saving and loading expect them to exist."""
        for group in self.param_groups:
            for weight in group["params"]:
                self.state[weight].setdefault("momentum_buffer", torch.zeros_like(weight))

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """One update of every weight with a gradient; collective over the groups of the sharded ones."""
        settings = self._settings
        self.create_state()
        with _precision(settings.muon_fp32_matmul_prec):
            for group in self.param_groups:
                for weight in group["params"]:
                    if weight.grad is None:
                        continue
                    gradient, decay = weight.grad, group["weight_decay"]
                    if settings.decoupled_weight_decay:
                        weight.mul_(1 - group["lr"] * decay)
                    elif decay:
                        gradient = gradient.add(weight, alpha=decay)
                    momentum = self.state[weight]["momentum_buffer"].lerp_(gradient, 1 - settings.muon_momentum)
                    if settings.muon_use_nesterov:
                        momentum = gradient.lerp(momentum, settings.muon_momentum)
                    weight.add_(self._update(weight, momentum), alpha=-group["lr"])

    def _update(self, weight: Tensor, momentum: Tensor) -> Tensor:
        if not (self._settings.muon_split_qkv and getattr(weight, "is_qkv", False)):
            return self._orthogonal(weight, momentum)
        by_group = momentum.view(-1, sum(self._qkv_rows), momentum.shape[1])
        parts = [
            self._orthogonal(weight, part.reshape(-1, momentum.shape[1])).view(part.shape)
            for part in by_group.split(self._qkv_rows, dim=1)
        ]
        return torch.cat(parts, dim=1).view(momentum.shape)

    def _orthogonal(self, weight: Tensor, matrix: Tensor) -> Tensor:
        """`matrix`, this rank's part of a matrix that is sharded like `weight`, orthogonalized and scaled."""
        settings = self._settings
        group, axis = _shards(weight)
        bfloat16 = settings.muon_fp32_matmul_prec == "medium"
        shape, steps = list(matrix.shape), settings.muon_num_ns_steps
        if group is None or settings.muon_tp_mode == "blockwise":
            found = newton_schulz(matrix, steps, bfloat16=bfloat16)
        elif settings.muon_tp_mode == "duplicated":
            shape[axis] *= group.size()
            parts = [torch.empty_like(matrix, memory_format=torch.contiguous_format) for _ in range(group.size())]
            dist.all_gather(parts, matrix.contiguous(), group=group)
            whole = newton_schulz(torch.cat(parts, dim=axis), steps, bfloat16=bfloat16)
            found = whole.chunk(group.size(), dim=axis)[group.rank()]
        else:
            shape[axis] *= group.size()
            found = newton_schulz(matrix, steps, bfloat16=bfloat16, transposed=axis == 0, group=group)
        return found * (scale(shape[0], shape[1], settings.muon_scale_mode) * settings.muon_extra_scale_factor)


def _shards(weight: Tensor) -> tuple[dist.ProcessGroup | None, int]:
    """The ranks that hold the shards of a weight and the axis that is cut; None if this rank has it whole."""
    axis = getattr(weight, "partition_dim", -1)
    if axis < 0:
        return None, axis
    if getattr(weight, "expert_tp", False):
        group = parallel_state.get_expert_tensor_parallel_group()
    else:
        group = parallel_state.get_tensor_model_parallel_group()
    return (group if group.size() > 1 else None), axis


@contextlib.contextmanager
def _precision(of_products: str) -> Iterator[None]:
    """torch's precision of float32 products within the block: TF32 on GPUs with `high`. `medium` casts instead."""
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if of_products == "high" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def build_muon(config: OptimizerConfig, stages: Sequence[nn.Module], overrides: Mapping[Any, Any]) -> ChainedOptimizer:
    """Muon over the matrices of this rank's `stages` and Adam over the rest, dense and expert weights apart."""
    config = dataclasses.replace(config, optimizer="adam")  # what megatron-core makes of the rest
    matrices, rest = _divided(stages)
    with _frozen(rest):
        groups = _get_param_groups(list(stages), config, overrides)
    parts = []
    for is_expert, ranks in (
        (False, parallel_state.get_model_parallel_group()),
        (True, parallel_state.get_expert_tensor_model_pipeline_parallel_group()),
    ):
        own = [group for group in groups if group["is_expert_parallel"] is is_expert]
        if own:
            parts.append(_part(Muon(own, config, _qkv_rows(stages[0].config)), config, ranks))
    with _frozen(matrices):
        adam = get_megatron_optimizer(config, list(stages), overrides, use_gloo_process_groups=False)
    config.optimizer = "muon"
    return ChainedOptimizer([*parts, *adam.chained_optimizers])


def _part(muon: Muon, config: OptimizerConfig, ranks: dist.ProcessGroup) -> MegatronOptimizer:
    """`muon` with gradients from Megatron's buffers; `ranks` share a model, over which the norm is summed."""

    def create_state(optimizer: Muon, _: OptimizerConfig | None = None) -> None:
        optimizer.create_state()

    part = (
        Float16OptimizerWithFloat16Params(muon, config, None, create_state)
        if config.bf16
        else FP32Optimizer(muon, config, create_state)
    )
    part.grad_stats_parallel_group = ranks
    part.tp_group = parallel_state.get_tensor_model_parallel_group()
    muon.create_state()
    return part


def _divided(stages: Sequence[nn.Module]) -> tuple[list[nn.Parameter], list[nn.Parameter]]:
    """The trained matrices, and the trained rest: embedding, output layer, value head, norms and biases.

    Sets the attributes by which Muon knows the fused weight of queries, keys and values, and experts' weights.
    """
    matrices, rest = [], []
    for stage in stages:
        for name, weight in stage.named_parameters():
            if not weight.requires_grad:
                continue
            end = getattr(weight, "is_embedding_or_output_parameter", False) or ".value_head." in f".{name}"
            if weight.dim() != 2 or end:
                rest.append(weight)
                continue
            matrices.append(weight)
            vars(weight).update(
                is_qkv=name.endswith("linear_qkv.weight"), expert_tp=not getattr(weight, "allreduce", True)
            )
    return matrices, rest


def _qkv_rows(config: Any) -> tuple[int, int, int]:
    queries = config.num_attention_heads // config.num_query_groups * config.kv_channels
    return queries, config.kv_channels, config.kv_channels


@contextlib.contextmanager
def _frozen(weights: Sequence[nn.Parameter]) -> Iterator[None]:
    """megatron-core makes optimizers of all weights that require a gradient."""
    for weight in weights:
        weight.requires_grad = False
    try:
        yield
    finally:
        for weight in weights:
            weight.requires_grad = True
