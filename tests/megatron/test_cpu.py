"""The CPU stand-ins: megatron-core gets a CPU where it requests CUDA, and nothing else changes."""

from __future__ import annotations

import subprocess
import sys

import pytest
import torch

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="the stand-ins are for machines without a GPU")

NAMES = ("arange", "tensor", "zeros", "ones", "empty", "full", "empty_like", "zeros_like", "cuda", "Tensor", "compile")
CUDA_NAMES = ("current_device", "synchronize", "get_rng_state", "set_rng_state", "Stream", "stream", "set_device")


@pytest.fixture(scope="module")
def activated() -> dict[str, object]:
    """The attributes of torch before the stand-ins were installed."""
    from slimrl.megatron import patches

    before = {name: getattr(torch, name) for name in NAMES}
    before |= {f"cuda.{name}": getattr(torch.cuda, name) for name in CUDA_NAMES}
    before |= {"Tensor.cuda": torch.Tensor.cuda, "Tensor.type": torch.Tensor.type, "to": torch.Tensor.to}
    patches.activate()
    patches.activate()  # twice is harmless
    return before


def test_torch_itself_is_not_patched(activated: dict[str, object]):
    for name, value in activated.items():
        owner, _, attribute = name.rpartition(".")
        holder = {"": torch, "cuda": torch.cuda, "Tensor": torch.Tensor}[owner]
        assert getattr(torch.Tensor if name == "to" else holder, attribute) is value, name
    with pytest.raises((AssertionError, RuntimeError)):
        torch.zeros(1, device="cuda")


def test_megatron_gets_cpu_tensors_when_it_requests_cuda(activated: dict[str, object]):
    from megatron.core.optimizer import clip_grads

    seen = clip_grads.torch
    assert seen is not torch
    assert seen.zeros(2, device="cuda").device.type == "cpu"
    assert seen.cuda.current_device() == torch.device("cpu")
    assert seen.matmul is torch.matmul
    seen.cuda.Stream().wait_stream(seen.cuda.current_stream())


def test_every_megatron_module_uses_the_stand_in(activated: dict[str, object]):
    plain = [
        name
        for name, module in list(sys.modules.items())
        if name.startswith("megatron.core") and vars(module).get("torch") is torch
    ]
    assert plain == []


def test_random_states_are_set(activated: dict[str, object]):
    from megatron.core.tensor_parallel import random

    state = torch.get_rng_state()
    first = torch.rand(1)
    random._set_cuda_rng_state(state)
    assert torch.equal(torch.rand(1), first)


def test_gradients_of_cpu_tensors_can_be_clipped(activated: dict[str, object]):
    from megatron.core.optimizer.clip_grads import clip_grad_by_total_norm_fp32

    parameter = torch.nn.Parameter(torch.zeros(2))
    parameter.grad = torch.tensor([3.0, 4.0])
    clip_grad_by_total_norm_fp32([parameter], 1.0, 5.0)
    torch.testing.assert_close(parameter.grad, torch.tensor([0.6, 0.8]))


def test_no_function_of_megatron_is_compiled(activated: dict[str, object]):
    from megatron.core.fusions import fused_bias_dropout, fused_bias_swiglu

    for function in (fused_bias_swiglu.swiglu, fused_bias_dropout.bias_dropout_add_fused_train):
        assert not hasattr(function, "_torchdynamo_orig_callable")
    x = torch.randn(3, 8)
    gate, up = x.chunk(2, dim=-1)
    torch.testing.assert_close(fused_bias_swiglu.swiglu(x), torch.nn.functional.silu(gate) * up)
    assert torch._dynamo.utils.counters["frames"] == {}


def test_weights_and_state_after_two_steps_are_those_of_torchs_adamw(activated: dict[str, object]):
    from megatron.core import optimizer

    flags = {"lr": 0.1, "weight_decay": 0.3, "betas": (0.8, 0.9), "eps": 1e-3}
    built = []
    for kind in (torch.optim.AdamW, optimizer.torch.optim.AdamW):
        weight = torch.nn.Parameter(torch.linspace(-1, 1, 5))
        adam = kind([weight], **flags)
        for step in (1, 2):
            adam.zero_grad()
            (weight**3 * step).sum().backward()
            adam.step()
        built.append((weight, adam))
    (expected, torchs), (weight, own) = built
    assert isinstance(own, torch.optim.AdamW) and type(own) is not type(torchs)
    torch.testing.assert_close(weight, expected, rtol=0, atol=0)
    torch.testing.assert_close(own.state_dict(), torchs.state_dict(), rtol=0, atol=0)
    own.load_state_dict(torchs.state_dict())


@pytest.mark.slow
def test_transformers_results_are_unchanged_by_the_patches(tmp_path):
    """Runs in a separate process: loading a model runs torch's factories under a meta device."""
    program = """
import sys, torch
from transformers import Qwen3Config, Qwen3ForCausalLM
config = Qwen3Config(vocab_size=16, hidden_size=32, intermediate_size=32, num_hidden_layers=1,
                     num_attention_heads=2, num_key_value_heads=1, head_dim=16)
torch.manual_seed(0)
Qwen3ForCausalLM(config).save_pretrained(sys.argv[1])
def run():
    model = Qwen3ForCausalLM.from_pretrained(sys.argv[1], dtype=torch.float32)
    return model.model.rotary_emb.inv_freq.clone(), model(torch.arange(16)[None]).logits
before = run()
from slimrl.megatron import patches
patches.activate()
after = run()
assert all(torch.equal(x, y) for x, y in zip(before, after)), (before, after)
expected = 10000.0 ** -(torch.arange(0, 16, 2) / 16)
torch.testing.assert_close(after[0], expected)
"""
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", program, str(tmp_path)], capture_output=True, text=True, timeout=100
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("sizes", [{"expert_model_parallel_size": 2, "tensor_model_parallel_size": 2}, {}])
def test_experts_divided_among_ranks_with_other_tokens_are_refused(sizes: dict[str, int]):
    from slimrl.megatron import parallel
    from tests.megatron.tiny import tiny_args

    args = tiny_args(**sizes, num_experts=4, expert_tensor_parallel_size=2)
    with pytest.raises(
        ValueError, match=r"--expert-tensor-parallel-size 2 send ranks parts of unequal size, which gloo"
    ):
        parallel.initialize(args, rank=0, world_size=4)
