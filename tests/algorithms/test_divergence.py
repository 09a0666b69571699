"""Divergences from chunks of two models' output layers against their definitions, in float64 with autograd."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slimrl.algorithms.divergence import Divergence, output_divergence, output_top_divergence
from slimrl.algorithms.log_probs import output_log_probs
from slimrl.arguments.flag import flag_specs
from slimrl.arguments.flags.critic_and_teacher import SAMPLED_REVERSE_KL, DistillationArguments

TOKENS, VOCABULARY, PADDED = 7, 150, 192
DIVERGENCES = {
    "forward_kl": Divergence("forward_kl"),
    "reverse_kl": Divergence("reverse_kl"),
    "jsd": Divergence("jsd"),
    "jsd towards the teacher": Divergence("jsd", 0.9),
    "jsd towards the student": Divergence("jsd", 0.05),
}


def definition(divergence: Divergence, student: Tensor, teacher: Tensor) -> Tensor:
    """From log-probabilities [tokens, vocabulary], as Agarwal et al. 2024 define it."""
    p, q = teacher.exp(), student.exp()

    def kl(one: Tensor, other: Tensor) -> Tensor:
        return (one * (one.log() - other.log())).sum(dim=1)

    if divergence.kind == "forward_kl":
        return kl(p, q)
    if divergence.kind == "reverse_kl":
        return kl(q, p)
    mixture = divergence.beta * p + (1 - divergence.beta) * q
    return divergence.beta * kl(p, mixture) + (1 - divergence.beta) * kl(q, mixture)


def random_inputs(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[Tensor]:
    """Hidden states and weight of student and teacher, whose hidden states are wider, and targets."""
    generator = torch.Generator().manual_seed(seed)
    shapes = [(TOKENS, 8), (PADDED, 8), (TOKENS, 12), (PADDED, 12)]
    tensors = [torch.randn(*shape, generator=generator).to(dtype) for shape in shapes]
    return [*tensors, torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)]


@pytest.mark.parametrize("divergence", DIVERGENCES.values(), ids=DIVERGENCES)
@pytest.mark.parametrize(("chunk_size", "temperature"), [(-1, 1.0), (3, 0.7), (1000, 1.6)])
def test_value_and_gradients_are_those_of_the_definition(divergence, chunk_size, temperature):
    hidden, weight, teacher_hidden, teacher_weight, targets = random_inputs()
    own = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
    exact = [tensor.double().requires_grad_() for tensor in (hidden, weight)]
    found = output_divergence(
        *own,
        teacher_hidden,
        teacher_weight,
        targets,
        divergence,
        vocab_size=VOCABULARY,
        group=None,
        temperature=temperature,
        chunk_size=chunk_size,
    )
    student, teacher = (
        ((states @ matrix.t())[:, :VOCABULARY] / temperature).log_softmax(dim=1)
        for states, matrix in (exact, (teacher_hidden.double(), teacher_weight.double()))
    )
    expected = (
        student.gather(1, targets[:, None])[:, 0],
        -(student.exp() * student).sum(dim=1),
        definition(divergence, student, teacher),
    )
    for column, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(column, wanted.float(), rtol=1e-5, atol=1e-5)
    weights = torch.linspace(0.5, 2.0, 3 * TOKENS).view(3, TOKENS)
    gradients = torch.autograd.grad((weights * torch.stack(found)).sum(), own)
    truth = torch.autograd.grad((weights.double() * torch.stack(expected)).sum(), exact)
    for gradient, wanted in zip(gradients, truth, strict=True):
        assert float((gradient - wanted).norm() / wanted.norm()) < 1e-5
    assert gradients[1][VOCABULARY:].count_nonzero() == 0


@pytest.mark.parametrize("divergence", DIVERGENCES.values(), ids=DIVERGENCES)
def test_equal_models_have_no_divergence_and_no_gradient(divergence):
    hidden, weight, *_, targets = random_inputs()
    own = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
    *_, value = output_divergence(*own, hidden, weight, targets, divergence, vocab_size=VOCABULARY, group=None)
    assert value.abs().max() < 1e-5
    assert all(gradient.abs().max() < 1e-4 for gradient in torch.autograd.grad(value.sum(), own))


def test_log_probabilities_and_entropy_are_those_without_a_teacher():
    hidden, weight, teacher_hidden, teacher_weight, targets = random_inputs(dtype=torch.bfloat16)
    plain = output_log_probs(hidden, weight, targets, vocab_size=VOCABULARY, group=None, chunk_size=64)
    found = output_divergence(
        hidden, weight, teacher_hidden, teacher_weight, targets, Divergence("jsd"), vocab_size=VOCABULARY, group=None
    )
    for one, other in zip(plain, found[:2], strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-5)


def test_probabilities_of_zero_give_finite_values():
    """The teacher excludes what the student would take, and the other way round."""
    hidden = torch.eye(2)
    weight = torch.zeros(64, 2)
    weight[0, 0] = weight[1, 1] = 2000.0
    targets = torch.zeros(2, dtype=torch.int64)
    for divergence in DIVERGENCES.values():
        own = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
        *_, value = output_divergence(*own, hidden.flip(0), weight, targets, divergence, vocab_size=64, group=None)
        gradients = torch.autograd.grad(value.sum(), own)
        assert all(bool(tensor.isfinite().all()) for tensor in (value, *gradients))


@pytest.mark.parametrize(("kind", "beta"), [("total_variation", 0.5), ("jsd", 0.0), ("jsd", 1.0)])
def test_unknown_divergence_is_an_error(kind, beta):
    with pytest.raises(ValueError, match=f"there is no divergence {kind} with beta {beta}"):
        Divergence(kind, beta)


def test_models_of_other_sizes_are_an_error():
    hidden, weight, teacher_hidden, teacher_weight, targets = random_inputs()
    settings = {"vocab_size": VOCABULARY, "group": None}
    with pytest.raises(ValueError, match="the student has 192 logits and the teacher 128"):
        output_divergence(hidden, weight, teacher_hidden, teacher_weight[:128], targets, DIVERGENCES["jsd"], **settings)
    with pytest.raises(ValueError, match="do not fit 7 targets"):
        output_divergence(hidden, weight, teacher_hidden[1:], teacher_weight, targets, DIVERGENCES["jsd"], **settings)


def test_flag_offers_every_divergence():
    (spec,) = (spec for spec in flag_specs(DistillationArguments) if spec.dest == "opd_divergence")
    assert set(spec.choices) == {SAMPLED_REVERSE_KL, *(divergence.kind for divergence in DIVERGENCES.values())}


@pytest.mark.parametrize("divergence", DIVERGENCES.values(), ids=DIVERGENCES)
@pytest.mark.parametrize(("chunk_size", "temperature", "k"), [(-1, 1.0, 5), (3, 0.7, 1), (1000, 1.6, 40)])
def test_divergence_of_the_top_tokens_and_a_rest_is_that_of_the_definition(divergence, chunk_size, temperature, k):
    hidden, weight, teacher_hidden, teacher_weight, targets = random_inputs(1)
    teacher = ((teacher_hidden.double() @ teacher_weight.double().t())[:, :VOCABULARY]).log_softmax(dim=1)
    top = teacher.topk(k, dim=1)
    own = [tensor.clone().requires_grad_() for tensor in (hidden, weight)]
    exact = [tensor.double().requires_grad_() for tensor in (hidden, weight)]
    settings = dict(vocab_size=VOCABULARY, group=None, temperature=temperature, chunk_size=chunk_size)
    found = output_top_divergence(*own, targets, top.indices, top.values.float(), divergence, **settings)
    student = ((exact[0] @ exact[1].t())[:, :VOCABULARY] / temperature).log_softmax(dim=1)

    def cells(log_probs: Tensor) -> Tensor:
        chosen = log_probs.gather(1, top.indices).exp()
        return torch.cat([chosen, 1 - chosen.sum(dim=1, keepdim=True)], dim=1).log()

    value = definition(divergence, cells(student), cells(teacher))
    whole = definition(divergence, student, teacher)
    expected = (student.gather(1, targets[:, None])[:, 0], -(student.exp() * student).sum(dim=1), value)
    assert (value <= whole + 1e-9).all()  # a lower bound
    for column, wanted in zip(found, expected, strict=True):
        torch.testing.assert_close(column, wanted.float(), rtol=2e-5, atol=1e-5)
    weights = torch.linspace(0.5, 2.0, 3 * TOKENS).view(3, TOKENS)
    gradients = torch.autograd.grad((weights * torch.stack(found)).sum(), own)
    truth = torch.autograd.grad((weights.double() * torch.stack(expected)).sum(), exact)
    for gradient, wanted in zip(gradients, truth, strict=True):
        assert float((gradient - wanted).norm() / wanted.norm()) < 1e-5
    assert gradients[1][VOCABULARY:].count_nonzero() == 0


def test_top_tokens_of_another_shape_are_an_error():
    hidden, weight, *_, targets = random_inputs()
    ids, values = torch.zeros(TOKENS, 3, dtype=torch.int64), torch.zeros(TOKENS, 2)
    with pytest.raises(ValueError, match=r"the teacher's top tokens have shapes \[\[7, 3\], \[7, 2\]\] for 7 targets"):
        output_top_divergence(
            hidden, weight, targets, ids, values, DIVERGENCES["jsd"], vocab_size=VOCABULARY, group=None
        )
