"""Loops in a fixed order of additions, which numba compiles: no sum is split by rows, threads or blocks.

IEEE 754 defines each multiplication, addition and division, and numba neither reorders nor fuses them unless asked to.
So a result depends on its own inputs alone: not on its place in a batch, on other rows, on the number of threads, or
on where keys are in a cache. Loops over neighbouring results use vector instructions, which changes no result.
Exponentials, logarithms, cosines and sines are those of the C library in float64, one by one, rounded to float32.

Arrays are C-contiguous float32 and int64. numba keeps the machine code on disk, beside this file or else in the user's
cache folder.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np

TILE = 64  # columns of a product whose sums stay in registers and the first-level cache


def _compiled(signature: str) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """The function as machine code, compiled or loaded at its first call: the import of numba takes 0.2 s."""

    def decorate(function: Callable[..., None]) -> Callable[..., None]:
        @functools.cache
        def machine_code() -> Callable[..., None]:
            import numba

            try:
                compiled: Callable[..., None] = numba.njit(signature, nogil=True, cache=True)(function)
            except RuntimeError:  # neither folder can be written
                compiled = numba.njit(signature, nogil=True)(function)
            return compiled

        @functools.wraps(function)
        def call(*arguments: Any) -> None:
            machine_code()(*arguments)

        return call

    return decorate


@_compiled("void(float32[:, ::1], float32[:, ::1], float32[:, ::1])")
def linear(rows: Any, weight: Any, output: Any) -> None:
    """`output` [rows, columns] = `rows` [rows, depth] times the transpose of `weight` [columns, depth].

    Each result is ((0 + x_0 w_0) + x_1 w_1) + ...; eight terms are added per visit of the sums.
    """
    depth, columns = rows.shape[1], weight.shape[0]
    tile = np.zeros((depth, TILE), np.float32)
    sums = np.empty(TILE, np.float32)
    whole = depth - depth % 8
    for first in range(0, columns, TILE):
        width = min(TILE, columns - first)
        for n in range(width):
            for k in range(depth):
                tile[k, n] = weight[first + n, k]
        for row in range(rows.shape[0]):
            for n in range(TILE):
                sums[n] = 0
            for k in range(0, whole, 8):
                x0, x1, x2, x3 = rows[row, k], rows[row, k + 1], rows[row, k + 2], rows[row, k + 3]
                x4, x5, x6, x7 = rows[row, k + 4], rows[row, k + 5], rows[row, k + 6], rows[row, k + 7]
                t0, t1, t2, t3 = tile[k], tile[k + 1], tile[k + 2], tile[k + 3]
                t4, t5, t6, t7 = tile[k + 4], tile[k + 5], tile[k + 6], tile[k + 7]
                for n in range(TILE):
                    half = (((sums[n] + x0 * t0[n]) + x1 * t1[n]) + x2 * t2[n]) + x3 * t3[n]
                    sums[n] = (((half + x4 * t4[n]) + x5 * t5[n]) + x6 * t6[n]) + x7 * t7[n]
            for k in range(whole, depth):
                x0 = rows[row, k]
                for n in range(TILE):
                    sums[n] += x0 * tile[k, n]
            for n in range(width):
                output[row, first + n] = sums[n]


@_compiled("void(float32[:, ::1], float32[::1], float64, float32[:, ::1])")
def rms_norm(rows: Any, weight: Any, epsilon: float, output: Any) -> None:
    """`output` [rows, size] = x / sqrt(mean(x^2) + epsilon) * weight, the mean in float64."""
    size = rows.shape[1]
    for row in range(rows.shape[0]):
        squares = 0.0
        for n in range(size):
            value = np.float64(rows[row, n])
            squares += value * value
        factor = np.float32(1.0 / math.sqrt(squares / size + epsilon))
        for n in range(size):
            output[row, n] = (rows[row, n] * factor) * weight[n]


@_compiled("void(float32[::1], float32[::1])")
def silu(values: Any, output: Any) -> None:
    """`output` = x / (1 + exp(-x))."""
    for n in range(values.shape[0]):
        value = np.float64(values[n])
        output[n] = np.float32(value / (1.0 + math.exp(-value)))


@_compiled("void(float32[::1], float32[::1], float32[::1])")
def cosines_and_sines(angles: Any, cosines: Any, sines: Any) -> None:
    """Of `angles` in radians."""
    for n in range(angles.shape[0]):
        angle = np.float64(angles[n])
        cosines[n] = np.float32(math.cos(angle))
        sines[n] = np.float32(math.sin(angle))


@_compiled("void(float32[:, ::1], float32, float32[:, ::1], float32[::1])")
def log_softmax(logits: Any, temperature: float, output: Any, entropy: Any) -> None:
    """Of `logits` [rows, columns] / temperature, and the `entropy` [rows] of the distribution, in nats.

    A logit of -inf (a forbidden token) has probability 0.
    """
    columns = logits.shape[1]
    for row in range(logits.shape[0]):
        top = np.float32(-np.inf)
        for n in range(columns):
            value = logits[row, n] / temperature
            output[row, n] = value
            top = max(top, value)
        total, weighted = 0.0, 0.0
        for n in range(columns):
            value = np.float64(output[row, n]) - np.float64(top)
            if value > -np.inf:
                power = math.exp(value)
                total += power
                weighted += power * value
        log_total = math.log(total)
        for n in range(columns):
            output[row, n] = np.float32((np.float64(output[row, n]) - np.float64(top)) - log_total)
        entropy[row] = np.float32(log_total - weighted / total)


@_compiled("void(float32[:, ::1], float32[:, ::1])")
def softmax(logits: Any, output: Any) -> None:
    """Of each row of `logits` [rows, columns]."""
    columns = logits.shape[1]
    powers = np.empty(columns, np.float64)
    for row in range(logits.shape[0]):
        top = np.float32(-np.inf)
        for n in range(columns):
            top = max(top, logits[row, n])
        total = 0.0
        for n in range(columns):
            powers[n] = math.exp(np.float64(logits[row, n]) - np.float64(top))
            total += powers[n]
        for n in range(columns):
            output[row, n] = np.float32(powers[n] / total)


@_compiled("void(float32[:, ::1], int64[::1], float32[:, ::1])")
def add_rows(rows: Any, places: Any, output: Any) -> None:
    """Adds `rows` [rows, size], one after another, to the rows `places` of `output`."""
    for row in range(rows.shape[0]):
        for n in range(rows.shape[1]):
            output[places[row], n] += rows[row, n]


@_compiled(
    "void(float32[:, :, ::1], float32[:, :, ::1], float32[:, :, ::1], int64[::1], int64[::1], int64[::1], float32,"
    " float32[:, :, ::1])"
)
def attend(
    queries: Any, keys: Any, values: Any, locations: Any, key_ends: Any, query_ends: Any, scale: float, output: Any
) -> None:
    """Causal attention of several sequences; `output` [queries, heads, value size].

    `queries` [queries, heads, size]: of each sequence those of its last tokens; sequence i has the queries before
    `query_ends[i]`. `keys` [cache size, KV heads, size], `values` [cache size, KV heads, value size]: token j is at
    index `locations[j]` of both, and sequence i has the tokens before `key_ends[i]`. Per query and head: the products
    with the keys, the largest, the exponentials, and their sums go through the tokens in their order.

    Both sums are padded to a multiple of four terms, with zeros, which add nothing.
    """
    size, value_size = queries.shape[2], values.shape[2]
    shared = queries.shape[1] // keys.shape[1]
    padded = size + -size % 4
    query = np.zeros(padded, np.float32)
    sums = np.empty(value_size, np.float32)
    first_key, first_query = 0, 0
    for sequence in range(key_ends.shape[0]):
        length, count = key_ends[sequence] - first_key, query_ends[sequence] - first_query
        turned = np.zeros((padded, length), np.float32)
        gathered = np.zeros((length + 3, value_size), np.float32)
        weights = np.empty(length + 3, np.float32)
        for kv_head in range(keys.shape[1]):
            for j in range(length):
                turned[:size, j] = keys[locations[first_key + j], kv_head]
                gathered[j] = values[locations[first_key + j], kv_head]
            for pair in range(shared * count):
                head, i = kv_head * shared + pair // count, pair % count
                visible = length - count + i + 1
                query[:size] = queries[first_query + i, head]
                weights[: visible + 3] = 0
                for d in range(0, padded, 4):
                    q0, q1, q2, q3 = query[d], query[d + 1], query[d + 2], query[d + 3]
                    t0, t1, t2, t3 = turned[d], turned[d + 1], turned[d + 2], turned[d + 3]
                    for j in range(visible):
                        weights[j] = (((weights[j] + q0 * t0[j]) + q1 * t1[j]) + q2 * t2[j]) + q3 * t3[j]
                top = np.float32(-np.inf)
                for j in range(visible):
                    weights[j] *= scale
                    top = max(top, weights[j])
                total = 0.0
                for j in range(visible):
                    weights[j] = np.float32(math.exp(np.float64(weights[j]) - np.float64(top)))
                    total += weights[j]
                sums[:] = 0
                for j in range(0, visible, 4):
                    w0, w1, w2, w3 = weights[j], weights[j + 1], weights[j + 2], weights[j + 3]
                    v0, v1, v2, v3 = gathered[j], gathered[j + 1], gathered[j + 2], gathered[j + 3]
                    for d in range(value_size):
                        sums[d] = (((sums[d] + w0 * v0[d]) + w1 * v1[d]) + w2 * v2[d]) + w3 * v3[d]
                output[first_query + i, head] = sums / np.float32(total)
        first_key, first_query = key_ends[sequence], query_ends[sequence]
