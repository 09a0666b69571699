"""How far scripts and families are proven: scripts, guides and scripts/proven.toml agree, and the claims hold."""

import re
import tomllib
from pathlib import Path

import pytest

from tests.families.toys import TOYS
from tests.scripts.test_models import ALIASES, CONFIGS, FIRST_LAYERS, NOT_SERVED
from tests.scripts.test_recipes import RECIPES, model_of

ROOT = Path(__file__).resolve().parents[2]
PROVEN = tomllib.loads((ROOT / "scripts/proven.toml").read_text())
RECIPE, MODEL, FAMILY = PROVEN["recipes"], PROVEN["models"], PROVEN["families"]
GATED, CHECKED, RUN, NOT_RUN = (
    "gated in CI on CPU",
    "checked against published configs",
    "run on a GPU",
    "not run",
)
EVERY = {
    **{f"scripts/{name}.sh": entry for name, entry in RECIPE.items()},
    **{f"scripts/models/{name}.sh": entry for name, entry in MODEL.items()},
    **FAMILY,
}


def with_level(entries: dict[str, dict[str, str]], level: str) -> list[str]:
    return sorted(name for name, entry in entries.items() if entry["level"] == level)


def column(page: str, first: str, wanted: str) -> dict[str, str]:
    """Column `wanted` of the table in docs/ whose first column is `first`, by first column."""
    lines = (ROOT / "docs" / page).read_text().splitlines()
    (start,) = [number for number, line in enumerate(lines) if line.startswith(f"| {first} |")]
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split("|")])
    place = rows[0].index(wanted)
    return {row[0]: row[place] for row in rows[2:]}


def config_of(model: str) -> str:
    """The published config.json with which a model script's flags are compared."""
    published = "deepseek-v3" if model in FIRST_LAYERS else ALIASES.get(model, model)
    return f"{published}.json"


def test_table_has_every_recipe_and_every_model():
    assert sorted(RECIPE) == RECIPES
    assert set(MODEL) == {path.stem for path in ROOT.glob("scripts/models/*.sh")}


@pytest.mark.parametrize("name", EVERY)
def test_level_is_one_of_four_and_a_gpu_run_has_a_date_and_a_machine(name):
    entry = EVERY[name]
    assert entry["level"] in (GATED, CHECKED, RUN, NOT_RUN)
    assert entry["level"] != RUN or re.fullmatch(r"20\d\d-\d\d-\d\d, .*\w.*", entry["by"])


@pytest.mark.parametrize("script", [name for name in EVERY if name.endswith(".sh")])
def test_script_states_its_proven_level(script):
    entry = EVERY[script]
    said = [line for line in (ROOT / script).read_text().splitlines() if "roven:" in line]
    assert said == [f"# Proven: {entry['level']} ({entry['by']})."]


def test_guides_state_each_proven_level():
    recipes = column("recipes.md", "script", "proven")
    said = {re.match(r"`(.*)\.sh`", cell)[1]: level for cell, level in recipes.items()}
    assert said == {name: entry["level"] for name, entry in RECIPE.items()}
    assert column("families.md", "family", "proven") == {name: entry["level"] for name, entry in FAMILY.items()}


def test_only_unsupported_entries_are_unproven():
    assert with_level(RECIPE, NOT_RUN) == [name for name in RECIPES if NOT_SERVED.match(model_of(name))]
    assert with_level(MODEL, NOT_RUN) == sorted(name for name in MODEL if NOT_SERVED.match(name))


@pytest.mark.parametrize("recipe", with_level(RECIPE, GATED))
def test_gated_recipe_is_run_by_the_named_test(recipe):
    text = (ROOT / RECIPE[recipe]["by"]).read_text()
    alone = re.search(rf'harness\.launch\(\s*\["bash", "scripts/{re.escape(recipe)}\.sh", "--tiny"', text)
    among_others = f'("{recipe}", ' in text and 'command = ["bash", f"scripts/{recipe}.sh", "--tiny"' in text
    assert alone or among_others


@pytest.mark.parametrize("model", with_level(MODEL, GATED))
def test_gated_model_belongs_to_a_gated_recipe(model):
    assert MODEL[model]["by"] in {RECIPE[name]["by"] for name in with_level(RECIPE, GATED) if model_of(name) == model}


def test_checked_entry_names_the_published_config():
    # tests/scripts/test_recipes.py and test_models.py compare each with this file
    for name in with_level(RECIPE, CHECKED):
        assert RECIPE[name]["by"] == config_of(model_of(name)), name
    for name in with_level(MODEL, CHECKED):
        assert MODEL[name]["by"] == config_of(name), name
    names = {entry["by"] for entry in (*RECIPE.values(), *MODEL.values()) if entry["level"] == CHECKED}
    assert names <= {path.name for path in CONFIGS.glob("*.json")}


@pytest.mark.parametrize("family", with_level(FAMILY, GATED))
def test_gated_family_has_a_toy_run_by_the_named_test(family):
    entry = FAMILY[family]
    assert entry["toy"] in TOYS
    assert '@pytest.fixture(scope="module", params=TOYS)' in (ROOT / entry["by"]).read_text()
    assert column("families.md", "family", "`model_type`")[family] == f"`{TOYS[entry['toy']].model_type}`"


def test_every_toy_belongs_to_a_family_of_the_guide():
    described = {TOYS[entry["toy"]].model_type for entry in FAMILY.values()}
    assert {toy.model_type for toy in TOYS.values()} == described
