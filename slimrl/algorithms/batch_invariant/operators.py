"""The kernels on tensors, with gradients: those of torch's own operators at the same inputs.

On a CPU they are `kernels`, in float32; on a GPU `triton_kernels`, in bfloat16, and torch's elementwise operators.

Gradients need not be the same bits in a server, only from run to run, which torch's operators give on a CPU, and on a
GPU with --deterministic-mode.
"""

from __future__ import annotations

import importlib
import math
import os
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor

from slimrl.algorithms.batch_invariant import kernels
from slimrl.algorithms.log_probs import output_log_probs

ROWS_AT_ONCE = 256  # whose logits are in memory


class _WithGradient(torch.autograd.Function):
    """The values of one function, the gradient of another that is equal but for rounding."""

    @staticmethod
    def forward(ctx: Any, values: Callable[..., Any], smooth: Callable[..., Any], *tensors: Tensor) -> Any:
        ctx.smooth = smooth
        ctx.save_for_backward(*tensors)
        return values(*tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        needed = ctx.needs_input_grad[2:]
        tensors = [x.detach().requires_grad_(need) for x, need in zip(ctx.saved_tensors, needed, strict=True)]
        with torch.enable_grad():
            outputs = ctx.smooth(*tensors)
        outputs = outputs if isinstance(outputs, tuple) else (outputs,)
        wanted = [x for x in tensors if x.requires_grad]
        found = iter(torch.autograd.grad(outputs, wanted, grads))
        return None, None, *(next(found) if x.requires_grad else None for x in tensors)


def _computed(values: Callable[..., Any], smooth: Callable[..., Any], *tensors: Tensor) -> Any:
    return _WithGradient.apply(values, smooth, *tensors)  # type: ignore[no-untyped-call]


def _array(tensor: Tensor) -> Any:
    """A float32 or integer tensor on the CPU as an array that the kernels take. Raises TypeError for another dtype."""
    if tensor.is_floating_point() and tensor.dtype != torch.float32:
        raise TypeError(f"batch-invariant operators compute in float32, not in {tensor.dtype}")
    return tensor.detach().contiguous().numpy()


def _on_gpu(tensor: Tensor) -> bool:
    """Whether Triton's kernels compute with it: on a GPU, or in Triton's interpreter."""
    return tensor.is_cuda or os.environ.get("TRITON_INTERPRET") == "1"


def _triton() -> Any:
    """The kernels for GPUs; on other machines Triton need not be installed."""
    return importlib.import_module("slimrl.algorithms.batch_invariant.triton_kernels")


def linear(x: Tensor, weight: Tensor) -> Tensor:
    """`x` [..., depth] @ `weight` [columns, depth]^T, without a gradient of its own (`product` has one)."""
    rows = x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    if _on_gpu(rows):
        output = _triton().linear(rows, weight)
    else:
        output = torch.empty(rows.shape[0], weight.shape[0])
        kernels.linear(_array(rows), _array(weight), output.numpy())
    result: Tensor = output.view(*x.shape[:-1], weight.shape[0])
    return result


def output_logits(hidden: Tensor, weight: Tensor) -> Tensor:
    """`linear` of `hidden` [rows, depth] with float32 results [rows, columns], which are not rounded on a GPU."""
    result: Tensor = _triton().linear(hidden, weight, torch.float32) if _on_gpu(hidden) else linear(hidden, weight)
    return result


def product(x: Tensor, weight: Tensor) -> Tensor:
    """`linear` with the gradients of `F.linear`."""
    result: Tensor = _computed(linear, F.linear, x, weight)
    return result


def rms_norm(x: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """`F.rms_norm` of `x` [..., size] over its last dimension."""

    def values(x: Tensor, weight: Tensor) -> Tensor:
        if _on_gpu(x):
            normed: Tensor = _triton().rms_norm(x.reshape(-1, x.shape[-1]), weight, epsilon).view(x.shape)
            return normed
        output = torch.empty(x.numel() // x.shape[-1], x.shape[-1])
        kernels.rms_norm(_array(x.reshape(output.shape)), _array(weight), epsilon, output.numpy())
        return output.view(x.shape)

    result: Tensor = _computed(values, lambda x, weight: F.rms_norm(x, weight.shape, weight, epsilon), x, weight)
    return result


def silu(x: Tensor) -> Tensor:
    """x sigmoid(x), elementwise."""
    if _on_gpu(x):
        return F.silu(x)

    def values(x: Tensor) -> Tensor:
        output = torch.empty(x.shape)
        kernels.silu(_array(x.flatten()), output.view(-1).numpy())
        return output

    result: Tensor = _computed(values, F.silu, x)
    return result


def cosines_and_sines(angles: Tensor) -> tuple[Tensor, Tensor]:
    """Of `angles` of any shape, in radians; without a gradient."""
    if _on_gpu(angles):
        return angles.cos(), angles.sin()
    cosines, sines = torch.empty(angles.shape), torch.empty(angles.shape)
    kernels.cosines_and_sines(_array(angles.flatten()), cosines.view(-1).numpy(), sines.view(-1).numpy())
    return cosines, sines


def rotate(x: Tensor, cosines: Tensor, sines: Tensor) -> Tensor:
    """The halves of the first numbers of `x` [tokens, ..., size] rotated, in float32, and then rounded as `x` is.

    `cosines` and `sines` [tokens, ..., half of the rotated numbers], float32.
    """
    half = cosines.shape[-1]
    first, second, rest = x.split([half, half, x.shape[-1] - 2 * half], dim=-1)
    first, second = first.float(), second.float()
    turned = first * cosines - second * sines, second * cosines + first * sines
    return torch.cat([part.to(x.dtype) for part in turned] + [rest], dim=-1)


def log_softmax(logits: Tensor, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
    """Natural log-probabilities of `logits` [rows, columns] / temperature, and entropies [rows]; no gradient."""
    if _on_gpu(logits):  # divided by a tensor, as in a server: by a number, torch multiplies with its inverse
        divisor = torch.full((), temperature, dtype=logits.dtype, device=logits.device)  # the host does not wait for it
        log_probs = _triton().log_softmax(logits / divisor)
        weighted = torch.where(log_probs > -math.inf, log_probs.exp() * log_probs, 0.0)
        return log_probs, -weighted.sum(-1)
    output, entropy = torch.empty(logits.shape), torch.empty(logits.shape[0])
    kernels.log_softmax(_array(logits), temperature, output.numpy(), entropy.numpy())
    return output, entropy


def route(logits: Tensor, count: int, *, over_all: bool) -> tuple[Tensor, Tensor]:
    """Weights [rows, count] and ids of the `count` experts with the largest `logits` [rows, experts], in that order.

    The weights are a softmax over these experts, or `over_all` of the row.
    """
    chosen, ids = logits.topk(count, dim=-1)

    def values(logits: Tensor) -> Tensor:
        output = torch.empty(logits.shape)
        kernels.softmax(_array(logits), output.numpy())
        return output

    weights: Tensor = _computed(values, lambda x: x.softmax(-1), logits if over_all else chosen)
    return (weights.gather(-1, ids) if over_all else weights), ids


def sum_rows(rows: Tensor, places: Tensor, count: int) -> Tensor:
    """[count, size] of the sums of the `rows` [rows, size] with each of `places`, added in their order."""

    def values(rows: Tensor) -> Tensor:
        output = torch.zeros(count, rows.shape[1])
        kernels.add_rows(_array(rows), _array(places), output.numpy())
        return output

    result: Tensor = _computed(values, lambda x: x.new_zeros(count, x.shape[1]).index_add(0, places, x), rows)
    return result


def attend_cached(
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    locations: Tensor,
    key_ends: Tensor,
    query_ends: Tensor,
    scale: float,
) -> Tensor:
    """`kernels.attend`: [queries, heads, value size]; no gradient."""
    output = torch.empty(*query.shape[:2], values.shape[2])
    arrays = (_array(x) for x in (query, keys, values, locations, key_ends, query_ends))
    kernels.attend(*arrays, scale, output.numpy())
    return output


def attend_packed(query: Tensor, key: Tensor, value: Tensor, lengths: Sequence[int], scale: float) -> Tensor:
    """Causal attention within each sequence of a pack; [tokens, heads, value size].

    `query` [tokens, heads, size], `key` [tokens, KV heads, size], `value` [tokens, KV heads, value size].
    """
    ends = torch.tensor(lengths).cumsum(0)

    def values_of(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        if _on_gpu(query):
            attended: Tensor = _triton().attend(query, key, value, lengths, scale)
            return attended
        return attend_cached(query, key, value, torch.arange(key.shape[0]), ends, ends, scale)

    def smooth(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        attended = []
        for pieces in zip(*(x.split(list(lengths)) for x in (query, key, value)), strict=True):
            q, k, v = (x.transpose(0, 1)[None] for x in pieces)
            found = F.scaled_dot_product_attention(q, k, v, is_causal=True, scale=scale, enable_gqa=True)
            attended.append(found[0].transpose(0, 1))
        return torch.cat(attended)

    result: Tensor = _computed(values_of, smooth, query, key, value)
    return result


def scored(
    hidden: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    vocab_size: int,
    group: dist.ProcessGroup | None,
    temperature: float,
    chunk_size: int,
) -> tuple[Tensor, Tensor]:
    """As `algorithms.log_probs.output_log_probs`, with the values that a server's sampler computes.

    The ranks of `group` gather all logits of `ROWS_AT_ONCE` tokens, as a server's ranks do.
    """

    def values(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        log_probs, entropies = [], []
        for rows, ids in zip(hidden.split(ROWS_AT_ONCE), targets.split(ROWS_AT_ONCE), strict=True):
            columns = _all_columns(output_logits(rows, weight), group)[:, :vocab_size]
            found, entropy = log_softmax(columns, temperature)
            log_probs.append(found.gather(1, ids[:, None])[:, 0])
            entropies.append(entropy)
        return torch.cat(log_probs), torch.cat(entropies)

    def smooth(hidden: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        return output_log_probs(
            hidden,
            weight,
            targets,
            vocab_size=vocab_size,
            group=group,
            temperature=temperature,
            chunk_size=chunk_size,
        )

    result: tuple[Tensor, Tensor] = _computed(values, smooth, hidden, weight)
    return result


def _all_columns(logits: Tensor, group: dist.ProcessGroup | None) -> Tensor:
    if group is None or group.size() == 1:
        return logits
    parts = [torch.empty_like(logits) for _ in range(group.size())]
    dist.all_gather(parts, logits.contiguous(), group=group)
    return torch.cat(parts, dim=1)
