"""Hugging Face files into Megatron-named parameters and back, without Megatron: names, shards, errors."""

import dataclasses

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from slimrl.models.families import family_for
from slimrl.models.model_spec import ModelSpec
from slimrl.weights.convert.hf_to_megatron import load_hf_checkpoint
from slimrl.weights.hf_checkpoint import HfCheckpoint, read_hf_config
from slimrl.weights.hf_checkpoint_writer import INDEX_NAME, ShardWriter, TensorSpec, index_text, plan_shards
from slimrl.weights.reshard import megatron_shape
from slimrl.weights.update.export import iter_hf_tensors
from tests.weights.models import named_module, save_tiny

FAMILIES = ["qwen3", "qwen2", "llama"]
PADDED_VOCAB = 256  # 150 real rows


def describe(folder):
    """(shape with padded vocabulary, family) of a saved model."""
    config = read_hf_config(folder)
    shape = dataclasses.replace(ModelSpec.from_hf_config(config), padded_vocab_size=PADDED_VOCAB)
    return shape, family_for(config)


def empty_model(shape, family, *, tp_size: int = 1, fused_norms: bool = False) -> nn.Module:
    """Parameters of the right names and local shapes, filled with NaN."""
    tensors = {}
    for row in family.rows(shape):
        local = list(megatron_shape(row, shape))
        if row.shard_dim is not None:
            local[row.shard_dim] //= tp_size
        tensors[row.megatron[-1 if fused_norms else 0]] = torch.full(local, torch.nan)
    return named_module(tensors, shape.num_layers)


@pytest.mark.parametrize("fused_norms", [False, True])
@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("model_type", FAMILIES)
def test_load_and_export_restore_every_tensor(tmp_path, model_type, tied, fused_norms):
    save_tiny(tmp_path, model_type, tied=tied)
    shape, family = describe(tmp_path)
    model = empty_model(shape, family, fused_norms=fused_norms)
    load_hf_checkpoint(model, shape, family, tmp_path)
    exported = [(name, tensor.clone()) for name, tensor in iter_hf_tensors(model, shape, family)]
    original = load_file(tmp_path / "model.safetensors")
    assert sorted(name for name, _ in exported) == sorted(original)
    assert all(torch.equal(tensor, original[name]) for name, tensor in exported)
    table = dict(model.named_parameters())["embedding.word_embeddings.weight"]
    assert torch.equal(table[shape.vocab_size :], torch.zeros(PADDED_VOCAB - 150, 32))


def test_each_of_two_ranks_loads_its_shards(tmp_path):
    save_tiny(tmp_path, "qwen2", tied=False)
    shape, family = describe(tmp_path)
    whole = empty_model(shape, family)
    load_hf_checkpoint(whole, shape, family, tmp_path)
    halves = [empty_model(shape, family, tp_size=2) for _ in range(2)]
    for rank, half in enumerate(halves):
        load_hf_checkpoint(half, shape, family, tmp_path, tp_rank=rank, tp_size=2)
    for (name, full), (_, first), (_, second) in zip(
        whole.named_parameters(), *(half.named_parameters() for half in halves), strict=True
    ):
        if "linear_fc1" in name:  # gate and up are sharded separately
            gate, up = full.chunk(2)
            assert torch.equal(first, torch.cat([gate[:24], up[:24]]))
            assert torch.equal(second, torch.cat([gate[24:], up[24:]]))
        elif "layernorm" in name:
            assert torch.equal(first, full)
        else:
            assert torch.equal(torch.cat([first, second], dim=1 if "proj" in name or "fc2" in name else 0), full)


def test_pipeline_stage_finds_its_layers_by_global_number(tmp_path):
    save_tiny(tmp_path)
    shape, family = describe(tmp_path)
    tensors = {
        name: parameter.detach()
        for name, parameter in empty_model(shape, family).named_parameters()
        if name.startswith("decoder.layers.0.") or name == "decoder.final_layernorm.weight"
    }
    # the last stage of a tied model holds a copy of the embedding as its head
    tensors["output_layer.weight"] = torch.full((PADDED_VOCAB, 32), torch.nan)
    stage = named_module(tensors, 1, first_layer=1)
    load_hf_checkpoint(stage, shape, family, tmp_path)
    original = load_file(tmp_path / "model.safetensors")
    loaded = dict(stage.named_parameters())
    down = loaded["decoder.layers.0.mlp.linear_fc2.weight"]
    assert torch.equal(down, original["model.layers.1.mlp.down_proj.weight"])
    assert torch.equal(loaded["output_layer.weight"][:150], original["model.embed_tokens.weight"])


def rewrite(folder, change) -> None:
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def load_into_empty(folder) -> None:
    shape, family = describe(folder)
    load_hf_checkpoint(empty_model(shape, family), shape, family, folder)


def test_missing_tensor_is_rejected_by_name(tmp_path):
    save_tiny(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.pop("model.layers.1.self_attn.k_norm.weight"))
    with pytest.raises(ValueError, match=r"lacks model\.layers\.1\.self_attn\.k_norm\.weight"):
        load_into_empty(tmp_path)


def test_unexpected_tensor_is_rejected_by_name(tmp_path):
    save_tiny(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"model.layers.0.self_attn.o_proj.bias": torch.ones(32)}))
    with pytest.raises(ValueError, match=r"has model\.layers\.0\.self_attn\.o_proj\.bias, which"):
        load_into_empty(tmp_path)


def test_tensor_of_another_shape_is_rejected_with_both_shapes(tmp_path):
    save_tiny(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors.update({"model.norm.weight": torch.ones(31)}))
    with pytest.raises(ValueError, match=r"model\.norm\.weight has shape \[31\].*require \[32\]"):
        load_into_empty(tmp_path)


def test_rotary_buffers_are_skipped(tmp_path):
    save_tiny(tmp_path, "llama")
    rewrite(tmp_path, lambda tensors: tensors.update({"model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4)}))
    load_into_empty(tmp_path)


def test_redundant_head_of_a_tied_model_must_equal_the_embedding(tmp_path):
    save_tiny(tmp_path)
    rewrite(tmp_path, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    load_into_empty(tmp_path)
    rewrite(tmp_path, lambda tensors: tensors["lm_head.weight"].add_(1e-3))
    with pytest.raises(ValueError, match=r"lm_head\.weight differs from model\.embed_tokens\.weight"):
        load_into_empty(tmp_path)


def test_model_with_a_parameter_outside_the_table_is_rejected(tmp_path):
    save_tiny(tmp_path)
    shape, family = describe(tmp_path)
    model = empty_model(shape, family)
    model.decoder.layers[0].register_parameter("extra", nn.Parameter(torch.ones(1)))
    with pytest.raises(ValueError, match=r"the model has decoder\.layers\.0\.extra"):
        load_hf_checkpoint(model, shape, family, tmp_path)
    with pytest.raises(ValueError, match=r"the model has decoder\.layers\.0\.extra"):
        list(iter_hf_tensors(model, shape, family))


def test_folder_without_weights_is_rejected(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor"):
        HfCheckpoint(tmp_path)


def test_files_with_an_index_are_read_back(tmp_path):
    tensors = {f"t{n}": torch.randn(10, generator=torch.Generator().manual_seed(n)) for n in range(5)}
    shards = plan_shards((TensorSpec(name, torch.float32, (10,)) for name in tensors), max_shard_bytes=80)
    with ShardWriter(tmp_path, shards) as writer:
        for name, tensor in tensors.items():
            writer.write(name, tensor)
    (tmp_path / INDEX_NAME).write_text(index_text(shards))
    assert len(list(tmp_path.glob("*.safetensors"))) == 3
    with HfCheckpoint(tmp_path) as checkpoint:
        assert sorted(checkpoint.names) == sorted(tensors)
        assert all(torch.equal(checkpoint.tensor(name), tensor) for name, tensor in tensors.items())
        assert checkpoint.dtype("t0") is torch.float32 and checkpoint.shape("t0") == (10,)


def test_damaged_files_are_named(tmp_path):
    save_tiny(tmp_path)
    whole = (tmp_path / "model.safetensors").read_bytes()
    for part in (b"", whole[:1000], whole[:-1]):
        (tmp_path / "model.safetensors").write_bytes(part)
        with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
            HfCheckpoint(tmp_path)
    for content in (b"[]", b"{", b"\xff\xfe"):
        (tmp_path / "config.json").write_bytes(content)
        with pytest.raises(ValueError, match=r"config\.json is not (valid JSON|a JSON object)"):
            read_hf_config(tmp_path)
    (tmp_path / "config.json").unlink()
    for text, complaint in (('{"weight_m', "is damaged"), ("[]", "is damaged"), ("{}", "has no weight_map")):
        (tmp_path / "model.safetensors.index.json").write_text(text)
        with pytest.raises(ValueError, match=rf"index\.json {complaint}"):
            HfCheckpoint(tmp_path)
