"""What stands in for kernels in single layers, and the size of the cache that fits these layers."""

from __future__ import annotations

import json
import math

import pytest
import torch

from slimrl.engines.sglang.cpu_patches import gate_sigmoid_mul, with_unscaled_rope
from slimrl.engines.sglang.server_args import kv_cache_tokens


@pytest.mark.parametrize(("do_add", "before"), [(True, 1.0), (False, 0.0)])
def test_a_shared_experts_gate_is_the_sigmoid_of_one_product_per_token(do_add, before):
    hidden, gate = torch.tensor([[1.0, 2.0], [0.0, -1.0]]), torch.tensor([0.5, 0.25])
    output = torch.ones(2, 2)
    gate_sigmoid_mul(hidden, gate, torch.tensor([[4.0, 8.0], [2.0, -2.0]]), output, do_add=do_add)
    first, second = 1 / (1 + math.exp(-1.0)), 1 / (1 + math.exp(0.25))
    expected = [[before + 4 * first, before + 8 * first], [before + 2 * second, before - 2 * second]]
    assert torch.allclose(output, torch.tensor(expected), atol=1e-6)


def test_only_scaled_rotary_tables_come_from_the_function_for_the_cpu():
    calls = []
    rope = with_unscaled_rope(
        lambda *args: calls.append(("general", *args)), lambda *args: calls.append(("scaled", *args))
    )
    scaling = {"rope_type": "deepseek_yarn"}
    rope(8, 8, 2048, 5e4, False, None, torch.float32, 1.0, "cpu")
    rope(8, 8, 2048, 5e4, False, scaling, torch.float32, 1.0, "cpu")
    assert calls == [
        ("general", 8, 8, 2048, 5e4, False, None, torch.float32, 1.0),
        ("scaled", 8, 8, 2048, 5e4, False, scaling, torch.float32, 1.0, "cpu"),
    ]


def test_the_cache_of_latent_attention_keeps_one_vector_per_token_whatever_the_number_of_heads(tmp_path):
    config = {"num_hidden_layers": 27, "num_attention_heads": 16, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert kv_cache_tokens(tmp_path) == 17260  # 27 x (512 + 64) x 4 bytes = 62208 bytes per token; 2^30 / 62208
