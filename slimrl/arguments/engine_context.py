"""How many tokens an engine takes, prompt and response together: --sglang-context-length, else what config.json says.

Read as SGLang 0.5.20 reads it. Called when the command line is read, before its rules.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slimrl.arguments.hf_config import rope
from slimrl.arguments.namespace import Arguments

# names of config.json for the longest sequence, in the server's order
_KEYS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings")
_UNITS = {"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12, "Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40}
# A server refuses a prompt of less than that many tokens below its context with HTTP 400; a response that is continued
# is such a prompt.
RESERVED_TOKENS = 6


def take_context_of_engines(args: Arguments) -> None:
    """Set `engine_context_len`; it stays None where it is not known, or where the engine cuts prompts by itself."""
    if args.debug_train_only or args.rollout_external_engine_addrs or args.sglang_options.get("allow_auto_truncate"):
        return
    given = args.sglang_options.get("context_length")
    try:
        context = context_of_model(args) if given is None else tokens(given)
    except ValueError:
        return  # the server's own parser says what is wrong with it
    cache = args.sglang_options.get("max_total_tokens")
    if isinstance(cache, int):
        context = cache if context is None else min(context, cache)
    if context is not None and context > RESERVED_TOKENS + 1:
        args.engine_context_len = context - RESERVED_TOKENS


def context_of_model(args: Arguments) -> int | None:
    """Tokens that the model of --hf-checkpoint is made for; None where its config.json does not say.

    With what --sglang-json-model-override-args changes of it.
    """
    if args.hf_checkpoint is None:
        return None
    try:
        config = json.loads((Path(args.hf_checkpoint) / "config.json").read_text(encoding="utf-8"))
        changes = json.loads(args.sglang_options.get("json_model_override_args") or "{}")
    except (OSError, TypeError, ValueError):
        return None  # another rule's problem, or the server's
    if not isinstance(config, dict) or not isinstance(changes, dict):
        return None
    for key, value in changes.items():
        is_part = key.endswith("_config") and isinstance(value, dict) and isinstance(config.get(key), dict)
        config[key] = {**config[key], **value} if is_part else value
    text = config.get("text_config")
    return stated_context(text if isinstance(text, dict) else config)


def stated_context(config: Mapping[str, Any]) -> int | None:
    """The longest sequence of a config.json, with the factor of a rope scaling that does not count its own."""
    settings = rope.settings(config)
    factor = settings.get("factor") or 1
    if "original_max_position_embeddings" in settings or rope.kind(config) == "llama3":
        factor = 1
    longest = next((config[key] for key in _KEYS if isinstance(config.get(key), int)), None)
    return None if longest is None else int(factor * longest)


def tokens(given: int | str) -> int:
    """A number as SGLang reads it: 32768, "32k" (thousands) or "32Ki" (powers of 1024). Raises ValueError."""
    text = str(given).strip()
    unit = next((unit for unit in sorted(_UNITS, key=len, reverse=True) if text.endswith(unit)), "")
    return int(float(text.removesuffix(unit)) * _UNITS.get(unit, 1))


def least(*limits: int | None) -> int | None:
    """The least of the limits that there are."""
    return min((limit for limit in limits if limit is not None), default=None)
