"""The operators of --true-on-policy-mode on GPUs: Triton kernels for sums, FlashAttention 3 for attention, in bfloat16.

As in the kernels of Thinking Machines' batch_invariant_ops, which SGLang and megatron-core have copies of, a row is
computed by one program with fixed blocks, so that its result does not depend on the number of rows. Trainer and server
call these same functions. Sums are in float32.

Imported where tensors are on a GPU only: Triton is not installed elsewhere. With TRITON_INTERPRET=1 the kernels run on
tensors of the CPU, which tests use, with another `DTYPE`: the interpreter has no products in bfloat16.
"""

# Triton compiles its functions and takes no other annotations than its own.
# mypy: disallow-untyped-defs=False, disallow-incomplete-defs=False, disallow-untyped-calls=False
# mypy: disallow-untyped-decorators=False

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

# rows, columns and depth of the part of a product that is in registers; SGLang's sizes for bfloat16
BLOCK_ROWS, BLOCK_COLUMNS, BLOCK_DEPTH = 128, 128, 64
BLOCK = 1024  # of a row that is summed
DTYPE = torch.bfloat16


# Triton would compile other code for one row, and for multiples of 16
@triton.jit(do_not_specialize=["rows"])
def _linear(
    x,
    weight,
    output,
    rows,
    columns,
    depth,
    block_rows: tl.constexpr,
    block_columns: tl.constexpr,
    block_depth: tl.constexpr,
):
    row = tl.program_id(0) * block_rows + tl.arange(0, block_rows).to(tl.int64)
    column = tl.program_id(1) * block_columns + tl.arange(0, block_columns).to(tl.int64)
    within_row, within_column = row[:, None] < rows, column[None, :] < columns
    sums = tl.zeros((block_rows, block_columns), dtype=tl.float32)
    for start in range(0, depth, block_depth):
        k = start + tl.arange(0, block_depth)
        left = tl.load(x + row[:, None] * depth + k[None, :], mask=within_row & (k[None, :] < depth), other=0.0)
        right = tl.load(
            weight + column[None, :] * depth + k[:, None], mask=within_column & (k[:, None] < depth), other=0.0
        )
        sums = tl.dot(left, right, sums)
    place = output + row[:, None] * columns + column[None, :]
    tl.store(place, sums.to(output.dtype.element_ty), mask=within_row & within_column)


@triton.jit
def _rms_norm(x, weight, output, size, epsilon, block: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * size
    squares = 0.0
    for start in range(0, size, block):
        n = start + tl.arange(0, block)
        values = tl.load(x + first + n, mask=n < size, other=0.0).to(tl.float32)
        squares += tl.sum(values * values)
    factor = 1.0 / tl.sqrt(squares / size + epsilon)
    for start in range(0, size, block):
        n = start + tl.arange(0, block)
        values = tl.load(x + first + n, mask=n < size, other=0.0).to(tl.float32)
        scale = tl.load(weight + n, mask=n < size, other=0.0).to(tl.float32)
        tl.store(output + first + n, (values * factor * scale).to(output.dtype.element_ty), mask=n < size)


@triton.jit
def _log_softmax(logits, output, size, block: tl.constexpr):
    first = tl.program_id(0).to(tl.int64) * size
    top = -float("inf")
    for start in range(0, size, block):
        n = start + tl.arange(0, block)
        top = tl.maximum(top, tl.max(tl.load(logits + first + n, mask=n < size, other=-float("inf"))))
    total = 0.0
    for start in range(0, size, block):
        n = start + tl.arange(0, block)
        values = tl.load(logits + first + n, mask=n < size, other=-float("inf"))
        total += tl.sum(tl.exp(values - top))
    log_total = tl.log(total)
    for start in range(0, size, block):
        n = start + tl.arange(0, block)
        values = tl.load(logits + first + n, mask=n < size, other=0.0)
        tl.store(output + first + n, values - top - log_total, mask=n < size)


def linear(x: Tensor, weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """`x` [rows, depth] @ `weight` [columns, depth]^T in `dtype`, or bfloat16. Raises TypeError for other inputs."""
    x, weight = _half(x).contiguous(), _half(weight).contiguous()
    (rows, depth), columns = x.shape, weight.shape[0]
    output = torch.empty(rows, columns, dtype=dtype or DTYPE, device=x.device)
    if output.numel():
        grid = triton.cdiv(rows, BLOCK_ROWS), triton.cdiv(columns, BLOCK_COLUMNS)
        sizes = {"block_rows": BLOCK_ROWS, "block_columns": BLOCK_COLUMNS, "block_depth": BLOCK_DEPTH}
        _linear[grid](x, weight, output, rows, columns, depth, **sizes, num_stages=3, num_warps=8)
    return output


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """x / sqrt(mean(x^2) + epsilon) * weight of `x` [rows, size], rounded once. Raises TypeError as `linear`."""
    x, weight = _half(x).contiguous(), _half(weight).contiguous()
    output = torch.empty_like(x)
    if output.numel():
        _rms_norm[(x.shape[0],)](x, weight, output, x.shape[1], epsilon, block=BLOCK)
    return output


def log_softmax(logits: Tensor) -> Tensor:
    """Natural log-probabilities of float32 `logits` [rows, columns]; -inf stands for a forbidden token."""
    logits = logits.contiguous()
    output = torch.empty_like(logits)
    if output.numel():
        _log_softmax[(logits.shape[0],)](logits, output, logits.shape[1], block=BLOCK)
    return output


def attend(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
    """Causal attention within each sequence of a pack, as `operators.attend_packed`.

    By the library of SGLang's backend fa3, and without splits of the keys, as a server with deterministic inference:
    whether it reads keys from a pack or from pages, it goes through them in the same blocks.
    """
    from sgl_kernel.flash_attn import flash_attn_varlen_func

    ends = torch.tensor([0, *lengths]).cumsum(0).to(query.device, torch.int32, non_blocking=True)
    attended: Tensor = flash_attn_varlen_func(
        *(_half(x).contiguous() for x in (query, key, value)),
        cu_seqlens_q=ends,
        cu_seqlens_k=ends,
        max_seqlen_q=max(lengths),
        max_seqlen_k=max(lengths),
        softmax_scale=scale,
        causal=True,
        num_splits=1,
    )
    return attended


def _half(tensor: Tensor) -> Tensor:
    if tensor.dtype != DTYPE:
        raise TypeError(f"batch-invariant operators on GPUs compute in bfloat16, not in {tensor.dtype}")
    return tensor.detach()
