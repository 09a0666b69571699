"""The model built from flags computes the logits of transformers for any packing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from slimrl.arguments import Arguments
from tests.megatron import tiny

pytestmark = pytest.mark.slow

SEQUENCES = [[5, 17, 80, 3, 9, 41, 41, 2], [7], [100, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12], [60, 61, 62]]


def packed_logits(
    rank: int, world_size: int, init_method: str, args: Arguments, hf_dir: Path, packs: list[list[list[int]]]
) -> list[Tensor]:
    """Logits [tokens, vocab] of every sequence, run in the given packs; padding to a multiple of 8 in each."""
    from megatron.core.packed_seq_params import PackedSeqParams

    from slimrl.megatron import parallel
    from slimrl.megatron.model import model_builder as model
    from slimrl.models.families import family_for
    from slimrl.models.model_spec import ModelSpec
    from slimrl.weights.convert.hf_to_megatron import load_hf_checkpoint

    state = parallel.initialize(args, rank=rank, world_size=world_size, local_rank=rank, init_method=init_method)
    built = model.build_model(args, state).eval()
    shape = ModelSpec.from_args(args)
    load_hf_checkpoint(
        built, shape, family_for({"model_type": "qwen3"}), hf_dir, tp_rank=state.tp_rank, tp_size=state.tp_size
    )
    results: list[Tensor] = []
    for pack in packs:
        lengths = [len(sequence) for sequence in pack]
        tokens = [token for sequence in pack for token in sequence]
        padding = -len(tokens) % 8
        lengths += [padding] * bool(padding)
        bounds = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
        params = PackedSeqParams(
            qkv_format="thd",
            cu_seqlens_q=bounds,
            cu_seqlens_kv=bounds,
            max_seqlen_q=max(lengths),
            max_seqlen_kv=max(lengths),
        )
        with torch.no_grad():
            local = built(torch.tensor([tokens + [0] * padding]), None, None, packed_seq_params=params)
        shards = [torch.empty_like(local) for _ in range(state.tp_size)]
        torch.distributed.all_gather(shards, local, group=state.tp_group)
        logits = torch.cat(shards, dim=-1)[0, :, : args.vocab_size]
        results += list(logits[: sum(map(len, pack))].split([len(sequence) for sequence in pack]))
    parallel.shutdown()
    return results


def expected_logits(hf_dir: Path) -> list[Tensor]:
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(hf_dir, dtype=torch.float32, attn_implementation="eager")
    with torch.no_grad():
        return [model(torch.tensor([sequence])).logits[0] for sequence in SEQUENCES]


def assert_close(actual: list[Tensor], expected: list[Tensor]) -> None:
    for ours, theirs in zip(actual, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=5e-6)


@pytest.mark.parametrize("tied", [True, False])
def test_packed_logits_match_transformers_per_sequence(tied: bool, models: Any, one_rank: Any, tmp_path: Path):
    folder = models.policy_hf if tied else tiny.save_qwen3(tmp_path / "untied", seed=3, tied=False)
    args = tiny.tiny_args(untie_embeddings_and_output_weights=not tied)
    expected = expected_logits(folder)
    assert max(float(logits.abs().max()) for logits in expected) > 2  # the comparison is meaningful
    together = one_rank.run(packed_logits, args, folder, [SEQUENCES])[0]
    assert_close(together, expected)
    alone = one_rank.run(packed_logits, args, folder, [[sequence] for sequence in SEQUENCES])[0]
    assert_close(alone, expected)


@pytest.mark.parametrize("sequence_parallel", [False, True])
def test_tensor_parallel_logits_match_transformers(sequence_parallel: bool, models: Any, two_ranks: Any):
    args = tiny.tiny_args(tensor_model_parallel_size=2, sequence_parallel=sequence_parallel)
    for result in two_ranks.run(packed_logits, args, models.policy_hf, [SEQUENCES[:2], SEQUENCES[2:]]):
        assert_close(result, expected_logits(models.policy_hf))
