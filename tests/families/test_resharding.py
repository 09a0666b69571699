"""Other parallel layouts load a converted checkpoint and export the original tensors."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from slimrl.models.families import family_for
from slimrl.models.model_spec import ModelSpec
from slimrl.weights.hf_checkpoint import HfCheckpoint, read_hf_config
from tests.families import jobs
from tests.families.conftest import Pools
from tests.families.layouts import LAYOUTS, flags
from tests.families.toys import TOYS, Toy

pytestmark = pytest.mark.slow

Found = tuple[Path, jobs.Outcome]
BY_NAME = {layout.name: layout for layout in LAYOUTS}
READ_BY = {
    "glm4": ("tensor 2, sequence", "pipeline 2"),
    "qwen2-moe": ("expert 2", "tensor 2, expert tensor 2", "pipeline 2"),
    "glm4-moe-mtp": ("expert 2", "tensor 2, expert tensor 2", "pipeline 2"),
}


def with_next_token_layer(toy: Toy) -> Toy:
    """The same model with one MTP layer, as config.json describes it."""
    layers = toy.config["num_hidden_layers"]
    return dataclasses.replace(
        toy,
        config=toy.config | {"num_hidden_layers": layers + 1},
        published=toy.published | {"num_hidden_layers": layers, "num_nextn_predict_layers": 1},
    )


RESHARDED = {
    "glm4": TOYS["glm4"],
    "qwen2-moe": TOYS["qwen2-moe"],
    "glm4-moe-mtp": with_next_token_layer(TOYS["glm4-moe"]),
}


@pytest.fixture(scope="module")
def read_back(pools: Pools, tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], list[Found]]:
    """By toy model and layout: the export of each rank after loading the torch_dist checkpoint."""
    root: Path = tmp_path_factory.mktemp("resharded")
    cases = {}
    for name, toy in RESHARDED.items():
        folder = toy.save(root / name / "hf", dtype="bf16", tokenizer=False)
        args = flags(toy, BY_NAME["one rank"], "--bf16")
        cases[name] = jobs.Case(name, args, folder, root / name / "torch_dist")
    pools[1].run(jobs.to_torch_dist, list(cases.values()))
    found: dict[tuple[str, str], list[Found]] = {}
    for layout in LAYOUTS:
        chosen = [name for name, layouts in READ_BY.items() if layout.name in layouts]
        if chosen:
            changed = [
                dataclasses.replace(cases[name], args=flags(RESHARDED[name], layout, "--bf16")) for name in chosen
            ]
            by_rank = pools[layout.ranks].run(jobs.logits_and_export, changed, [])
            found |= {(name, layout.name): [(cases[name].folder, one[name]) for one in by_rank] for name in chosen}
    return found


@pytest.mark.parametrize(("name", "layout"), [(name, layout) for name, all_ in READ_BY.items() for layout in all_])
def test_layout_reads_the_checkpoint_and_exports_the_original_tensors(name, layout, read_back):
    for folder, outcome in read_back[name, layout]:
        config = read_hf_config(folder)
        family = family_for(config)
        assert outcome.different == []
        assert outcome.names == family.hf_names(ModelSpec.from_hf_config(config))
        with HfCheckpoint(folder) as origin:
            carried = {tensor for tensor in origin.names if tensor.startswith(family.carried_prefixes(config))}
            assert set(outcome.names) == set(origin.names) - carried
        assert bool(carried) is name.endswith("-mtp")
