"""Which patches of megatron-core apply to which machine, and that those for a GPU without Transformer Engine work."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slimrl.megatron import patches
from tests.megatron import tiny
from tests.megatron.launch import RankPool

ON_CPU = [
    "torch stand-in",
    "plain functions",
    "CPU tensor types",
    "sharding on the CPU",
    "optimizer offload on the CPU",
    "tensor.cuda()",
    "random state",
    "token counts",
]
WITHOUT_ENGINE = ["router product", "fp8 state", "engine version", "latent attention", "sharded linear layers"]
ON_GPU = ["events of DeepEP"]
EVERYWHERE = ["pickles of checkpoints", "checksums of checkpoints", "sharded frozen weights"]
# cuda, transformer_engine, apex
MACHINES = {
    (False, False, False): ON_CPU + WITHOUT_ENGINE + EVERYWHERE,
    (False, False, True): ON_CPU + WITHOUT_ENGINE + EVERYWHERE,
    (False, True, False): ON_CPU + WITHOUT_ENGINE + EVERYWHERE,
    (False, True, True): ON_CPU + WITHOUT_ENGINE + EVERYWHERE,
    (True, False, False): WITHOUT_ENGINE + ON_GPU + EVERYWHERE,
    (True, False, True): WITHOUT_ENGINE + ON_GPU + EVERYWHERE,
    (True, True, False): ["linear layers without Apex", *ON_GPU, *EVERYWHERE],
    (True, True, True): ON_GPU + EVERYWHERE,
}


@pytest.mark.parametrize("machine", MACHINES)
def test_machine_gets_the_patches_it_needs(machine: tuple[bool, bool, bool]):
    cuda, transformer_engine, apex = machine
    found = patches.patches_for(cuda=cuda, transformer_engine=transformer_engine, apex=apex)
    assert [patch.name for patch in found] == MACHINES[machine]


@pytest.mark.parametrize("machine", MACHINES)
def test_machine_is_inspected_when_patches_are_applied(
    monkeypatch: pytest.MonkeyPatch, machine: tuple[bool, bool, bool]
):
    cuda, transformer_engine, apex = machine
    applied: list[str] = []
    rows = [
        patches.Patch(patch.name, patch.repairs, patch.applies, lambda name=patch.name: applied.append(name))
        for patch in patches.PATCHES
    ]
    monkeypatch.setattr(patches, "PATCHES", tuple(rows))
    monkeypatch.setattr(patches, "is_cpu", lambda: not cuda)
    monkeypatch.setattr(patches, "transformer_engine_installed", lambda: transformer_engine)
    monkeypatch.setattr(patches, "apex_installed", lambda: apex)
    patches.activate()
    assert applied == MACHINES[machine]


def without_engine(rank: int, world_size: int, init_method: str, patched: bool) -> dict[str, str]:
    """Failures of megatron-core, unpatched or with the patches of a GPU without Transformer Engine; by attempt."""
    if patched:
        for patch in 2 * patches.patches_for(cuda=True, transformer_engine=False, apex=False):  # twice is harmless
            patch.apply()
    failures = {}
    for attempt in (route, recompute_norm, ask_for_version, find_engine_linear, look_for_engine_linear):
        try:
            attempt()
        except (NameError, TypeError, AssertionError) as error:
            failures[attempt.__name__] = f"{type(error).__name__}: {error}"
    return failures


def route() -> None:
    from megatron.core.transformer.moe.moe_utils import router_gating_linear

    torch.manual_seed(0)
    x, weight = (torch.randn(shape, dtype=torch.bfloat16, requires_grad=True) for shape in ((3, 1, 8), (4, 8)))
    logits = router_gating_linear(x, weight, None, torch.float32)
    expected = x.float() @ weight.float().T
    torch.testing.assert_close(logits, expected)
    upstream = torch.randn_like(expected)
    ours, plain = (torch.autograd.grad(y, (x, weight), upstream) for y in (logits, expected))
    for gradient, truth in zip(ours, plain, strict=True):
        torch.testing.assert_close(gradient, truth)


def recompute_norm() -> None:
    """Recomputes a norm like a layer, without the random state of a GPU."""
    from megatron.core.tensor_parallel import random

    random._get_all_rng_states, random._set_all_rng_states = tuple, lambda *_: None
    random._fork_rng = random.contextlib.nullcontext
    x = torch.randn(3, 8, requires_grad=True)
    weight = torch.randn(8, 8, requires_grad=True)
    norm = torch.nn.RMSNorm(8)
    random._CHECKPOINTING = True
    kept = random.CheckpointWithoutOutput()
    normalised = kept.checkpoint(norm, x)
    projected = normalised @ weight
    kept.discard_output_and_register_recompute(projected)
    assert normalised.untyped_storage().nbytes() == 0
    projected.square().sum().backward()
    truth = x.detach().clone().requires_grad_()
    (norm(truth) @ weight.detach()).square().sum().backward()
    torch.testing.assert_close(x.grad, truth.grad)


def ask_for_version() -> None:
    from megatron.core.optimizer import OptimizerConfig

    OptimizerConfig(
        optimizer="adam",
        use_distributed_optimizer=True,
        use_precision_aware_optimizer=True,
        optimizer_cpu_offload=True,
        exp_avg_dtype=torch.bfloat16,
    )


def find_engine_linear() -> None:
    from megatron.core.transformer import multi_latent_attention as latent

    assert not latent.HAVE_TE or not isinstance(torch.nn.Linear(1, 1), latent.TELinear)


def look_for_engine_linear() -> None:
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter

    assert not isinstance(torch.nn.Linear(1, 1), mcore_fsdp_adapter.TELinear)


@pytest.mark.slow
def test_failures_without_transformer_engine_are_fixed_by_its_patches(one_rank: RankPool):
    failing = one_rank.run(without_engine, False)[0]
    assert {name: text.partition(":")[0] for name, text in failing.items()} == {
        "route": "NameError",
        "recompute_norm": "NameError",
        "ask_for_version": "TypeError",
        "find_engine_linear": "TypeError",
        "look_for_engine_linear": "TypeError",
    }
    assert one_rank.run(without_engine, True)[0] == {}


def output_layer(rank: int, world_size: int, init_method: str, apply: bool) -> Any:
    """Whether the output layer and a row-parallel layer of a model with gradient fusion also fuse."""
    from megatron.core.tensor_parallel import RowParallelLinear

    from slimrl.megatron import config, parallel
    from slimrl.megatron.model import model_builder

    args = tiny.tiny_args(untie_embeddings_and_output_weights=True)
    state = parallel.initialize(args, rank=rank, world_size=world_size, local_rank=rank, init_method=init_method)
    if apply:
        for patch in 2 * patches.patches_for(cuda=True, transformer_engine=True, apex=False):
            patch.apply()
    shape = config.transformer_config(args)
    shape.gradient_accumulation_fusion = True
    built = model_builder.policy_model(args, shape, True, True)
    rows = [module for module in built.modules() if isinstance(module, RowParallelLinear)]
    kept = all(module.config is shape for module in (built.output_layer, *rows))
    fused = {module.gradient_accumulation_fusion for module in (built.output_layer, *rows)}
    parallel.shutdown()
    return state.world_size, kept, fused


@pytest.mark.slow
def test_megatron_layers_are_built_without_apex_where_others_fuse_gradients(one_rank: RankPool):
    with pytest.raises(RuntimeError, match="fused_weight_gradient_mlp_cuda module is not found"):
        one_rank.run(output_layer, False)
    assert one_rank.run(output_layer, True)[0] == (1, True, {False})


def with_deepep_of_sglang(rank: int, world_size: int, init_method: str) -> tuple[bool, bool, int, bool]:
    """DeepEP's dispatch before and after the patch, beside a package with the names of sgl-deep-ep 0.1.2.

    The package itself needs a GPU to be imported.
    """
    import importlib
    import sys
    import types

    from megatron.core.transformer.moe import fused_a2a, token_dispatcher

    class Buffer:
        num_sms = 20

        @classmethod
        def set_num_sms(cls, number: int) -> None:
            cls.num_sms = number

    package, utils = types.ModuleType("deep_ep"), types.ModuleType("deep_ep.utils")
    event, overlap = type("EventHandle", (), {}), type("EventOverlap", (), {})
    vars(package).update(Buffer=Buffer, EventHandle=event, EventOverlap=overlap, utils=utils, __path__=[])
    vars(utils).update(EventHandle=event)
    sys.modules |= {"deep_ep": package, "deep_ep.utils": utils}
    importlib.reload(fused_a2a)  # as its first import finds the package
    before = fused_a2a.HAVE_DEEP_EP
    for _ in range(2):  # twice is harmless
        patches.take_events_of_deepep()
    token_dispatcher.set_deepep_num_sms(24)
    return before, token_dispatcher.fused_dispatch is not None, Buffer.num_sms, fused_a2a.EventOverlap is overlap


def without_deepep(rank: int, world_size: int, init_method: str) -> bool:
    """Whether experts can be dispatched by DeepEP after the patch, where it is absent."""
    from megatron.core.transformer.moe import token_dispatcher

    patches.take_events_of_deepep()
    return token_dispatcher.fused_dispatch is not None


@pytest.mark.slow
def test_deepep_of_sglang_is_found(one_rank: RankPool):
    assert one_rank.run(with_deepep_of_sglang)[0] == (False, True, 24, True)
    assert one_rank.run(without_deepep)[0] is False
