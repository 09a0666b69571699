"""The reward model of `--rm-model` as its folder describes it, and whether slimrl starts servers for it.

Read from config.json alone. Called by the rules, the plan, the placement and the reward itself.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

from slimrl.arguments.namespace import Arguments

REWARD_MODEL = "reward_model"  # of --rm-type
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")  # one of them is in a folder with a tokenizer
# the classes of SGLang that give numbers in place of tokens; one number of a response is its reward
ARCHITECTURES = (
    "Gemma2ForSequenceClassification",
    "InternLM2ForRewardModel",
    "LlamaForSequenceClassification",
    "LlamaForSequenceClassificationWithNormal_Weights",
    "Qwen2ForRewardModel",
    "Qwen2ForSequenceClassification",
    "Qwen3ForRewardModel",
    "Qwen3ForSequenceClassification",
)
_SEVERAL_LABELS = "LlamaForSequenceClassificationWithNormal_Weights"  # weighs its labels to one number itself


@dataclasses.dataclass(frozen=True)
class RewardModelConfig:
    """What config.json says; `context` and `vocabulary` are None where it says nothing."""

    architecture: str
    labels: int
    context: int | None
    vocabulary: int | None

    @classmethod
    def read(cls, folder: Path) -> RewardModelConfig:
        """Raises ValueError, a sentence, where the folder has no readable config.json."""
        path = folder / "config.json"
        try:
            config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"--rm-model {folder} has no readable config.json ({error}): copy the model again."
            ) from error
        labels = config.get("num_labels") or len(config.get("id2label") or {}) or 1
        scaled = config.get("rope_scaling") is not None
        return cls(
            architecture=(config.get("architectures") or ["nothing"])[0],
            labels=labels,
            context=None if scaled else config.get("max_position_embeddings"),
            vocabulary=config.get("vocab_size"),
        )

    @property
    def fault(self) -> str | None:
        """Why a server cannot give one number for a response; None where it can."""
        if self.architecture not in ARCHITECTURES:
            return f"is a {self.architecture}, and a reward model is one of {', '.join(ARCHITECTURES)}"
        if self.labels != 1 and self.architecture != _SEVERAL_LABELS:
            return f"gives {self.labels} numbers for a response, and a reward is one"
        return None


def starts_reward_servers(args: Arguments) -> bool:
    """Whether slimrl starts the servers of the reward model: it is given, and no server that runs already."""
    return args.rm_model is not None and args.rm_url is None and not args.debug_train_only


def reward_slots(args: Arguments) -> int:
    """Slots of the reward model's servers, behind those of training and rollout."""
    return args.rm_num_gpus if starts_reward_servers(args) else 0
