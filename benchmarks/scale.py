"""What more engines cost a run: the real driver, manager, trainer and sglang-router, with instant engines.

    OMP_NUM_THREADS=1 python benchmarks/scale.py [--engines 8 64 512] [--ranks 1] [--steps 5] [--json FILE]

Runs `train.py` once per number of engines: a tiny model on `--ranks` training ranks, `--samples-per-engine` samples per
engine and step, weight updates from disk (which the engines of instant_engines.py acknowledge without reading). So what
is left is control: prompts, requests, answers, weight updates, health. Prints, per number of engines:

- start: seconds from the start of train.py to its first rollout
- update: seconds of a weight update (median over the steps after the first), and HTTP calls per engine in it
- CPU of the driver, the rollout manager, the router and the training rank in milliseconds per step and engine
- memory of the manager

and writes them to FILE, which scale_model.py reads. Engines and run share this machine's cores, so that seconds include
the engines' own work. control_ranks.py and engine_calls.py measure training ranks and the calls of a weight update on
their own.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path

import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
PROCESSES = {"driver": "train.py", "manager": "RolloutManager", "router": "sglang::router", "rank": "train_process"}
RUN_TIMEOUT_S = 900.0


@dataclasses.dataclass(frozen=True)
class Measured:
    """One run; CPU in milliseconds per step and engine."""

    engines: int
    start_s: float
    update_s: float
    rollout_s: float
    calls: float
    cpu_ms: dict[str, float]
    manager_gib: float


def shell_array(folder: Path) -> list[str]:
    """MODEL_ARGS of a tiny model."""
    script = f"source '{folder}/model_args.sh'; printf '%s\\n' \"${{MODEL_ARGS[@]}}\""
    return subprocess.run(["bash", "-c", script], check=True, capture_output=True, text=True).stdout.split()


def make_model(folder: Path) -> None:
    """A random tiny model, and its Megatron checkpoint beside it."""
    program = [sys.executable, str(ROOT / "tools/make_tiny_model.py"), "--output-dir", str(folder / "tiny")]
    subprocess.run([*program, "--warm-start-steps", "0"], check=True, capture_output=True)
    convert = [sys.executable, str(ROOT / "tools/convert_hf_to_torch_dist.py"), *shell_array(folder / "tiny")]
    source = ["--hf-checkpoint", str(folder / "tiny/model"), "--save", str(folder / "torch_dist")]
    subprocess.run([*convert, *source], check=True, capture_output=True)


def flags(folder: Path, addresses: list[str], options: argparse.Namespace) -> list[str]:
    """The command line of one run."""
    tiny, samples = folder / "tiny", options.samples_per_engine * len(addresses)
    line = f"""--hf-checkpoint {tiny}/model --ref-load {folder}/torch_dist --prompt-data {tiny}/train.jsonl
     --input-key prompt --label-key label --apply-chat-template --rm-type math --num-rollout {options.steps}
     --rollout-batch-size {samples // 8} --n-samples-per-prompt 8 --rollout-max-response-len 16
     --use-dynamic-batch-size --max-tokens-per-gpu 8192 --advantage-estimator grpo --lr 0
     --actor-num-nodes 1 --actor-num-gpus-per-node {options.ranks} --update-weight-transport disk
     --update-weight-disk-dir {folder}/weights --run-name run --runs-dir {folder}/runs"""
    return [*shell_array(tiny), *line.split(), "--rollout-external-engine-addrs", *addresses]


def cpu_seconds(root: psutil.Process) -> dict[str, float]:
    """CPU time so far of each kind of process of a run."""
    found = dict.fromkeys(PROCESSES, 0.0)
    for process in [root, *root.children(recursive=True)]:
        try:
            line, times = " ".join(process.cmdline()), process.cpu_times()
        except psutil.NoSuchProcess:
            continue
        for name, word in PROCESSES.items():
            if word in line and (name != "driver" or process.pid == root.pid):
                found[name] += times.user + times.system
    return found


def run(folder: Path, engines: int, options: argparse.Namespace) -> Measured:
    """One run with so many engines."""
    program = [sys.executable, str(ROOT / "benchmarks/instant_engines.py"), "--engines", str(engines)]
    served = subprocess.Popen(
        [*program, "--model-path", str(folder / "tiny/model")],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert served.stdout is not None
    addresses = json.loads(served.stdout.readline())["addresses"]
    (folder / "weights").mkdir(exist_ok=True)
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    try:
        return _measured(folder, addresses, options, environment)
    finally:
        served.communicate("")
        shutil.rmtree(folder / "runs", ignore_errors=True)


def _measured(folder: Path, addresses: list[str], options: argparse.Namespace, environment: dict[str, str]) -> Measured:
    engines, began = len(addresses), time.monotonic()
    process = subprocess.Popen(
        [sys.executable, "train.py", *flags(folder, addresses, options)],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert process.stdout is not None
    start, before, after, lines = 0.0, {}, {}, []
    counts: dict[str, int] = {}
    for line in process.stdout:
        lines.append(line)
        if "running rollouts" in line:
            start = time.monotonic() - began
        if " step 0 |" in line:
            before, counts = cpu_seconds(psutil.Process(process.pid)), _counts(addresses[0])
        if f" step {options.steps - 1} |" in line:
            after = cpu_seconds(psutil.Process(process.pid))
            counts = {path: count - counts.get(path, 0) for path, count in _counts(addresses[0]).items()}
        if time.monotonic() - began > RUN_TIMEOUT_S:
            process.kill()
    if process.wait() != 0 or not after:
        raise SystemExit("".join(lines[-30:]))
    summary = json.loads((folder / "runs/run/summary.json").read_text())
    steps, between = summary["steps"][1:], options.steps - 1
    ignored = ("/generate", "/health", "/v1/loads", "/benchmark/counts", "/server_info", "*")
    calls = sum(count for path, count in counts.items() if path not in ignored) / between / engines
    return Measured(
        engines,
        start,
        statistics.median(step["seconds"]["update_weights"] for step in steps),
        statistics.median(step["perf/rollout_time"] for step in steps),
        calls,
        {name: 1000 * (after[name] - before[name]) / between / engines for name in PROCESSES},
        max(step["memory"]["rollout_manager_rss_gib"] for step in steps),
    )


def _counts(address: str) -> dict[str, int]:
    with urllib.request.urlopen(f"http://{address}/benchmark/counts", timeout=30) as answer:
        return json.load(answer)


def report(found: list[Measured]) -> None:
    """The table."""
    print(f"{'engines':>8} {'start s':>8} {'update s':>9} {'calls':>6} {'rollout s':>10}", end="")
    print("".join(f"{name + ' ms':>12}" for name in PROCESSES), f"{'manager GiB':>12}")
    for one in found:
        print(
            f"{one.engines:>8} {one.start_s:>8.1f} {one.update_s:>9.3f} {one.calls:>6.1f} {one.rollout_s:>10.3f}",
            end="",
        )
        print("".join(f"{one.cpu_ms[name]:>12.2f}" for name in PROCESSES), f"{one.manager_gib:>12.2f}")


def main() -> None:
    """Reads the flags and measures."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engines", type=int, nargs="+", default=[8, 64, 512])
    parser.add_argument("--ranks", type=int, default=1)
    parser.add_argument("--steps", type=int, default=5)
    parser.add_argument("--samples-per-engine", type=int, default=8)
    parser.add_argument("--json", type=Path, help="where to write the measurements")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="scale-") as name:
        folder = Path(name)
        make_model(folder)
        found = [run(folder, engines, options) for engines in options.engines]
    report(found)
    if options.json is not None:
        per_engine = {"samples_per_engine": options.samples_per_engine}
        options.json.write_text(json.dumps([dataclasses.asdict(one) | per_engine for one in found], indent=1))


if __name__ == "__main__":
    main()
