"""A recipe over two machines for the job files of tools/launch.py, and what its good end must not say."""

from __future__ import annotations

import re
import subprocess
import sys
import textwrap
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
RECIPE = """
cd {root}
source scripts/lib/say.sh
source scripts/lib/ray.sh
ray_begin --num-gpus 1 --object-store-memory 100000000
ray_job python3 {folder}/driver.py
"""
# Loses its first try, as a run that lost a process; the second one sees both nodes again.
FAILS_ONCE = """
import pathlib, sys, ray
ray.init(logging_level="error")
nodes = {node["NodeManagerAddress"] for node in ray.nodes()}
print("GPUs", ray.cluster_resources()["GPU"], "nodes", len(nodes), flush=True)
seen = pathlib.Path(__file__).with_name("tried")
if not seen.exists():
    seen.touch()
    sys.exit(75)
"""
# Ray's words when its control store, the GCS, ends before its other processes: a failure to a reader of the log.
RAY_ERRORS = re.compile(r"gcs|raylet|rpc|traceback|core dumped|node_died|marked dead", re.IGNORECASE)


def job_file(folder: Path, driver: str, *options: str) -> str:
    """The file that the tool writes for a recipe whose job is `driver`; all of it is in `folder`, which nodes share."""
    (folder / "driver.py").write_text(textwrap.dedent(driver))
    (folder / "run-two.sh").write_text(RECIPE.format(root=ROOT, folder=folder))
    words = [sys.executable, "tools/launch.py", *options, "--base", str(folder), "--nodes", "2"]
    words += ["--gpus-per-node", "1", "--memory-gib", "4", "--shm-gib", "1", "--", "bash", str(folder / "run-two.sh")]
    return subprocess.run(words, cwd=ROOT, capture_output=True, text=True, timeout=60, check=True).stdout
