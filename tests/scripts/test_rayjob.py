"""The script of a RayJob, run on the head of a real Ray cluster: the recipe starts once the cluster has its GPUs."""

from __future__ import annotations

import re
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.end_to_end import harness
from tests.tools.launching import documents
from tools import launch

ROOT = Path(__file__).resolve().parents[2]
pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
# As in a pod, Ray's programs find the cluster of this machine by the folder that they have in common. Unlike a pod's,
# this cluster listens on loopback alone, which the programs must know.
SCRIPT = """
set -euo pipefail
source scripts/lib/say.sh
source scripts/lib/ray.sh
ray_begin --num-gpus 2 --object-store-memory 100000000
mkdir "$HOME/tmp" && ln -s "$RAY_FOLDER/r" "$HOME/tmp/ray" && export RAY_TMPDIR=$HOME/tmp
export RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0
for file in "$@"; do
   bash "$file" && code=0 || code=$?
   echo "$(basename "$file") ended with $code"
done
"""
TIMEOUT_S = 10


def script_of_a_job(folder: Path, nodes: int) -> Path:
    """The ConfigMap's script for a job over `nodes` with two GPUs each, which gives up soon."""
    (folder / "run-own.sh").write_text('echo "recipe runs with $*"\n')
    resources = ["--nodes", str(nodes), "--gpus-per-node", "2", "--memory-gib", "4", "--shm-gib", "1"]
    pods = ["--image", "i", "--claim", "c", "--base", str(folder), "--max-restarts", "1"]
    words = ["kubernetes", *resources, *pods, "--", "bash", str(folder / "run-own.sh")]
    options = launch.parser().parse_args(words)
    config_map, _ = documents(launch.WRITERS["kubernetes"](launch.job_of(options), options))
    text = config_map["data"]["launch.sh"]
    assert text.count("cd /opt/slimrl\n") == 1 and text.count("--timeout-s 1800 &&") == 1
    text = text.replace("cd /opt/slimrl\n", f"cd {ROOT}\n").replace(
        "--timeout-s 1800 &&", f"--timeout-s {TIMEOUT_S} &&"
    )
    file = folder / f"launch{nodes}.sh"
    file.write_text(text)
    return file


def test_recipe_of_a_rayjob_starts_when_the_cluster_has_its_gpus_and_is_tried_again_when_it_has_not(tmp_path):
    files = [str(script_of_a_job(tmp_path, nodes)) for nodes in (1, 2)]
    done = harness.launch(
        ["bash", "-c", SCRIPT, "script", *files],
        log=tmp_path / "script.out",
        run_dir=tmp_path,
        cwd=ROOT,
        path=f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
        home=tmp_path,
    ).finish(200)
    assert done.code == 0, done.output
    enough, missing = done.output.split("launch1.sh ended with 0\n")
    assert f"recipe runs with --runs-dir {tmp_path}/runs\n" in enough and "restart" not in enough
    assert "recipe runs" not in missing
    said = re.findall(
        r"^slimrl: the Ray cluster has 2 of 4 GPUs after 10 s; its nodes: 127\.0\.0\.1$", missing, re.MULTILINE
    )
    assert len(said) == 2 and "exit code 75: restart 1 of at most 1" in missing
    assert missing.endswith("launch2.sh ended with 75\n")
    assert done.left == []


def test_wait_for_a_cluster_that_does_not_answer_is_limited(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        command = [sys.executable, str(ROOT / "scripts/lib/wait_for_gpus.py"), "--gpus", "1", "--timeout-s", "4"]
        variables = {"PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "RAY_ADDRESS": address}
        done = subprocess.run(command, env=variables, capture_output=True, text=True, timeout=60)
    assert done.returncode == 75, done.stderr
    assert "slimrl: no answer from the Ray cluster within 4 s" in done.stderr
