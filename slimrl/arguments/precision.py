"""The number format of training where no flag says it: that of the model, as its config.json states it."""

from __future__ import annotations

import json
from pathlib import Path

from slimrl.arguments.namespace import Arguments

_FORMATS = {"bfloat16": "bf16", "float16": "fp16"}


def take_precision_of_model(args: Arguments, given: frozenset[str]) -> None:
    """Set `bf16` or `fp16` as the weights in --hf-checkpoint have it, unless a flag has decided; says so in `notes`.

    Where nobody says it, weights are fp32, but bf16 with --optimizer-cpu-offload, which has no others. A file that is
    absent or broken is the rules' business, and leaves fp32.
    """
    if args.hf_checkpoint is None or {"bf16", "fp16"} & given:
        return
    stated = _stated(Path(args.hf_checkpoint) / "config.json")
    name = _FORMATS.get(stated or "")
    if stated == "" and args.optimizer_cpu_offload:
        args.bf16 = True
        args.notes.append(
            "training is in bf16: config.json of --hf-checkpoint states no format, and --optimizer-cpu-offload works on"
            " 16-bit weights."
        )
    elif name is not None:
        setattr(args, name, True)
        args.notes.append(f"training is in {name}, as config.json of --hf-checkpoint says; for fp32 give --no-bf16.")


def _stated(path: Path) -> str | None:
    """The name that config.json gives, "" where it gives none; None without such a file."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    if not isinstance(config, dict):
        return None
    text = config.get("text_config")
    entries = {**(text if isinstance(text, dict) else {}), **config}
    return str(entries.get("dtype") or entries.get("torch_dtype") or "")
