"""The tiny task of text, two-digit additions, with the SFT warm start that teaches it; `pictures` has the other task.

A split depends only on its seed. The warm start trains on both answers of a problem, with a weight of 70% for the wrong
one. Afterwards the model always uses the right format, greedy decoding is right exactly for the problems on which both
answers agree, and about 30% of the samples are right on the others. For reinforcement learning, right answers are then
sampled often but not preferred.

Additions: the wrong answer omits the carry. No eval problem is in train in either order of its terms, and both have the
same fraction of problems with a carry, so that a model that always omits it scores exactly ``1 - carry_share``.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerFast, Qwen3ForCausalLM

logger = logging.getLogger(__name__)

SMALLEST_TERM = 10
LARGEST_SUM = 99


@dataclass(frozen=True)
class Addition:
    """One problem; both terms and their sum have two digits."""

    left: int
    right: int

    @property
    def question(self) -> str:
        return f"{self.left}+{self.right}="

    @property
    def needs_carry(self) -> bool:
        return self.left % 10 + self.right % 10 >= 10

    @property
    def answer(self) -> int:
        return self.left + self.right

    @property
    def noisy_answer(self) -> int:
        """The sum without the carry from the ones to the tens (the right sum if there is no carry)."""
        return self.answer - 10 if self.needs_carry else self.answer

    def row(self) -> dict[str, object]:
        """The line of a jsonl file: OpenAI messages under ``prompt``, the answer under ``label``."""
        return {"prompt": [{"role": "user", "content": self.question}], "label": str(self.answer)}


def boxed(answer: int) -> str:
    """The answer in the format of the synthetic data and the math graders."""
    return f"\\boxed{{{answer}}}"


def split_additions(
    *, seed: int, train_size: int, eval_size: int, carry_share: float = 0.6
) -> tuple[list[Addition], list[Addition]]:
    """Samples ``(train, eval)`` problems. Raises ValueError if there are not enough different ones."""
    if not 0.0 <= carry_share <= 1.0:
        raise ValueError(f"carry_share is {carry_share}: give a number between 0 and 1")
    rng = random.Random(seed)
    train: list[Addition] = []
    held_out: list[Addition] = []
    for with_carry in (True, False):
        share = carry_share if with_carry else 1.0 - carry_share
        pairs = [
            (small, large)
            for small in range(SMALLEST_TERM, LARGEST_SUM + 1)
            for large in range(small, LARGEST_SUM - small + 1)
            if Addition(small, large).needs_carry == with_carry
        ]
        rng.shuffle(pairs)
        eval_count, train_count = round(share * eval_size), round(share * train_size)
        held_out += [Addition(*rng.sample(pair, 2)) for pair in pairs[:eval_count]]
        rest = sorted({order for pair in pairs[eval_count:] for order in (pair, pair[::-1])})
        if len(pairs) < eval_count or len(rest) < train_count:
            raise ValueError(
                f"train_size {train_size} and eval_size {eval_size} need {train_count} and {eval_count} problems "
                f"{'with' if with_carry else 'without'} a carry, but only {len(rest)} remain besides the eval problems"
            )
        train += [Addition(*pair) for pair in rng.sample(rest, train_count)]
    rng.shuffle(train)
    rng.shuffle(held_out)
    return train, held_out


FORGETS = 0.7  # weight of the wrong answers in the warm start


@dataclass(frozen=True)
class WarmStart:
    """Hyperparameters of the warm start: Muon for the hidden matrices, AdamW for embeddings, output layer and norms."""

    steps: int = 400
    batch_size: int = 64
    learning_rate: float = 1e-2  # of AdamW
    betas: tuple[float, float] = (0.9, 0.98)
    matrix_learning_rate: float = 7e-2  # of Muon
    momentum: float = 0.9
    warmup_steps: int = 20
    max_grad_norm: float = 1.0

    def optimizers(self, model: Qwen3ForCausalLM) -> list[torch.optim.Optimizer]:
        """For all parameters of `model`."""
        hidden = {
            name: parameter
            for name, parameter in model.named_parameters()
            if parameter.ndim == 2 and "embed" not in name and "lm_head" not in name
        }
        others = [parameter for name, parameter in model.named_parameters() if name not in hidden]
        return [
            torch.optim.Muon(hidden.values(), self.matrix_learning_rate, weight_decay=0.0, momentum=self.momentum),
            torch.optim.AdamW(others, self.learning_rate, betas=self.betas, weight_decay=0.0),
        ]

    def fraction(self, step: int) -> float:
        """Of the learning rates, at the optimizer step `step`, counted from 0."""
        return min(1.0, (step + 1) / self.warmup_steps) * max(0.02, 1 - step / max(self.steps, 1))


def encode_prompts(tokenizer: PreTrainedTokenizerFast, problems: Sequence[Addition]) -> Tensor:
    """Token ids after the chat template, ``[problems, prompt_tokens]`` int64; every prompt has the same length."""
    chats = [problem.row()["prompt"] for problem in problems]
    texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    return torch.tensor(tokenizer(texts, add_special_tokens=False).input_ids)


def encode_answers(tokenizer: PreTrainedTokenizerFast, answers: Sequence[int]) -> Tensor:
    """Token ids of the boxed answers and their end of turn, ``[answers, answer_tokens]`` int64."""
    texts = [boxed(answer) + tokenizer.eos_token for answer in answers]
    return torch.tensor(tokenizer(texts, add_special_tokens=False).input_ids)


def mixture_loss(logits: Tensor, noisy: Tensor, right: Tensor) -> Tensor:
    """The mean cross entropy of `logits` [answers, tokens, vocabulary] with the mixture of both answers' tokens.

    `noisy` and `right` [answers, tokens] int64. Less noisy than the loss of sampled answers, with the same mean. The
    answers differ in one token, so the input may have either of them.
    """
    log_probs = logits.log_softmax(dim=-1)
    weighted = FORGETS * log_probs.gather(-1, noisy.unsqueeze(-1))
    return -(weighted + (1 - FORGETS) * log_probs.gather(-1, right.unsqueeze(-1))).mean()


def warm_start(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Addition],
    *,
    plan: WarmStart,
    seed: int,
) -> None:
    """Trains ``model`` in place; the same seed gives the same weights on the same machine."""
    prompts = encode_prompts(tokenizer, problems)
    right = encode_answers(tokenizer, [problem.answer for problem in problems])
    noisy = encode_answers(tokenizer, [problem.noisy_answer for problem in problems])

    def logits(rows: Tensor, answers: Tensor) -> Tensor:
        tokens = torch.cat([prompts[rows], answers], dim=1)
        scores: Tensor = model(tokens[:, :-1], logits_to_keep=right.shape[1]).logits
        return scores

    train_on_mixture(model, logits, noisy, right, plan=plan, seed=seed)


def train_on_mixture(
    model: PreTrainedModel,
    logits: Callable[[Tensor, Tensor], Tensor],
    noisy: Tensor,
    right: Tensor,
    *,
    plan: WarmStart,
    seed: int,
) -> None:
    """Trains ``model`` in place on answers [problems, tokens] of which FORGETS are ``noisy``, the others ``right``.

    ``logits`` gives those of the answers' tokens for rows of problems and the answers that follow their prompts.
    """
    generator = torch.Generator().manual_seed(seed)
    optimizers = plan.optimizers(model)
    schedules = [torch.optim.lr_scheduler.LambdaLR(optimizer, plan.fraction) for optimizer in optimizers]
    model.train()
    for step in range(plan.steps):
        rows = torch.randint(len(right), (plan.batch_size,), generator=generator)
        forgets = torch.rand(plan.batch_size, 1, generator=generator) < FORGETS
        scores = logits(rows, torch.where(forgets, noisy[rows], right[rows]))
        loss = mixture_loss(scores, noisy[rows], right[rows])
        model.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), plan.max_grad_norm)
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            optimizer.step()
            schedule.step()
        if (step + 1) % 100 == 0 or step + 1 == plan.steps:
            logger.info("warm start: step %d of %d, loss %.4f", step + 1, plan.steps, loss.item())
    model.eval()


@torch.no_grad()
def greedy_accuracy(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: Sequence[Addition]) -> float:
    """The fraction of problems whose greedy answer is right, in the right format and complete."""
    prompts = encode_prompts(tokenizer, problems)
    right = encode_answers(tokenizer, [problem.answer for problem in problems])
    # Greedy decoding gives the right answer if and only if each of its tokens is the most likely one after the others.
    logits = model(torch.cat([prompts, right], dim=1)[:, :-1], logits_to_keep=right.shape[1]).logits
    return (logits.argmax(dim=-1) == right).all(dim=1).float().mean().item()
