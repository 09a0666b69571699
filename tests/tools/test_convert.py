"""The converters as programs: bit-exact in both directions, and every error is raised before writing."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from slimrl.arguments.checkpoints import find_corruption, read_manifest
from slimrl.weights.convert.torch_dist_reader import TorchDistCheckpoint
from tests.tools.converting import model_args, run_tool, run_tool_subprocess
from tests.weights.models import save_tiny

TO_TORCH_DIST = "convert_hf_to_torch_dist.py"
TO_HF = "convert_torch_dist_to_hf.py"


@pytest.fixture(scope="module")
def converted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tied Qwen3 in `hf` and its conversion in `torch_dist`; not to be changed."""
    root = tmp_path_factory.mktemp("converted")
    save_tiny(root / "hf", "qwen3", tied=True)
    (root / "hf" / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    done = run_tool(
        TO_TORCH_DIST, *model_args("qwen3", tied=True), "--hf-checkpoint", root / "hf", "--save", root / "torch_dist"
    )
    assert done.returncode == 0, done.stderr
    return root


def same_tensors(first: Path, second: Path) -> bool:
    one, other = load_file(first / "model.safetensors"), load_file(second / "model.safetensors")
    return one.keys() == other.keys() and all(
        one[name].dtype == other[name].dtype and torch.equal(one[name], other[name]) for name in one
    )


def back(root: Path, output: Path, *flags: object, origin: Path | None = None, run=run_tool):
    """Runs the converter back to Hugging Face."""
    source = ("--input-dir", root / "torch_dist" / "release", "--origin-hf-dir", origin or root / "hf")
    return run(TO_HF, *source, "--output-dir", output, *flags)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model_type", "tied", "dtype"),
    [("qwen3", False, torch.bfloat16), ("qwen2", True, torch.float32), ("llama", False, torch.float32)],
)
def test_model_round_trips_bit_for_bit(tmp_path, model_type, tied, dtype):
    save_tiny(tmp_path / "hf", model_type, tied=tied, dtype=dtype)
    flags = model_args(model_type, tied=tied)
    there = run_tool(TO_TORCH_DIST, *flags, "--hf-checkpoint", tmp_path / "hf", "--save", tmp_path / "torch_dist")
    assert there.returncode == 0, there.stderr
    again = back(tmp_path, tmp_path / "again")
    assert again.returncode == 0, again.stderr
    assert same_tensors(tmp_path / "hf", tmp_path / "again")
    assert json.loads((tmp_path / "again/config.json").read_text()) == json.loads(
        (tmp_path / "hf/config.json").read_text()
    )


@pytest.mark.slow
def test_padded_tied_model_round_trips_with_its_sidecar_files(converted, tmp_path):
    assert (converted / "torch_dist/latest_checkpointed_iteration.txt").read_text() == "release"
    checkpoint = TorchDistCheckpoint(converted / "torch_dist/release")
    table = checkpoint.read(checkpoint.find("embedding.word_embeddings.weight"))
    assert table.shape == (256, 32) and not table[150:].any()  # 150 rows, padded to a multiple of 128
    done = back(converted, tmp_path / "again", run=run_tool_subprocess)
    assert done.returncode == 0, done.stderr
    assert same_tensors(converted / "hf", tmp_path / "again")
    names = {path.name for path in (tmp_path / "again").iterdir()}
    assert names == {"config.json", "generation_config.json", "tokenizer_config.json", "model.safetensors"}
    assert [path.name for path in tmp_path.iterdir()] == ["again"]


@pytest.mark.slow
def test_converted_folder_says_the_sizes_of_its_model_and_files(converted, tmp_path):
    """So that a run with the flags of another model, or with a truncated file, is refused before it starts."""
    release = shutil.copytree(converted / "torch_dist/release", tmp_path / "release")
    written = read_manifest(release)
    config = json.loads((converted / "hf/config.json").read_text())
    assert written is not None and written["sizes"] == {
        "num_layers": config["num_hidden_layers"],
        "hidden_size": config["hidden_size"],
        "ffn_hidden_size": config["intermediate_size"],
        "num_attention_heads": config["num_attention_heads"],
    }
    assert find_corruption(release) is None
    data = max(release.glob("*.distcp"), key=lambda path: path.stat().st_size)
    data.write_bytes(data.read_bytes()[:-1])
    assert f"it is incomplete: {data.name} has" in str(find_corruption(release))


@pytest.mark.slow
def test_single_layer_is_read_from_the_stacked_layers(converted):
    checkpoint = TorchDistCheckpoint(converted / "torch_dist/release")
    original = load_file(converted / "hf/model.safetensors")
    stored = checkpoint.find("decoder.layers.1.mlp.linear_fc2.weight")
    assert stored.shape == (32, 48)
    assert torch.equal(checkpoint.read(stored), original["model.layers.1.mlp.down_proj.weight"])
    assert checkpoint.find("decoder.layers.2.mlp.linear_fc2.weight") is None


@pytest.mark.slow
def test_other_vocabulary_size_keeps_that_many_rows_up_to_all_stored(converted, tmp_path):
    done = back(converted, tmp_path / "again", "--vocab-size", 256)
    assert done.returncode == 0, done.stderr
    table = load_file(tmp_path / "again/model.safetensors")["model.embed_tokens.weight"]
    assert table.shape == (256, 32) and not table[150:].any()
    assert json.loads((tmp_path / "again/config.json").read_text())["vocab_size"] == 256
    refused = back(converted, tmp_path / "more", "--vocab-size", 257)
    assert refused.returncode == 2 and "at least 257 rows" in refused.stderr


@pytest.mark.slow
def test_origin_that_stores_its_tied_head_keeps_it(converted, tmp_path):
    origin = tmp_path / "origin"
    origin.mkdir()
    (origin / "config.json").write_bytes((converted / "hf/config.json").read_bytes())
    tensors = load_file(converted / "hf/model.safetensors")
    save_file({**tensors, "lm_head.weight": tensors["model.embed_tokens.weight"].clone()}, origin / "model.safetensors")
    assert back(converted, tmp_path / "again", origin=origin).returncode == 0
    assert same_tensors(origin, tmp_path / "again")


@pytest.mark.slow
def test_existing_outputs_are_rejected_unless_forced(converted, tmp_path):
    output = tmp_path / "again"
    output.mkdir()
    (output / "mine.txt").write_text("kept")
    refused = back(converted, output)
    assert refused.returncode == 2
    assert f"{output} exists already" in refused.stderr and "--force" in refused.stderr
    assert (output / "mine.txt").read_text() == "kept"
    refused = back(converted, output, "--force")
    assert refused.returncode == 2 and "also has mine.txt, which would be lost" in refused.stderr
    assert (output / "mine.txt").read_text() == "kept"
    (output / "mine.txt").rename(output / "model.safetensors")
    assert back(converted, output, "--force").returncode == 0
    assert same_tensors(converted / "hf", output)

    flags = (*model_args("qwen3", tied=True), "--hf-checkpoint", converted / "hf")
    refused = run_tool(TO_TORCH_DIST, *flags, "--save", converted / "torch_dist")
    assert refused.returncode == 2 and "torch_dist exists already" in refused.stderr
    trained = tmp_path / "run" / "iter_0000100"
    trained.mkdir(parents=True)
    refused = run_tool(TO_TORCH_DIST, *flags, "--save", tmp_path / "run", "--force")
    assert refused.returncode == 2 and "also has iter_0000100, which would be lost" in refused.stderr
    assert trained.is_dir()

    refused = back(converted, converted, "--force")
    assert refused.returncode == 2 and "which would be lost" in refused.stderr


@pytest.mark.slow
def test_empty_destination_is_filled_without_a_bar_outside_a_terminal(converted, tmp_path):
    (tmp_path / "torch_dist").mkdir()
    flags = (*model_args("qwen3", tied=True), "--hf-checkpoint", converted / "hf")
    done = run_tool(TO_TORCH_DIST, *flags, "--save", tmp_path / "torch_dist")
    assert done.returncode == 0 and "converting" not in done.stderr
    (tmp_path / "again").mkdir()
    done = back(tmp_path, tmp_path / "again", origin=converted / "hf")
    assert done.returncode == 0 and done.stderr == ""
    assert same_tensors(converted / "hf", tmp_path / "again")


@pytest.mark.slow
def test_files_have_the_requested_size_and_a_correct_index(converted, tmp_path):
    done = back(converted, tmp_path / "again", "--chunk-size", 20000)
    assert done.returncode == 0, done.stderr
    index = json.loads((tmp_path / "again/model.safetensors.index.json").read_text())
    originals = load_file(converted / "hf/model.safetensors")
    assert index["metadata"]["total_size"] == sum(tensor.nbytes for tensor in originals.values())
    files = sorted((tmp_path / "again").glob("*.safetensors"))
    assert sorted(set(index["weight_map"].values())) == [path.name for path in files] and len(files) > 4
    for path in files:
        for name, tensor in load_file(path).items():
            assert index["weight_map"][name] == path.name and torch.equal(tensor, originals[name])
    refused = back(converted, tmp_path / "more", "--chunk-size", 0)
    assert refused.returncode == 2 and "--chunk-size" in refused.stderr


@pytest.mark.slow
def test_tensors_missing_from_the_checkpoint_come_from_the_origin_on_request(converted, tmp_path):
    origin = tmp_path / "origin"
    origin.mkdir()
    config = json.loads((converted / "hf/config.json").read_text())
    (origin / "config.json").write_text(json.dumps({**config, "tie_word_embeddings": False}))
    tensors = load_file(converted / "hf/model.safetensors")
    extra = {"lm_head.weight": torch.randn(150, 32), "vision.weight": torch.randn(3, 5)}
    save_file({**tensors, **extra}, origin / "model.safetensors")
    refused = back(converted, tmp_path / "again", origin=origin)
    assert refused.returncode == 2 and "has vision.weight" in refused.stderr
    done = back(converted, tmp_path / "again", "-a", origin=origin)
    assert done.returncode == 0, done.stderr
    assert same_tensors(origin, tmp_path / "again")


@pytest.mark.slow
def test_family_may_be_given_and_an_unknown_one_is_rejected(converted, tmp_path):
    origin = tmp_path / "origin"
    origin.mkdir()
    config = json.loads((converted / "hf/config.json").read_text())
    (origin / "config.json").write_text(json.dumps({**config, "model_type": "my_qwen"}))
    (origin / "model.safetensors").write_bytes((converted / "hf/model.safetensors").read_bytes())
    refused = back(converted, tmp_path / "again", origin=origin)
    assert refused.returncode == 2 and "my_qwen" in refused.stderr
    assert back(converted, tmp_path / "again", "--model-name", "Qwen3ForCausalLM", origin=origin).returncode == 0
    assert same_tensors(origin, tmp_path / "again")
    assert json.loads((tmp_path / "again/config.json").read_text())["model_type"] == "my_qwen"
    refused = back(converted, tmp_path / "more", "--model-name", "qwen9")
    assert refused.returncode == 2 and "--model-name qwen9 is not a supported family" in refused.stderr


@pytest.mark.slow
def test_origin_of_another_model_is_rejected(converted, tmp_path):
    save_tiny(tmp_path / "llama", "llama")
    refused = back(converted, tmp_path / "again", origin=tmp_path / "llama")
    assert refused.returncode == 2 and "k_layernorm" not in refused.stdout
    assert "has shape [128, 32]" in refused.stderr  # of the fused attention weight: the heads are wider
    assert not (tmp_path / "again").exists()


def test_flags_that_disagree_with_the_config_are_rejected_with_both_values(tmp_path):
    save_tiny(tmp_path / "hf", "qwen3")
    flags = [*model_args("qwen3", tied=True), "--num-layers", "3", "--rotary-base", "1000000"]
    done = run_tool(TO_TORCH_DIST, *flags, "--hf-checkpoint", tmp_path / "hf", "--save", tmp_path / "torch_dist")
    assert done.returncode == 2
    assert "--num-layers is 3 and config.json says num_hidden_layers 2" in done.stderr
    assert "--rotary-base is 1000000 and config.json says rope_theta 10000" in done.stderr
    assert not (tmp_path / "torch_dist").exists()


def test_checkpoint_with_a_missing_tensor_is_rejected_before_writing(tmp_path):
    save_tiny(tmp_path / "hf", "qwen3")
    tensors = load_file(tmp_path / "hf/model.safetensors")
    tensors.pop("model.norm.weight")
    save_file(tensors, tmp_path / "hf/model.safetensors")
    flags = (*model_args("qwen3", tied=True), "--hf-checkpoint", tmp_path / "hf")
    done = run_tool(TO_TORCH_DIST, *flags, "--save", tmp_path / "torch_dist")
    assert done.returncode == 2 and "lacks model.norm.weight" in done.stderr
    assert not (tmp_path / "torch_dist").exists()


def test_missing_flags_and_folders_are_named(tmp_path):
    save_tiny(tmp_path / "hf", "qwen3")
    done = run_tool(TO_TORCH_DIST, *model_args("qwen3", tied=True), "--hf-checkpoint", tmp_path / "hf")
    assert done.returncode == 2 and "--save is missing" in done.stderr
    done = run_tool(
        TO_HF, "--input-dir", tmp_path, "--output-dir", tmp_path / "again", "--origin-hf-dir", tmp_path / "hf"
    )
    assert done.returncode == 2 and "is not a torch_dist checkpoint" in done.stderr


@pytest.mark.slow
def test_parallel_flags_and_a_megatron_checkout_on_the_path_change_nothing(converted, tmp_path):
    checkout = tmp_path / "Megatron-LM"
    (checkout / "megatron/core").mkdir(parents=True)
    (checkout / "megatron/core/__init__.py").write_text("raise ImportError('this is the checkout')\n")
    flags = (*model_args("qwen3", tied=True), "--hf-checkpoint", converted / "hf", "--save", tmp_path / "torch_dist")
    layout = ("--tensor-model-parallel-size", 2, "--pipeline-model-parallel-size=2", "--sequence-parallel")
    layout += ("--decoder-last-pipeline-num-layers", 1, "--cp-comm-type", "p2p", "a2a")
    done = run_tool_subprocess(TO_TORCH_DIST, *flags, *layout, python_path=str(checkout))
    assert done.returncode == 0, done.stderr
    assert "--tensor-model-parallel-size, --pipeline-model-parallel-size" in done.stdout
    assert f"ignoring {checkout} on the import path" in done.stdout
    assert back(tmp_path, tmp_path / "again", origin=converted / "hf").returncode == 0
    assert same_tensors(converted / "hf", tmp_path / "again")
