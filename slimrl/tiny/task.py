"""The tiny task: two-digit additions as synthetic data, and the SFT warm start that teaches them with a known error.

A split depends on its seed only. No eval problem is in train in either order of its terms, and both have the same share
of problems with a carry, so that a model which always forgets the carry scores exactly ``1 - carry_share``.

The warm start trains on answers that forget the carry seven times in ten. The model then always answers in the right
form and, where a carry is needed, is right in about three samples of ten; greedy decoding solves exactly the problems
without a carry. This leaves reinforcement learning right answers that are sampled often but not preferred.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerFast, Qwen3ForCausalLM

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
        """The sum with the carry from the ones to the tens left out (the right sum where there is none)."""
        return self.answer - 10 if self.needs_carry else self.answer

    def row(self) -> dict[str, object]:
        """The line of a jsonl file: OpenAI messages under ``prompt``, the answer under ``label``."""
        return {"prompt": [{"role": "user", "content": self.question}], "label": str(self.answer)}


def boxed(answer: int) -> str:
    """The form in which the pupil answers and which math graders look for."""
    return f"\\boxed{{{answer}}}"


def split_additions(
    *, seed: int, train_size: int, eval_size: int, carry_share: float = 0.6
) -> tuple[list[Addition], list[Addition]]:
    """Draw ``(train, eval)`` problems; raises ValueError where there are not enough different ones."""
    if not 0.0 <= carry_share <= 1.0:
        raise ValueError(f"carry_share is {carry_share}, but a share is between 0 and 1")
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
                f"train_size {train_size} and eval_size {eval_size} ask for {train_count} and {eval_count} problems "
                f"{'with' if with_carry else 'without'} a carry; beside the eval problems only {len(rest)} are left"
            )
        train += [Addition(*pair) for pair in rng.sample(rest, train_count)]
    rng.shuffle(train)
    rng.shuffle(held_out)
    return train, held_out


logger = logging.getLogger(__name__)

FORGETS = 0.7


@dataclass(frozen=True)
class WarmStart:
    """How long and how fast; the defaults take about 20 seconds on one core.

    With half the steps the model has learnt some carries by heart instead of the rule, and reinforcement learning
    ends near 0.9 instead of near 1.
    """

    steps: int = 900
    batch_size: int = 128
    learning_rate: float = 1e-2
    warmup_steps: int = 50
    max_grad_norm: float = 1.0


def encode_prompts(tokenizer: PreTrainedTokenizerFast, problems: Sequence[Addition]) -> Tensor:
    """Token ids after the chat template, ``[problems, prompt_tokens]`` int64; every prompt has the same length."""
    chats = [problem.row()["prompt"] for problem in problems]
    texts = [tokenizer.apply_chat_template(chat, add_generation_prompt=True, tokenize=False) for chat in chats]
    return torch.tensor(tokenizer(texts, add_special_tokens=False).input_ids)


def encode_answers(tokenizer: PreTrainedTokenizerFast, answers: Sequence[int]) -> Tensor:
    """Token ids of the boxed answers and their end of turn, ``[answers, answer_tokens]`` int64."""
    texts = [boxed(answer) + tokenizer.eos_token for answer in answers]
    return torch.tensor(tokenizer(texts, add_special_tokens=False).input_ids)


def warm_start(
    model: Qwen3ForCausalLM,
    tokenizer: PreTrainedTokenizerFast,
    problems: Sequence[Addition],
    *,
    plan: WarmStart,
    seed: int,
) -> None:
    """Train ``model`` in place; the same seed gives the same weights on the same machine."""
    prompts = encode_prompts(tokenizer, problems)
    right = encode_answers(tokenizer, [problem.answer for problem in problems])
    forgetful = encode_answers(tokenizer, [problem.noisy_answer for problem in problems])
    generator = torch.Generator().manual_seed(seed)
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.learning_rate, betas=(0.9, 0.98), weight_decay=0.0)
    model.train()
    for step in range(plan.steps):
        warmup, decay = (step + 1) / plan.warmup_steps, 1 - step / plan.steps
        optimizer.param_groups[0]["lr"] = plan.learning_rate * min(1.0, warmup) * max(0.02, decay)
        rows = torch.randint(len(problems), (plan.batch_size,), generator=generator)
        forgets = torch.rand(plan.batch_size, 1, generator=generator) < FORGETS
        targets = torch.where(forgets, forgetful[rows], right[rows])
        tokens = torch.cat([prompts[rows], targets], dim=1)
        logits = model(tokens[:, :-1], logits_to_keep=targets.shape[1]).logits
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), plan.max_grad_norm)
        optimizer.step()
        if (step + 1) % 100 == 0 or step + 1 == plan.steps:
            logger.info("warm start: step %d of %d, loss %.4f", step + 1, plan.steps, loss.item())
    model.eval()


@torch.no_grad()
def greedy_accuracy(model: Qwen3ForCausalLM, tokenizer: PreTrainedTokenizerFast, problems: Sequence[Addition]) -> float:
    """The share of problems whose greedy answer is the right one, in the right form and ended, between 0 and 1."""
    prompts = encode_prompts(tokenizer, problems)
    right = encode_answers(tokenizer, [problem.answer for problem in problems])
    # Greedy decoding gives the right answer exactly where each of its tokens is the most likely one after the others.
    logits = model(torch.cat([prompts, right], dim=1)[:, :-1], logits_to_keep=right.shape[1]).logits
    return (logits.argmax(dim=-1) == right).all(dim=1).float().mean().item()
