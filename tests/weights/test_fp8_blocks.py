"""Block-quantized weights against hand-computed numbers."""

import json

import pytest
import torch
from safetensors.torch import save_file

from slimrl.weights.hf_checkpoint import HfCheckpoint, block_size, dequantised

FP8 = torch.float8_e4m3fn
PUBLISHED = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}


def test_each_block_is_multiplied_by_its_scale_and_the_last_blocks_are_cropped():
    weight = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, 6.0], [7.0, 8.0, 9.0]]).to(FP8)  # integers up to 16 are exact
    scale = torch.tensor([[0.5, 10.0], [-1.0, 0.25]])
    expected = torch.tensor([[0.5, 1.0, 30.0], [2.0, 2.5, 60.0], [-7.0, -8.0, 2.25]])
    assert torch.equal(dequantised(weight, scale, (2, 2), torch.float32), expected)


def test_quantized_block_is_restored_within_half_an_fp8_step():
    original = torch.randn(200, 300, generator=torch.Generator().manual_seed(0))
    scale, quantised = torch.empty(2, 3), torch.empty(200, 300, dtype=FP8)
    for i, rows in enumerate(original.split(128)):
        for j, block in enumerate(rows.split(128, 1)):
            scale[i, j] = block.abs().max() / 448  # the largest number of e4m3
            quantised[128 * i : 128 * i + 128, 128 * j : 128 * j + 128] = (block / scale[i, j]).to(FP8)
    error = (dequantised(quantised, scale, dtype=torch.float32) - original).abs()
    # three bits after the leading one: half a step is 1/16 of the value; below 2^-6 steps are 2^-9 wide
    assert (error <= original.abs() / 16 + scale.max() * 2**-10).all() and error.max() > 0


def test_result_is_rounded_once():
    weight, scale = torch.full((1, 1), 3.5).to(FP8), torch.tensor([[1.01]])
    assert dequantised(weight, scale).item() == torch.tensor(3.5 * 1.01).bfloat16().item() == 3.53125


def test_scales_of_another_shape_are_rejected():
    with pytest.raises(ValueError, match=r"scales of shape \[1, 2\] do not fit a weight of shape \[200, 128\]"):
        dequantised(torch.zeros(200, 128, dtype=FP8), torch.ones(1, 2))


def test_block_size_comes_from_config_json():
    assert block_size({}) is None
    assert block_size({"quantization_config": PUBLISHED}) == (128, 128)
    assert block_size({"quantization_config": PUBLISHED | {"weight_block_size": [64, 32]}}) == (64, 32)
    with pytest.raises(ValueError, match="quant_method 'compressed-tensors'.*use the bf16 checkpoint"):
        block_size({"quantization_config": {"quant_method": "compressed-tensors"}})


def save_quantised(folder, *, with_config: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
    weight, scale = torch.arange(6.0).reshape(2, 3).to(FP8), torch.tensor([[2.0]])
    tensors = {"a.weight": weight, "a.weight_scale_inv": scale, "norm.weight": torch.ones(3, dtype=torch.bfloat16)}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps({"quantization_config": PUBLISHED} if with_config else {}))
    return weight, scale


def test_fp8_checkpoint_is_read_as_its_bf16_tensors(tmp_path):
    save_quantised(tmp_path)
    with HfCheckpoint(tmp_path) as checkpoint:
        assert sorted(checkpoint.names) == ["a.weight", "norm.weight"]
        assert checkpoint.dtype("a.weight") is torch.bfloat16 and checkpoint.shape("a.weight") == (2, 3)
        assert torch.equal(checkpoint.tensor("a.weight"), 2 * torch.arange(6.0).reshape(2, 3).bfloat16())


def test_fp8_values_without_scales_are_rejected(tmp_path):
    save_quantised(tmp_path, with_config=False)
    with HfCheckpoint(tmp_path) as checkpoint, pytest.raises(ValueError, match=r"a\.weight is stored as F8_E4M3"):
        checkpoint.tensor("a.weight")
