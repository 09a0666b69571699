"""Launch scripts of slime users run unchanged: every flag is accepted, or rejected by name with an alternative."""

from __future__ import annotations

import io
import json
import shutil
import subprocess
from pathlib import Path

import PIL.Image
import pyarrow
import pyarrow.parquet
import pytest
import torch
from safetensors.torch import save_file

from slimrl.arguments import read_args
from slimrl.engines.sglang.server_args import router_flags, server_flags
from tests.arguments.conftest import CHATML, complete_model, make_checkpoint
from tests.compatibility import recipes
from tests.compatibility.recipes import RECIPES, Recipe

ROOT = Path(__file__).resolve().parents[2]
CONFIGS = ROOT / "tests/scripts/published_configs"
TABLES = {"sglang": server_flags, "router": router_flags}


def model_args(model: str) -> list[str]:
    """MODEL_ARGS as bash sees them after `source scripts/models/<model>.sh`."""
    script = f'source "scripts/models/{model}.sh" && printf "%s\\n" "${{MODEL_ARGS[@]}}"'
    run = subprocess.run(["bash", "-c", script], cwd=ROOT, capture_output=True, text=True, check=True, timeout=20)
    return run.stdout.split()


def folder_of(recipe: Recipe, folder: Path) -> Path:
    """A folder with the model, the reference and the datasets of the recipe."""
    (folder / "hf").mkdir()
    shutil.copy(CONFIGS / f"{recipe.model}.json", folder / "hf/config.json")
    complete_model(folder / "hf")
    (folder / "hf/chat_template.jinja").write_text(CHATML)
    make_checkpoint(folder / "torch_dist", "release")
    (folder / "roles.yaml").write_text(recipes.ROLES)
    (folder / "hf2").mkdir()
    shutil.copy(CONFIGS / "qwen3-0.6B.json", folder / "hf2/config.json")
    complete_model(folder / "hf2")
    for name, text in recipes.GROUPS.items():
        (folder / f"{name}.yaml").write_text(text.replace("DATA", str(folder)))
    row = json.dumps({"prompt": [{"role": "user", "content": "1+1"}], "label": "2"})
    for name in ("dapo-math-17k", "aime-2024"):
        (folder / f"{name}.jsonl").write_text(row + "\n")
    for name in ("gsm8k", "openhermes"):
        prompt = [{"role": "user", "content": "1+1"}]
        answered = prompt if name == "gsm8k" else [*prompt, {"role": "assistant", "content": "2"}]
        columns = {"messages": [answered], "prompt": [prompt], "label": ["2"]}
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / f"{name}.parquet")
    if recipe.decoder is not None:  # geo3k as published
        save_file({"x": torch.zeros(1)}, folder / "hf/model.safetensors")
        (folder / "hf/preprocessor_config.json").write_text("{}")
        made = io.BytesIO()
        PIL.Image.new("RGB", (56, 56)).save(made, "PNG")
        question = {"role": "user", "content": "<image>Find x."}
        columns = {"problem": [question["content"]], "answer": ["3"], "images": [[{"bytes": made.getvalue()}]]}
        columns["messages"] = [[question, {"role": "assistant", "content": "3"}]]
        pyarrow.parquet.write_table(pyarrow.table(columns), folder / "geo3k.parquet")
    return folder


@pytest.mark.parametrize("recipe", RECIPES.values(), ids=RECIPES.keys())
def test_slime_recipe_is_accepted_except_for_named_unsupported_flags(recipe: Recipe, tmp_path: Path):
    line = model_args(recipe.decoder or recipe.model) + recipe.flags.format(data=folder_of(recipe, tmp_path)).split()
    _, problems = read_args(line, entry=recipe.entry, passthrough=TABLES)
    assert {problem.flag for problem in problems} == set(recipe.refused), [str(problem) for problem in problems]
    for problem in problems:
        remedy = ("use", "give", "leave", "lower", "divide", "did you mean", "ends and can be resumed")
        assert any(word in str(problem) for word in remedy), problem


@pytest.mark.parametrize("recipe", [recipe for recipe in RECIPES.values() if recipe.refused], ids=lambda r: r.model)
def test_recipe_without_unsupported_flags_has_no_other_error(recipe: Recipe, tmp_path: Path):
    folder = folder_of(recipe, tmp_path)
    words = model_args(recipe.decoder or recipe.model) + recipe.flags.format(data=folder).split()
    kept, dropping = [], False
    for word in words:
        if word.startswith("--"):
            dropping = word in (*recipe.refused, *recipe.beside)
        if not dropping:
            kept.append(word)
    _, problems = read_args(
        [*kept, *recipe.instead.format(data=folder).split()], entry=recipe.entry, passthrough=TABLES
    )
    assert problems == []


def test_learning_rates_of_the_roles_are_those_of_policy_and_critic(tmp_path: Path):
    recipe = RECIPES["PPO, colocated, with a file of roles"]
    line = model_args(recipe.decoder or recipe.model) + recipe.flags.format(data=folder_of(recipe, tmp_path)).split()
    args, _ = read_args(line, passthrough=TABLES)
    assert (args.lr, args.critic_lr, args.critic_overrides, args.critic_num_gpus) == (1e-6, 1e-5, {}, 0)
    own = RECIPES["manual: PPO with a critic on GPUs of its own"]
    args, _ = read_args(model_args(own.model) + own.flags.format(data=tmp_path).split(), passthrough=TABLES)
    assert (args.actor_num_gpus, args.critic_num_gpus, args.rollout_num_gpus) == (4, 4, 8)
