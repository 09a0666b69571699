"""The tokens that end a response by themselves, as the engines know them.

An engine that aborts a request does not look whether its last token is one of these: going on behind it would train on
what no engine would have written.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def stop_tokens(model_folder: str | None, tokenizer: Any) -> frozenset[int]:
    """End-of-sequence ids of the tokenizer, and of config.json and generation_config.json where they are there."""
    found = [tokenizer.eos_token_id]
    for name in ("config.json", "generation_config.json"):
        path = Path(model_folder or "") / name
        if model_folder is not None and path.is_file():
            ids = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            found += ids if isinstance(ids, list) else [ids]
    return frozenset(token for token in found if token is not None)
