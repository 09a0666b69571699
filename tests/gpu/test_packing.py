"""On GPUs packing does not change a sequence's result, with Transformer Engine's attention and with slimrl's."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from slimrl.arguments import Arguments
from tests.gpu.conftest import needs
from tests.megatron import tiny
from tests.megatron.launch import run_ranks

pytestmark = [pytest.mark.slow, needs()]

# Multiples of four, as two context-parallel ranks need them; a piece of the longest is masked in two blocks.
LENGTHS = [12, 2080, 4, 300, 64]
# |difference| / |expected| of logits and of gradients: rounding of float32, and of bfloat16 over two layers.
IMPLEMENTATIONS = {"local": ({}, 1e-5), "transformer_engine": ({"bf16": True}, 2e-2)}
EACH = ["local", pytest.param("transformer_engine", marks=needs("transformer_engine"))]


def logits_and_gradient(
    rank: int, world_size: int, init_method: str, args: Arguments, packs: list[list[int]]
) -> tuple[Tensor, Tensor]:
    """Logits of all samples end to end, as this rank has them, and the gradient of all weights, summed over ranks.

    `packs` are the indices of the samples in each pack; the loss is a fixed weighting of the logits.
    """
    from slimrl.megatron import parallel
    from slimrl.megatron.model import model_builder
    from slimrl.megatron.model.micro_batch import local_rows, packed_sequences

    state = parallel.initialize(args, rank=rank, world_size=world_size, local_rank=rank, init_method=init_method)
    built = model_builder.build_model(args, state)
    generator = torch.Generator().manual_seed(7)
    samples = [torch.randint(args.vocab_size, (length,), generator=generator) for length in LENGTHS]
    weights = [torch.randn(length, args.padded_vocab_size, generator=generator) for length in LENGTHS]
    results = []
    for pack in packs:
        lengths = torch.tensor([LENGTHS[number] for number in pack])
        rows = local_rows(lengths, rank, world_size)
        tokens = torch.cat([samples[number] for number in pack])[rows].to(state.device)
        weight = torch.cat([weights[number] for number in pack])[rows].to(state.device)
        sequences = packed_sequences(lengths, world_size, state.device, rank=rank)
        logits = built(tokens.unsqueeze(0), None, None, packed_seq_params=sequences)[0].float()
        (logits * weight).sum().backward()
        results.append(logits.detach())
    gradient = torch.cat([parameter.grad.float().flatten() for parameter in built.parameters()])
    torch.distributed.all_reduce(gradient)
    result = torch.cat(results).cpu(), gradient.cpu()
    parallel.shutdown()
    return result


def relative(actual: Tensor, expected: Tensor) -> float:
    """|actual - expected| / |expected|."""
    return float((actual - expected).norm() / expected.norm())


def flags(implementation: str, **changes: object) -> tuple[Arguments, float]:
    """A tiny model with long positions, and the bound of its arithmetic."""
    numbers, bound = IMPLEMENTATIONS[implementation]
    common = {"transformer_impl": implementation, "max_position_embeddings": 4096}
    return tiny.tiny_args(**common, **numbers, **changes), bound


@pytest.mark.parametrize("implementation", EACH)
def test_packing_gives_the_logits_and_gradients_of_single_samples(implementation: str):
    args, bound = flags(implementation)
    everything = list(range(len(LENGTHS)))
    ((packed, packed_gradient),) = run_ranks(logits_and_gradient, 1, args, [everything])
    ((alone, alone_gradient),) = run_ranks(logits_and_gradient, 1, args, [[number] for number in everything])
    assert relative(packed, alone) < bound
    assert relative(packed_gradient, alone_gradient) < bound


@needs(gpus=2)
@pytest.mark.parametrize("implementation", EACH)
def test_two_ranks_sharing_a_pack_match_one(implementation: str):
    from slimrl.megatron.model.micro_batch import local_rows

    args, bound = flags(implementation)
    shared_args, _ = flags(implementation, context_parallel_size=2)
    everything = list(range(len(LENGTHS)))
    ((whole, gradient),) = run_ranks(logits_and_gradient, 1, args, [everything])
    for rank, (logits, summed) in enumerate(run_ranks(logits_and_gradient, 2, shared_args, [everything])):
        assert relative(logits, whole[local_rows(torch.tensor(LENGTHS), rank, 2)]) < bound
        assert relative(summed, gradient) < bound


def test_attention_never_synchronizes_with_the_device():
    from megatron.core.transformer import TransformerConfig
    from megatron.core.transformer.enums import AttnMaskType

    from slimrl.megatron.model.attention import PackedCoreAttention
    from slimrl.megatron.model.micro_batch import packed_sequences

    config = TransformerConfig(
        num_layers=1, hidden_size=256, num_attention_heads=4, num_query_groups=2, attention_dropout=0.0
    )
    attention = PackedCoreAttention(config, 1, AttnMaskType.causal, "self")
    device = torch.device("cuda")
    sequences = packed_sequences(torch.tensor(LENGTHS), 1, device, rank=0)
    query, key, value = (torch.randn(sum(LENGTHS), heads, 64, device=device, requires_grad=True) for heads in (4, 2, 2))
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        attention(query, key, value, None, packed_seq_params=sequences).sum().backward()
    finally:
        torch.cuda.set_sync_debug_mode("default")
