"""The quickstart itself, whole: what a new user gets."""

import json
import shutil
import subprocess
import sys
import uuid
from pathlib import Path

import pytest

from tests.end_to_end import harness

ROOT = Path(__file__).resolve().parents[2]


def test_a_folder_that_holds_something_else_is_not_replaced():
    name = f"test-{uuid.uuid4().hex[:8]}"
    trained = ROOT / "runs" / name / "checkpoints"
    trained.mkdir(parents=True)
    try:
        command = ["bash", "scripts/quickstart.sh", "--run-name", name]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
        assert done.returncode == 2
        assert f"runs/{name} holds something else than a quickstart" in done.stderr
        assert trained.is_dir()
    finally:
        shutil.rmtree(trained.parent)


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_quickstart_learns_to_carry_and_leaves_only_its_folder(tmp_path):
    environment = Path(sys.prefix)
    stamp = environment / "installed"
    if not stamp.is_file() or not stamp.read_text().rstrip().endswith(f" {ROOT}"):
        pytest.skip(
            "only in an environment that scripts/setup.sh made here: the quickstart would install into this one"
        )
    name = f"test-{uuid.uuid4().hex[:8]}"
    run_dir = ROOT / "runs" / name
    try:
        started = harness.launch(
            ["bash", "scripts/quickstart.sh", "--run-name", name],
            log=tmp_path / "quickstart.out",
            run_dir=run_dir,
            cwd=ROOT,
            path="/usr/local/bin:/usr/bin:/bin",
            home=tmp_path,
            more={"VENV": str(environment)},
        )
        done = started.finish(800)
        assert done.code == 0, done.output[-6000:]
        assert done.summary["eval"]["before"] <= 0.5
        assert done.summary["eval"]["after"] >= 0.9
        assert len(done.summary["steps"]) == 30
        assert max(done.steps("train_rollout_logprob_abs_diff_mean")) < 1e-5
        assert max(done.steps("train_rollout_logprob_abs_diff_max")) < 1e-3
        assert json.loads((run_dir / "hf/config.json").read_text())["model_type"] == "qwen3"
        assert (run_dir / "reward.png").read_bytes().startswith(b"\x89PNG")
        assert done.left == []
        assert list(Path("/tmp").glob(f"slimrl-ray-{started.process.pid}-*")) == []
        assert "\x1b[" not in done.output  # no colour codes where there is no terminal
    finally:
        shutil.rmtree(run_dir, ignore_errors=True)
        (ROOT / "runs" / f".{name}.lock").unlink(missing_ok=True)
