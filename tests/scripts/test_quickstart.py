"""The full quickstart, as a new user runs it."""

import json
import re
import shutil
import sys
import uuid
from pathlib import Path

import pytest

from tests.end_to_end import harness

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("options", [[], ["--ppo"]], ids=["GRPO", "PPO"])
def test_quickstart_learns_carrying_and_leaves_only_its_folder(tmp_path, options):
    environment = Path(sys.prefix)
    stamp = environment / "installed"
    if not stamp.is_file() or not stamp.read_text().rstrip().endswith(f" {ROOT}"):
        pytest.skip(
            "only in an environment that scripts/setup.sh made here: the quickstart would install into this one"
        )
    name = f"test-{uuid.uuid4().hex[:8]}"
    earlier = ROOT / "runs" / name
    (earlier / "checkpoints").mkdir(parents=True)
    run_dir = ROOT / "runs" / f"{name}_attempt_2"
    try:
        started = harness.launch(
            ["bash", "scripts/quickstart.sh", *options, "--run-name", name],
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
        assert "\x1b[" not in done.output  # no colour codes without a terminal
        assert f"runs/{name} exists and is kept" in done.output
        assert [path.name for path in earlier.iterdir()] == ["checkpoints"]
        kept = {path.name for path in (run_dir / "rollouts").iterdir()}
        assert kept == {f"{n}.jsonl" for n in range(20, 30)} | {f"eval_{n}.jsonl" for n in (0, 10, 20, 30)}
        lines = done.output.splitlines()
        assert max(len(line) for line in lines if re.search(r" step \d+ \|", line)) <= 100
        assert not re.search(r"INFO \S+\.py:\d+ -- |submitted successfully", done.output)  # Ray's own lines
        assert re.search(r"completed: evaluation addition from 0\.\d+ to (1|0\.9\d*).* over 30 steps in", done.output)
        assert lines[-1].split()[0] == "serve" and f"--model-path runs/{run_dir.name}/hf" in lines[-1]
    finally:
        for folder in (run_dir, earlier):
            shutil.rmtree(folder, ignore_errors=True)
