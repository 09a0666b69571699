"""slime's helpers around generation: `GenerateState`, `post` and `get`, `run`, and what a rollout function returns.

`GenerateState` holds the run's tokenizer and sampling parameters.
A `post` to the run's own router, while a sample is generated, goes through the run's client, which limits, retries and
aborts it. Any other is a plain call, retried where nothing answered.
`run` is for ordinary functions that call coroutines: it uses one event loop, in a thread of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import importlib
import logging
import threading
from collections.abc import Coroutine, Iterator, Mapping
from typing import Any, TypeVar

import aiohttp
import orjson

from slimrl.arguments import Arguments
from slimrl.data.sample import Sample
from slimrl.engines.protocol import ServiceError
from slimrl.hooks import own_path
from slimrl.rollout.generation.sample_tracker import CustomGenerateCall, own_headers
from slimrl.rollout.sampling import SamplingConfig

_MODEL_NAMES = ("default", "actor")


class GenerateState:
    """What a generate function needs to know of the run; may be made once per sample."""

    def __init__(self, args: Arguments) -> None:
        trusted = bool(args.sglang_options.get("trust_remote_code"))
        self.args = args
        self.tokenizer = _cached_tokenizer(args.hf_checkpoint, trusted)
        self.processor = None
        self.sampling_params: dict[str, Any] = dict(SamplingConfig.for_training(args).base)
        self.semaphore = asyncio.Semaphore(args.sglang_server_concurrency)

    @property
    def aborted(self) -> bool:
        """Whether the rollout is full: what is asked of the engines now comes back aborted."""
        making = CustomGenerateCall.current()
        return making is not None and making.stopped()

    @contextlib.contextmanager
    def dp_rank_context(self) -> Iterator[int]:
        """The data-parallel rank of a server to ask, always 0: the router chooses."""
        yield 0


async def generate(args: Arguments, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """The built-in generation, for a generate function that changes what goes in or comes out of it.

    Continues `sample.tokens`, which hold the prompt. Raises RuntimeError outside of a generate function.
    """
    making = CustomGenerateCall.current()
    if making is None:
        raise RuntimeError(
            "slime.rollout.sglang_rollout.generate was called where no sample is generated: call it from within a"
            " function of --custom-generate-function-path"
        )
    await making.continue_sample(sample, sampling_params)
    return sample


def get_model_url(args: Arguments, model_name: str, endpoint: str = "/generate") -> str:
    """The address of `endpoint` at the run's router. Raises ValueError for a model that the run does not have."""
    if model_name not in _MODEL_NAMES:
        raise ValueError(f"there is no model {model_name!r}: a run serves one, {' or '.join(_MODEL_NAMES)}")
    return f"http://{args.sglang_router_ip}:{args.sglang_router_port}{endpoint}"


def load_tokenizer(name_or_path: str, chat_template_path: str | None = None, **options: Any) -> Any:
    """The tokenizer of a Hugging Face folder, with another chat template where one is given; `options` go along."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name_or_path, **options)
    if chat_template_path is not None:
        with open(chat_template_path, encoding="utf-8") as file:
            tokenizer.chat_template = file.read()
    return tokenizer


def load_processor(name_or_path: str, **options: Any) -> None:
    """None: images are not served."""
    return None


@functools.lru_cache(maxsize=4)
def _cached_tokenizer(path: str, trusted: bool) -> Any:
    return load_tokenizer(path, trust_remote_code=trusted)


logger = logging.getLogger(__name__)

TIME_LIMIT_S = 600.0
CONNECT_LIMIT_S = 10.0
PAUSE_S = 1.0
_TOO_MANY_REQUESTS = 429


class RequestFailedError(ServiceError):
    """The service refused the request, or did not answer it in all attempts."""


class _NoResponseError(Exception):
    """It may answer later."""


async def post(url: str, payload: Any, max_retries: int = 60, headers: Mapping[str, str] | None = None) -> Any:
    """The decoded JSON that `url` answers to a POST of `payload` as JSON, or its text where it is none.

    Sent up to `max_retries` times, a second apart, where the connection failed, or with HTTP 429 and 5xx. Raises
    RequestFailedError after that, and at once for any other status than 2xx. To the run's router, from within a
    generate function, `max_retries` and `headers` are the client's own (`slimrl.engines.sglang.client`), and so are the
    errors.
    """
    making = CustomGenerateCall.current()
    if making is not None and url.startswith(f"{making.router_url}/"):
        return await making.ask(url, payload or {})
    for attempt in range(1, max_retries + 1):
        try:
            return await _call("POST", url, orjson.dumps(payload or {}, default=_plain), headers)
        except _NoResponseError as error:
            if attempt == max_retries:
                raise RequestFailedError(f"{error} (tried {attempt} times)") from error
            logger.warning("%s: trying again in %g s", error, PAUSE_S)
        await asyncio.sleep(PAUSE_S)
    raise ValueError(f"post was called with max_retries {max_retries}: give at least 1")


async def get(url: str) -> Any:
    """The decoded JSON, or text, that `url` answers to a GET. Raises RequestFailedError where it fails."""
    try:
        return await _call("GET", url, None, None)
    except _NoResponseError as error:
        raise RequestFailedError(str(error)) from error


async def _call(method: str, url: str, body: bytes | None, headers: Mapping[str, str] | None) -> Any:
    timeout = aiohttp.ClientTimeout(total=TIME_LIMIT_S, sock_connect=CONNECT_LIMIT_S)
    sent = {"Content-Type": "application/json", **own_headers(url), **(headers or {})}
    try:
        # no proxy from the environment, and no redirect: the payload is for the address that was given
        async with (
            aiohttp.ClientSession(timeout=timeout, trust_env=False) as session,
            session.request(method, url, data=body, headers=sent, allow_redirects=False) as response,
        ):
            status, content = response.status, await response.read()
    except TimeoutError as error:
        raise _NoResponseError(f"{url} did not answer within {TIME_LIMIT_S:g} s") from error
    except aiohttp.ClientError as error:
        raise _NoResponseError(f"{url} cannot be reached: {type(error).__name__}: {error}") from error
    if status == _TOO_MANY_REQUESTS or status >= 500:
        raise _NoResponseError(f"{url} failed with HTTP {status}: {content[:300].decode(errors='replace')}")
    if not 200 <= status < 300:
        raise RequestFailedError(f"{url} answered HTTP {status}: {content[:300].decode(errors='replace')}")
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        return content.decode(errors="replace")


def _plain(value: Any) -> Any:
    """Arrays and NumPy's numbers as JSON has them."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__} is no JSON")


T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """The coroutine's result, waited for; it runs in one event loop of the process, in a thread of its own."""
    return asyncio.run_coroutine_threadsafe(coroutine, _loop()).result()


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="slimrl-background", daemon=True).start()
    return loop


def load_function(path: str | None) -> Any:
    """What is at a dotted path; None for None. Raises ImportError or AttributeError where nothing does."""
    if path is None:
        return None
    module, _, name = own_path(path).rpartition(".")
    return getattr(importlib.import_module(module), name)


class SingletonMeta(type):
    """Classes of this metaclass have one instance per process, made by the first call."""

    def __call__(cls, *arguments: Any, **keywords: Any) -> Any:
        if "_only" not in cls.__dict__:
            cls._only = super().__call__(*arguments, **keywords)
        return cls._only


@dataclasses.dataclass
class RolloutFnTrainOutput:
    """Groups of samples, and metrics by name."""

    samples: list[list[Sample]]
    metrics: dict[str, Any] | None = None


@dataclasses.dataclass
class RolloutFnEvalOutput:
    """By name of the set a dict with its `rewards` and `samples`. Raises ValueError where it is given metrics."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.metrics:
            raise ValueError(
                f"metrics {sorted(self.metrics)} of an evaluation belong to no set: report them in"
                " --custom-eval-rollout-log-function-path"
            )
