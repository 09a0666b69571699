"""The teacher's term of the advantages against sums over a whole vocabulary, in float64."""

from __future__ import annotations

import pytest
import torch

from slimrl.algorithms.losses import TeacherTerm, sampled_reverse_kl


def distributions(vocabulary: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """Log-probabilities of student and teacher, float64 [vocabulary]."""
    generator = torch.Generator().manual_seed(3)
    student, teacher = torch.randn(2, vocabulary, generator=generator, dtype=torch.float64)
    return student.log_softmax(0), teacher.log_softmax(0)


def test_mean_over_the_student_is_the_closed_form_of_the_reverse_kl():
    student, teacher = distributions()
    mean = (student.exp() * sampled_reverse_kl(student, teacher)).sum()
    expected = torch.distributions.kl_divergence(
        torch.distributions.Categorical(logits=student), torch.distributions.Categorical(logits=teacher)
    )
    assert float(mean) == pytest.approx(float(expected), rel=1e-14)


def test_policy_gradient_with_the_penalty_is_the_gradient_of_the_reverse_kl():
    start, teacher = distributions()
    logits = start.clone().requires_grad_()
    student = logits.log_softmax(0)
    divergence = (student.exp() * (student - teacher)).sum()
    (expected,) = torch.autograd.grad(divergence, logits)
    # every token once, weighted by its probability: the mean over samples without its noise
    advantages = -TeacherTerm(teacher, kl_coef=1.0).penalty(start, torch.ones(7, dtype=torch.float64))
    loss = -(start.exp() * advantages * logits.log_softmax(0)).sum()
    (actual,) = torch.autograd.grad(loss, logits)
    torch.testing.assert_close(actual, expected, rtol=0, atol=1e-15)


def test_penalty_is_weighted_and_masked_tokens_have_none():
    student = torch.tensor([-1.0, -2.0, -0.5], dtype=torch.float64)
    teacher = torch.tensor([-0.5, -torch.inf, -1.5], dtype=torch.float64)
    mask = torch.tensor([1.0, 0.0, 1.0], dtype=torch.float64)
    assert TeacherTerm(teacher, kl_coef=0.3).penalty(student, mask).tolist() == pytest.approx([-0.15, 0.0, 0.3])
