"""Expert layers without Megatron: which layers, which experts, which shards; what is carried over or rejected."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from slimrl.models.families import ModelMapping, family_for, glm4, param_mapping
from slimrl.models.model_spec import ModelSpec
from slimrl.weights.convert.hf_to_megatron import check_checkpoint, load_hf_checkpoint
from slimrl.weights.hf_checkpoint import HfCheckpoint, read_hf_config
from slimrl.weights.reshard import check_tensor_parallel, from_shards, local_shape, to_shard
from slimrl.weights.update.export import iter_hf_tensors
from tests.families.toys import TOYS
from tests.weights.models import named_module

GROUPED, ONE_BY_ONE = 1, 0  # the spellings of an expert's tensors in the table


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("toys")
    return {name: TOYS[name].save(root / name, tokenizer=False) for name in ("qwen2-moe", "qwen3-moe", "glm4-moe")}


def describe(folder: Path, **changes: Any) -> tuple[ModelSpec, ModelMapping]:
    config = read_hf_config(folder) | changes
    return ModelSpec.from_hf_config(config), family_for(config)


def tensors_of(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in folder.glob("*.safetensors") for name, tensor in load_file(file).items()}


def empty_model(
    shape: ModelSpec, family: ModelMapping, *, experts: range, spelling: int = ONE_BY_ONE, etp_size: int = 1
) -> nn.Module:
    """The parameters of a rank with `experts`, filled with NaN; its own numbers count from 0."""
    tensors = {}
    for row in family.rows(shape):
        if row.expert is not None and row.expert not in experts:
            continue
        name = row.megatron[spelling if row.expert is not None else 0]
        if row.expert is not None:
            old, new = (f"local_experts.{n}." for n in (row.expert, row.expert - experts.start))
            if spelling == GROUPED:
                old, new = (f".weight{n}" for n in (row.expert, row.expert - experts.start))
            name = name.replace(old, new)
        size = 1 if row.expert is None else etp_size
        dtype = torch.float32 if "expert_bias" in name else torch.bfloat16
        tensors[name] = torch.full(local_shape(row, shape, size=size), torch.nan, dtype=dtype)
    biases = {name: tensors.pop(name) for name in list(tensors) if name.endswith("expert_bias")}
    model = named_module(tensors, shape.num_layers)
    for name, bias in biases.items():
        module, _, leaf = name.rpartition(".")
        model.get_submodule(module).register_buffer(leaf, bias)
    for layer in range(shape.num_layers):
        if shape.moe_layers[layer]:
            model.get_submodule(f"decoder.layers.{layer}.mlp").local_expert_indices = list(experts)
    return model


def own(model: nn.Module, name: str) -> torch.Tensor:
    return model.get_submodule(name.rpartition(".")[0]).get_parameter(name.rpartition(".")[2]).detach()


@pytest.mark.parametrize("spelling", [ONE_BY_ONE, GROUPED])
def test_rank_loads_its_experts_by_global_number(folders, spelling):
    shape, family = describe(folders["qwen3-moe"])
    stored = tensors_of(folders["qwen3-moe"])
    model = empty_model(shape, family, experts=range(4, 8), spelling=spelling)
    load_hf_checkpoint(model, shape, family, folders["qwen3-moe"])
    for local, number in enumerate(range(4, 8)):
        grouped = spelling == GROUPED
        path = f"linear_fc1.weight{local}" if grouped else f"local_experts.{local}.linear_fc1.weight"
        loaded = own(model, f"decoder.layers.1.mlp.experts.{path}")
        parts = [stored[f"model.layers.1.mlp.experts.{number}.{part}_proj.weight"] for part in ("gate", "up")]
        assert torch.equal(loaded, torch.cat(parts).bfloat16())


@pytest.mark.parametrize("name", ["qwen2-moe", "qwen3-moe", "glm4-moe"])
@pytest.mark.parametrize("spelling", [ONE_BY_ONE, GROUPED])
def test_load_and_export_restore_every_tensor_and_the_full_precision_bias(folders, name, spelling):
    shape, family = describe(folders[name])
    model = empty_model(shape, family, experts=range(8), spelling=spelling)
    load_hf_checkpoint(model, shape, family, folders[name])
    exported = {key: tensor.clone() for key, tensor in iter_hf_tensors(model, shape, family)}
    stored = tensors_of(folders[name])
    assert exported.keys() == stored.keys()
    for key, tensor in stored.items():
        bias = key.endswith("e_score_correction_bias")
        assert exported[key].dtype is (torch.float32 if bias else torch.bfloat16)
        assert torch.equal(exported[key], tensor.to(exported[key].dtype))


def test_expert_tensor_parallelism_shards_only_experts(folders):
    shape, family = describe(folders["qwen2-moe"])
    stored = tensors_of(folders["qwen2-moe"])
    model = empty_model(shape, family, experts=range(8), etp_size=2)
    load_hf_checkpoint(model, shape, family, folders["qwen2-moe"], etp_rank=1, etp_size=2)
    down = own(model, "decoder.layers.0.mlp.experts.local_experts.5.linear_fc2.weight")
    assert torch.equal(down, stored["model.layers.0.mlp.experts.5.down_proj.weight"][:, 16:].bfloat16())
    shared = own(model, "decoder.layers.0.mlp.shared_experts.linear_fc2.weight")
    assert torch.equal(shared, stored["model.layers.0.mlp.shared_expert.down_proj.weight"].bfloat16())


def test_only_moe_layers_have_experts(folders):
    shape, family = describe(folders["glm4-moe"])
    names = family.hf_names(shape)
    assert [layer for layer in range(3) if f"model.layers.{layer}.mlp.gate.weight" in names] == [1, 2]
    assert [layer for layer in range(3) if f"model.layers.{layer}.mlp.up_proj.weight" in names] == [0]
    shape, family = describe(folders["qwen3-moe"], mlp_only_layers=[1])
    names = family.hf_names(shape)
    assert "model.layers.1.mlp.up_proj.weight" in names and "model.layers.0.mlp.gate.weight" in names
    assert len(names) == len(set(names))


def test_experts_are_ordered_each_with_all_its_tensors(folders):
    shape, family = describe(folders["qwen3-moe"])
    names = [name for name in family.hf_names(shape) if name.startswith("model.layers.0.mlp.")]
    assert names[:5] == [
        "model.layers.0.mlp.gate.weight",
        "model.layers.0.mlp.experts.0.gate_proj.weight",
        "model.layers.0.mlp.experts.0.up_proj.weight",
        "model.layers.0.mlp.experts.0.down_proj.weight",
        "model.layers.0.mlp.experts.1.gate_proj.weight",
    ]


def test_parts_absent_from_config_json_are_not_expected(folders):
    shape, family = describe(folders["glm4-moe"], use_qk_norm=False, attention_bias=False, n_shared_experts=0)
    names = " ".join(family.hf_names(shape))
    assert "q_norm" not in names and "bias" not in names.replace("e_score_correction_bias", "")
    assert "shared_experts" not in names


def test_missing_expert_is_rejected_by_name(folders, tmp_path):
    shape, family = describe(folders["qwen3-moe"])
    tensors = tensors_of(folders["qwen3-moe"])
    tensors.pop("model.layers.1.mlp.experts.7.down_proj.weight")
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    (tmp_path / "config.json").write_text(json.dumps(read_hf_config(folders["qwen3-moe"])))
    with (
        HfCheckpoint(tmp_path) as checkpoint,
        pytest.raises(ValueError, match=r"lacks model\.layers\.1\.mlp\.experts\.7\.down_proj\.weight"),
    ):
        check_checkpoint(checkpoint, shape, family)


@pytest.mark.parametrize("announced", [True, False])
def test_layers_beyond_the_last_are_ignored_only_when_config_json_has_them(folders, tmp_path, announced):
    shape, family = describe(folders["glm4-moe"])
    tensors = tensors_of(folders["glm4-moe"])
    tensors |= {"model.layers.3.eh_proj.weight": torch.ones(64, 128), "model.layers.3.enorm.weight": torch.ones(64)}
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    config = read_hf_config(folders["glm4-moe"]) | {"num_nextn_predict_layers": int(announced)}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert family.carried_prefixes(config) == (("model.layers.3.",) if announced else ())
    with HfCheckpoint(tmp_path) as checkpoint:
        if announced:
            check_checkpoint(checkpoint, shape, family)
        else:
            with pytest.raises(ValueError, match=r"has model\.layers\.3\.eh_proj\.weight.*check --num-layers"):
                check_checkpoint(checkpoint, shape, family)


def test_mtp_layers_of_mimo_have_their_own_name_and_count():
    family = family_for({"model_type": "mimo"})
    assert family.carried_prefixes({"num_hidden_layers": 36, "num_nextn_predict_layers": 2}) == (
        "model.mtp_layers.0.",
        "model.mtp_layers.1.",
    )


def test_gate_and_up_stored_as_one_tensor_are_sharded_separately():
    shape = dataclasses.replace(ModelSpec.from_hf_config(GLM4), ffn_hidden_size=4)
    packed = torch.arange(8.0)[:, None] + torch.zeros(1, 64)  # rows 0 to 3 are the gate, 4 to 7 the up projection
    shards = [to_shard(glm4.GATE_UP, [packed], shape, rank=rank, size=2) for rank in (0, 1)]
    assert [shard[:, 0].tolist() for shard in shards] == [[0, 1, 4, 5], [2, 3, 6, 7]]
    assert torch.equal(from_shards(glm4.GATE_UP, shards, shape)[0], packed)


def test_indivisible_sizes_are_rejected_with_both_numbers(folders):
    shape, _ = describe(folders["qwen2-moe"])
    shape = dataclasses.replace(shape, padded_vocab_size=384)
    with pytest.raises(
        ValueError, match=r"--expert-tensor-parallel-size 64 does not divide --moe-ffn-hidden-size \(32"
    ):
        check_tensor_parallel(shape, 1, 64)
    odd = dataclasses.replace(shape, experts=dataclasses.replace(shape.experts, shared_ffn_hidden_size=63))
    with pytest.raises(ValueError, match=r"does not divide --moe-shared-expert-intermediate-size \(63\)"):
        check_tensor_parallel(odd, 2)
    check_tensor_parallel(shape, 2, 2)
    odd = dataclasses.replace(shape, experts=dataclasses.replace(shape.experts, ffn_hidden_size=63))
    check_tensor_parallel(odd, 2)  # experts are not sharded by default


def test_expert_rows_have_both_megatron_spellings():
    row = param_mapping.EXPERT_GATE_UP.at(3, 17)
    assert row.megatron == (
        "decoder.layers.3.mlp.experts.local_experts.17.linear_fc1.weight",
        "decoder.layers.3.mlp.experts.linear_fc1.weight17",
    )
    assert row.expert == 17


GLM4 = {
    "model_type": "glm4",
    "num_hidden_layers": 1,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
