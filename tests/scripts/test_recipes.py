"""All recipes: what they submit is a line of known flags that fit the model, the data and the slots."""

import json
import re
from pathlib import Path

import pytest

from slimrl.arguments import read_args
from slimrl.arguments.namespace import all_flag_specs
from slimrl.sglang.flags import router_flags, server_flags
from tests.scripts.test_models import NOT_SERVED, published
from tests.scripts.test_recipe import submitted

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted(path.stem for path in ROOT.glob("scripts/run-*.sh"))
# What waits beyond the flags that say so of themselves in `not_served`: engines larger than a node; and supervised
# training, which generates nothing and has no groups.
ENGINES = {"--rollout-num-gpus-per-engine"}
SUPERVISED = {"--rollout-function-path", "--debug-train-only", "--rollout-max-response-len", "--n-samples-per-prompt"}


def model_of(recipe: str) -> str:
    (model,) = re.findall(r"^recipe_model (\S+) ", (ROOT / f"scripts/{recipe}.sh").read_text(), re.MULTILINE)
    return model


def value(line: list[str], flag: str) -> str:
    return line[line.index(flag) + 1]


def prepare(line: list[str], model: str) -> None:
    """Makes the files that the line names, as docs/recipes.md has them downloaded, but empty."""
    checkpoint, reference = Path(value(line, "--hf-checkpoint")), Path(value(line, "--ref-load"))
    checkpoint.mkdir(parents=True, exist_ok=True)
    (checkpoint / "config.json").write_text(json.dumps(published(model)))
    (reference / "release").mkdir(parents=True, exist_ok=True)
    (reference / "latest_checkpointed_iteration.txt").write_text("release")
    for path in (Path(word) for word in line if word.endswith((".jsonl", ".parquet"))):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps({"prompt": "1+1", "messages": "1+1", "label": "2"}) + "\n")


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_submits_flags_that_are_accepted_or_known_to_wait(recipe, tmp_path):
    entry, *line = submitted(["bash", f"scripts/{recipe}.sh", "--lr", "3e-6"], tmp_path / "base")
    model = model_of(recipe)
    prepare(line, model)
    args, problems = read_args(line, entry=entry, passthrough={"sglang": server_flags, "router": router_flags})
    waiting = {name for spec in all_flag_specs() if spec.not_served for name in spec.on + spec.off} | ENGINES
    if recipe.endswith("-sft"):
        waiting |= SUPERVISED
    if NOT_SERVED.match(model):
        waiting |= {"--hf-checkpoint"}
    assert [problem for problem in problems if problem.flag not in waiting] == []
    assert args.lr == 3e-6  # the last one wins
    assert entry == "train_async.py" if recipe.endswith("-sft") else "train.py"


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_recipe_says_on_how_many_nodes_it_runs(recipe, tmp_path):
    _, *line = submitted(["bash", f"scripts/{recipe}.sh"], tmp_path / "base")
    nodes = int(value(line, "--actor-num-nodes"))
    if "--rollout-num-gpus" in line and nodes > 1:
        nodes += int(value(line, "--rollout-num-gpus")) // 8
    text = (ROOT / f"scripts/{recipe}.sh").read_text()
    assert ("on one machine with 8" in text) == (nodes == 1)
    if nodes > 1:
        assert f"on {nodes} machines with 8 GPUs each" in text and f"WORLD_SIZE={nodes}," in text


def test_the_guide_lists_every_recipe_and_nothing_else():
    listed = re.findall(r"^\| `(run-[\w.-]+)\.sh`", (ROOT / "docs/recipes.md").read_text(), re.MULTILINE)
    assert sorted(listed) == RECIPES
