"""scripts/run-qwen3-4B.sh and its short form in the README submit valid command lines."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from slimrl.arguments import Arguments, read_args
from slimrl.engines.sglang.server_args import router_flags, server_flags
from tests.arguments.conftest import complete_model

ROOT = Path(__file__).resolve().parents[2]
# config.json of Qwen/Qwen3-4B on the Hugging Face Hub
QWEN3_4B = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "max_position_embeddings": 40960,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
# Replace Ray's command and Python: print the job instead of submitting it, and check no flags.
RAY = """#!/usr/bin/env bash
while [[ $1 != -- ]]; do shift; done
printf '%s\\0' "${@:2}" >"$SUBMITTED"
"""
PYTHON = f"""#!/usr/bin/env bash
case $* in
   *scripts/lib/ray_job.py*) exec ray "$@" ;;
   '-m slimrl.cluster.command_line '*) ;;
   *) exec {sys.executable} "$@" ;;
esac
"""


@pytest.fixture
def base(tmp_path) -> Path:
    """The folder with empty model, reference checkpoint and data files, laid out as in docs/quickstart.md."""
    folder = tmp_path / "base"
    for name in ("Qwen3-4B", "Qwen3-4B_torch_dist/release", "dapo-math-17k", "aime-2024"):
        (folder / name).mkdir(parents=True)
    for name in ("metadata.json", ".metadata"):
        (folder / "Qwen3-4B_torch_dist/release" / name).touch()
    (folder / "Qwen3-4B/config.json").write_text(json.dumps(QWEN3_4B))
    complete_model(folder / "Qwen3-4B", tokens=151669)
    (folder / "Qwen3-4B_torch_dist/latest_checkpointed_iteration.txt").write_text("release")
    row = json.dumps({"prompt": [{"role": "user", "content": "1+1"}], "label": "2"})
    for name in ("dapo-math-17k", "aime-2024"):
        (folder / name / f"{name}.jsonl").write_text(row + "\n")
    return folder


def submitted(command: list[str], base: Path) -> list[str]:
    """The entry point and its arguments that `command` would run as a Ray job on the cluster at RAY_ADDRESS."""
    stand_ins, job = base.parent / "bin", base.parent / "job"
    stand_ins.mkdir()
    for name, text in (("ray", RAY), ("python3", PYTHON)):
        (stand_ins / name).write_text(text)
        (stand_ins / name).chmod(0o755)
    environment = {
        "PATH": f"{stand_ins}:/usr/local/bin:/usr/bin:/bin",
        "BASE": str(base),
        "RAY_ADDRESS": "http://127.0.0.1:1",
        "SUBMITTED": str(job),
    }
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr
    python, *line = job.read_text().split("\0")[:-1]
    assert python == "python3"
    return line


def accepted(line: list[str]) -> Arguments:
    entry, *argv = line
    args, problems = read_args(argv, entry=entry, passthrough={"sglang": server_flags, "router": router_flags})
    assert problems == []
    return args


def test_recipe_colocates_on_all_8_gpus(base):
    line = submitted(["bash", "scripts/run-qwen3-4B.sh"], base)
    args = accepted(line)
    assert line[0] == "train.py" and args.colocate
    assert (args.actor_num_gpus, args.rollout_num_gpus, args.data_parallel_size) == (8, 8, 4)
    assert args.sglang_options == {"mem_fraction_static": 0.7}
    assert args.global_batch_size == 32 * 8


@pytest.mark.parametrize(("option", "entry"), [("--split", "train.py"), ("--async", "train_async.py")])
def test_recipe_trains_on_2_gpus_and_generates_on_6(option, entry, base):
    line = submitted(["bash", "scripts/run-qwen3-4B.sh", option], base)
    args = accepted(line)
    assert line[0] == entry and not args.colocate
    assert (args.actor_num_gpus, args.rollout_num_gpus, args.data_parallel_size) == (2, 6, 1)
    assert args.sglang_options == {"mem_fraction_static": 0.8}


def test_extra_arguments_override_the_recipe(base):
    args = accepted(submitted(["bash", "scripts/run-qwen3-4B.sh", "--split", "--lr", "2e-6"], base))
    assert args.lr == 2e-6


def test_short_readme_command_is_accepted_in_both_placements(base):
    readme = (ROOT / "README.md").read_text()
    (script,) = (block for block in re.findall(r"```bash\n(.*?)```", readme, re.DOTALL) if "PERF_ARGS=(" in block)
    colocated = "--actor-num-nodes 1 --actor-num-gpus-per-node 8 --colocate"
    (split,) = re.findall(r"^ *(--actor-num-nodes 1 --actor-num-gpus-per-node 2 [^\\\n]*)", readme, re.MULTILINE)
    assert colocated in script
    line = submitted(["bash", "-euc", script.replace("/root", str(base))], base)
    assert (accepted(line).actor_num_gpus, accepted(line).rollout_num_gpus) == (8, 8)
    wanted = colocated.split()
    start = line.index(wanted[0])
    assert line[start : start + len(wanted)] == wanted
    line[start : start + len(wanted)] = split.split()
    assert (accepted(line).actor_num_gpus, accepted(line).rollout_num_gpus) == (2, 6)


@pytest.mark.parametrize(("module", "is_there"), [("my_reward", True), ("absent_reward", False)])
def test_custom_function_may_be_in_the_folder_that_the_recipe_was_started_from(module, is_there, tmp_path):
    (tmp_path / "my_reward.py").write_text("async def score(args, sample):\n    return 1.0\n")
    path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    refused = subprocess.run(
        ["bash", str(ROOT / "scripts/run-qwen3-4B.sh"), "--custom-rm-path", f"{module}.score"],
        cwd=tmp_path,
        env={**os.environ, "PATH": path, "BASE": str(tmp_path / "base")},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert refused.returncode == 2 and "--hf-checkpoint" in refused.stderr
    assert ("there is no module" in refused.stderr) is not is_there
