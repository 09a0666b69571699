"""The parts of the CPU platform that can be tested without a server: placeholders, layers, size of the cache."""

from __future__ import annotations

import json
import math
import subprocess
import sys
import types

import pytest
import torch
import torch.distributed as dist

from slimrl.engines.sglang.cpu_patches import (
    AbsentPackageFinder,
    bucket_receiver,
    gate_sigmoid_mul,
    install,
    with_unscaled_rope,
)
from slimrl.engines.sglang.operators.seeded_sampling import murmur_hash32
from slimrl.engines.sglang.server_args import kv_cache_tokens


def murmur3(words: list[int]) -> int:
    """MurmurHash3 x86 32 bit of little-endian words with seed 0, after its public description."""
    state = 0
    for word in words:
        word = word * 0xCC9E2D51 % 2**32
        word = (word * 2**15 + word // 2**17) % 2**32
        state ^= word * 0x1B873593 % 2**32
        state = (state * 2**13 + state // 2**19) % 2**32
        state = (state * 5 + 0xE6546B64) % 2**32
    state ^= 4 * len(words)
    state = (state ^ state // 2**16) * 0x85EBCA6B % 2**32
    state = (state ^ state // 2**13) * 0xC2B2AE35 % 2**32
    return state ^ state // 2**16


def test_reference_hash_gives_the_published_value():
    assert murmur3([0]) == 0x2362F9DE  # of four zero bytes


def test_seeded_sampler_hash_is_murmur3_of_seed_position_and_column():
    seeds = [0, 1, 2**31, 2**32 + 5, 2**63 - 1]
    positions, columns = [0, 7, 1000, 40959, 3], [0, 1, 151935]
    hashes = murmur_hash32(torch.tensor(seeds), torch.tensor(positions), torch.tensor(columns))
    expected = [
        [murmur3([seed % 2**32, seed >> 32, position, column]) for column in columns]
        for seed, position in zip(seeds, positions, strict=True)
    ]
    assert hashes.tolist() == expected


def test_nothing_is_patched_when_cuda_is_available(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    before = list(sys.meta_path)
    assert install() is False
    assert sys.meta_path == before


def test_finder_stands_in_only_for_missing_packages():
    finder = AbsentPackageFinder()
    assert finder.find_spec("triton.language") is not None and finder.find_spec("torchvision") is not None
    assert finder.find_spec("tritonclient") is None and finder.find_spec("flashinfer") is None


def test_stand_in_supports_decorators_and_refuses_to_compute():
    program = """
import sys
sys.modules["torch"] = None  # not needed by what follows
from slimrl.engines.sglang.cpu_patches import AbsentPackageFinder, _AbsentModule
kernels, jit = _AbsentModule("sgl_kernel"), _AbsentModule("triton").jit
assert jit(len) is len and jit(num_warps=4)(len) is len
assert _AbsentModule("torchvision").InterpolationMode.BICUBIC == "BICUBIC"
try:
    kernels.rmsnorm(1, 2)
except NotImplementedError as error:
    print(error)
"""
    output = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60)
    assert output.stdout.startswith("sgl_kernel.rmsnorm is not available"), output.stderr


@pytest.mark.parametrize(("do_add", "before"), [(True, 1.0), (False, 0.0)])
def test_shared_expert_gate_is_the_sigmoid_of_one_product_per_token(do_add, before):
    hidden, gate = torch.tensor([[1.0, 2.0], [0.0, -1.0]]), torch.tensor([0.5, 0.25])
    output = torch.ones(2, 2)
    gate_sigmoid_mul(hidden, gate, torch.tensor([[4.0, 8.0], [2.0, -2.0]]), output, do_add=do_add)
    first, second = 1 / (1 + math.exp(-1.0)), 1 / (1 + math.exp(0.25))
    expected = [[before + 4 * first, before + 8 * first], [before + 2 * second, before - 2 * second]]
    assert torch.allclose(output, torch.tensor(expected), atol=1e-6)


def test_only_scaled_rotary_tables_use_the_cpu_function():
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


def test_latent_kv_cache_keeps_one_vector_per_token_for_any_number_of_heads(tmp_path):
    config = {"num_hidden_layers": 27, "num_attention_heads": 16, "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    (tmp_path / "config.json").write_text(json.dumps(config))
    assert kv_cache_tokens(tmp_path) == 17260  # 27 x (512 + 64) x 4 bytes = 62208 bytes per token; 2^30 / 62208


def test_broadcasts_are_received_into_the_same_memory_and_a_failure_is_reported(tmp_path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    loaded: list[tuple[str, torch.Tensor]] = []
    model = types.SimpleNamespace(load_weights=loaded.extend)
    updater = types.SimpleNamespace(get_model=lambda: model, _model_update_group={"g": dist.group.WORLD})
    receive = bucket_receiver()
    assert receive(updater, ["a", "b"], ["float32", torch.bfloat16], [[2, 3], [4]], "g")[0] is True
    assert receive(updater, ["c"], ["float32"], [(5,)], "g")[0] is True
    assert [(name, t.dtype, tuple(t.shape)) for name, t in loaded] == [
        ("a", torch.float32, (2, 3)),
        ("b", torch.bfloat16, (4,)),
        ("c", torch.float32, (5,)),
    ]
    a, b, c = (tensor.data_ptr() for _, tensor in loaded)
    assert b == a + 24 and c == a  # one after another, as the sender packs them; then again from the start
    model.load_weights = lambda weights: 1 / 0
    assert receive(updater, ["c"], ["float32"], [(5,)], "g") == (
        False,
        "Failed to update parameter online: division by zero. The full weights are partially updated.",
    )
    dist.destroy_process_group()
