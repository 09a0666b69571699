"""The folder from which a reward model without a bias is served: links to the model's files, and a zero bias."""

from __future__ import annotations

import json
from pathlib import Path

import numpy
from safetensors.numpy import load_file, save_file

from slimrl.cluster.engines.other_servers import servable_folder

CLASS = "Qwen2ForSequenceClassification"


def model(folder: Path, weight: float, **others: float) -> Path:
    folder.mkdir()
    tensors = {
        name: numpy.full((1, 4), value, numpy.float32) for name, value in {"score.weight": weight, **others}.items()
    }
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"name": folder.name}))
    return folder


def test_changed_model_under_the_same_run_name_is_served(tmp_path):
    first, second, into = model(tmp_path / "first", 1.0), model(tmp_path / "second", 2.0), tmp_path / "run" / "rm_model"
    (first / "merges.txt").write_text("of the first alone")
    for source, weight in ((first, 1.0), (second, 2.0), (second, 2.0)):
        assert servable_folder(source, CLASS, into) == into
        assert load_file(into / "model.safetensors")["score.weight"].tolist() == [[weight] * 4]
        assert load_file(into / "score-bias.safetensors")["score.bias"].tolist() == [0.0]
        assert json.loads((into / "config.json").read_text()) == {"name": source.name}
    assert not (into / "merges.txt").exists()
    assert (first / "merges.txt").read_text() == "of the first alone"  # only links were removed


def test_model_that_needs_no_added_bias_is_served_from_its_own_folder(tmp_path):
    whole = model(tmp_path / "whole", 1.0, **{"score.bias": 3.0})
    assert servable_folder(whole, CLASS, tmp_path / "into") == whole
    plain = model(tmp_path / "plain", 1.0)
    assert servable_folder(plain, "LlamaForSequenceClassification", tmp_path / "into") == plain
    assert not (tmp_path / "into").exists()
