"""slime's helpers of a rollout: generation, graders, reward functions and metrics, as ordinary functions.

`GenerateState` has the run's tokenizer and sampling parameters.
While a sample is generated, a `post` to the run's router goes through the run's client, which limits, retries and
aborts it. Any other call is a plain request, retried if there is no response.
`run` lets ordinary functions call coroutines: it uses one event loop in a separate thread.

Answers are graded by equivalence, as slimrl grades them. Grading that takes more than a comparison runs in a separate
process with a time limit, and the caller blocks; if it fails, the answer counts as wrong. `async_rm` does the same
without blocking other samples. docs/metrics.md describes the metrics.

slime's reward functions of on-policy distillation fetch the log-probabilities of a teacher on SGLang servers and give
every response the reward 0. Here `--use-opd --opd-type sglang` fetches them, with or without these functions, and only
the reward is left.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import functools
import importlib
import itertools
import logging
import threading
import time
from collections import Counter
from collections.abc import Coroutine, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import aiohttp
import orjson

from slimrl.arguments import Arguments
from slimrl.arguments.engine_groups import POLICY_NAMES
from slimrl.data.sample import Sample
from slimrl.engines.protocol import SamplingConfig, ServiceError
from slimrl.hooks import own_path
from slimrl.rollout.generation.sample_tracker import CustomGenerateCall, own_headers, patience_s
from slimrl.rollout.metrics import PASS_REWARD, mean, pass_at_k
from slimrl.rollout.rm_hub import rule_reward
from slimrl.rollout.rm_hub.grader_pool import GraderFailure, GraderPool

_TAIL_CHARS = 300  # of a solution: the answer is in them


class GenerateState:
    """The run's state for generate functions; may be constructed per sample."""

    def __init__(self, args: Arguments) -> None:
        trusted = args.trusts_remote_code
        self.args = args
        self.tokenizer = _cached_tokenizer(args.hf_checkpoint, trusted)
        self.processor = None
        self.sampling_params: dict[str, Any] = dict(SamplingConfig.for_training(args).base)
        self.semaphore = asyncio.Semaphore(args.sglang_server_concurrency)

    @property
    def aborted(self) -> bool:
        """Whether the rollout is full: new requests to the engines return aborted."""
        call = CustomGenerateCall.current()
        return call is not None and call.stopped()

    @contextlib.contextmanager
    def dp_rank_context(self) -> Iterator[int]:
        """The data-parallel rank of a server, always 0: the router chooses."""
        yield 0


async def generate(args: Arguments, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """The built-in generation, for generate functions that change its input or output.

    Continues `sample.tokens`, which include the prompt. Raises RuntimeError outside a generate function.
    """
    call = CustomGenerateCall.current()
    if call is None:
        raise RuntimeError(
            "slime.rollout.sglang_rollout.generate was called outside a generate function: call it only within a"
            " function of --custom-generate-function-path"
        )
    await call.continue_sample(sample, sampling_params)
    return sample


def get_model_url(args: Arguments, model_name: str, endpoint: str = "/generate") -> str:
    """The address of `endpoint` at the model's router: the policy, or a model of --sglang-config by its name there.

    Raises ValueError for a model that the run does not have.
    """
    if (router := args.sglang_model_routers.get(model_name)) is not None:
        return f"http://{router[0]}:{router[1]}{endpoint}"
    if model_name not in POLICY_NAMES:
        names = sorted({*POLICY_NAMES, *args.sglang_model_routers})
        raise ValueError(f"there is no model {model_name!r}: the run serves {', '.join(names)}")
    return f"http://{args.sglang_router_ip}:{args.sglang_router_port}{endpoint}"


def load_tokenizer(name_or_path: str, chat_template_path: str | None = None, **options: Any) -> Any:
    """The tokenizer of a Hugging Face folder, with another chat template if given; `options` for `from_pretrained`."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(name_or_path, **options)
    if chat_template_path is not None:
        with open(chat_template_path, encoding="utf-8") as file:
            tokenizer.chat_template = file.read()
    return tokenizer


def load_processor(name_or_path: str, **options: Any) -> None:
    """None: a run reads the images of its prompts itself, and the processor of transformers needs torchvision."""
    return None


@functools.lru_cache(maxsize=4)
def _cached_tokenizer(path: str, trusted: bool) -> Any:
    return load_tokenizer(path, trust_remote_code=trusted)


logger = logging.getLogger(__name__)

TIME_LIMIT_S = 600.0
CONNECT_LIMIT_S = 10.0
PAUSE_S = 1.0
MAX_RETRIES = 60
_TOO_MANY_REQUESTS = 429
_UNAVAILABLE = (502, 503, 504)  # of a router without servers, or whose server has just been lost


class RequestFailedError(ServiceError):
    """The service rejected the request, or did not respond in any attempt."""


class _NoResponseError(Exception):
    """No response; the request may be retried. `unavailable`: no server could take it."""

    def __init__(self, text: str, *, unavailable: bool = False) -> None:
        super().__init__(text)
        self.unavailable = unavailable


async def post(url: str, payload: Any, max_retries: int = MAX_RETRIES, headers: Mapping[str, str] | None = None) -> Any:
    """Sends a POST with `payload` as JSON; returns the decoded JSON response, or its text if it is not JSON.

    Sent up to `max_retries` times, a second apart, after connection failures, HTTP 429 and 5xx. Raises
    RequestFailedError after that, and immediately for other statuses than 2xx. With the default `max_retries` a call to
    a router of the run waits longer for lost servers, which --use-fault-tolerance replaces. For calls to the run's
    router from a generate function, `max_retries`, `headers` and errors are those of the run's client
    (`slimrl.engines.sglang.client`).
    """
    call = CustomGenerateCall.current()
    if call is not None and url.startswith(f"{call.router_url}/"):
        return await call.ask(url, payload or {})
    if max_retries < 1:
        raise ValueError(f"post was called with max_retries {max_retries}: give at least 1")
    deadline = time.monotonic() + (patience_s(url) if max_retries == MAX_RETRIES else 0.0)
    for attempt in itertools.count(1):
        try:
            return await _call("POST", url, orjson.dumps(payload or {}, default=_plain), headers)
        except _NoResponseError as error:
            if attempt >= max_retries and not (error.unavailable and time.monotonic() < deadline):
                raise RequestFailedError(f"{error} (tried {attempt} times)") from error
            logger.warning("%s: retrying in %g s", error, PAUSE_S)
        await asyncio.sleep(PAUSE_S)
    raise AssertionError("unreachable")


async def get(url: str) -> Any:
    """Sends a GET; returns the decoded JSON response, or its text. Raises RequestFailedError."""
    try:
        return await _call("GET", url, None, None)
    except _NoResponseError as error:
        raise RequestFailedError(str(error)) from error


async def _call(method: str, url: str, body: bytes | None, headers: Mapping[str, str] | None) -> Any:
    timeout = aiohttp.ClientTimeout(total=TIME_LIMIT_S, sock_connect=CONNECT_LIMIT_S)
    sent = {"Content-Type": "application/json", **own_headers(url), **(headers or {})}
    try:
        # no proxy from the environment, and no redirect: the payload is only for the given address
        async with (
            aiohttp.ClientSession(timeout=timeout, trust_env=False) as session,
            session.request(method, url, data=body, headers=sent, allow_redirects=False) as response,
        ):
            status, content = response.status, await response.read()
    except TimeoutError as error:
        raise _NoResponseError(f"{url} did not respond within {TIME_LIMIT_S:g} s") from error
    except aiohttp.ClientError as error:
        text = f"{url} cannot be reached: {type(error).__name__}: {error}"
        raise _NoResponseError(text, unavailable=True) from error
    if status == _TOO_MANY_REQUESTS or status >= 500:
        text = f"{url} failed with HTTP {status}: {content[:300].decode(errors='replace')}"
        raise _NoResponseError(text, unavailable=status in _UNAVAILABLE)
    if not 200 <= status < 300:
        raise RequestFailedError(f"{url} returned HTTP {status}: {content[:300].decode(errors='replace')}")
    try:
        return orjson.loads(content)
    except orjson.JSONDecodeError:
        return content.decode(errors="replace")


def _plain(value: Any) -> Any:
    """Converts arrays and NumPy scalars for JSON."""
    if hasattr(value, "tolist"):
        return value.tolist()
    raise TypeError(f"a value of type {type(value).__name__} cannot be converted to JSON")


T = TypeVar("T")


def run(coroutine: Coroutine[Any, Any, T]) -> T:
    """Runs the coroutine in the process's background event loop and waits for its result."""
    return asyncio.run_coroutine_threadsafe(coroutine, _loop()).result()


@functools.cache
def _loop() -> asyncio.AbstractEventLoop:
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="slimrl-background", daemon=True).start()
    return loop


def load_function(path: str | None) -> Any:
    """The object at a dotted path; None for None. Raises ImportError or AttributeError."""
    if path is None:
        return None
    module, _, name = own_path(path).rpartition(".")
    return getattr(importlib.import_module(module), name)


class SingletonMeta(type):
    """Metaclass of singletons: the first call creates the class's only instance."""

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
    """`data` has a dict of `rewards` and `samples` by name of the set. Raises ValueError if `metrics` are given."""

    data: dict[str, dict[str, Any]]
    metrics: dict[str, Any] | None = None

    def __post_init__(self) -> None:
        if self.metrics:
            raise ValueError(
                f"metrics {sorted(self.metrics)} of an evaluation belong to no evaluation set: report them in"
                " --custom-eval-rollout-log-function-path"
            )


def compute_score(
    solution_str: str, ground_truth: Any, strict_box_verify: bool = False, pause_tokens_index: list[int] | None = None
) -> dict[str, Any]:
    """`{"score": 1.0 or -1.0, "acc", "pred"}` of the last "Answer: ...", or of the last box, near the end."""
    if pause_tokens_index is not None:
        raise ValueError("pause_tokens_index is unsupported: leave it out")
    tail = solution_str[-_TAIL_CHARS:]
    return _graded("boxed_dapo" if strict_box_verify else "dapo", tail, ground_truth)


def grade_answer_verl(solution_str: str, ground_truth: Any) -> bool:
    """Whether the last box of a solution is equivalent to the truth; False without a truth."""
    if ground_truth is None or ground_truth == "":
        return False
    return bool(_graded("math", solution_str, ground_truth))


def answers_are_equal(given_answer: str, ground_truth: Any) -> bool:
    """Whether two answers are equivalent."""
    return grade_answer_verl(f"\\boxed{{{given_answer}}}", ground_truth)


def get_deepscaler_rule_based_reward(response: str, label: Any) -> int:
    """1 if the last box after the thinking is equivalent to the label, else 0."""
    return int(_graded("deepscaler", response, label))


def f1_score(prediction: str | None, ground_truth: str) -> tuple[float, float, float]:
    """F1, precision and recall of the words shared with the truth."""
    if prediction is None or (score := rule_reward.f1(prediction, ground_truth)) == 0:
        return 0.0, 0.0, 0.0
    words, expected = rule_reward.normalized(prediction), rule_reward.normalized(ground_truth)
    shared = sum((Counter(words) & Counter(expected)).values())
    return score, shared / max(len(words), 1), shared / max(len(expected), 1)


def compute_gpqa_reward(response: str, label: Any, metadata: dict[str, Any] | None = None) -> float:
    """1.0 if the response chooses the right letter, else 0.0."""
    return float(_graded("gpqa", response, label, metadata))


def _graded(rm_type: str, response: str, label: Any, metadata: dict[str, Any] | None = None) -> Any:
    sample = Sample(response=response, label=label, metadata=dict(metadata or {}))
    try:
        return run(rule_reward.grade(rm_type, sample, _graders()))
    except GraderFailure:
        return rule_reward.wrong_answer_reward(rm_type)


@functools.cache
def _graders() -> GraderPool:
    """A pool of one grader, which ends with this process."""
    return GraderPool(size=1)


def dict_add_prefix(values: Mapping[str, Any], prefix: str) -> dict[str, Any]:
    """A copy with `prefix` before each name."""
    return {f"{prefix}{name}": value for name, value in values.items()}


def compute_pass_rate(
    flat_rewards: Sequence[float], group_size: int, num_groups: int | None = None
) -> dict[str, float]:
    """`pass@k` for k = 1, 2, 4, ... up to `group_size`, the mean over groups end to end; {} for groups of one.

    Raises ValueError if the number of rewards does not match `num_groups`.
    """
    count = len(flat_rewards) // group_size if num_groups is None else num_groups
    if len(flat_rewards) != count * group_size:
        raise ValueError(f"{len(flat_rewards)} rewards are not {count} groups of {group_size}")
    if group_size == 1 or not count:
        return {}
    groups = [flat_rewards[start : start + group_size] for start in range(0, len(flat_rewards), group_size)]
    passed = [sum(reward >= PASS_REWARD for reward in group) for group in groups]
    ks = [1 << power for power in range(group_size.bit_length())]
    return {f"pass@{k}": mean([pass_at_k(group_size, one, k) for one in passed]) for k in ks}


async def reward_func(args: Arguments, sample: Sample, **kwargs: Any) -> float:
    """0, for `--custom-rm-path`. Raises ValueError without a teacher: nothing would be learned."""
    if not args.use_opd:
        raise ValueError("this reward is always 0 and needs a teacher: add --use-opd --opd-type sglang")
    return 0.0


def post_process_rewards(args: Arguments, samples: list[Sample], **kwargs: Any) -> tuple[list[float], list[float]]:
    """0 for every sample, for `--custom-reward-post-process-path`."""
    return [0.0] * len(samples), [0.0] * len(samples)
