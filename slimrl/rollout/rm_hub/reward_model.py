"""Rewards from a reward model on SGLang servers (`--rm-type reward_model --rm-model ...`).

Sends token ids to `/classify` and takes the one number of the reply, a logit of any sign. At most `--rm-concurrency`
requests are in flight per server, and every wait is bounded. Samples of a lost server are scored by another. A failure
is an error that names the server, never a reward of 0.

The ids are those of the conversation or the text by the reward model's own tokenizer, or the policy's ids. Only the
policy's end-of-turn tokens are cut off, since a chat template adds its own, and only special tokens of the reward
model's template or tokenizer are added.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import math
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import orjson

from slimrl.arguments import Arguments
from slimrl.arguments.engines import TOKENIZER_FILES, RewardModelConfig
from slimrl.data.sample import Sample
from slimrl.rollout.dataset.prompt_dataset import MESSAGES_KEY
from slimrl.rollout.rm_hub.remote import RemoteReward, RemoteRewardError, RemoteUnreachable


class RewardInput:
    """`tokenizer` is the reward model's, `form` one of `conversation`, `text` and `tokens`.

    `endings` are the policy's special tokens, which may be at the end of a response's text.
    """

    def __init__(self, tokenizer: Any, form: str, endings: Sequence[str]) -> None:
        self.form = form
        self._tokenizer = tokenizer
        self._endings = tuple(endings)

    @classmethod
    def open(cls, folder: str, form: str | None, policy_folder: str, *, trust: tuple[bool, bool]) -> RewardInput:
        """Loads the tokenizer; `form` None chooses (see `choose_format`). Raises ValueError where the form cannot be.

        `trust` says whether code of the reward model's and of the policy's tokenizer may be run.
        """
        from transformers import AutoTokenizer

        if not any((Path(folder) / name).is_file() for name in TOKENIZER_FILES):
            raise ValueError(f"--rm-model {folder} has no tokenizer: copy it there, it reads with its own")
        own = AutoTokenizer.from_pretrained(folder, trust_remote_code=trust[0])
        policy = AutoTokenizer.from_pretrained(policy_folder, trust_remote_code=trust[1])
        return cls(own, choose_format(own, policy, form, folder), policy.all_special_tokens)

    def token_ids(self, sample: Sample) -> list[int]:
        """The ids that are scored; the score is that of the last one. Raises ValueError where there is none."""
        if self.form == "tokens":
            ids = sample.tokens
        elif self.form == "text":
            if not isinstance(sample.prompt, str):
                raise ValueError(
                    f"sample {sample.index}: its prompt is a list of messages, which --rm-input text cannot join to a"
                    " response: give --rm-input conversation, or --apply-chat-template"
                )
            ids = self._tokenizer(sample.prompt + self.response(sample))["input_ids"]
        else:
            messages = [*asked(sample), {"role": "assistant", "content": self.response(sample)}]
            text = self._tokenizer.apply_chat_template(messages, tokenize=False)
            ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids:
            raise ValueError(
                f"sample {sample.index}: its prompt and response are empty, which no reward model can read"
            )
        return ids

    def response(self, sample: Sample) -> str:
        """The response's text without the special tokens at its end."""
        text = sample.response
        while text.endswith(self._endings) and self._endings:
            text = text[: -max(len(one) for one in self._endings if text.endswith(one))]
        return text


def choose_format(tokenizer: Any, policy_tokenizer: Any, form: str | None, folder: str) -> str:
    """The form asked for, or else the conversation where the model has a chat template, tokens where they mean the same
    as the policy's, and text otherwise.

    Raises ValueError where the form asked for cannot be had.
    """
    if form == "conversation" and not tokenizer.chat_template:
        raise ValueError(
            f"--rm-input conversation: the tokenizer of --rm-model {folder} has no chat template: give one, or text"
        )
    if form in ("conversation", "text"):
        return form
    if form is None and tokenizer.chat_template:
        return "conversation"
    same = tokenizer.get_vocab() == policy_tokenizer.get_vocab()
    if form == "tokens" and not same:
        raise ValueError(
            f"--rm-input tokens: the tokenizer of --rm-model {folder} is not the policy's, the same ids mean other"
            " tokens there: leave it out, or give conversation or text"
        )
    return "tokens" if same else "text"


def asked(sample: Sample) -> list[dict[str, Any]]:
    """The messages that the sample answers; a prompt that is text is one of the user."""
    messages = sample.metadata.get(MESSAGES_KEY, sample.prompt)
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else messages


logger = logging.getLogger(__name__)

AVOIDED_S = 60.0  # for so long a server that could not be reached is asked only where all others fail, too


class RewardModelError(RemoteRewardError):
    """The reward model cannot score a sample, or answered something that is no reward."""


@dataclasses.dataclass(eq=False)
class _Server:
    """One server, how many requests it has, and until when (`time.monotonic`) it is asked only if no other can be."""

    url: str
    service: RemoteReward
    turns: asyncio.Semaphore
    in_flight: int = 0
    avoided_until: float = 0.0


class RewardModel:
    """Scores samples on the server with the fewest requests; `reward_input` says what is read of them."""

    def __init__(
        self,
        urls: list[str],
        reward_input: RewardInput,
        *,
        concurrency: int,
        vocabulary: int | None,
        key: str | None = None,
    ) -> None:
        """`concurrency` is per server; ids from `vocabulary` on are refused, because a server would die of them."""
        self._servers = [
            _Server(
                url,
                RemoteReward(f"{url}/classify", name=f"the reward model's server {url}", key=key),
                asyncio.Semaphore(concurrency),
            )
            for url in urls
        ]
        self._input = reward_input
        self._vocabulary = math.inf if vocabulary is None else vocabulary
        self._turns = asyncio.Semaphore(concurrency * len(urls))
        # one thread: a tokenizer is not made for several, and the rollout's loop has other work
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="slimrl-reward-tokens")

    @classmethod
    def from_args(cls, args: Arguments) -> RewardModel:
        """The reward model at `--rm-url`. Raises ValueError where its folder or tokenizer does not suit."""
        config = RewardModelConfig.read(Path(args.rm_model))
        own, policy = (bool(flags.get("trust_remote_code")) for flags in (args.rm_server_options, args.sglang_options))
        reward_input = RewardInput.open(args.rm_model, args.rm_input, args.hf_checkpoint, trust=(own, policy))
        urls = addresses(args.rm_url)
        logger.info("reward model %s at %s reads: %s", args.rm_model, ", ".join(urls), reward_input.form)
        key = args.rm_server_options.get("api_key")
        return cls(urls, reward_input, concurrency=args.rm_concurrency, vocabulary=config.vocabulary, key=key)

    async def reward(self, sample: Sample) -> float:
        """The reward of a sample.

        Raises RewardModelError on a sample that cannot be read or a reply that is no single finite number,
        RemoteRefused on a 3xx or 4xx (as for a sample longer than the model's context), RemoteUnreachable when all
        attempts on all servers failed.
        """
        loop = asyncio.get_running_loop()
        try:
            token_ids = await loop.run_in_executor(self._tokenizing, self._input.token_ids, sample)
        except ValueError as error:
            raise RewardModelError(str(error)) from error
        if max(token_ids) >= self._vocabulary:
            raise RewardModelError(
                f"sample {sample.index}: token {max(token_ids)} is none of the {self._vocabulary} that the reward model"
                " has: its tokenizer is not the model's, copy both from one place"
            )
        async with self._turns:
            return await self._ask_any(orjson.dumps({"input_ids": token_ids}))

    async def _ask_any(self, body: bytes) -> float:
        """The reward by the first server that can be reached."""
        left = list(self._servers)
        while True:
            now = time.monotonic()
            server = min(left, key=lambda one: (one.avoided_until > now, one.in_flight))
            left.remove(server)
            server.in_flight += 1
            try:
                async with server.turns:
                    return reward_of(await server.service.ask(body), server.url)
            except RemoteUnreachable as error:
                server.avoided_until = time.monotonic() + AVOIDED_S
                if not left:
                    raise
                logger.warning("%s; another server is asked", error)
            finally:
                server.in_flight -= 1

    def close(self) -> None:
        """Ends the connections and the thread."""
        self._tokenizing.shutdown(wait=False, cancel_futures=True)
        for server in self._servers:
            server.service.close()


def addresses(url: str) -> list[str]:
    """The servers that `--rm-url` names."""
    return [part.strip().rstrip("/") for part in url.split(",") if part.strip()]


def reward_of(reply: bytes, url: str) -> float:
    """The one number of a reply to `/classify`. Raises RewardModelError on anything else."""
    try:
        answer = orjson.loads(reply)
    except orjson.JSONDecodeError as error:
        raise RewardModelError(f"the reward model's server {url} answered {reply[:300]!r}, not JSON") from error
    scores = answer.get("embedding") if isinstance(answer, dict) else None
    if not isinstance(scores, list) or len(scores) != 1:
        shown = f"{len(scores)} numbers" if isinstance(scores, list) else repr(answer)[:300]
        raise RewardModelError(
            f"the reward model's server {url} answered {shown} for one response: serve a model with one label, started"
            " with --is-embedding"
        )
    if not isinstance(scores[0], int | float) or not math.isfinite(scores[0]):
        raise RewardModelError(f"the reward model's server {url} answered {scores[0]!r}, which is no finite number")
    return float(scores[0])
