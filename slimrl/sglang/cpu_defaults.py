"""What a server needs on a machine without CUDA, unless its command line says otherwise."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

DEFAULTS = (
    "--device=cpu",
    "--attention-backend=torch_native",
    "--dtype=float32",
    "--disable-overlap-schedule",
    "--sleep-on-idle",
)
# an allocator for CUDA: without it the server answers calls that release memory, and keeps it
CUDA_ONLY = "--enable-memory-saver"
KV_CACHE_BYTES = 1 << 30
KV_CACHE_TOKENS = (8192, 65536)  # least and most


def with_defaults(argv: Sequence[str]) -> list[str]:
    """`argv` behind the defaults: of two equal flags the last one counts. What only CUDA has is left out.

    Left to itself the server would take most of the machine's memory for its KV cache.
    """
    model = _model_path(argv)
    cache = [f"--max-total-tokens={kv_cache_tokens(model)}"] if model is not None else []
    return [*DEFAULTS, *cache, *(word for word in argv if word != CUDA_ONLY)]


def _model_path(argv: Sequence[str]) -> Path | None:
    """The local folder behind `--model-path` (or `--model`), if there is one."""
    words = [part for word in argv for part in (word.split("=", 1) if word.startswith("--") else [word])]
    for flag, value in zip(words, words[1:], strict=False):
        if flag in ("--model-path", "--model") and (Path(value) / "config.json").is_file():
            return Path(value)
    return None


def kv_cache_tokens(model_path: Path) -> int:
    """Tokens of KV cache that fit into 1 GiB at float32, within the bounds of `KV_CACHE_TOKENS`."""
    config = json.loads((model_path / "config.json").read_text())
    bytes_per_token = 4 * config["num_hidden_layers"] * _cached_values(config)
    least, most = KV_CACHE_TOKENS
    return max(least, min(most, KV_CACHE_BYTES // bytes_per_token))


def _cached_values(config: dict[str, Any]) -> int:
    """Numbers kept per token and layer: keys and values of each head, or one latent vector and one rotary key."""
    if "kv_lora_rank" in config:
        return config["kv_lora_rank"] + config["qk_rope_head_dim"]
    heads = config["num_attention_heads"]
    kv_heads = config.get("num_key_value_heads") or heads
    return 2 * kv_heads * (config.get("head_dim") or config["hidden_size"] // heads)
