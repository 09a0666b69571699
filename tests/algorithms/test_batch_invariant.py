"""Batch-invariant operators: values against float64, gradients of torch's operators, bits independent of the batch."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from slimrl.algorithms.batch_invariant import operators
from slimrl.algorithms.log_probs import output_log_probs


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def in_float64(query, key, value, scale):
    """Causal attention of one sequence, [tokens, heads, size] in float64."""
    shared = query.shape[1] // key.shape[1]
    key, value = (x.double().repeat_interleave(shared, 1) for x in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query.double(), key) * scale
    hidden = torch.ones(scores.shape[1:]).triu(scores.shape[2] - scores.shape[1] + 1).bool()
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, float("-inf")).softmax(-1), value)


@pytest.mark.parametrize(("depth", "columns"), [(1, 1), (7, 3), (64, 64), (100, 71), (129, 200)])
def test_row_of_a_product_is_the_same_in_every_batch(depth, columns):
    x, weight = normal(37, depth), normal(columns, depth, seed=1)
    whole = operators.linear(x, weight)
    torch.testing.assert_close(whole.double(), x.double() @ weight.double().t(), rtol=1e-5, atol=1e-4)
    for rows in (1, 2, 5, 16, 36):
        assert torch.equal(operators.linear(x[:rows], weight), whole[:rows])
        assert torch.equal(operators.linear(x[rows:], weight), whole[rows:])


def test_column_of_a_product_is_the_same_in_every_part_of_the_weight():
    x, weight = normal(9, 50), normal(130, 50, seed=1)
    parts = [operators.linear(x, part) for part in weight.split([1, 64, 60, 5])]
    assert torch.equal(torch.cat(parts, dim=1), operators.linear(x, weight))


def test_product_of_no_rows_has_its_columns():
    assert operators.linear(torch.empty(0, 1, 8), normal(3, 8)).shape == (0, 1, 3)


def test_product_of_half_precision_is_refused():
    with pytest.raises(TypeError, match="float32, not in torch.bfloat16"):
        operators.linear(normal(2, 8).bfloat16(), normal(3, 8).bfloat16())


@pytest.mark.parametrize(("size", "value_size"), [(16, 16), (6, 10), (5, 3)])
def test_attention_from_a_scattered_cache_equals_that_of_a_pack(size, value_size):
    """One token at a time, in two halves and as a whole, the sequences alone and together: the same bits."""
    lengths, heads, kv_heads, scale = [20, 1, 33], 4, 2, 0.3
    tokens = sum(lengths)
    query, key, value = (
        normal(tokens, heads, size),
        normal(tokens, kv_heads, size, seed=1),
        normal(tokens, kv_heads, value_size, seed=2),
    )
    packed = operators.attend_packed(query, key, value, lengths, scale)
    places = torch.randperm(2 * tokens, generator=torch.Generator().manual_seed(3))[:tokens]
    keys, values = torch.full((2 * tokens, kv_heads, size), 9.0), torch.full((2 * tokens, kv_heads, value_size), 9.0)
    keys[places], values[places] = key, value
    start = 0
    for length in lengths:
        rows = slice(start, start + length)
        exact = in_float64(query[rows], key[rows], value[rows], scale)
        torch.testing.assert_close(packed[rows].double(), exact, rtol=1e-5, atol=1e-5)
        for first, end in [(n, n + 1) for n in range(length)] + [(0, length // 2), (length // 2, length)]:
            ends = torch.tensor([end]), torch.tensor([end - first])
            part = query[start + first : start + end]
            found = operators.attend_cached(part, keys, values, places[start : start + end], *ends, scale)
            assert torch.equal(found, packed[start + first : start + end])
        start += length


def test_log_softmax_and_entropy_are_those_of_float64():
    logits = 5 * normal(6, 300)
    logits[2, 7] = float("-inf")
    log_probs, entropy = operators.log_softmax(logits, 0.7)
    exact = (logits.double() / 0.7).log_softmax(-1)
    torch.testing.assert_close(log_probs.double(), exact, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(entropy.double(), -(exact.exp() * exact.clamp(min=-1e300)).sum(-1), rtol=1e-5, atol=1e-5)
    assert torch.equal(operators.log_softmax(logits[3:4], 0.7)[0], log_probs[3:4])
    assert torch.equal(operators.log_softmax(logits / torch.tensor([[0.7]]))[0], log_probs)  # as a server divides


def test_other_operators_are_those_of_float64():
    x, weight = 3 * normal(5, 48), normal(48, seed=1)
    torch.testing.assert_close(
        operators.rms_norm(x, weight, 1e-6).double(), F.rms_norm(x.double(), (48,), weight.double(), 1e-6)
    )
    torch.testing.assert_close(operators.silu(x).double(), F.silu(x.double()), rtol=1e-6, atol=1e-6)
    cosines, sines = operators.cosines_and_sines(100 * x)
    torch.testing.assert_close(cosines.double(), (100 * x).double().cos(), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(sines.double(), (100 * x).double().sin(), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("over_all", [False, True])
def test_routing_weights_are_a_softmax(over_all):
    logits = normal(7, 10).requires_grad_()
    weights, ids = operators.route(logits, 3, over_all=over_all)
    exact = logits.double().softmax(-1).gather(1, ids) if over_all else logits.double().gather(1, ids).softmax(-1)
    torch.testing.assert_close(weights.double(), exact, rtol=1e-6, atol=1e-6)
    (weights * normal(7, 3)).sum().backward()
    found, logits.grad = logits.grad, None
    (exact * normal(7, 3).double()).sum().backward()
    torch.testing.assert_close(found, logits.grad, rtol=1e-5, atol=1e-6)


def test_rows_are_added_in_their_order():
    rows = torch.tensor([[1e8], [1.0], [-1e8], [2.0]])
    assert operators.sum_rows(rows, torch.tensor([1, 1, 1, 0]), 2).tolist() == [[2.0], [0.0]]  # 1 is lost in 1e8
    assert operators.sum_rows(rows[[0, 2, 1, 3]], torch.tensor([1, 1, 1, 0]), 2).tolist() == [[2.0], [1.0]]


def test_gradients_are_those_of_torch():
    hidden, weight = normal(11, 20).requires_grad_(), normal(40, 20, seed=1).requires_grad_()
    targets = torch.arange(11)
    settings = {"vocab_size": 37, "group": None, "temperature": 0.8, "chunk_size": -1}
    factor = normal(2, 11, seed=2)
    found, expected = (
        torch.autograd.grad((torch.stack(score(hidden, weight, targets, **settings)) * factor).sum(), (hidden, weight))
        for score in (operators.scored, output_log_probs)
    )
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    found, expected = (
        torch.autograd.grad((norm(hidden).square()).sum(), hidden)[0]
        for norm in (lambda x: operators.rms_norm(x, torch.ones(20), 1e-6), lambda x: F.rms_norm(x, (20,), eps=1e-6))
    )
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-6)


def test_gradients_of_attention_are_those_of_float64():
    query, key, value = (normal(9, heads, 8, seed=heads).requires_grad_() for heads in (4, 2, 1))
    value = normal(9, 2, 8, seed=5).requires_grad_()
    factor = normal(9, 4, 8, seed=7)
    found = torch.autograd.grad(
        (operators.attend_packed(query, key, value, [4, 5], 0.4) * factor).sum(), (query, key, value)
    )
    halves = [in_float64(query[rows], key[rows], value[rows], 0.4) for rows in (slice(4), slice(4, 9))]
    expected = torch.autograd.grad((torch.cat(halves) * factor).sum(), (query, key, value))
    for ours, exact in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-5)
