"""`GenerateState` and what stands beside it in slime: the tokenizer and the sampling parameters of the run."""

from __future__ import annotations

import asyncio
import contextlib
import functools
from collections.abc import Iterator
from typing import Any

from slimrl.arguments import Arguments
from slimrl.data.sample import Sample
from slimrl.rollout.making import Making
from slimrl.rollout.sampling import SamplingPlan

_MODEL_NAMES = ("default", "actor")


class GenerateState:
    """What a generate function needs to know of the run; may be made once per sample."""

    def __init__(self, args: Arguments) -> None:
        trusted = bool(args.sglang_options.get("trust_remote_code"))
        self.args = args
        self.tokenizer = _cached_tokenizer(args.hf_checkpoint, trusted)
        self.processor = None
        self.sampling_params: dict[str, Any] = dict(SamplingPlan.for_training(args).base)
        self.semaphore = asyncio.Semaphore(args.sglang_server_concurrency)

    @property
    def aborted(self) -> bool:
        """Whether the rollout is full: what is asked of the engines now comes back aborted."""
        making = Making.current()
        return making is not None and making.stopped()

    @contextlib.contextmanager
    def dp_rank_context(self) -> Iterator[int]:
        """The data-parallel rank of a server to ask, always 0: the router chooses."""
        yield 0


async def generate(args: Arguments, sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """The built-in generation, for a generate function that changes what goes in or comes out of it.

    Continues `sample.tokens`, which hold the prompt. Raises RuntimeError outside of a generate function.
    """
    making = Making.current()
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
