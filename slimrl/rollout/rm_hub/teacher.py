"""The teacher's log-probabilities of sampled tokens, from SGLang servers (`--use-opd --opd-type sglang`).

Sends the token ids of prompt and response to `/generate` with `max_new_tokens` 0: the server only prefills, and returns
the log-probability of each response token given the tokens before it, at temperature 1. The ids are the student's, so
teacher and student need the same tokenizer. If a server is lost, another one answers. A failure is an error that names
the server.
"""

from __future__ import annotations

import dataclasses
import functools
import logging
import math
from pathlib import Path
from typing import Any

import numpy as np
import orjson

from slimrl.arguments import Arguments
from slimrl.arguments.flags.critic_and_teacher import DistillationArguments
from slimrl.arguments.hf_config import served_vocabulary, teachers_of_groups
from slimrl.data.sample import PackedColumn, Sample
from slimrl.rollout.rm_hub.remote import RemoteRewardError, ServerPool, addresses, patience

logger = logging.getLogger(__name__)

PATH = "/generate"
TIME_LIMIT_S = 600.0  # a request may wait for the prefill of others
MAX_REPLY_BYTES = 1 << 28  # about 30 bytes per token of the response
_LOWEST_LOG_PROB = -1e30  # servers clamp -inf to the lowest number of the type


class TeacherError(RemoteRewardError):
    """A sample cannot be sent to the teacher, or the response has no log-probability for each of its tokens."""


class ServedTeacher:
    """The teacher on the servers at `urls`."""

    column = "teacher_log_probs"

    def __init__(
        self,
        urls: list[str],
        *,
        concurrency: int,
        vocabulary: int | None,
        key: str | None = None,
        owner: str = "the teacher",
        top: int = 0,
        patience_s: float = 0.0,
    ) -> None:
        """`concurrency` is per server; ids >= `vocabulary` are rejected: the teacher has another tokenizer.

        `patience_s` as in `ServerPool`. Messages call it `owner`. With `top` it also gives so many most probable tokens
        at each place.
        """
        self._top = top
        self._pool = ServerPool(
            [url.removesuffix(PATH) for url in urls],
            PATH,
            owner=owner,
            concurrency=concurrency,
            key=key,
            time_limit_s=TIME_LIMIT_S,
            max_reply_bytes=MAX_REPLY_BYTES,
            patience_s=patience_s,
        )
        self._vocabulary = math.inf if vocabulary is None else vocabulary

    @classmethod
    def from_args(cls, args: Arguments) -> ServedTeacher | None:
        """The teacher at `--rm-url`; None without an address: a custom function sets the log-probabilities."""
        if args.rm_url is None:
            return None
        urls, key = addresses(args.rm_url), args.rm_server_options.get("api_key")
        logger.info("teacher %s at %s", args.rm_model or "", ", ".join(urls))
        vocabulary = None if args.rm_model is None else served_vocabulary(Path(args.rm_model))
        return cls(
            urls,
            concurrency=args.rm_concurrency,
            vocabulary=vocabulary,
            key=key,
            top=_top_tokens(args),
            patience_s=patience(replaced=args.rm_servers_replaced),
        )

    async def fill(self, sample: Sample) -> None:
        """Sets `teacher_log_probs` of a finished sample, one for each response token, and the teacher's top tokens.

        Raises TeacherError for a token outside the teacher's vocabulary or an unusable response, RemoteRefused for
        HTTP 3xx or 4xx (such as a sample longer than the teacher's context), RemoteUnreachable if all attempts on all
        servers fail.
        """
        if sample.response_length == 0:
            sample.teacher_log_probs = []
            return
        column = sample.column("tokens")
        token_ids = column.tolist() if isinstance(column, PackedColumn) else column  # the sample's stay packed
        if max(token_ids) >= self._vocabulary:
            raise TeacherError(
                f"sample {sample.index}: token {max(token_ids)} is outside the teacher's vocabulary of"
                f" {self._vocabulary}: --opd-type sglang needs a teacher with the student's tokenizer"
            )
        # the first of the returned tokens has no log-probability: begin with the last one of the prompt
        request = {
            "input_ids": token_ids,
            "sampling_params": {"max_new_tokens": 0, "temperature": 0},
            "return_logprob": True,
            "logprob_start_len": sample.prompt_length - 1,
        }
        if self._top:
            request["top_logprobs_num"] = self._top
        expected = token_ids[sample.prompt_length :]

        def read(body: bytes, url: str) -> tuple[list[float], tuple[list[int], list[float]]]:
            reply = Reply(body)
            values = log_probs_of(reply, url, expected)
            return values, top_tokens_of(reply, url, len(expected), self._top) if self._top else ([], [])

        values, (ids, top) = await self._pool.ask(orjson.dumps(request), read)
        if self._top:
            sample.pack("teacher_top_ids", PackedColumn(np.array(ids, np.int32).tobytes(), "i4"))
            sample.pack("teacher_top_log_probs", PackedColumn(np.array(top, np.float64).tobytes(), "f8"))
        sample.pack("teacher_log_probs", PackedColumn(np.array(values, np.float64).tobytes(), "f8"))

    def move(self, old: str, new: str) -> None:
        """As `ServerPool.move`."""
        self._pool.move(old, new)

    def close(self) -> None:
        """Closes the connections."""
        self._pool.close()


class NamedTeachers:
    """Several teachers; a sample's metadata names its own under `key` (`--opd-teacher-key`)."""

    column = "teacher_log_probs"

    def __init__(self, teachers: dict[str, ServedTeacher], key: str) -> None:
        self._teachers = teachers
        self._key = key

    @classmethod
    def from_args(cls, args: Arguments) -> NamedTeachers | None:
        """The teachers of the flags; None without the addresses of several servers."""
        if not args.opd_teachers:
            return None
        folders = args.opd_teacher_folders  # of the teachers whose servers slimrl has started
        in_groups = {name: 0 for name in teachers_of_groups(args)}  # whose router has the key of the run's engines
        for model in args.server_models:
            if model.name in in_groups:
                in_groups[model.name] = sum(group.servers for group in model.groups)
        found = {
            name: ServedTeacher(
                addresses(urls),
                concurrency=args.rm_concurrency * in_groups.get(name, 1),
                vocabulary=served_vocabulary(Path(folders[name])) if name in folders else None,
                key=(args.sglang_options if name in in_groups else args.rm_server_options).get("api_key"),
                owner=f"the teacher {name}",
                top=_top_tokens(args),
                patience_s=patience(replaced=args.rm_servers_replaced),
            )
            for name, urls in args.opd_teachers.items()
        }
        logger.info("teachers %s", ", ".join(f"{name} at {urls}" for name, urls in args.opd_teachers.items()))
        return cls(found, args.opd_teacher_key)

    async def fill(self, sample: Sample) -> None:
        """As `ServedTeacher.fill`. Raises TeacherError for a sample without the name of a teacher."""
        name = sample.metadata.get(self._key)
        if name not in self._teachers:
            raise TeacherError(
                f"sample {sample.index} has metadata.{self._key} {name!r}, and the teachers are"
                f" {', '.join(self._teachers)}: keep the metadata of the prompt, or set the name of a teacher"
            )
        await self._teachers[name].fill(sample)

    def move(self, old: str, new: str) -> None:
        """As `ServerPool.move`."""
        for teacher in self._teachers.values():
            teacher.move(old, new)

    def close(self) -> None:
        """Closes the connections."""
        for teacher in self._teachers.values():
            teacher.close()


@dataclasses.dataclass(frozen=True)
class Reply:
    """A response of `/generate`, decoded once: the top tokens of a long sample are megabytes."""

    body: bytes

    @functools.cached_property
    def meta_info(self) -> Any:
        """Raises orjson.JSONDecodeError, KeyError or TypeError if there is none."""
        return orjson.loads(self.body)["meta_info"]


def log_probs_of(reply: Reply, url: str, token_ids: list[int]) -> list[float]:
    """The log-probabilities of `token_ids`, the last input tokens, in a response of `/generate`.

    Raises TeacherError for anything else.
    """
    try:
        entries = reply.meta_info["input_token_logprobs"][-len(token_ids) :]
        values, found = [float(entry[0]) for entry in entries], [entry[1] for entry in entries]
    except (orjson.JSONDecodeError, KeyError, TypeError, IndexError, ValueError) as error:
        raise TeacherError(
            f"the teacher's server {url} returned {reply.body[:300]!r}, without a log-probability for each of"
            f" {len(token_ids)} input tokens ({type(error).__name__}): serve a language model with SGLang"
        ) from error
    # SGLang reports an id of 0 in place of the last one of the vocabulary
    if len(found) != len(token_ids) or any(a not in (b, 0) for a, b in zip(found, token_ids, strict=True)):
        raise TeacherError(
            f"the teacher's server {url} returned log-probabilities of {len(found)} other tokens than the"
            f" {len(token_ids)} that it was sent: --rm-url must be an SGLang server"
        )
    broken = next((value for value in values if not _LOWEST_LOG_PROB <= value <= 1e-3), None)
    if broken is not None:
        raise TeacherError(f"the teacher's server {url} returned {broken}, which is not a log-probability")
    return values


def _top_tokens(flags: DistillationArguments) -> int:
    return flags.opd_top_k if flags.has_divergence else 0


def top_tokens_of(reply: Reply, url: str, count: int, top: int) -> tuple[list[int], list[float]]:
    """Ids and log-probabilities of the `top` most probable tokens at the last `count` places, end to end.

    Raises TeacherError if the response of `/generate` has others.
    """
    try:
        places = reply.meta_info["input_top_logprobs"][-count:]
        entries = [(int(entry[1]), float(entry[0])) for place in places for entry in place]
    except (orjson.JSONDecodeError, KeyError, TypeError, IndexError, ValueError) as error:
        raise TeacherError(
            f"the teacher's server {url} returned no top_logprobs of its input ({type(error).__name__}): serve a"
            " language model with SGLang"
        ) from error
    if len(places) != count or any(len({entry[1] for entry in place}) != top for place in places):
        raise TeacherError(
            f"the teacher's server {url} did not return {top} different tokens at each of {count} places: lower"
            " --opd-top-k"
        )
    return [token for token, _ in entries], [max(value, _LOWEST_LOG_PROB) for _, value in entries]
