"""What a Hugging Face folder holds beside its weights, taken over from the folder the model came from.

Called by the converter and by the export beside checkpoints, whose folders are therefore alike.
"""

from __future__ import annotations

import glob
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from slimrl.weights.hf_shards import INDEX_NAME, SINGLE_NAME, Shard, index_text

# what the original folder may hold besides the files a loader of the result wants
_WEIGHT_SUFFIXES = (".safetensors", ".index.json", ".bin", ".pt", ".pth", ".gguf", ".h5", ".msgpack", ".onnx")
_OWN_FILES = ("config.json", SINGLE_NAME, "model-?????-of-?????.safetensors", INDEX_NAME)  # beside the original's


def companions(origin: Path) -> list[Path]:
    """Tokenizer, chat template, generation config and the like."""
    return sorted(
        path
        for path in origin.iterdir()
        if path.is_file() and path.name != "config.json" and not path.name.endswith(_WEIGHT_SUFFIXES)
    )


def replaceable(beside: Sequence[Path]) -> tuple[str, ...]:
    """Patterns of all files in a folder that was made with the companions `beside`."""
    return (*_OWN_FILES, *(glob.escape(path.name) for path in beside))


def finish(folder: Path, shards: Sequence[Shard], beside: Sequence[Path], config: dict[str, Any]) -> None:
    """Everything beside the weights: tokenizer, index and, last, config.json, without which nothing loads it."""
    for path in beside:
        shutil.copyfile(path, folder / path.name)
    if len(shards) > 1:
        (folder / INDEX_NAME).write_text(index_text(shards), encoding="utf-8")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
