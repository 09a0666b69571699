"""Sampling parameters of a request, under the engine's names, and the seed of each sample."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

from slimrl.arguments.namespace import EvalDataset, SamplingArguments
from slimrl.arguments.served_models import least
from slimrl.data.sample import Sample


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
