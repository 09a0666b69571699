"""Rewards from a reward model on SGLang servers (`--rm-type reward_model --rm-model ...`).

Sends token ids to `/classify`; the reward is the single number of the response, a logit of any sign. At most
`--rm-concurrency` requests are in flight per server, and every wait is bounded. If a server is lost, another one scores
its samples. A failure is an error that names the server, never a reward of 0.

The ids are those that training on preferences has (`slimrl.rollout.preference_rollout`): of the conversation in the
reward model's chat template; of prompt and response as two texts, followed by the end token if the response is
complete; or the policy's ids. The policy's special tokens at the end of the response's text are removed, because the
reward model has its own.
"""

from __future__ import annotations

import asyncio
import logging
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import orjson

from slimrl.arguments import Arguments
from slimrl.arguments.hf_config import TOKENIZER_FILES, RewardModelConfig
from slimrl.data.sample import Sample, SampleStatus
from slimrl.rollout.dataset.prompt_dataset import MESSAGES_KEY
from slimrl.rollout.dataset.tokenizer import load_tokenizer
from slimrl.rollout.rm_hub.remote import RemoteRewardError, ServerPool, addresses, patience


class RewardInput:
    """`tokenizer` is the reward model's, `form` one of `conversation`, `text`, `tokens` and `template`.

    `endings` are the policy's special tokens, which may end a response's text. `template` is a text with {prompt} and
    {response}, for the form of that name.
    """

    def __init__(self, tokenizer: Any, form: str, endings: Sequence[str], template: str | None = None) -> None:
        self.form = form
        self.tokenizer = tokenizer
        self._endings = tuple(endings)
        self._template = template

    @classmethod
    def open(
        cls,
        folder: str,
        form: str | None,
        policy_folder: str,
        *,
        trust: tuple[bool, bool],
        template: str | None = None,
    ) -> RewardInput:
        """Loads the tokenizer; `form` None selects one (see `choose_format`), or "template" if there is one.

        Raises ValueError if the form is impossible. `trust`: whether code of the reward model's and of the policy's
        tokenizer may be run.
        """
        if not any((Path(folder) / name).is_file() for name in TOKENIZER_FILES):
            raise ValueError(f"--rm-model {folder} has no tokenizer: copy the reward model's tokenizer files there")
        tokenizer = load_tokenizer(folder, trust_code=trust[0])
        policy = load_tokenizer(policy_folder, trust_code=trust[1])
        chosen = choose_format(tokenizer, policy, form, folder) if template is None else "template"
        return cls(tokenizer, chosen, policy.all_special_tokens, template)

    def token_ids(self, sample: Sample) -> list[int]:
        """The ids to score; the reward model scores the last one. Raises ValueError if there are none."""
        if self.form == "tokens":
            ids = sample.tokens
        elif self.form == "text":
            if not isinstance(sample.prompt, str):
                raise ValueError(
                    f"sample {sample.index}: its prompt is a list of messages, which --rm-input text cannot concatenate"
                    " with a response: use --rm-input conversation, or --apply-chat-template"
                )
            ids = self._of_texts(sample, sample.prompt, self.response(sample))
        elif self._template is not None:
            ids = self._of_texts(sample, *self._in_template(self._template, sample))
        else:
            messages = [*prompt_messages(sample), {"role": "assistant", "content": self.response(sample)}]
            text = self.tokenizer.apply_chat_template(messages, tokenize=False)
            ids = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        if not ids:
            raise ValueError(
                f"sample {sample.index}: its prompt and response are empty, so that there is nothing to score"
            )
        return ids

    def _of_texts(self, sample: Sample, prompt: str, response: str) -> list[int]:
        """The tokens of both texts, as training on pairs of text makes them; none for empty texts.

        Each text is tokenized by itself without special tokens, and the end token follows a complete response.
        """
        before, after = self.tokenizer([prompt, response], add_special_tokens=False)["input_ids"]
        end = self.tokenizer.eos_token_id
        is_complete = sample.status not in (SampleStatus.TRUNCATED, SampleStatus.ABORTED)
        if (before or after) and is_complete and end is not None and after[-1:] != [end]:
            after = [*after, end]
        return [*before, *after]

    def _in_template(self, template: str, sample: Sample) -> tuple[str, str]:
        """The template's text before the response, and the response with the text after it.

        Its prompt is that of the data, without the policy's template.
        """
        messages = prompt_messages(sample)
        if len(messages) != 1 or not isinstance(messages[0]["content"], str):
            raise ValueError(
                f"sample {sample.index}: its prompt has {len(messages)} messages, and --rm-input-template takes one"
                " text: use --rm-input conversation"
            )
        before, after = template.split("{response}")  # one of the two has the prompt
        prompt = messages[0]["content"]
        before, after = (prompt.join(part.split("{prompt}")) for part in (before, after))
        return before, self.response(sample) + after

    def response(self, sample: Sample) -> str:
        """The response's text without the special tokens at its end."""
        text = sample.response
        while text.endswith(self._endings) and self._endings:
            text = text[: -max(len(one) for one in self._endings if text.endswith(one))]
        return text


def choose_format(tokenizer: Any, policy_tokenizer: Any, form: str | None, folder: str) -> str:
    """The requested form; by default "conversation" if the model has a chat template, else "tokens" if its vocabulary
    equals the policy's, else "text".

    Raises ValueError if the requested form is impossible.
    """
    if form == "conversation" and not tokenizer.chat_template:
        raise ValueError(
            f"--rm-input conversation: the tokenizer of --rm-model {folder} has no chat template: add one, or use text"
        )
    if form in ("conversation", "text"):
        return form
    if form is None and tokenizer.chat_template:
        return "conversation"
    same = tokenizer.get_vocab() == policy_tokenizer.get_vocab()
    if form == "tokens" and not same:
        raise ValueError(
            f"--rm-input tokens: the tokenizer of --rm-model {folder} has another vocabulary than the policy's: leave"
            " --rm-input out, or use conversation or text"
        )
    return "tokens" if same else "text"


def trusted(model: Mapping[str, Any], policy: Mapping[str, Any]) -> tuple[bool, bool]:
    """Whether the code in the folder of each may run, by the options of their servers."""
    return bool(model.get("trust_remote_code")), bool(policy.get("trust_remote_code"))


def prompt_messages(sample: Sample) -> list[dict[str, Any]]:
    """The messages of the prompt; a text prompt is one user message."""
    messages = sample.metadata.get(MESSAGES_KEY, sample.prompt)
    return [{"role": "user", "content": messages}] if isinstance(messages, str) else messages


logger = logging.getLogger(__name__)
_Tokenized = TypeVar("_Tokenized")
_Reply = TypeVar("_Reply")


class RewardModelError(RemoteRewardError):
    """The reward model cannot score a sample, or its response is not a reward."""


class ClassifierServers:
    """The servers of a classifier, which scores token ids; samples are tokenized in a thread."""

    def __init__(
        self, urls: list[str], *, concurrency: int, vocabulary: int | None, key: str | None, patience_s: float
    ) -> None:
        """`concurrency` is per server; ids >= `vocabulary` are rejected, because they would crash a server.

        `patience_s` as in `ServerPool`.
        """
        self._pool = ServerPool(
            urls, "/classify", owner="the reward model", concurrency=concurrency, key=key, patience_s=patience_s
        )
        self._vocabulary = math.inf if vocabulary is None else vocabulary
        # one thread: tokenizers are not thread-safe, and the rollout's loop must not block
        self._tokenizing = ThreadPoolExecutor(1, thread_name_prefix="slimrl-reward-tokens")

    async def tokenized(self, tokenize: Callable[[Sample], _Tokenized], sample: Sample) -> _Tokenized:
        """`tokenize(sample)`. Raises RewardModelError for its ValueError."""
        try:
            return await asyncio.get_running_loop().run_in_executor(self._tokenizing, tokenize, sample)
        except ValueError as error:
            raise RewardModelError(str(error)) from error

    async def ask(
        self, sample: Sample, ids: list[int] | list[list[int]], largest: int, read: Callable[[bytes, str], _Reply]
    ) -> _Reply:
        """The server's answer to the token `ids` of a sample, of which `largest` is one, as `read` reads it.

        Raises RewardModelError for ids outside the vocabulary, and as `ServerPool.ask`.
        """
        if largest >= self._vocabulary:
            raise RewardModelError(
                f"sample {sample.index}: token {largest} is outside the reward model's vocabulary of"
                f" {self._vocabulary}: its tokenizer does not match the model, copy both from the same checkpoint"
            )
        return await self._pool.ask(orjson.dumps({"input_ids": ids}), read)

    def move(self, old: str, new: str) -> None:
        """As `ServerPool.move`."""
        self._pool.move(old, new)

    def close(self) -> None:
        """Closes the connections and the thread."""
        self._tokenizing.shutdown(wait=False, cancel_futures=True)
        self._pool.close()


class RewardModel:
    """Scores samples on the server with the fewest requests; `reward_input` converts them to token ids."""

    def __init__(
        self,
        urls: list[str],
        reward_input: RewardInput,
        *,
        concurrency: int,
        vocabulary: int | None,
        key: str | None = None,
        patience_s: float = 0.0,
    ) -> None:
        """As `ClassifierServers`."""
        self._servers = ClassifierServers(
            urls, concurrency=concurrency, vocabulary=vocabulary, key=key, patience_s=patience_s
        )
        self._input = reward_input

    @classmethod
    def from_args(cls, args: Arguments) -> RewardModel:
        """The reward model at `--rm-url`. Raises ValueError if its folder or tokenizer is unsuitable."""
        assert args.rm_model is not None and args.rm_url is not None  # checked by the caller
        config = RewardModelConfig.read(Path(args.rm_model))
        reward_input = RewardInput.open(
            args.rm_model,
            args.rm_input,
            args.hf_checkpoint,
            trust=trusted(args.rm_server_options, args.engine_options),
            template=args.rm_input_template,
        )
        urls = addresses(args.rm_url)
        logger.info("reward model %s at %s, input: %s", args.rm_model, ", ".join(urls), reward_input.form)
        return cls(
            urls,
            reward_input,
            concurrency=args.rm_concurrency,
            vocabulary=config.vocabulary,
            key=args.rm_server_options.get("api_key"),
            patience_s=patience(replaced=args.rm_servers_replaced),
        )

    async def reward(self, sample: Sample) -> float:
        """The reward of a sample.

        Raises RewardModelError for a sample that cannot be tokenized or a response that is not one finite number,
        RemoteRefused for HTTP 3xx or 4xx (such as a sample longer than the model's context), RemoteUnreachable if all
        attempts on all servers fail.
        """
        token_ids = await self._servers.tokenized(self._input.token_ids, sample)
        return await self._servers.ask(sample, token_ids, max(token_ids), reward_of)

    def move(self, old: str, new: str) -> None:
        """As `ServerPool.move`."""
        self._servers.move(old, new)

    def close(self) -> None:
        """Closes the connections and the thread."""
        self._servers.close()


def reward_of(reply: bytes, url: str) -> float:
    """The single number of a `/classify` response. Raises RewardModelError for anything else."""
    try:
        answer = orjson.loads(reply)
    except orjson.JSONDecodeError as error:
        raise RewardModelError(f"the reward model's server {url} returned {reply[:300]!r}, not JSON") from error
    scores = answer.get("embedding") if isinstance(answer, dict) else None
    if not isinstance(scores, list) or len(scores) != 1:
        shown = f"{len(scores)} numbers" if isinstance(scores, list) else repr(answer)[:300]
        raise RewardModelError(
            f"the reward model's server {url} returned {shown} for one response: serve a model with one label, started"
            " with --is-embedding"
        )
    if not isinstance(scores[0], int | float) or not math.isfinite(scores[0]):
        raise RewardModelError(f"the reward model's server {url} returned {scores[0]!r}, which is not a finite number")
    return float(scores[0])
