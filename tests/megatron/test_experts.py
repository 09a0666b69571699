"""Gradients of expert weights are reduced over tensor-parallel ranks, which silently fails without their attribute."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slimrl.arguments import Arguments
from tests.megatron import tiny

pytestmark = pytest.mark.slow


def expert_gradients(
    rank: int, world_size: int, init_method: str, args: Arguments, folder: Path, marked: bool
) -> dict[str, Tensor]:
    """Reduced gradients of the experts of a small mixture-of-experts model; rank count 1 writes the weights first."""
    from megatron.core.distributed import DistributedDataParallel
    from megatron.core.models.gpt import GPTModel
    from megatron.core.pipeline_parallel import get_forward_backward_func

    from slimrl.megatron import config, parallel
    from slimrl.megatron.checkpoint import start, state
    from slimrl.megatron.model import model_builder

    parallel.initialize(args, rank=rank, world_size=world_size, local_rank=rank, init_method=init_method)
    shape = dataclasses.replace(
        config.transformer_config(args),
        num_moe_experts=4,
        moe_ffn_hidden_size=32,
        moe_router_topk=2,
        moe_router_load_balancing_type="none",
    )
    built = GPTModel(
        config=shape,
        transformer_layer_spec=model_builder.block_spec(shape),
        vocab_size=args.padded_vocab_size,
        max_sequence_length=64,
        position_embedding_type="rope",
        share_embeddings_and_output_weights=True,
    )
    if marked:
        model_builder.mark_parameters(built)
    if world_size == 1:
        state.save_model_only(built, folder)
    start.load_model_only(built, folder)
    wrapped = DistributedDataParallel(shape, config.ddp_config(args), built)
    tokens = torch.arange(16)[None] * 7 % args.vocab_size

    def step(_: Any, module: torch.nn.Module) -> tuple[Tensor, Any]:
        output = module(tokens, torch.arange(16)[None], None, labels=tokens.roll(-1))
        return output, lambda losses: (losses.sum(), torch.tensor(16, dtype=torch.int), {})

    wrapped.zero_grad_buffer()
    get_forward_backward_func()(
        forward_step_func=step,
        data_iterator=iter([None]),
        model=[wrapped],
        num_microbatches=1,
        seq_length=16,
        micro_batch_size=1,
        forward_only=False,
    )
    gradients = {name: p.main_grad.clone() for name, p in built.named_parameters() if ".experts." in name}
    parallel.shutdown()
    return gradients


def test_expert_gradients_with_tensor_parallelism_match_one_rank(one_rank: Any, two_ranks: Any, tmp_path: Path):
    expected = one_rank.run(expert_gradients, tiny.tiny_args(), tmp_path, True)[0]
    assert len(expected) == 16 and max(float(g.abs().max()) for g in expected.values()) > 1e-4
    args = tiny.tiny_args(tensor_model_parallel_size=2, sequence_parallel=True, expert_tensor_parallel_size=1)
    for gradients in two_ranks.run(expert_gradients, args, tmp_path, True):
        for name, value in expected.items():
            torch.testing.assert_close(gradients[name], value, rtol=1e-4, atol=1e-7)
    first, second = two_ranks.run(expert_gradients, args, tmp_path, False)
    assert any(not torch.equal(first[name], second[name]) for name in first)  # the purpose of the attribute
