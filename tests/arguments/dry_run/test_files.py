"""Checkpoints that a run starts from, headers of weight files, and locations of hooks."""

import json
from pathlib import Path

import pytest

from slimrl.arguments.checkpoints import find, start_of
from slimrl.arguments.dry_run.plan import hook_locations
from slimrl.models.hf_folder import UnreadableFileError, bytes_per_weight, read_hf_files
from tests.arguments.dry_run.published import QWEN3_4B, flags


def checkpoint(folder: Path, latest: str) -> str:
    name = latest if latest == "release" else f"iter_{int(latest):07d}"
    (folder / name).mkdir(parents=True)
    (folder / "latest_checkpointed_iteration.txt").write_text(latest)
    return str(folder)


def test_fresh_start_loads_the_reference_and_begins_at_rollout_0(tmp_path):
    reference = checkpoint(tmp_path / "ref", "release")
    start = start_of(flags(QWEN3_4B, ref_load=reference, load=str(tmp_path / "new"), use_kl_loss=True))
    assert (start.flag, start.first_rollout, start.resumed) == ("--ref-load", 0, False)
    assert start.weights == start.reference
    assert start.weights.folder == tmp_path / "ref" / "release"
    assert start.sentence == (
        f"--load {tmp_path}/new has no checkpoint yet: a fresh start from --ref-load {reference}/release, with"
        f" rollout 0"
    )


def test_resumed_run_continues_after_the_newest_iteration(tmp_path):
    load = checkpoint(tmp_path / "run", "19")
    start = start_of(flags(QWEN3_4B, load=load))
    assert (start.flag, start.first_rollout, start.resumed, start.reference) == ("--load", 20, True, None)
    assert start.weights.folder.name == "iter_0000019"
    assert start.sentence == f"resuming from {load}/iter_0000019 with rollout 20"


def test_finetune_loads_only_the_weights(tmp_path):
    start = start_of(flags(QWEN3_4B, load=checkpoint(tmp_path / "run", "19"), finetune=True))
    assert (start.first_rollout, start.resumed) == (0, False)
    assert start.sentence == f"a fresh start from --load {tmp_path}/run/iter_0000019, with rollout 0"


def test_step_and_first_rollout_may_be_given(tmp_path):
    load = checkpoint(tmp_path / "run", "19")
    (tmp_path / "run" / "iter_0000009").mkdir()
    start = start_of(flags(QWEN3_4B, load=load, ckpt_step=9, start_rollout_id=3))
    assert (start.weights.folder.name, start.first_rollout, start.resumed) == ("iter_0000009", 3, True)


def test_path_of_an_iteration_folder_is_accepted(tmp_path):
    folder = tmp_path / "iter_0000007"
    folder.mkdir()
    (folder / "metadata.json").write_text("{}")
    assert find(str(folder), None).iteration == 7
    replaced = folder.rename(folder.with_name(folder.name + ".old"))  # as a kill may leave it
    assert find(str(replaced), None).iteration == 7


def safetensors(path: Path, tensors: dict[str, list[int]], dtype: str = "BF16", width: int = 2) -> None:
    """A file with these shapes, all zero."""
    entries, offset = {}, 0
    for name, shape in tensors.items():
        size = width
        for length in shape:
            size *= length
        entries[name] = {"dtype": dtype, "shape": shape, "data_offsets": [offset, offset + size]}
        offset += size
    header = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(offset))


def test_element_count_excludes_scales_mtp_layers_and_the_tied_embedding(tmp_path):
    safetensors(
        tmp_path / "model.safetensors",
        {
            "model.embed_tokens.weight": [10, 4],
            "model.layers.0.mlp.up_proj.weight": [8, 4],
            "model.layers.0.mlp.up_proj.weight_scale_inv": [1, 1],
            "model.layers.1.mlp.up_proj.weight": [8, 4],
            "model.layers.2.eh_proj.weight": [4, 8],
            "model.mtp_layers.0.norm.weight": [4],
            "model.norm.weight": [4],
            "lm_head.weight": [10, 4],
        },
    )
    tied = read_hf_files(tmp_path, layers=2, tied=True)
    assert (tied.files, tied.tensors, tied.elements) == (1, 8, 40 + 32 + 32 + 4)
    assert tied.bytes == 2 * (40 + 32 + 1 + 32 + 32 + 4 + 4 + 40)
    assert read_hf_files(tmp_path, layers=2, tied=False).elements == 40 + 32 + 32 + 4 + 40


def test_shard_named_by_the_index_may_be_missing(tmp_path):
    safetensors(tmp_path / "model-1.safetensors", {"a": [3]})
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    files = read_hf_files(tmp_path, layers=1, tied=False)
    assert (files.elements, files.missing) == (3, ("model-2.safetensors",))


def test_packed_weights_are_not_compared(tmp_path):
    safetensors(tmp_path / "model.safetensors", {"model.layers.0.mlp.up_proj.qweight": [2, 2]})
    assert read_hf_files(tmp_path, layers=1, tied=False).elements is None


def test_engine_keeps_the_dtype_of_the_weight_files(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    assert bytes_per_weight(tmp_path, None, 3) == 2.0
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "fp8"}}))
    assert bytes_per_weight(tmp_path, None, 3) == 1.0
    safetensors(tmp_path / "model.safetensors", {"a": [3]}, dtype="F32", width=4)
    assert bytes_per_weight(tmp_path, read_hf_files(tmp_path, layers=1, tied=False), 3) == 4.0


def test_folder_without_weights_has_no_files(tmp_path):
    assert read_hf_files(tmp_path, layers=1, tied=False) is None


@pytest.mark.parametrize("content", [b"short", (10).to_bytes(8, "little") + b"not json!!", b""])
def test_broken_file_is_named(tmp_path, content):
    (tmp_path / "model.safetensors").write_bytes(content)
    with pytest.raises(UnreadableFileError, match=r"model\.safetensors"):
        read_hf_files(tmp_path, layers=1, tied=False)


def test_truncated_file_is_named(tmp_path):
    safetensors(tmp_path / "model.safetensors", {"a": [100]})
    whole = (tmp_path / "model.safetensors").read_bytes()
    (tmp_path / "model.safetensors").write_bytes(whole[:-1])
    with pytest.raises(UnreadableFileError, match="is truncated"):
        read_hf_files(tmp_path, layers=1, tied=False)


def test_hooks_are_located_in_source_without_importing_it(tmp_path, monkeypatch):
    (tmp_path / "my_hooks").mkdir()
    (tmp_path / "my_hooks" / "__init__.py").write_text("raise RuntimeError('imported')\n")
    (tmp_path / "my_hooks" / "judge.py").write_text(
        "import torch_of_tomorrow\n\n\nasync def judge(args, sample): ...\n"
    )
    monkeypatch.chdir(tmp_path)
    args = flags(QWEN3_4B, custom_rm_path="my_hooks.judge.judge", custom_generate_function_path="no.such.thing")
    places = {place.flag: place for place in hook_locations(args)}
    assert (places["--custom-rm-path"].file.name, places["--custom-rm-path"].line) == ("judge.py", 4)
    assert "--custom-generate-function-path" not in places
    assert places["--rollout-function-path"].file.name == "rollout_function.py"


def test_slime_paths_are_located_in_slimrl():
    path = "slime.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std"
    places = {place.flag: place for place in hook_locations(flags(QWEN3_4B, dynamic_sampling_filter_path=path))}
    found = places["--dynamic-sampling-filter-path"]
    assert found.function.startswith("slimrl.")
    assert found.line is not None


def test_each_hook_of_one_flag_has_its_own_location():
    paths = ["examples.filters.between", "examples.reward.judge"]
    places = [place for place in hook_locations(flags(QWEN3_4B, rollout_sample_hook_path=paths))]
    found = [(place.function, place.file.name) for place in places if place.flag == "--rollout-sample-hook-path"]
    assert found == [("examples.filters.between", "filters.py"), ("examples.reward.judge", "reward.py")]


@pytest.mark.parametrize("file", ["../../secret.safetensors", "/etc/passwd", "..", "sub/model.safetensors", "", 5])
def test_both_readers_reject_an_index_entry_outside_the_folder(tmp_path, file):
    from slimrl.weights.hf_checkpoint import HfCheckpoint

    index = {"weight_map": {"model.norm.weight": file}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    complaint = r"index\.json says that model\.norm\.weight is in .*not in its folder"
    with pytest.raises(UnreadableFileError, match=complaint):
        read_hf_files(tmp_path, layers=2, tied=False)
    with pytest.raises(UnreadableFileError, match=complaint):
        HfCheckpoint(tmp_path)
