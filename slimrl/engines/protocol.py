"""The interface to an inference engine: token ids and sampling parameters in, token ids and log-probabilities out.

`ServiceError` is the base of all failures of engines, graders and reward services. Such an error is never attributed to
a custom function, even if it is raised inside one.

An engine's client records what the server reports of every response (cache hits, speculative decoding, latencies); the
rollout manager takes the metrics once per rollout.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import hashlib
import statistics
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from slimrl.arguments.hf_config import least
from slimrl.data.routed_experts import Routes
from slimrl.data.sample import PackedFields, Sample, Span
from slimrl.engines.prompt_images import PromptImages, with_images

if TYPE_CHECKING:
    from slimrl.arguments.namespace import EvalDataset, SamplingArguments


class ResponseCounts(Protocol):
    """The counted fields of a response; 0 or None if the server does not report them."""

    prompt_tokens: int
    cached_tokens: int
    completion_tokens: int
    e2e_latency: float | None
    queue_time: float | None
    spec_num_correct_drafts: int
    spec_num_proposed_drafts: int
    spec_verify_ct: int


class RequestStats:
    """Sums and latencies since the last `take`."""

    def __init__(self) -> None:
        self._clear()
        self._apart = contextvars.ContextVar("apart", default=False)

    def _clear(self) -> None:
        self._prompt_tokens = self._cached_tokens = 0
        self._drafts = self._accepted = self._passes = self._tokens_of_passes = 0
        self._latencies: list[float] = []
        self._queue_times: list[float] = []

    def note(self, answer: ResponseCounts) -> None:
        """Records one response."""
        if self._apart.get():
            return
        self._prompt_tokens += answer.prompt_tokens
        self._cached_tokens += answer.cached_tokens
        if answer.e2e_latency is not None:
            self._latencies.append(answer.e2e_latency)
        if answer.queue_time is not None:
            self._queue_times.append(answer.queue_time)
        if answer.spec_verify_ct:
            self._drafts += answer.spec_num_proposed_drafts
            self._accepted += answer.spec_num_correct_drafts
            self._passes += answer.spec_verify_ct
            self._tokens_of_passes += answer.completion_tokens

    @property
    def is_apart(self) -> bool:
        """Whether this task is within `apart`."""
        return self._apart.get()

    @contextlib.contextmanager
    def apart(self) -> Iterator[None]:
        """Excludes requests made within the block, and in tasks that it starts (evaluations)."""
        before = self._apart.set(True)
        try:
            yield
        finally:
            self._apart.reset(before)

    def take(self, samples: int) -> dict[str, float]:
        """Metrics by full name for a rollout of `samples` samples, then resets; empty without requests."""
        metrics: dict[str, float] = {}
        if self._prompt_tokens:
            metrics["rollout/prefix_cache_hit_rate"] = self._cached_tokens / self._prompt_tokens
            metrics["rollout/avg_cached_tokens_per_sample"] = self._cached_tokens / samples
        if self._drafts:
            metrics["rollout/spec_accept_rate"] = self._accepted / self._drafts
        if self._passes:
            metrics["rollout/spec_accept_length"] = self._tokens_of_passes / self._passes
        for name, times in (("e2e_latency", self._latencies), ("queue_time", self._queue_times)):
            metrics |= {f"perf/request/{name}/{key}": value for key, value in time_statistics(times).items()}
        self._clear()
        return metrics


def time_statistics(seconds: Sequence[float]) -> dict[str, float]:
    """Mean, median, p99 (nearest rank), max and min; empty for an empty sequence."""
    if not seconds:
        return {}
    ordered = sorted(seconds)
    return {
        "mean": statistics.fmean(ordered),
        "median": statistics.median(ordered),
        "p99": ordered[-(-99 * len(ordered) // 100) - 1],
        "max": ordered[-1],
        "min": ordered[0],
    }


RETRY_TIMEOUT_S = 16.0  # of a request that no server accepts, without --use-fault-tolerance


class ServiceError(RuntimeError):
    """A service that slimrl runs or calls failed."""


@dataclasses.dataclass
class Generation(PackedFields):
    """The response to one request; `token_ids` and `log_probs` are aligned, one entry per new token.

    `version_spans` give the weight version that sampled each token (`slimrl.data.sample`); empty if all tokens are from
    `weight_version`, the last version.
    """

    token_ids: list[int]
    log_probs: list[float]
    finish_reason: str  # "stop" | "length" | "abort"
    weight_version: str
    text: str = ""
    version_spans: list[Span] = dataclasses.field(default_factory=list)
    sent_ns: int = 0  # time.monotonic_ns when the successful attempt was sent; 0 if unknown
    prompt_tokens: int = 0  # as the engine counts them; 0 if it does not
    routed_experts: Routes | None = None  # of prompt and response, if the client asks for them

    PACKABLE: ClassVar[frozenset[str]] = frozenset({"token_ids", "log_probs"})

    @property
    def new_tokens(self) -> int:
        """Number of new tokens."""
        return len(self.column("token_ids"))


class EngineCallError(ServiceError):
    """A request of an EngineClient failed, also one that a custom function made."""


class EngineClient(Protocol):
    """Asynchronous client of a group of engines."""

    async def generate(
        self,
        input_ids: list[int],
        sampling_params: dict[str, Any],
        session_id: str | None = None,
        images: PromptImages | None = None,
    ) -> Generation:
        """Continue `input_ids`. Raises on an HTTP error, on a lost server (after the retries) and on a timeout."""
        ...

    async def ask(self, path: str, payload: dict[str, Any], session_id: str | None = None) -> Any:
        """The engine's decoded response to any POST ("/generate", "/v1/chat/completions"), unchanged.

        Raises as `generate` does.
        """
        ...

    async def abort_all(self) -> None:
        """Abort every request in flight; each returns its tokens so far and finish_reason "abort"."""
        ...


class ServerList(Protocol):
    """What the recovery of servers tells and asks a client."""

    server_urls: list[str]  # for aborts, which the router does not forward; assign when the servers change
    resent: int  # number of resent requests

    def set_concurrency(self, requests: int) -> None:
        """At most so many requests are in flight from now on; those that are in flight continue."""


class EngineGroupClient(EngineClient, ServerList, Protocol):
    """The client that the rollout manager opens (`async with`) and closes at the end."""

    requests: RequestStats

    @property
    def in_flight(self) -> int:
        """Number of requests that were sent and not yet answered."""

    @property
    def concurrency(self) -> int:
        """The largest number of requests in flight."""

    async def __aenter__(self) -> EngineGroupClient:
        """Opens its connections."""
        ...

    def use_weight_version(self, version: str) -> None:
        """Requests from now on use these weights, which every server has.

        Only of an adapter in servers that other runs use, too; other requests get the newest weights in any case.
        """

    async def close(self) -> None:
        """Drops every connection; requests in flight are cancelled and not resent."""


class StoppableEngine:
    """An EngineClient that can be stopped when a rollout is full; later requests return empty at once."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self.stopped = False

    def start(self) -> None:
        """Lets requests pass (again)."""
        self.stopped = False

    async def stop(self) -> None:
        """Aborts the requests in flight; every later request returns aborted and empty."""
        self.stopped = True
        await self._client.abort_all()

    async def generate(
        self,
        input_ids: list[int],
        sampling_params: dict[str, Any],
        session_id: str | None = None,
        images: PromptImages | None = None,
    ) -> Generation:
        """The client's `generate`; aborted and without tokens once stopped."""
        if self.stopped:
            return Generation([], [], "abort", "")
        return await self._client.generate(input_ids, sampling_params, session_id, **with_images(images))

    async def ask(self, path: str, payload: dict[str, Any], session_id: str | None = None) -> Any:
        """The client's `ask`; once stopped, the response of a generation that was aborted before it began."""
        if self.stopped and (answer := aborted_answer(path)) is not None:
            return answer
        return await self._client.ask(path, payload, session_id)

    async def abort_all(self) -> None:
        """The client's `abort_all`."""
        await self._client.abort_all()


def aborted_answer(path: str) -> dict[str, Any] | None:
    """The engine's response on `path` to a request aborted without a token; None if `path` does not generate."""
    finish = {"type": "abort", "message": "the rollout is full"}
    if path == "/generate":
        meta = {"id": "", "finish_reason": finish, "prompt_tokens": 0, "completion_tokens": 0, "cached_tokens": 0}
        return {"text": "", "output_ids": [], "meta_info": {**meta, "output_token_logprobs": []}}
    if path == "/v1/chat/completions":
        message = {"role": "assistant", "content": "", "tool_calls": None}
        return {"choices": [{"index": 0, "message": message, "logprobs": {"content": []}, "finish_reason": "abort"}]}
    return None


class EngineError(EngineCallError):
    """Any failure of an engine or of a call to one."""


class EngineUnsupportedError(EngineError):
    """The engine cannot do what the run needs of it on these machines."""


class EngineRequestError(EngineError):
    """The engine rejected a request (HTTP 4xx); a retry would be rejected, too."""

    def __init__(self, url: str, status: int, body: str) -> None:
        super().__init__(f"{url} rejected the request with HTTP {status}: {body}")
        self.url, self.status, self.body = url, status, body

    def __reduce__(self) -> tuple[type, tuple[str, int, str]]:
        return type(self), (self.url, self.status, self.body)


class EngineResponseError(EngineError):
    """The response is malformed or has impossible values: the server is broken or not an engine."""


class EngineUnavailableError(EngineError):
    """No engine responded after all retries: the connection failed or broke, or the response was HTTP 5xx."""


class EngineTimeoutError(EngineUnavailableError):
    """An engine did not respond in time."""


def sampling_seed(*identity: int | str | None) -> int:
    """A 31-bit seed for one sample, derived from its identity; independent of process and order."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in identity)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") >> 1


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """Sampling configuration of a dataset; `base` has the engine's sampling parameters without a seed."""

    base: dict[str, Any]
    max_context_len: int | None  # tokens, prompt and response together
    seed_identity: tuple[int | str, ...] | None  # None: requests have no seed

    @classmethod
    def for_training(cls, flags: SamplingArguments) -> SamplingConfig:
        """From the `--rollout-*` flags; one seed per sample only if an engine may be deterministic."""
        base = {
            "temperature": flags.rollout_temperature,
            "top_p": flags.rollout_top_p,
            "top_k": flags.rollout_top_k,
            "max_new_tokens": flags.rollout_max_response_len,
            "stop": flags.rollout_stop,
            "stop_token_ids": flags.rollout_stop_token_ids,
            "skip_special_tokens": flags.rollout_skip_special_tokens,
            "no_stop_trim": True,
            "spaces_between_special_tokens": False,
        }
        limit = least(flags.rollout_max_context_len, flags.engine_context_len)
        return cls(base, limit, (flags.rollout_seed,) if _takes_seeds(flags) else None)

    @classmethod
    def for_evaluation(cls, flags: SamplingArguments, dataset: EvalDataset) -> SamplingConfig:
        """From an evaluation set's values; temperature 0 is greedy."""
        base = {
            "temperature": dataset.temperature,
            "top_p": dataset.top_p,
            "top_k": dataset.top_k,
            "max_new_tokens": dataset.max_response_len,
            "stop": dataset.stop,
            "stop_token_ids": dataset.stop_token_ids,
            "skip_special_tokens": dataset.skip_special_tokens,
            "no_stop_trim": dataset.no_stop_trim,
            "spaces_between_special_tokens": False,
        }
        if dataset.min_new_tokens is not None:
            base["min_new_tokens"] = dataset.min_new_tokens
        if dataset.repetition_penalty is not None:
            base["repetition_penalty"] = dataset.repetition_penalty
        identity = (flags.rollout_seed, "eval", dataset.name) if _takes_seeds(flags) else None
        return cls(base, least(dataset.max_context_len, flags.engine_context_len), identity)

    def params(self, sample: Sample, *identity: int | str | None) -> dict[str, Any]:
        """The sampling parameters for `sample`; `identity` identifies the sample within the dataset.

        `max_new_tokens` is the remaining budget: limited by the tokens generated so far and by the context length.
        """
        budget = self.base["max_new_tokens"]
        if self.max_context_len is not None:
            budget = min(budget, self.max_context_len - sample.prompt_length)
        params = {**self.base, "max_new_tokens": budget - sample.response_length}
        if self.seed_identity is not None:
            params["sampling_seed"] = sampling_seed(*self.seed_identity, *identity)
        return params


def _takes_seeds(flags: SamplingArguments) -> bool:
    """Whether an engine may be deterministic: without seeds it returns the same response to all samples of a prompt.

    Any external server may be deterministic, also after a restart during the run. Other engines ignore the seed.
    """
    external = bool(flags.rollout_external_engine_addrs)
    return external or bool(flags.sglang_options.get("enable_deterministic_inference"))
