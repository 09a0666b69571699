"""Job files of schedulers: valid by the schedulers' own schemas, with the resources of the recipe's plan."""

from __future__ import annotations

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import jsonschema
import pytest
import yaml

from slimrl.arguments.dry_run import NodeResources
from tests.tools.launching import (
    GIB,
    KINDS,
    PODS,
    RECIPE,
    SCHEMAS,
    documents,
    pods,
    resources,
    script_of_a_node,
    written,
)
from tools import launch
from tools.launchers import job as job_module

ROOT = Path(__file__).resolve().parents[2]
NETWORK = {
    "GLOO_SOCKET_IFNAME": "eth0",
    "NCCL_SOCKET_IFNAME": "eth0",
    "NCCL_IB_HCA": "mlx5_0,mlx5_1",
    "NCCL_DEBUG": "INFO",
}
OF_NETWORK = ["--network-interface", "eth0", "--ib-devices", "mlx5_0,mlx5_1", "--env", "NCCL_DEBUG=INFO"]


@pytest.mark.parametrize("kind", KINDS[:2], ids=["rayjob", "raycluster"])
def test_pods_of_ray_have_the_variables_of_the_network(kind):
    """`ray start` must have them: a job's variables do not reach other nodes."""
    scheduler, *options = kind
    _, document = documents(written(scheduler, *options, *PODS, *OF_NETWORK))
    for _, pod in pods(document):
        values = {one["name"]: one.get("value") for one in pod["containers"][0]["env"]}
        assert values.items() >= NETWORK.items()


@pytest.mark.parametrize("scheduler", ["pytorchjob", "slurm", "skypilot"])
def test_script_of_every_node_sets_the_variables_of_the_network(scheduler, tmp_path):
    script, variables = script_of_a_node(scheduler, tmp_path, *OF_NETWORK)
    lines = bash(script, tmp_path, resume="env", **variables)
    assert dict(line.split("=", 1) for line in lines if "=" in line).items() >= NETWORK.items()


WORDS = r'''printf "%s\n" "$@" "BASE=$BASE" "VALUE=${VALUE:-}" "PORT=$RAY_PORT"'''


def bash(script: str, folder: Path, *, resume: str = WORDS, **variables: str) -> list[str]:
    """The lines of a node's script with the command `resume` for scripts/resume.sh, by default one per word."""
    (folder / "scripts").mkdir()
    (folder / "scripts/resume.sh").write_text(resume)
    done = subprocess.run(
        ["bash", "-c", script],
        env={"PATH": os.environ["PATH"], **variables},
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=20,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def test_script_of_a_node_runs_the_recipe_with_its_words_unchanged(tmp_path):
    hostile = "a b'c\"$HOME`id`"
    command = ["--", "bash", "scripts/run-qwen3-4B.sh", "--run-name", hostile]
    options = [*PODS, "--env", f"VALUE={hostile}", "--project", str(tmp_path), "--max-restarts", "3", "--port", "7000"]
    script, _ = documents(written("pytorchjob", *options, command=command))
    words = bash(script["data"]["launch.sh"], tmp_path)
    assert words[:5] == ["--max-restarts", "3", "--rejoin-timeout-s", "1800", "--"]
    assert words[5:-3] == [*command[1:], "--runs-dir", "/data/runs"]
    assert words[-3:] == ["BASE=/data", f"VALUE={hostile}", "PORT=7000"]


def test_ray_job_waits_for_its_gpus_before_each_try(tmp_path):
    script, _ = documents(written("kubernetes", *PODS, nodes=2))
    words = bash(script["data"]["launch.sh"].replace("cd /opt/slimrl\n", ""), tmp_path)
    start = words.index("--") + 1
    command = words[start:-3]
    assert command[:2] == ["bash", "-c"] and command[2].startswith("python3 scripts/lib/wait_for_gpus.py --gpus 16 ")
    ready = command[2].replace("python3 scripts/lib/wait_for_gpus.py", "echo waited")
    last = ["printf", "%s\n", "a b", "$c"]
    done = subprocess.run(["bash", "-c", ready, command[3], *last], capture_output=True, text=True, timeout=10)
    assert done.stdout == "waited --gpus 16 --timeout-s 1800\na b\n$c\n"


def test_path_of_tensorboard_comes_from_the_environment(tmp_path):
    script, _ = documents(written("pytorchjob", *PODS, "--project", str(tmp_path)))
    words = bash(script["data"]["launch.sh"], tmp_path, AIHC_TENSORBOARD_LOG_PATH="/logs/a b")
    assert words[-5:-3] == ["--tensorboard-dir", "/logs/a b"]


@pytest.mark.parametrize("nodes", [1, 2])
@pytest.mark.parametrize("install", [["--image", "registry/slimrl:1"], ["--setup", "pip install -e ."]])
def test_skypilot_task_restarts_lost_runs_only(install, nodes):
    options = ["--accelerator", "H100", "--base", "/data", "--bucket", "s3://data", "--secret", "HF_TOKEN"]
    task = yaml.safe_load(written("skypilot", *options, *install, nodes=nodes))
    jsonschema.validate(task, SCHEMAS["skypilot"])
    assert task["num_nodes"] == nodes and task["resources"]["accelerators"] == "H100:8"
    assert task["resources"]["memory"] == "800+"
    assert task["resources"]["job_recovery"] == {"strategy": "FAILOVER", "max_restarts_on_errors": 0}
    assert task["secrets"] == {"HF_TOKEN": None, **({"RAY_AUTH_TOKEN": None} if nodes > 1 else {})}
    assert ("setup" in task) == (install[0] == "--setup")


def test_skypilot_task_sets_the_node_numbers(tmp_path):
    task = yaml.safe_load(
        written("skypilot", "--accelerator", "H100", "--image", "i", "--base", "/data", "--bucket", "s3://b")
    )
    run = task["run"].replace("exec bash", 'echo "$WORLD_SIZE $RANK $MASTER_ADDR ${RAY_ADDRESS:-}"; exec bash')
    nodes = {"SKYPILOT_NUM_NODES": "2", "SKYPILOT_NODE_RANK": "1", "SKYPILOT_NODE_IPS": "10.0.0.1\n10.0.0.2"}
    assert bash(run, tmp_path, RAY_ADDRESS="127.0.0.1:6380", **nodes)[0] == "2 1 10.0.0.1 "


def test_slurm_file_asks_for_the_nodes_of_the_plan():
    text = written("slurm", "--time", "1-00:00:00", "--partition", "gpu", "--base", "/data", "--sbatch=--qos=high")
    words = set(re.findall(r"^#SBATCH (\S+)$", text, re.MULTILINE))
    assert words >= {
        *("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8", "--mem=800G", "--time=1-00:00:00"),
        *("--partition=gpu", "--exclusive", "--requeue", "--signal=B:TERM@300", "--qos=high"),
    }
    assert subprocess.run(["bash", "-n", "-c", text], timeout=10).returncode == 0
    with_gres = written("slurm", "--time", "1:00:00", "--gpus-as", "gres", "--cpus", "96", "--base", "/data")
    assert "#SBATCH --gres=gpu:8\n" in with_gres and "#SBATCH --cpus-per-task=96\n" in with_gres


def test_resources_are_those_of_the_recipe_s_plan(tmp_path, monkeypatch, capsys):
    """A script that takes the flags of a recipe, since a real one needs the model's files."""
    recipe = tmp_path / "run-own.sh"
    fields = {"nodes": 3, "gpus_per_node": 4, "memory_bytes": 100 * GIB, "shared_memory_bytes": 24 * GIB}
    recipe.write_text(
        'echo "$BASE $*" >"$(dirname "$0")/called"\nwhile (($# > 1)); do if [[ $1 == --dry-run-resources ]]; then'
        f" echo '{json.dumps(fields)}' >\"$2\"; fi; shift; done\n"
    )
    monkeypatch.setenv("WORLD_SIZE", "2")
    file = tmp_path / "job.yaml"
    options = [*PODS, "--gpu-memory-gib", "80", "--output", str(file), "--", "bash", str(recipe), "--lr", "1e-6"]
    assert launch.main(["pytorchjob", *options]) == 0
    assert re.match(
        r"/data --lr 1e-6 --dry-run --dry-run-resources \S+ --gpu-memory-gib 80$", (tmp_path / "called").read_text()
    )
    _, document = documents(file.read_text())
    assert sum(number for number, _ in pods(document)) == 3
    assert document["metadata"]["name"] == "own"


def test_plan_that_is_rejected_is_shown(tmp_path, capsys):
    (tmp_path / "run-own.sh").write_text('echo "--lr: too high" >&2; exit 2\n')
    assert launch.main(["pytorchjob", *PODS, "--", "bash", str(tmp_path / "run-own.sh")]) == 2
    said = capsys.readouterr().err
    assert "--lr: too high" in said and "--nodes, --gpus-per-node, --memory-gib and --shm-gib" in said


def test_real_recipe_without_its_model_is_rejected_by_name(tmp_path, capsys):
    options = ["--image", "i", "--claim", "c", "--base", str(tmp_path), "--", "bash", "scripts/run-qwen3-4B.sh"]
    assert launch.main(["pytorchjob", *options]) == 2
    assert f"{tmp_path}/Qwen3-4B" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "secret"),
    [("HF_TOKEN", True), ("WANDB_API_KEY", True), ("AWS_SECRET_ACCESS_KEY", True), ("TOKENIZERS_PARALLELISM", False)],
)
def test_variable_is_a_secret_by_the_words_of_its_name(name, secret, capsys):
    code = launch.main(["pytorchjob", *PODS, *resources(1), "--env", f"{name}=x", *RECIPE])
    assert (code == 2) is secret


def test_step_of_slurm_has_all_cores_of_a_node():
    text = written("slurm", "--time", "1:00:00", "--base", "/data", "--image", "registry/slimrl:1")
    (line,) = [line for line in text.splitlines() if line.startswith("srun ")]
    assert '--cpus-per-task="${SLURM_CPUS_PER_TASK:-$SLURM_CPUS_ON_NODE}" --cpu-bind=none' in line
    assert "--container-image=registry/slimrl:1 --container-mounts=/data:/data" in line


BAD = {
    "all at once": (
        ["--name", "My_Job", "--port", "40000", "--max-restarts", "-1", "--base", "data", "--env", "HF_TOKEN=hf_x"],
        ["--name My_Job", "--port 40000", "--max-restarts -1", "--base data", "--secret HF_TOKEN=SECRET:KEY"],
    ),
    "part of the resources": (["--nodes", "2"], ["give all four"]),
    "no recipe": (["--", "python3", "train.py"], ["no recipe: give bash scripts/run-"]),
    "toy": (["--", "bash", "scripts/run-qwen3-4B.sh", "--tiny"], ["--tiny: runs on this machine's CPU"]),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_options_are_refused_with_the_fix(name, capsys):
    options, sentences = BAD[name]
    given = [] if name == "part of the resources" else resources(2)
    command = [] if "--" in options else RECIPE
    assert launch.main(["pytorchjob", "--image", "i", "--claim", "c", *given, *options, *command]) == 2
    said = capsys.readouterr().err
    for sentence in sentences:
        assert sentence in said


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (["kubernetes", "--image", "i"], "--claim: checkpoints must survive a pod"),
        (["kubernetes", *PODS, "--queue", "q"], "--queue q is of volcano or kueue: give --gang-scheduler."),
        (["kubernetes", *PODS, "--secret", "HF_TOKEN"], "--secret HF_TOKEN: give the Kubernetes secret and its key"),
        (["kubernetes", *PODS, "--project", "/data/slimrl"], "--project /data/slimrl: the job's program runs with"),
        (["kubernetes", *PODS, "--rejoin-timeout-s", "0"], "--rejoin-timeout-s 0: give 1 or more."),
        (["skypilot", "--accelerator", "H100", "--image", "i"], "--bucket: checkpoints must survive a machine"),
        (["slurm", "--time", "1:00", "--secret", "HF_TOKEN"], "--secret HF_TOKEN: Slurm has no secrets"),
    ],
)
def test_option_that_a_scheduler_would_ignore_is_refused(words, sentence, capsys):
    assert launch.main([*words, *resources(1), *RECIPE]) == 2
    assert sentence in capsys.readouterr().err


def test_value_of_a_secret_is_not_printed(capsys):
    launch.main(["pytorchjob", *PODS, *resources(1), "--env", "MY_PASSWORD=s3cret", *RECIPE])
    assert "s3cret" not in capsys.readouterr().err


def test_skypilot_needs_an_image_or_a_command_that_installs(capsys):
    assert launch.main(["skypilot", "--accelerator", "H100", "--bucket", "s3://b", *resources(1), *RECIPE]) == 2
    assert "either --image with slimrl, or --setup" in capsys.readouterr().err


def test_exit_code_of_a_lost_run_is_the_same_everywhere():
    from slimrl.cluster.command_line import EXIT_RESUMABLE

    assert job_module.RESUMABLE == EXIT_RESUMABLE
    for file in ("ray_cluster.py", "ray_job.py"):
        assert f"EXIT_RESUMABLE = {EXIT_RESUMABLE} " in (ROOT / "scripts/lib" / file).read_text()
    resume = (ROOT / "scripts/resume.sh").read_text()
    assert f" {EXIT_RESUMABLE} " in resume
    (no_head,) = re.findall(r"^EXIT_NO_HEAD = (\d+)$", (ROOT / "scripts/lib/ray_node.py").read_text(), re.MULTILINE)
    assert f"\nNO_HEAD={no_head} " in resume and int(no_head) == os.EX_UNAVAILABLE


def test_tool_runs_from_the_command_line():
    command = [sys.executable, "tools/launch.py", "slurm", "--time", "1:00:00", *resources(1), *RECIPE]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0 and done.stdout.startswith("#!/usr/bin/env bash\n#SBATCH --job-name=glm4-7-30b-a3b\n")


SCHEDULERS = ("kubernetes", "pytorchjob", "slurm", "skypilot")


def test_files_of_the_documentation_are_what_the_tool_writes():
    for scheduler in SCHEDULERS:
        page = (ROOT / f"docs/launch-{scheduler}.md").read_text()
        (shown,) = re.findall(
            r"```bash\n(python tools/launch\.py (?:[^\n]*\\\n)+[^\n]*)\n```\n\n```\w+\n(.*?)```", page, re.DOTALL
        )
        command, text = shown
        assert command.startswith(f"python tools/launch.py {scheduler} ")
        words = shlex.split(command.replace("\\\n", " "))[2:]
        options = launch.parser().parse_args(words)
        assert launch.WRITERS[options.scheduler](launch.job_of(options), options) == text


def test_resources_survive_their_file(tmp_path):
    one = NodeResources(2, 8, 5, 3)
    one.write(tmp_path / "a.json")
    assert NodeResources.read(tmp_path / "a.json") == one
