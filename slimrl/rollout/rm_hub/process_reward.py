"""Rewards of the steps of a response from a process reward model on SGLang servers (`--rm-step-separator`).

A response is divided into steps at the separator. The model reads the prompt and the steps, each followed by its
marker, and its reward for a step is the output at the last token of that marker, as in Lightman et al. 2023
(arXiv:2305.20050) and Wang et al. 2024 (Math-Shepherd, arXiv:2312.08935). SGLang returns the output at the last token
of a sequence only, so the sequence up to each marker is sent, all of a sample in one request; the model is causal, so
these are the outputs of one pass over the whole sequence. The tokens of prompt, steps and markers are those of each
part by itself: a sequence is a prefix of the next one.

A reward is added to the last trained token of its step (`Sample.token_rewards`). A failure is an error that names the
server.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from pathlib import Path
from typing import Any

import orjson

from slimrl.arguments import Arguments
from slimrl.arguments.hf_config import RewardModelConfig
from slimrl.data.sample import Sample
from slimrl.rollout.dataset.tokenizer import load_tokenizer
from slimrl.rollout.rm_hub.remote import addresses, patience
from slimrl.rollout.rm_hub.reward_model import (
    ClassifierServers,
    RewardInput,
    RewardModelError,
    prompt_messages,
    trusted,
)

logger = logging.getLogger(__name__)

STEP_REWARDS = "step_rewards"  # metadata of a sample: the rewards of its steps, without the coefficient
_WORD = "a"  # a token is decoded after this one: some tokenizers drop the space at the start of a text


@dataclasses.dataclass(frozen=True)
class Step:
    """A step of a response: its text without the separator, and the place of its last token in the response."""

    text: str
    last: int


_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"
_BYTES_OF_A_CHARACTER = 4  # at most, in UTF-8


class StepSplitter:
    """Divides response tokens into steps; `tokenizer` is the policy's."""

    def __init__(self, tokenizer: Any, separator: str) -> None:
        self._tokenizer = tokenizer
        self._separator = separator
        self._special = set(tokenizer.all_special_ids)
        self._before = tokenizer(_WORD, add_special_tokens=False)["input_ids"]
        self._pieces: dict[tuple[int, ...], str] = {}

    def steps(self, token_ids: list[int]) -> list[Step]:
        """The steps of a response. Steps of white space have none; the end of the response ends the last one."""
        pieces = self._texts(token_ids)
        text = "".join(pieces)
        token_of_char = [place for place, piece in enumerate(pieces) for _ in piece]
        found, start = [], 0
        while (end := text.find(self._separator, start)) >= 0:
            after = end + len(self._separator)
            if text[start:end].strip():
                found.append(Step(text[start:end], token_of_char[after - 1]))
            start = after
        if text[start:].strip():
            found.append(Step(text[start:], len(token_ids) - 1))
        return found

    def _texts(self, token_ids: list[int]) -> list[str]:
        """The text of each token; that of a character of several tokens is the last one's."""
        texts, held = [""] * len(token_ids), []
        for place, token in enumerate(token_ids):
            if token not in self._special:
                held.append(token)
            if not held:
                continue
            text = self._decoded(tuple(held))
            ends = place + 1 == len(token_ids) or token in self._special or len(held) == _BYTES_OF_A_CHARACTER
            if ends or not text.endswith(_INCOMPLETE):
                texts[place], held = text, []
        return texts

    def _decoded(self, tokens: tuple[int, ...]) -> str:
        """The text of tokens after another one; a part of a character at their end is a replacement character."""
        if tokens not in self._pieces:
            whole, before = (self._tokenizer.decode(ids) for ids in ([*self._before, *tokens], self._before))
            self._pieces[tokens] = whole.removeprefix(before)
        return self._pieces[tokens]


class StepInput:
    """Token ids up to the marker of each step, as the process reward model reads them."""

    def __init__(self, read: RewardInput, splitter: StepSplitter, marker: str) -> None:
        """`read` has the model's tokenizer and form; `marker` follows each step in the place of the separator."""
        self.form = read.form
        self._tokenizer = read.tokenizer
        self._splitter = splitter
        self._marker = read.tokenizer(marker, add_special_tokens=False)["input_ids"]

    def rows(self, sample: Sample) -> tuple[list[Step], list[list[int]]]:
        """The steps of a sample, and the ids up to the end of each. Raises ValueError for an unsuitable prompt."""
        steps = self._splitter.steps(list(sample.tokens[sample.prompt_length :]))
        if self.form == "tokens":
            return steps, [list(sample.tokens[: sample.prompt_length + step.last + 1]) for step in steps]
        ids, rows = self._prompt(sample), []
        for step in steps:
            ids = [*ids, *self._tokenizer(step.text, add_special_tokens=False)["input_ids"], *self._marker]
            rows.append(ids)
        return steps, rows

    def _prompt(self, sample: Sample) -> list[int]:
        if self.form == "conversation":
            text = self._tokenizer.apply_chat_template(
                prompt_messages(sample), tokenize=False, add_generation_prompt=True
            )
            return list(self._tokenizer(text, add_special_tokens=False)["input_ids"])
        if not isinstance(sample.prompt, str):
            raise ValueError(
                f"sample {sample.index}: its prompt is a list of messages, which --rm-input text cannot concatenate"
                " with steps: use --rm-input conversation, or --apply-chat-template"
            )
        return list(self._tokenizer(sample.prompt)["input_ids"])


class ProcessRewardModel:
    """Scores the steps of samples on the server with the fewest requests."""

    column = "token_rewards"

    def __init__(
        self,
        urls: list[str],
        step_input: StepInput,
        *,
        coefficient: float,
        labels: int,
        concurrency: int,
        vocabulary: int | None = None,
        key: str | None = None,
        patience_s: float = 0.0,
    ) -> None:
        """`labels` is the number of outputs per token, 1 or 2; the others as in `ClassifierServers`."""
        self._servers = ClassifierServers(
            urls, concurrency=concurrency, vocabulary=vocabulary, key=key, patience_s=patience_s
        )
        self._input = step_input
        self._coefficient = coefficient
        self._labels = labels

    @classmethod
    def from_args(cls, args: Arguments) -> ProcessRewardModel:
        """The model at `--rm-url`. Raises ValueError if its folder or tokenizer is unsuitable."""
        assert args.rm_model is not None and args.rm_url is not None  # checked by the caller
        assert args.rm_step_separator is not None
        config = RewardModelConfig.read(Path(args.rm_model))
        trust = trusted(args.rm_server_options, args.engine_options)
        read = RewardInput.open(args.rm_model, args.rm_input, args.hf_checkpoint, trust=trust)
        policy = load_tokenizer(args.hf_checkpoint, trust_code=trust[1])
        separator = args.rm_step_separator
        marker = separator if args.rm_step_marker is None else args.rm_step_marker
        urls = addresses(args.rm_url)
        logger.info("process reward model %s at %s, input: %s", args.rm_model, ", ".join(urls), read.form)
        return cls(
            urls,
            StepInput(read, StepSplitter(policy, separator), marker),
            coefficient=args.rm_step_coef,
            labels=config.labels,
            concurrency=args.rm_concurrency,
            vocabulary=config.vocabulary,
            key=args.rm_server_options.get("api_key"),
            patience_s=patience(replaced=args.rm_servers_replaced),
        )

    async def fill(self, sample: Sample) -> None:
        """Sets `token_rewards` of a finished sample, and the rewards of its steps in its metadata.

        Raises RewardModelError for a sample that cannot be tokenized or an unusable response, RemoteRefused for HTTP
        3xx or 4xx, RemoteUnreachable if all attempts on all servers fail.
        """
        steps, rows = await self._servers.tokenized(self._input.rows, sample)
        rewards: list[float] = []
        if rows:
            read = functools.partial(step_rewards_of, count=len(rows), labels=self._labels)
            rewards = await self._servers.ask(sample, rows, max(map(max, rows)), read)
        sample.metadata[STEP_REWARDS] = rewards
        sample.token_rewards = at_trained_tokens(sample, steps, [self._coefficient * one for one in rewards])

    def move(self, old: str, new: str) -> None:
        """As `ServerPool.move`."""
        self._servers.move(old, new)

    def close(self) -> None:
        """Closes the connections and the thread."""
        self._servers.close()


def at_trained_tokens(sample: Sample, steps: list[Step], rewards: list[float]) -> list[float]:
    """One number per response token: the reward of a step at its last trained token, 0 elsewhere.

    A step of masked tokens only, such as a tool's output, has no token for its reward.
    """
    values, first = [0.0] * sample.response_length, 0
    for step, reward in zip(steps, rewards, strict=True):
        places = range(step.last, first - 1, -1)
        trained = next((at for at in places if sample.loss_mask is None or sample.loss_mask[at]), None)
        if trained is not None:
            values[trained] += reward
        first = step.last + 1
    return values


def step_rewards_of(reply: bytes, url: str, count: int, labels: int) -> list[float]:
    """The rewards of `count` sequences in a response of `/classify`.

    A reward is the output, a logit; with two labels it is the probability of the second one.
    Raises RewardModelError for anything else.
    """
    try:
        answer = orjson.loads(reply)
        outputs = [[float(value) for value in one["embedding"]] for one in answer]
    except (orjson.JSONDecodeError, KeyError, TypeError, ValueError) as error:
        raise RewardModelError(
            f"the reward model's server {url} returned {reply[:300]!r}, without an output for each step"
            f" ({type(error).__name__}): start it with --is-embedding"
        ) from error
    if len(outputs) != count or any(len(values) != labels for values in outputs):
        shown = sorted({len(values) for values in outputs})
        raise RewardModelError(
            f"the reward model's server {url} returned {len(outputs)} outputs of {shown} numbers for {count} steps, and"
            f" --rm-model has {labels} labels: serve that model"
        )
    return [values[0] if labels == 1 else _second_of(*values) for values in outputs]


def _second_of(first: float, second: float) -> float:
    """The probability of the second of two labels by their logits, without overflow."""
    gap = second - first
    return 1 / (1 + math.exp(-gap)) if gap >= 0 else math.exp(gap) / (1 + math.exp(gap))
