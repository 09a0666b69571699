"""Log-probabilities from hidden states against a float64 matrix product, log_softmax and autograd.

The ranks of a group are threads of this process, as in `test_log_probs`.
"""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slimrl.algorithms import log_probs as module
from slimrl.algorithms.log_probs import output_log_probs, piece_columns
from tests.algorithms.live_bytes import LiveBytes
from tests.algorithms.test_log_probs import on_ranks

TOKENS, WIDTH, VOCAB, PADDED = 23, 16, 500, 512
CHUNK = 3  # tokens' logits: 66 columns, which are rounded to 64


def example(dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Hidden states, a weight with wild padding rows, targets, and the weights [2, tokens] of the outputs in a loss."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator)
    weight = torch.randn(PADDED, WIDTH, generator=generator)
    weight[VOCAB:] = 30.0
    targets = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    targets[:4] = torch.tensor([0, 63, 64, VOCAB - 1])  # where chunks begin and end
    return hidden.to(dtype), weight.to(dtype), targets, torch.randn(2, TOKENS, generator=generator)


def reference(temperature: float, dtype: torch.dtype = torch.float32) -> tuple[Tensor, ...]:
    """float64: log-probabilities, entropies, the gradients by hidden states and by weight."""
    hidden, weight, targets, weights = example(dtype)
    hidden, weight = hidden.double().requires_grad_(), weight.double().requires_grad_()
    log_p = (hidden @ weight[:VOCAB].t() / temperature).log_softmax(-1)
    log_probs, entropy = log_p.gather(1, targets[:, None]).squeeze(1), -(log_p.exp() * log_p).sum(-1)
    ((log_probs * weights[0]).sum() + (entropy * weights[1]).sum()).backward()
    return log_probs.detach(), entropy.detach(), hidden.grad, weight.grad


def own(weight: Tensor, group: object, temperature: float, chunk_size: int) -> tuple[Tensor, ...]:
    """The same from the function under test, for one rank's rows of the weight."""
    hidden, _, targets, weights = example(weight.dtype)
    hidden, weight = hidden.requires_grad_(), weight.clone().requires_grad_()
    log_probs, entropy = output_log_probs(
        hidden, weight, targets, vocab_size=VOCAB, group=group, temperature=temperature, chunk_size=chunk_size
    )
    ((log_probs * weights[0]).sum() + (entropy * weights[1]).sum()).backward()
    return log_probs.detach(), entropy.detach(), hidden.grad, weight.grad


@pytest.mark.parametrize("chunk_size", [-1, 1, CHUNK, 100])
@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_full_weight_matches_float64(temperature: float, chunk_size: int):
    log_probs, entropy, hidden_grad, weight_grad = own(example()[1], None, temperature, chunk_size)
    expected = reference(temperature)
    assert log_probs.dtype == entropy.dtype == torch.float32
    assert (log_probs - expected[0]).abs().max() < 1e-5
    assert (entropy - expected[1]).abs().max() < 5e-6
    assert (hidden_grad - expected[2]).abs().max() < 1e-5
    assert (weight_grad - expected[3]).abs().max() < 1e-5
    assert weight_grad[VOCAB:].abs().max() == 0, "padding rows must get no gradient"


@pytest.mark.parametrize("ranks", [2, 4, 64])
def test_any_split_over_ranks_matches_float64(ranks: int):
    # 512 rows over 64 ranks are 8 each: rank 62 holds four real rows, rank 63 only padding.
    shards = example()[1].chunk(ranks)
    results = on_ranks(ranks, lambda rank, group: own(shards[rank], group, 0.8, CHUNK))
    expected = reference(0.8)
    for log_probs, entropy, *_ in results:
        assert (log_probs - expected[0]).abs().max() < 1e-5
        assert (entropy - expected[1]).abs().max() < 5e-6
    assert (sum(hidden_grad for _, _, hidden_grad, _ in results) - expected[2]).abs().max() < 1e-5
    assert (torch.cat([weight_grad for *_, weight_grad in results]) - expected[3]).abs().max() < 1e-5


def test_bfloat16_weight_gradients_have_bfloat16_accuracy():
    log_probs, entropy, hidden_grad, weight_grad = own(example(torch.bfloat16)[1], None, 1.0, CHUNK)
    expected = reference(1.0, torch.bfloat16)
    assert hidden_grad.dtype == weight_grad.dtype == torch.bfloat16
    assert (log_probs - expected[0]).abs().max() < 0.1  # logits up to 16 in steps of 2^-4
    assert (entropy - expected[1]).abs().max() < 0.05
    for actual, exact in ((hidden_grad, expected[2]), (weight_grad, expected[3])):
        assert (actual.double() - exact).norm() < 2**-5 * exact.norm()


@pytest.mark.parametrize("frozen", ["hidden", "weight"])
def test_gradients_are_computed_only_for_inputs_that_need_them(frozen: str):
    hidden, weight, targets, _ = example()
    leaves = {"hidden": hidden, "weight": weight}
    for name, leaf in leaves.items():
        leaf.requires_grad_(name != frozen)
    log_probs, _ = output_log_probs(hidden, weight, targets, vocab_size=VOCAB, group=None)
    log_probs.sum().backward()
    assert leaves.pop(frozen).grad is None
    (leaf,) = leaves.values()
    exact = {"hidden": hidden.detach().double(), "weight": weight.detach().double()}
    (name,) = leaves
    exact[name].requires_grad_()
    log_p = (exact["hidden"] @ exact["weight"][:VOCAB].t()).log_softmax(-1)
    log_p.gather(1, targets[:, None]).sum().backward()
    assert (leaf.grad - exact[name].grad).abs().max() < 1e-5


def test_empty_input_gives_empty_results_and_zero_gradients():
    hidden, weight = torch.zeros(0, WIDTH, requires_grad=True), torch.ones(PADDED, WIDTH, requires_grad=True)
    log_probs, entropy = output_log_probs(
        hidden, weight, torch.zeros(0, dtype=torch.int64), vocab_size=VOCAB, group=None
    )
    (log_probs.sum() + entropy.sum()).backward()
    assert log_probs.shape == entropy.shape == (0,)
    assert hidden.grad.shape == (0, WIDTH)
    assert weight.grad.shape == weight.shape and weight.grad.abs().max() == 0


def test_masked_tokens_and_impossible_targets_give_no_nan():
    # the second token's logits are -inf, and so is all of the third piece of 64 columns
    hidden, weight = torch.ones(3, 1), torch.zeros(256, 1)
    weight[1], weight[128:192] = float("-inf"), float("-inf")
    weight.requires_grad_()
    log_probs, entropy = output_log_probs(
        hidden, weight, torch.tensor([1, 2, 256]), vocab_size=256, group=None, chunk_size=1
    )
    left = torch.tensor(191.0).log()
    assert log_probs.tolist() == [float("-inf"), pytest.approx(-float(left)), float("-inf")]
    assert entropy.tolist() == pytest.approx([float(left)] * 3)
    (gradient,) = torch.autograd.grad(entropy.sum() + log_probs[1], weight)
    assert gradient.isfinite().all()


def test_at_most_a_tenth_of_the_logits_is_held_at_a_time():
    tokens, width, vocab = 256, 16, 16384
    hidden = torch.randn(tokens, width, requires_grad=True)
    weight = torch.randn(vocab, width, requires_grad=True)
    logits = 4 * tokens * vocab
    with LiveBytes() as forward:
        scores = output_log_probs(hidden, weight, torch.zeros(tokens, dtype=torch.int64), vocab_size=vocab, group=None)
        loss = sum(scores).sum()
    with LiveBytes() as backward:
        gradients = torch.autograd.grad(loss, (hidden, weight))
    gradient_bytes = sum(gradient.untyped_storage().nbytes() for gradient in gradients)
    assert 0 < forward.peak <= 0.1 * logits
    assert 0 < backward.peak - gradient_bytes <= 0.1 * logits


def test_chunk_size_bounds_the_logits_held_to_that_many_tokens():
    assert piece_columns(8192, 75968, 2, 1024) == 9472  # an eighth of the columns, to a multiple of 64
    assert piece_columns(100, 75968, 2, 1024) >= 75968  # more tokens than there are: all at once
    assert piece_columns(8192, 75968, 2, -1) == 896  # 1/16 x 2 / (2 + 8) of them
    assert piece_columns(8192, 75968, 4, -1) == 1536  # 1/16 x 4 / (4 + 8)
    assert piece_columns(8192, 128, 4, 1) == 64


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"vocab_size": 513}, "vocab_size is 513 and the logits have 512 x 1 columns"),
        ({"temperature": 0.0}, "temperature is 0.0 and must be positive"),
        ({"chunk_size": 0}, "chunk_size is 0"),
        ({"targets": torch.zeros(3, dtype=torch.int64)}, r"hidden states have shape \[23, 16\].* targets \[3\]"),
        ({"weight": torch.zeros(512, 15)}, r"the weight \[512, 15\]"),
    ],
)
def test_invalid_arguments_are_rejected(change: dict, message: str):
    hidden, weight, targets, _ = example()
    arguments = {"weight": weight, "targets": targets, "vocab_size": VOCAB, "group": None, **change}
    with pytest.raises(ValueError, match=message):
        output_log_probs(hidden, **arguments)


def test_chunk_size_is_in_tokens(monkeypatch):
    asked = []
    monkeypatch.setattr(module, "piece_columns", lambda *sizes: asked.append(sizes) or piece_columns(*sizes))
    hidden, weight = torch.randn(5, 3), torch.randn(128, 3)
    targets = torch.zeros(5, dtype=torch.int64)
    output_log_probs(hidden, weight, targets, vocab_size=128, group=None, chunk_size=2)
    assert asked == [(5, 128, 4, 2)]
