"""LoRA adapters of every family: from a PEFT folder they compute as the merged model in transformers, and come back.

The merged model is the folder of the base with scale * B A added to each weight in float64, by published names.
"""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from slimrl.models.adapters import AdapterConfig, targets_in
from slimrl.models.families import family_for
from slimrl.models.model_spec import ModelSpec
from slimrl.weights.hf_checkpoint import read_hf_config
from tests.families import adapter_jobs, jobs
from tests.families.adapter_jobs import AdaptedOutcome
from tests.families.conftest import Pools
from tests.families.layouts import LAYOUTS, WITH_EXPERTS, flags
from tests.families.toys import TOYS, Toy
from tests.megatron.lora_truth import ALL, ALPHA, LATENT, RANK, changes, published_weights, save_adapter

pytestmark = pytest.mark.slow
FAMILIES = [name for name, toy in TOYS.items() if not toy.sees]  # tests/megatron/test_vision_lora.py has the others
NO_QUERY_LATENT = ("q_proj", *LATENT[2:])
# projections by Hugging Face names, as the classes of transformers have them
TARGETS = dict.fromkeys(FAMILIES, ALL) | {
    "deepseek-v3": LATENT,
    "kimi-k2": LATENT,
    "glm4-moe-lite": LATENT,
    "moonlight": NO_QUERY_LATENT,
    "glm4": (*ALL[:4], "gate_up_proj", "down_proj"),
}
BY_NAME = {layout.name: layout for layout in LAYOUTS}
RUN_IN = {"one rank": FAMILIES, "tensor 2, sequence": FAMILIES, "expert 2": [n for n in FAMILIES if n in WITH_EXPERTS]}
CASES = [(name, layout) for layout, names in RUN_IN.items() for name in names]
SEQUENCES = [
    torch.randint(0, 281, (length,), generator=torch.Generator().manual_seed(length)).tolist() for length in (21, 1, 13)
]


def merged(base: Path, adapter: Path, folder: Path) -> Path:
    """The folder of the merged model, in one file."""
    own = published_weights(base)
    added = changes({n: t.double() for n, t in load_file(adapter / "adapter_model.safetensors").items()})
    assert added.keys() <= own.keys()
    shutil.copytree(base, folder, ignore=shutil.ignore_patterns("*.safetensors*"))
    sums = {n: (t.double() + added[n]).to(t.dtype) if n in added else t for n, t in own.items()}
    save_file(sums, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def adapters(folders: dict[str, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("adapters")
    return {n: save_adapter(folders[n], root / n, targets=TARGETS[n], scale=0.1) for n in FAMILIES}


@pytest.fixture(scope="module")
def expected(
    folders: dict[str, Path], adapters: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("merged")
    return {name: merged(folders[name], adapters[name], root / name) for name in FAMILIES}


def case(name: str, layout: str, folder: Path) -> jobs.Case:
    args = flags(TOYS[name], BY_NAME[layout], "--expert-tensor-parallel-size", "1")  # adapted experts are whole
    args.lora_rank, args.lora_alpha = RANK, ALPHA
    args.lora_target_modules = list(TARGETS[name]) if name == "glm4" else None  # those of the others are the default
    return jobs.Case(name, args, folder)


@pytest.fixture(scope="module")
def found(
    pools: Pools, folders: dict[str, Path], adapters: dict[str, Path]
) -> dict[tuple[str, str], list[AdaptedOutcome]]:
    """Results of each rank, by family and layout."""
    results: dict[tuple[str, str], list[AdaptedOutcome]] = {}
    for layout, names in RUN_IN.items():
        cases = [case(name, layout, folders[name]) for name in names]
        by_rank = pools[BY_NAME[layout].ranks].run(adapter_jobs.adapted, cases, adapters, SEQUENCES)
        results |= {(name, layout): [one[name] for one in by_rank] for name in names}
    return results


def furthest(toy: Toy, folder: Path, logits: list[Tensor]) -> float:
    """From transformers, as a fraction of a sequence's largest logit."""
    wanted = [toy.reference_logits(folder, torch.tensor([sequence]))[0] for sequence in SEQUENCES]
    return max(float((own - one).abs().max() / one.abs().max()) for own, one in zip(logits, wanted, strict=True))


@pytest.mark.parametrize(("name", "layout"), CASES)
def test_adapters_compute_as_the_merged_model_in_transformers(name, layout, found, expected, folders, adapters):
    stored = set(load_file(adapters[name] / "adapter_model.safetensors"))
    sums = published_weights(expected[name])
    for result in found[name, layout]:
        difference = furthest(TOYS[name], expected[name], result.logits)
        print(f"{name}, {layout}: {difference:.1e}")
        assert difference < 3e-6
        assert furthest(TOYS[name], folders[name], result.base) < 3e-6
        assert furthest(TOYS[name], expected[name], result.base) > 1e-2  # the adapters matter
        assert (result.names, result.different) == (stored, [])
        far = max(float((tensor.double() - sums[key].double()).abs().max()) for key, tensor in result.merged.items())
        assert far < 1e-6


@pytest.mark.parametrize("name", FAMILIES)
def test_every_projection_has_an_adapter_by_default_unless_the_rule_asks_for_the_targets(name, folders):
    args = case(name, "one rank", folders[name]).args
    config = AdapterConfig.from_args(args)
    assert config is not None
    found = targets_in(family_for(read_hf_config(folders[name])), ModelSpec.from_args(args))
    assert set(found) == set(config.targets) == set(TARGETS[name])
