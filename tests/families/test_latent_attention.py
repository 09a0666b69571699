"""Families with latent attention: logits, loss and every gradient of packed sequences match transformers."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from slimrl.arguments import Arguments
from tests.families import latent_jobs
from tests.families.conftest import Pools
from tests.families.latent_jobs import PassResult
from tests.families.toys import TOYS, Toy

pytestmark = pytest.mark.slow

FAMILIES = ("deepseek-v3", "kimi-k2", "moonlight", "glm4-moe-lite")
TENSOR = ("--tensor-model-parallel-size", "2", "--sequence-parallel")
EXPERT = ("--expert-model-parallel-size", "2", "--expert-tensor-parallel-size", "1")
LAYOUTS = {"one": (), "tp2": TENSOR, "ep2": EXPERT, "tp2-ep2": TENSOR + EXPERT}


def flags_of(toy: Toy, *layout: str) -> Arguments:
    """Flags of the model and layout, as for a conversion tool."""
    from slimrl.arguments.parse import read_args

    args, problems = read_args([*toy.flags, *layout], entry="convert_hf_to_torch_dist.py")
    assert [problem for problem in problems if problem.flag not in ("--hf-checkpoint", "--save")] == []
    args.use_distributed_optimizer = False  # each rank keeps only its shard of the gradients
    return args


@pytest.fixture(scope="module")
def found(pools: Pools, folders: dict[str, Path]) -> dict[tuple[str, str], list[PassResult]]:
    """Results of each rank, by family and layout."""
    results: dict[tuple[str, str], list[PassResult]] = {}
    for layout, flags in LAYOUTS.items():
        cases = {name: (flags_of(TOYS[name], *flags), folders[name]) for name in FAMILIES}
        by_rank = pools[2 if flags else 1].run(latent_jobs.passes, cases)
        results |= {(name, layout): [one[name] for one in by_rank] for name in FAMILIES}
    return results


@pytest.fixture(scope="module")
def expected(folders: dict[str, Path]) -> dict[str, PassResult]:
    """transformers and autograd, one sequence at a time."""
    return {name: reference(TOYS[name], folders[name]) for name in FAMILIES}


def reference(toy: Toy, folder: Path) -> PassResult:
    model = toy.load(folder)
    ids = latent_jobs.tokens(toy.decoder["vocab_size"])
    pieces = [model(sequence[None]).logits[0] for sequence in ids.split(latent_jobs.SEQUENCES)]
    logits = torch.cat(pieces)
    loss = torch.nn.functional.cross_entropy(logits, latent_jobs.labels(ids), reduction="sum")
    (loss / ids.numel()).backward()
    gradients: dict[str, Tensor] = {}
    for name, parameter in model.named_parameters():
        if ".experts." not in name:
            gradients[name] = parameter.grad
            continue
        before, kind = name.rsplit(".", 1)  # transformers computes with all experts in one tensor
        parts = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}[kind]
        for expert, whole in enumerate(parameter.grad):
            for part, tensor in zip(parts, whole.chunk(len(parts)), strict=True):
                gradients[f"{before}.{expert}.{part}.weight"] = tensor
    return PassResult(float(loss), logits.detach(), gradients)


def furthest(actual: Tensor, wanted: Tensor) -> float:
    """The largest difference, as a fraction of the largest expected value."""
    return float((actual - wanted).abs().max() / wanted.abs().max().clamp(min=1e-30))


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_packed_logits_and_loss_match_transformers(found, expected, name, layout):
    wanted = expected[name]
    for result in found[name, layout]:
        assert furthest(result.logits, wanted.logits) < 1e-5
        assert result.loss == pytest.approx(wanted.loss, rel=1e-5)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("name", FAMILIES)
def test_every_gradient_matches_transformers(found, expected, name, layout):
    wanted = expected[name].gradients
    for result in found[name, layout]:
        assert result.gradients.keys() == wanted.keys()
        far = {key: furthest(result.gradients[key], value) for key, value in wanted.items() if value.abs().max() > 0}
        worst = max(far, key=far.__getitem__)
        assert far[worst] < 1e-5, worst
        # an expert without tokens has none
        assert all(not result.gradients[key].any() for key in wanted.keys() - far.keys())


def test_tensor_without_sequence_parallelism_is_rejected(pools: Pools, folders: dict[str, Path]):
    args = flags_of(TOYS["moonlight"], "--tensor-model-parallel-size", "2")
    for sentence in pools[2].run(latent_jobs.refusal, args, folders["moonlight"]):
        assert sentence == (
            "--tensor-model-parallel-size 2 with --multi-latent-attention needs --sequence-parallel in training: add it"
        )
