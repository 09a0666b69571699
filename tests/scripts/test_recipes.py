"""All recipes submit command lines of known flags that fit the model, the data and the GPUs."""

import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from slimrl.arguments import read_args
from slimrl.arguments.namespace import all_flag_specs
from slimrl.cluster.command_line import early_problems
from slimrl.engines.sglang.server_args import router_flags, server_flags
from slimrl.observability.rollout_dump import read_dump
from tests.arguments.conftest import CHATML, complete_model
from tests.end_to_end import harness
from tests.mooncake import mooncake
from tests.scripts.test_models import NOT_SERVED, published
from tests.scripts.test_recipe import submitted
from tests.scripts.test_shell import run

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted(path.stem for path in ROOT.glob("scripts/run-*.sh"))


def model_of(recipe: str) -> str:
    (model,) = re.findall(r"^recipe_model (\S+) ", (ROOT / f"scripts/{recipe}.sh").read_text(), re.MULTILINE)
    return model


def value(line: list[str], flag: str) -> str:
    return line[line.index(flag) + 1]


def prepare(line: list[str], model: str) -> None:
    """Creates the files that the line names, empty, as docs/recipes.md downloads them."""
    checkpoint, reference = Path(value(line, "--hf-checkpoint")), Path(value(line, "--ref-load"))
    teachers = {Path(value(line, "--rm-model")): "qwen3-32B"} if "--rm-model" in line else {}
    for folder, name in {checkpoint: model, **teachers}.items():
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(published(name)))
        complete_model(folder)
        (folder / "chat_template.jinja").write_text(CHATML)
        if "vision_config" in published(name):
            (folder / "preprocessor_config.json").write_text("{}")
    (reference / "release").mkdir(parents=True, exist_ok=True)
    for name in ("metadata.json", ".metadata"):
        (reference / "release" / name).touch()
    (reference / "latest_checkpointed_iteration.txt").write_text("release")
    data = (word for word in line if word.endswith((".jsonl", ".parquet")) and not word.startswith("{run_dir}"))
    for path in map(Path, data):
        path.parent.mkdir(parents=True, exist_ok=True)
        talk = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]
        row = {"prompt": "1+1", "messages": talk, "label": "2", "chosen": "2", "rejected": "3"}
        rows = [row]
        if "kto" in line:
            rows = [{"prompt": "1+1", "completion": answer, "label": answer == "2"} for answer in "23"]
        if path.suffix == ".parquet":
            pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows), path)
        else:
            path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_is_accepted_unless_its_family_is_unsupported(recipe, tmp_path):
    entry, *line = submitted(["bash", f"scripts/{recipe}.sh", "--lr", "3e-6"], tmp_path / "base")
    model = model_of(recipe)
    prepare(line, model)
    args, problems = read_args(line, entry=entry, passthrough={"sglang": server_flags, "router": router_flags})
    refused = {spec.name for spec in all_flag_specs() if spec.refuses(vars(args)[spec.dest])} | {"--hf-checkpoint"}
    if NOT_SERVED.match(model):
        problems = [problem for problem in problems if problem.flag not in refused]
    assert problems == []
    assert args.lr == 3e-6  # the last one wins
    assert entry == "train_async.py" if recipe.endswith("-sft") else "train.py"


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_states_its_number_of_nodes(recipe, tmp_path):
    _, *line = submitted(["bash", f"scripts/{recipe}.sh"], tmp_path / "base")
    nodes = int(value(line, "--actor-num-nodes"))
    if "--rollout-num-gpus" in line and nodes > 1:
        nodes += int(value(line, "--rollout-num-gpus")) // 8
    text = (ROOT / f"scripts/{recipe}.sh").read_text()
    assert ("on one machine with 8" in text) == (nodes == 1)
    if nodes > 1:
        assert f"on {nodes} machines with 8 GPUs each" in text and f"WORLD_SIZE={nodes}," in text


def test_guide_lists_exactly_the_recipes():
    listed = re.findall(r"^\| `(run-[\w.-]+)\.sh`", (ROOT / "docs/recipes.md").read_text(), re.MULTILINE)
    assert sorted(listed) == RECIPES


def places(tmp_path: Path, folder: Path) -> dict[str, object]:
    """Where a recipe runs; `folder` is removed: if it exists, the recipe uses another one."""
    shutil.rmtree(folder, ignore_errors=True)
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    return {"log": tmp_path / "recipe.out", "run_dir": folder, "cwd": ROOT, "path": path, "home": tmp_path}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_kto_recipe_learns_the_labels_of_unseen_answers_on_the_cpu(tmp_path):
    folder = ROOT / "runs/run-qwen3-4B-kto-tiny"
    started = harness.launch(
        ["bash", "scripts/run-qwen3-4B-kto.sh", "--tiny", "--seed", "7"], **places(tmp_path, folder)
    )
    done = started.finish(380)
    assert done.code == 0, done.output
    assert done.left == []
    first, *_, last = (entry["metrics"] for entry in done.summary["eval"]["history"])
    assert first["eval/held-out-loss"] == 0.5 and first["eval/held-out"] == 0  # policy and reference are equal
    assert last["eval/held-out-loss"] < 0.4 and last["eval/held-out"] > 0.7 and last["eval/held-out-reward_margin"] > 1
    shutil.rmtree(folder)


SHORT = ["--num-rollout", "10", "--eval-interval", "5"]


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("recipe", "flags"),
    [
        ("run-qwen2.5-VL-3B-geo3k", []),
        ("run-qwen2.5-VL-3B-geo3k", ["--lora-rank", "16", "--lr", "3e-3"]),
        ("run-qwen2.5-VL-3B-geo3k", ["--multimodal-keys", '{"video": "videos"}', *SHORT]),
        ("run-qwen2.5-VL-3B-geo3k-multi-turn", SHORT),
        ("run-qwen3-VL-30B-A3B-geo3k", SHORT),
    ],
    ids=["tower and decoder", "adapters of the decoder", "films", "several turns", "experts"],
)
def test_recipe_with_images_learns_to_count_squares_on_the_cpu(recipe: str, flags: list[str], tmp_path):
    """The model has to see the pictures, and engines the trained tower: half of the answers are right at first."""
    folder = ROOT / f"runs/{recipe}-tiny"
    command = ["bash", f"scripts/{recipe}.sh", "--tiny", "--seed", "7", *flags]
    done = harness.launch(command, **places(tmp_path, folder)).finish(580)
    assert done.code == 0, done.output
    assert done.left == []
    first, *_, last = (entry["metrics"] for entry in done.summary["eval"]["history"])
    assert first["eval/squares"] <= 0.5 and last["eval/squares"] >= 0.9
    assert max(done.steps("train_rollout_logprob_abs_diff_max")) < 1e-4
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_recipe_trains_a_toy_of_its_family_on_the_cpu(tmp_path):
    folder = ROOT / "runs/run-qwen3-30B-A3B-tiny"
    started = harness.launch(
        ["bash", "scripts/run-qwen3-30B-A3B.sh", "--tiny", "--seed", "7"], **places(tmp_path, folder)
    )
    done = started.finish(380)
    assert done.code == 0, done.output
    assert done.left == []
    assert done.steps("weight_version") == ["0", "1"]
    assert max(done.steps("train_rollout_logprob_abs_diff_max")) < 1e-4
    assert sorted(path.name for path in (folder / "rollouts").iterdir()) == [
        *("0.jsonl", "1.jsonl", "eval_0.jsonl", "eval_2.jsonl")
    ]
    assert not re.search(r"INFO \S+\.py:\d+ -- |submitted successfully|ray job", done.output)  # Ray's own lines
    lines = done.output.splitlines()
    assert any(re.match(r"\d\d:\d\d:\d\d completed: .* over 2 steps in ", line) for line in lines)
    assert lines[-1].split()[0] == "export"  # the last lines show how to continue
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("recipe", "steps", "loss", "norm"),
    [
        ("run-qwen3-4B-base-sft", 4, "loss", "grad_norm"),
        ("run-qwen3-4B-rm", 4, "loss", "grad_norm"),
        ("run-qwen3-4B-dpo", 4, "loss", "grad_norm"),
        ("run-qwen3-4B-ppo", 2, "critic-value_loss", "critic-grad_norm"),  # the first step is the critic's alone
        ("run-qwen3-8B-opd", 2, "loss", "grad_norm"),
        ("run-qwen3-8B-math-fsdp", 2, "loss", "grad_norm"),
    ],
)
def test_recipe_of_every_algorithm_trains_on_the_cpu(recipe: str, steps: int, loss: str, norm: str, tmp_path):
    folder = ROOT / f"runs/{recipe}-tiny"
    command = ["bash", f"scripts/{recipe}.sh", "--tiny", "--seed", "7", "--num-rollout", str(steps)]
    done = harness.launch(command, **places(tmp_path, folder)).finish(380)
    assert done.code == 0, done.output
    assert done.left == []
    losses, norms = done.steps(loss), done.steps(norm)
    assert len(losses) == steps and all(map(math.isfinite, losses)) and min(norms) > 0, (losses, norms)
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_recipe_with_groups_of_engines_asks_its_frozen_judge_on_the_cpu(tmp_path):
    folder = ROOT / "runs/run-qwen3-4B-judge-tiny"
    started = harness.launch(
        ["bash", "scripts/run-qwen3-4B-judge.sh", "--tiny", "--seed", "7"], **places(tmp_path, folder)
    )
    done = started.finish(380)
    assert done.code == 0, done.output
    assert done.left == []
    assert done.steps("weight_version") == ["0", "1"]
    assert max(done.steps("train_rollout_logprob_abs_diff_max")) < 1e-4
    assert {"sglang0.log", "sglang1.log", "sglang_judge-0.log"} <= {path.name for path in (folder / "logs").iterdir()}
    for rollout in range(2):
        samples = read_dump(folder / f"rollouts/{rollout}.jsonl").samples
        assert len(samples) == 64
        for sample in samples:
            by_rule = re.search(r"\\boxed\{(\d+)\}", sample.response)
            right = by_rule is not None and int(by_rule[1]) == int(sample.label)
            assert ("judge" in sample.metadata) != right  # asked about the others only
            assert sample.reward == float(right or sample.metadata["judge"].strip().lower().startswith("yes"))
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_recipe_with_prefill_and_decode_servers_trains_on_the_cpu(tmp_path, tmp_path_factory):
    folder = ROOT / "runs/run-qwen3-4B-pd-tiny"
    started = harness.launch(
        ["bash", "scripts/run-qwen3-4B-pd.sh", "--tiny", "--seed", "7"],
        **places(tmp_path, folder),
        more=mooncake(tmp_path_factory),
    )
    done = started.finish(380)
    assert done.code == 0, done.output
    assert done.left == []
    assert done.steps("weight_version") == ["0", "1"]
    assert max(done.steps("train_rollout_logprob_abs_diff_max")) < 1e-4
    prefill, decode = ((folder / f"logs/sglang{server}.log").read_text() for server in (0, 1))
    assert "'disaggregation_mode': 'prefill'" in prefill and "'disaggregation_mode': 'decode'" in decode
    shutil.rmtree(folder)


# Replaces Python: keeps the flags that a recipe checks before it makes anything, and refuses them.
RECORDER = f"""#!/usr/bin/env bash
[[ $* == *slimrl.cluster.command_line* ]] || exec {sys.executable} "$@"
printf '%s\\0' "$@" >"$CHECKED/options"
cat >"$CHECKED/flags"
exit 2
"""


@pytest.mark.parametrize("recipe", [name for name in RECIPES if not NOT_SERVED.match(model_of(name))])
def test_flags_of_a_toy_fit_each_other(recipe, tmp_path):
    (tmp_path / "python3").write_text(RECORDER)
    (tmp_path / "python3").chmod(0o755)
    environment = {"PATH": f"{tmp_path}:/usr/local/bin:/usr/bin:/bin", "CHECKED": str(tmp_path)}
    command = ["bash", f"scripts/{recipe}.sh", "--tiny"]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2, done.stderr
    options = (tmp_path / "options").read_text().split("\0")
    entry, folder = value(options, "--entry"), Path(value(options, "--made-later"))
    flags = (tmp_path / "flags").read_text().split("\0")[:-1]
    assert early_problems(flags, entry, folder, {"sglang": server_flags, "router": router_flags}) == []


def test_recipe_of_a_family_without_a_toy_reports_it(tmp_path):
    refused = run("bash", "scripts/run-minimax-m2.sh", "--tiny")
    assert refused.returncode == 2
    assert "run-minimax-m2 is for a model that this version does not support, so it has no toy" in refused.stderr


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipe_prints_help(recipe):
    shown = run("bash", f"scripts/{recipe}.sh", "--help")
    assert shown.returncode == 0 and shown.stderr == ""
    assert f"bash scripts/{recipe}.sh" in shown.stdout and "shellcheck" not in shown.stdout
