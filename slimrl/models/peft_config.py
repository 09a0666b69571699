"""PEFT's adapter_config.json and the header of its tensors, compared with the flags before a run."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slimrl.models.adapters import AdapterConfig

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"
_LONGEST_HEADER = 100_000_000  # bytes, the limit of the format

# settings that change what an adapter computes, with the only value that is served
_PLAIN: dict[str, Any] = {
    "use_rslora": False,
    "use_dora": False,
    "bias": "none",
    "fan_in_fan_out": False,
    "modules_to_save": None,
    "layers_to_transform": None,
    "rank_pattern": {},
    "alpha_pattern": {},
    "trainable_token_indices": None,
    "target_parameters": None,
}


def peft_config(adapters: AdapterConfig, base: str | None = None) -> dict[str, Any]:
    """The adapter_config.json of `adapters`; `base` is the name or folder of the base model."""
    return _PLAIN | {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base,
        "inference_mode": True,
        "r": adapters.rank,
        "lora_alpha": adapters.alpha,
        "lora_dropout": 0.0,
        "target_modules": list(adapters.targets),
    }


def problem_with_shapes(folder: Path, expected: Mapping[str, tuple[int, ...]]) -> str | None:
    """The first tensor in which the folder differs from `expected`, as the end of a sentence; None if none does.

    Reads the header of the file, as the safetensors format defines it: its length in 8 bytes, then JSON.
    """
    with (folder / WEIGHTS_NAME).open("rb") as file:
        length = int.from_bytes(file.read(8), "little")
        try:
            header = json.loads(file.read(min(length, _LONGEST_HEADER)))
        except ValueError:
            return f"has a damaged {WEIGHTS_NAME}: copy or download it again"
    stored = {name: tuple(entry["shape"]) for name, entry in header.items() if name != "__metadata__"}
    for name in sorted(expected.keys() | stored.keys()):
        if name not in stored:
            return f"lacks {name}: give the adapter of this model"
        if name not in expected:
            return f"has {name}, which the flags do not describe: give the adapter of this model"
        if stored[name] != expected[name]:
            return (
                f"has {name} of shape {list(stored[name])} and the flags describe {list(expected[name])}: give the"
                " adapter of this model"
            )
    return None


def problem_with(folder: Path, adapters: AdapterConfig) -> str | None:
    """Why `folder` cannot be loaded as these adapters, as the end of a sentence; None if it can."""
    for name in (CONFIG_NAME, WEIGHTS_NAME):
        if not (folder / name).is_file():
            return f"has no {name}: give the folder of a PEFT adapter"
    try:
        found = json.loads((folder / CONFIG_NAME).read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        return f"has a damaged {CONFIG_NAME} ({error}): copy or download it again"
    if found.get("peft_type") != "LORA":
        return f"is of peft_type {found.get('peft_type')!r}, and only 'LORA' is supported: give another folder"
    for key, value in _PLAIN.items():
        if (found.get(key) or value) != value:
            return f"has {key} {found[key]!r} in {CONFIG_NAME}, and only {value!r} is supported: give another folder"
    if found.get("r") != adapters.rank:
        return f"has rank {found.get('r')} (r) and --lora-rank is {adapters.rank}: make them equal"
    if found.get("lora_alpha") != adapters.alpha:
        return f"has lora_alpha {found.get('lora_alpha')} and --lora-alpha is {adapters.alpha:g}: make them equal"
    targets = found.get("target_modules")
    if not isinstance(targets, list) or set(targets) != set(adapters.targets):
        own = " ".join(adapters.targets)
        return f"has target_modules {targets} and --lora-target-modules is {own}: make them equal"
    return None
