"""`check_checkpoint.py` finds every difference between two checkpoints and reports it in its exit code."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.tools.converting import model_args, run_tool, run_tool_subprocess
from tests.weights.models import save_tiny
from tools.check_checkpoint import compare_checkpoints, max_difference

TOOL = "check_checkpoint.py"


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tied Qwen3 in `hf` and its conversion in `torch_dist`; not to be changed."""
    root = tmp_path_factory.mktemp("converted")
    save_tiny(root / "hf", "qwen3", tied=True)
    flags = (*model_args("qwen3", tied=True), "--hf-checkpoint", root / "hf", "--save", root / "torch_dist")
    done = run_tool("convert_hf_to_torch_dist.py", *flags)
    assert done.returncode == 0, done.stderr
    return root


def changed(converted: Path, folder: Path, change) -> Path:
    """A copy of the Hugging Face folder with other tensors."""
    shutil.copytree(converted / "hf", folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.mark.slow
def test_equal_checkpoints_exit_with_0(converted):
    done = run_tool_subprocess(TOOL, "--input-dir", converted / "torch_dist", "--hf-checkpoint", converted / "hf")
    assert done.returncode == 0, done.stderr
    elements = sum(tensor.numel() for tensor in load_file(converted / "hf" / "model.safetensors").values())
    assert f"EQUAL: 24 tensors, {elements:,} elements" in done.stdout


@pytest.mark.slow
def test_one_changed_element_is_found_named_and_measured(converted, tmp_path):
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.1.self_attn.k_proj.weight"][31, 5] += 0.5

    other = changed(converted, tmp_path / "hf", change)
    arguments = ("--input-dir", converted / "torch_dist" / "release", "--hf-checkpoint", other)
    done = run_tool(TOOL, *arguments, "--worst", 1)
    assert done.returncode == 1 and "DIFFERENT: 1 of 24 tensors differ" in done.stdout
    worst = done.stdout.splitlines()[2].split()  # below the line about the bytes and the head
    assert worst[-1] == "model.layers.1.self_attn.k_proj.weight" and float(worst[0]) == pytest.approx(0.5, abs=1e-6)
    assert run_tool(TOOL, *arguments, "--tolerance", 0.6).returncode == 0


@pytest.mark.slow
def test_dtypes_shapes_and_one_sided_tensors_are_differences(converted, tmp_path):
    def change(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.norm.weight"] = tensors["model.norm.weight"].bfloat16().float().half()
        tensors["model.layers.0.mlp.down_proj.weight"] = torch.ones(32, 47)
        tensors["model.layers.9.mlp.down_proj.weight"] = torch.ones(2)
        del tensors["model.layers.0.input_layernorm.weight"]
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + 1

    found = compare_checkpoints(converted / "torch_dist/release", changed(converted, tmp_path / "hf", change))
    assert not found.is_equal(tolerance=100)
    assert found.only_hf == ("model.layers.9.mlp.down_proj.weight",)
    assert found.only_stored == ()
    by_name = {pair.name: pair for pair in found.pairs}
    assert by_name["model.norm.weight"].hf_dtype is torch.float16 and not by_name["model.norm.weight"].is_equal(100)
    assert by_name["model.layers.0.mlp.down_proj.weight"].max_difference is None
    assert found.worst()[0].name == "model.layers.0.mlp.down_proj.weight"
    assert by_name["lm_head.weight"].max_difference == pytest.approx(1)  # it must equal the tied embedding
    assert "model.layers.0.input_layernorm.weight" not in by_name


@pytest.mark.slow
def test_different_layer_counts_leave_tensors_on_the_torch_dist_side(converted, tmp_path):
    def change(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if ".layers.1." in name]:
            del tensors[name]

    other = changed(converted, tmp_path / "hf", change)
    config = json.loads((other / "config.json").read_text()) | {"num_hidden_layers": 1}
    (other / "config.json").write_text(json.dumps(config))
    found = compare_checkpoints(converted / "torch_dist/release", other)
    assert "decoder.layers.mlp.linear_fc1.weight" in found.only_stored and not found.is_equal()


@pytest.mark.slow
def test_non_checkpoint_exits_with_2(converted, tmp_path):
    for arguments, message in (
        ((tmp_path, converted / "hf"), "is not a torch_dist checkpoint"),
        ((converted / "torch_dist", tmp_path), "config.json does not exist"),
        ((converted / "torch_dist", tmp_path / "no where"), "give the folder of a Hugging Face model, or a model id"),
    ):
        done = run_tool(TOOL, "--input-dir", arguments[0], "--hf-checkpoint", arguments[1])
        assert done.returncode == 2 and message in done.stderr, done.stderr


def test_difference_is_per_element_and_infinite_when_only_one_is_nan():
    one = torch.tensor([1.0, float("nan"), float("inf"), -2.0])
    assert max_difference(one, one.clone()) == 0
    assert max_difference(one, torch.tensor([1.25, float("nan"), float("inf"), -2.0])) == 0.25
    assert max_difference(one, torch.tensor([1.0, 0.0, float("inf"), -2.0])) == float("inf")
    assert max_difference(torch.tensor([0.0]), torch.tensor([-0.0])) == 0
    assert max_difference(torch.ones(3).bfloat16(), torch.full((3,), 1.5)) == 0.5
