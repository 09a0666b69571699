"""A reward model's folder as SGLang loads it: with the zero bias that some of its classes expect.

transformers' sequence classifiers of Qwen2 and Qwen3 have a score head without a bias; SGLang's have one, which keeps
its random first value where the checkpoint has none, and every reward would be off by it, on each server by another.
Called before the servers of a reward model start.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy
from safetensors.numpy import save_file

from slimrl.arguments.hf_files import INDEX, read_tensor_names

BIASED = ("Qwen2ForSequenceClassification", "Qwen3ForSequenceClassification")
BIAS = "score.bias"
BIAS_FILE = "score-bias.safetensors"


def servable_folder(model: Path, architecture: str, into: Path) -> Path:
    """`model` itself where nothing is missing, else `into`, filled anew with links to its files and the zero bias.

    Raises ValueError where its weights are not in safetensors files, which the bias can be laid beside.
    """
    if architecture not in BIASED:
        return model
    names = read_tensor_names(model)
    if BIAS in names:
        return model
    if not names:
        raise ValueError(f"--rm-model {model} has no safetensors files: save it again with safetensors")
    if into.exists():  # of an earlier start under the same run name, perhaps with another model
        shutil.rmtree(into)
    into.mkdir(parents=True)
    for file in model.iterdir():
        if file.name != INDEX:
            (into / file.name).symlink_to(file.resolve())
    save_file({BIAS: numpy.zeros(1, numpy.float32)}, into / BIAS_FILE)
    index = model / INDEX
    if index.is_file():
        content = json.loads(index.read_text())
        content["weight_map"][BIAS] = BIAS_FILE
        (into / INDEX).write_text(json.dumps(content))
    return into
