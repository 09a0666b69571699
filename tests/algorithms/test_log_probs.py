"""Vocabulary-parallel log-probability and entropy against a float64 log_softmax with autograd.

The ranks of a group are threads of this process, each with its own gloo group over one in-memory store.
"""

import datetime
import math
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from slimrl.algorithms.log_probs import _chunks, vocab_parallel_log_probs
from tests.algorithms.live_bytes import LiveBytes

TOKENS, VOCAB, PADDED = 23, 50, 64


def example(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Logits [tokens, padded] with wild padding columns, targets, and weights of the two outputs in the loss."""
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(TOKENS, PADDED, generator=generator) * 4
    logits[:, VOCAB:] = 100.0
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    targets[0], targets[1] = 0, VOCAB - 1
    weights = torch.randn(2, TOKENS, generator=generator)
    return logits.to(dtype), targets, weights[0], weights[1]


def reference(logits: Tensor, targets: Tensor, log_prob_weight: Tensor, entropy_weight: Tensor, temperature: float):
    """float64: log-probs, entropy, and the gradient of their weighted sum."""
    exact = logits.double()[:, :VOCAB].clone().requires_grad_()
    log_p = (exact / temperature).log_softmax(-1)
    log_probs = log_p.gather(1, targets[:, None]).squeeze(1)
    entropy = -(log_p.exp() * log_p).sum(-1)
    ((log_probs * log_prob_weight).sum() + (entropy * entropy_weight).sum()).backward()
    return log_probs.detach(), entropy.detach(), exact.grad


def own(shard: Tensor, group: dist.ProcessGroup | None, temperature: float, chunk_size: int):
    """The same from the function under test, for one rank's columns."""
    _, targets, log_prob_weight, entropy_weight = example()
    leaf = shard.clone().requires_grad_()
    log_probs, entropy = vocab_parallel_log_probs(
        leaf, targets, vocab_size=VOCAB, group=group, temperature=temperature, chunk_size=chunk_size
    )
    ((log_probs * log_prob_weight).sum() + (entropy * entropy_weight).sum()).backward()
    assert torch.equal(leaf, shard), "the logits were modified"
    return log_probs.detach(), entropy.detach(), leaf.grad


def on_ranks(ranks: int, function):
    """Run `function(rank, group)` on one thread per rank."""
    store = dist.HashStore()

    def run(rank: int):
        group = dist.ProcessGroupGloo(store, rank, ranks, datetime.timedelta(seconds=20))
        return function(rank, group)

    with ThreadPoolExecutor(ranks) as pool:
        return list(pool.map(run, range(ranks)))


@pytest.mark.parametrize("chunk_size", [-1, 1, 7, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_full_logits_match_float64(temperature, chunk_size):
    logits, *rest = example()
    log_probs, entropy, gradient = own(logits, None, temperature, chunk_size)
    expected_log_probs, expected_entropy, expected_gradient = reference(logits, *rest, temperature)
    assert log_probs.dtype == entropy.dtype == torch.float32
    assert (log_probs - expected_log_probs).abs().max() < 5e-6
    assert (entropy - expected_entropy).abs().max() < 2e-6
    assert (gradient[:, :VOCAB] - expected_gradient).abs().max() < 3e-6
    assert gradient[:, VOCAB:].abs().max() == 0, "padding columns must get no gradient"


@pytest.mark.parametrize("ranks", [1, 2, 4, 16])
def test_any_split_over_ranks_matches_float64(ranks):
    # 64 columns over 16 ranks are 4 each: rank 12 holds two real columns, ranks 13 to 15 only padding.
    logits, *rest = example()
    expected_log_probs, expected_entropy, expected_gradient = reference(logits, *rest, 0.8)
    shards = logits.chunk(ranks, dim=1)
    results = on_ranks(ranks, lambda rank, group: own(shards[rank].contiguous(), group, 0.8, 5))
    for log_probs, entropy, _ in results:
        assert (log_probs - expected_log_probs).abs().max() < 5e-6
        assert (entropy - expected_entropy).abs().max() < 2e-6
    gradient = torch.cat([gradient for _, _, gradient in results], dim=1)
    assert (gradient[:, :VOCAB] - expected_gradient).abs().max() < 3e-6
    assert gradient[:, VOCAB:].abs().max() == 0


def test_chunking_is_bit_identical():
    logits, *_ = example()
    for whole, chunked in zip(own(logits, None, 0.7, -1), own(logits, None, 0.7, 4), strict=True):
        assert torch.equal(whole, chunked)


def test_bfloat16_logits_are_reduced_in_float32():
    logits, *rest = example(torch.bfloat16)
    log_probs, entropy, gradient = own(logits, None, 1.0, -1)
    expected_log_probs, expected_entropy, expected_gradient = reference(logits, *rest, 1.0)
    assert (log_probs - expected_log_probs).abs().max() < 5e-6
    assert (entropy - expected_entropy).abs().max() < 2e-6
    assert gradient.dtype == torch.bfloat16
    assert torch.allclose(gradient[:, :VOCAB].double(), expected_gradient, rtol=2**-8, atol=1e-6)


def test_each_output_alone_has_the_right_gradient():
    logits, targets, *_ = example()
    ones, zeros = torch.ones(TOKENS), torch.zeros(TOKENS)
    for output, weights in ((0, (ones, zeros)), (1, (zeros, ones))):
        leaf = logits.clone().requires_grad_()
        vocab_parallel_log_probs(leaf, targets, vocab_size=VOCAB, group=None)[output].sum().backward()
        *_, expected = reference(logits, targets, *weights, 1.0)
        assert (leaf.grad[:, :VOCAB] - expected).abs().max() < 3e-6


def test_masked_tokens_with_logit_minus_infinity_give_no_nan():
    logits = torch.tensor([[0.0, float("-inf"), 0.0, 0.0]], requires_grad=True)
    log_probs, entropy = vocab_parallel_log_probs(logits, torch.tensor([2]), vocab_size=4, group=None)
    (log_probs + entropy).sum().backward()
    assert log_probs.item() == pytest.approx(-math.log(3), rel=1e-6)
    assert entropy.item() == pytest.approx(math.log(3), rel=1e-6)
    assert logits.grad.tolist()[0] == pytest.approx([-1 / 3, 0.0, 2 / 3, -1 / 3], rel=1e-6)


def test_impossible_targets_have_log_probability_minus_infinity():
    logits = torch.zeros(4, 8)
    logits[3, 1] = float("-inf")
    log_probs, _ = vocab_parallel_log_probs(logits, torch.tensor([-1, 6, 5, 1]), vocab_size=6, group=None)
    assert log_probs.tolist() == [float("-inf"), float("-inf"), pytest.approx(-math.log(6)), float("-inf")]


def test_huge_logits_do_not_overflow():
    logits = torch.tensor([[3e38, 0.0], [-3e38, -3e38]])
    log_probs, entropy = vocab_parallel_log_probs(logits, torch.tensor([0, 1]), vocab_size=2, group=None)
    assert log_probs.tolist() == pytest.approx([0.0, -math.log(2)])
    assert entropy.tolist() == pytest.approx([0.0, math.log(2)])


def test_empty_input_gives_empty_results_and_a_gradient():
    logits = torch.zeros(0, 8, requires_grad=True)
    log_probs, entropy = vocab_parallel_log_probs(
        logits, torch.zeros(0, dtype=torch.int64), vocab_size=8, group=None, chunk_size=4
    )
    (log_probs.sum() + entropy.sum()).backward()
    assert log_probs.shape == entropy.shape == (0,)
    assert logits.grad.shape == (0, 8)


def test_the_softmax_is_not_kept_for_backward():
    logits = torch.zeros(16, 32, requires_grad=True)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: kept.append(tensor) or tensor, lambda tensor: tensor):
        vocab_parallel_log_probs(logits, torch.zeros(16, dtype=torch.int64), vocab_size=32, group=None)
    matrices = [tensor for tensor in kept if tensor.dim() == 2]
    assert [tensor.data_ptr() for tensor in matrices] == [logits.data_ptr()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_extra_memory_is_less_than_a_tenth_of_the_logits(dtype):
    logits = torch.zeros(128, 4096, dtype=dtype, requires_grad=True)
    targets = torch.zeros(128, dtype=torch.int64)
    size = logits.untyped_storage().nbytes()
    with LiveBytes() as forward:
        log_probs, entropy = vocab_parallel_log_probs(logits, targets, vocab_size=4000, group=None)
        loss = (log_probs + entropy).sum()
    with LiveBytes() as backward:
        (gradient,) = torch.autograd.grad(loss, logits)
    assert 0 < forward.peak <= 0.1 * size
    assert 0 < backward.peak - gradient.untyped_storage().nbytes() <= 0.1 * size


def test_chunk_size_bounds_forward_and_backward_memory():
    logits = torch.zeros(64, 512, requires_grad=True)
    targets = torch.zeros(64, dtype=torch.int64)
    two_buffers, per_row = 2 * 4 * 512 * 4, 64 * 100
    with LiveBytes() as forward:
        log_probs, entropy = vocab_parallel_log_probs(logits, targets, vocab_size=500, group=None, chunk_size=4)
        loss = (log_probs + entropy).sum()
    with LiveBytes() as backward:
        torch.autograd.grad(loss, logits)
    assert forward.peak <= two_buffers + per_row
    assert backward.peak <= two_buffers + per_row + logits.untyped_storage().nbytes()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 9}, "vocab_size is 9 and the logits have 8 x 1 columns"),
        ({"temperature": 0.0}, "temperature is 0.0 and must be positive"),
        ({"chunk_size": 0}, "chunk_size is 0"),
        ({"targets": torch.zeros(3, dtype=torch.int64)}, r"logits have shape \[2, 8\] and targets \[3\]"),
    ],
)
def test_invalid_arguments_are_rejected(change, message):
    arguments = {"targets": torch.zeros(2, dtype=torch.int64), "vocab_size": 8, "group": None, **change}
    with pytest.raises(ValueError, match=message):
        vocab_parallel_log_probs(torch.zeros(2, 8), **arguments)


@pytest.mark.parametrize(
    ("dtype", "size", "lengths"),
    [
        # two float32 buffers of 1/64 or 1/32 of the rows take 1/16 of the bytes of bfloat16 or float32 logits
        (torch.bfloat16, -1, [14] * 64 + [4]),
        (torch.float32, -1, [28] * 32 + [4]),
        (torch.float32, 400, [400, 400, 100]),
        (torch.float32, 1, [1] * 900),
    ],
)
def test_chunk_is_a_sixteenth_of_the_logits_or_the_given_number_of_rows(dtype, size, lengths):
    pieces = list(_chunks(torch.empty(900, 3, dtype=dtype), size))
    assert [piece.stop - piece.start for piece in pieces] == lengths
    assert [piece.start for piece in pieces] == [sum(lengths[:place]) for place in range(len(lengths))]
