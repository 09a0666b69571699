"""Flags of LoRA adapters."""

from __future__ import annotations

import dataclasses

from slimrl.arguments.flag import flag
from slimrl.models.adapters import TARGETS


@dataclasses.dataclass
class LoraArguments:
    """LoRA adapters (arXiv:2106.09685), trained in place of the weights of the policy."""

    lora_rank: int | None = flag(
        None, "train LoRA adapters of this rank; the weights of --ref-load are their base and stay as they are", above=0
    )
    lora_alpha: float | None = flag(
        None, "scale of the adapters: their part is multiplied by alpha / rank (default: the rank)", above=0
    )
    lora_target_modules: list[str] | None = flag(
        None,
        "projections with an adapter, by their Hugging Face names; those of experts included (default: all)",
        choices=TARGETS,
        nargs="+",
    )
    lora_dropout: float = flag(
        0.0,
        "probability of dropping an input of an adapter in training",
        at_least=0,
        below=1,
        not_served="dropout before adapters is unsupported: the engines sample without it; leave it out",
    )
    lora_load: str | None = flag(None, "PEFT folder with the adapters of a new run (default: fresh ones, by --seed)")
    lora_merge: bool = flag(
        False,
        "merge the adapters into the weights that the engines and --save-hf get (default: the engines load them beside"
        " their base, and --save-hf writes PEFT folders)",
    )
