"""On-policy distillation: the student learns from a teacher's log-probabilities of the tokens that it sampled itself.

The reverse KL of a sequence is E_{y ~ student} sum_t [log student(y_t | y_<t) - log teacher(y_t | y_<t)]; its sampled
terms, with the sign of a reward, are the advantages of a policy gradient (on-policy data and the reverse KL of Agarwal
et al. 2024, arXiv:2306.13649; in this form Lu 2025, "On-Policy Distillation", Thinking Machines Lab). No term is
discounted into earlier tokens.
"""

from __future__ import annotations

import dataclasses

from torch import Tensor


@dataclasses.dataclass(frozen=True)
class TeacherTerm:
    """The teacher's `log_probs`, float32 [response tokens], and the weight of the reverse KL to it."""

    log_probs: Tensor
    kl_coef: float

    def penalty(self, student: Tensor, mask: Tensor) -> Tensor:
        """What is subtracted from the advantages: kl_coef * (student - teacher), [response tokens]; 0 where masked.

        `student` has the log-probabilities of the same tokens under the policy that they were sampled from.
        """
        return (self.kl_coef * sampled_reverse_kl(student, self.log_probs)).masked_fill(mask == 0, 0.0)


def sampled_reverse_kl(student: Tensor, teacher: Tensor) -> Tensor:
    """log student - log teacher of the sampled tokens, in nats.

    Its mean over samples of the student is KL(student || teacher): the estimator k1 of Schulman 2020
    (http://joschu.net/blog/kl-approx.html).
    """
    return student - teacher
