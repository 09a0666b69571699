"""The number format of training where no flag says it: that of the model, as its config.json states it."""

from __future__ import annotations

import json
from pathlib import Path

from slimrl.arguments.namespace import Arguments

_FORMATS = {"bfloat16": "bf16", "float16": "fp16"}


def take_precision_of_model(args: Arguments, given: frozenset[str]) -> None:
    """Set `bf16` or `fp16` as the weights in --hf-checkpoint have it, unless a flag has decided; says so in `notes`.

    A file that is absent or broken is the rules' business, and leaves fp32.
    """
    if args.hf_checkpoint is None or {"bf16", "fp16"} & given:
        return
    name = _FORMATS.get(_stated(Path(args.hf_checkpoint) / "config.json"))
    if name is not None:
        setattr(args, name, True)
        args.notes.append(f"training is in {name}, as config.json of --hf-checkpoint says; for fp32 give --no-bf16.")


def _stated(path: Path) -> str:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return ""
    if not isinstance(config, dict):
        return ""
    text = config.get("text_config")
    entries = {**(text if isinstance(text, dict) else {}), **config}
    return str(entries.get("dtype") or entries.get("torch_dtype") or "")
