"""What is asked of the engine for one sample: sampling parameters in the engine's names, and the sample's own seed."""

from __future__ import annotations

import dataclasses
import hashlib
from typing import Any

from slimrl.arguments import Arguments
from slimrl.arguments.engines import least
from slimrl.arguments.namespace import EvalDataset
from slimrl.data.sample import Sample


def sampling_seed(*identity: int | str) -> int:
    """A stable seed of 31 bits for one sample, from what identifies it; the same in every process and order."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in identity)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=4).digest(), "big") >> 1


@dataclasses.dataclass(frozen=True)
class SamplingConfig:
    """How a data set is sampled; `base` holds the engine's sampling parameters without a seed."""

    base: dict[str, Any]
    max_context_len: int | None  # tokens, prompt and response together
    seed_identity: tuple[int | str, ...] | None  # None: the engine draws as it likes

    @classmethod
    def for_training(cls, args: Arguments) -> SamplingConfig:
        """From the `--rollout-*` flags; one seed per sample only where an engine may be deterministic."""
        base = {
            "temperature": args.rollout_temperature,
            "top_p": args.rollout_top_p,
            "top_k": args.rollout_top_k,
            "max_new_tokens": args.rollout_max_response_len,
            "stop": args.rollout_stop,
            "stop_token_ids": args.rollout_stop_token_ids,
            "skip_special_tokens": args.rollout_skip_special_tokens,
            "no_stop_trim": True,
            "spaces_between_special_tokens": False,
        }
        limit = least(args.rollout_max_context_len, args.engine_context_len)
        return cls(base, limit, (args.rollout_seed,) if _takes_seeds(args) else None)

    @classmethod
    def for_evaluation(cls, args: Arguments, dataset: EvalDataset) -> SamplingConfig:
        """From an evaluation set's own values; temperature 0 is greedy."""
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
        identity = (args.rollout_seed, "eval", dataset.name) if _takes_seeds(args) else None
        return cls(base, least(dataset.max_context_len, args.engine_context_len), identity)

    def params(self, sample: Sample, *identity: int | str) -> dict[str, Any]:
        """The request's sampling parameters for `sample`, which `identity` tells from all others of the data set.

        `max_new_tokens` leaves out what the sample has generated already and what the context length has no room for.
        """
        budget = self.base["max_new_tokens"]
        if self.max_context_len is not None:
            budget = min(budget, self.max_context_len - sample.prompt_length)
        params = {**self.base, "max_new_tokens": budget - sample.response_length}
        if self.seed_identity is not None:
            params["sampling_seed"] = sampling_seed(*self.seed_identity, *identity)
        return params


def _takes_seeds(args: Arguments) -> bool:
    """Whether a deterministic engine may be asked, which without a seed answers every sample of a prompt alike.

    Any external server may be one, also one that its owner starts again during the run; others ignore the seed.
    """
    external = bool(args.rollout_external_engine_addrs)
    return external or bool(args.sglang_options.get("enable_deterministic_inference"))
