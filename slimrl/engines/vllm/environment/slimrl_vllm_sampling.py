"""slimrl's sampling parameters as vLLM's `SamplingParams`. Runs in vLLM's environment."""

from __future__ import annotations

from typing import Any

# slimrl's name (that of SGLang's server) -> vLLM's
_NAMES = {
    "max_new_tokens": "max_tokens",
    "min_new_tokens": "min_tokens",
    "temperature": "temperature",
    "top_p": "top_p",
    "top_k": "top_k",
    "min_p": "min_p",
    "frequency_penalty": "frequency_penalty",
    "presence_penalty": "presence_penalty",
    "repetition_penalty": "repetition_penalty",
    "stop": "stop",
    "stop_token_ids": "stop_token_ids",
    "ignore_eos": "ignore_eos",
    "skip_special_tokens": "skip_special_tokens",
    "spaces_between_special_tokens": "spaces_between_special_tokens",
    "no_stop_trim": "include_stop_str_in_output",
    "sampling_seed": "seed",
    "logit_bias": "logit_bias",
}


class UnknownParameterError(ValueError):
    """A request has a sampling parameter that vLLM has no counterpart of."""


def sampling_params(given: dict[str, Any], output_kind: Any) -> Any:
    """The `SamplingParams` of a request, with the log-probability of every sampled token.

    Raises UnknownParameterError, which names the parameter, and ValueError for a value that vLLM rejects.
    """
    from vllm import SamplingParams

    if unknown := sorted(given.keys() - _NAMES.keys()):
        raise UnknownParameterError(f"sampling_params has {', '.join(unknown)}, which vLLM's server does not take here")
    values = {_NAMES[name]: value for name, value in given.items() if value is not None}
    return SamplingParams(**values, logprobs=0, detokenize=True, output_kind=output_kind)
