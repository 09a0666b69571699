"""Memory leaks in a long run: memory of every process per step, over a real run of small steps.

    python benchmarks/leak.py [--steps 200] [--warm-up 40]

Makes the tiny model, runs train.py with real SGLang and Megatron on one GPU (two prompts, two samples each, a few
tokens) and reads the memory of every process after every step from summary.json. Prints, for each process, memory
after the warm-up and at the end, and the growth per step: the median of all slopes between pairs of steps (Theil and
Sen), which a single jump does not affect. Limit: 0.05 MiB per step, half a gigabyte in ten thousand steps.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LIMIT_MIB = 0.05
FLAGS = """--colocate --actor-num-gpus-per-node 1 --rollout-batch-size 2 --n-samples-per-prompt 2
 --num-steps-per-rollout 1 --rollout-max-response-len 4 --use-dynamic-batch-size --max-tokens-per-gpu 512
 --input-key prompt --label-key label --apply-chat-template --rm-type math --lr 1e-5 --lr-decay-style constant
 --rollout-shuffle --use-tensorboard --run-name leak"""


def slope(values: list[float]) -> float:
    """Theil-Sen: the median of (y_j - y_i) / (j - i) over all pairs i < j."""
    pairs = itertools.combinations(enumerate(values), 2)
    return statistics.median((later - earlier) / (j - i) for (i, earlier), (j, later) in pairs)


def run(folder: Path, steps: int) -> list[dict[str, float]]:
    """GiB by process after every step of a run of `steps` steps in `folder`."""
    made = folder / "made"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}

    def call(*words: object) -> None:
        subprocess.run([sys.executable, *map(str, words)], check=True, cwd=folder, env=environment)

    call(ROOT / "tools/make_tiny_model.py", "--output-dir", made, "--seed", 0)
    script = f"source '{made}/model_args.sh'; printf '%s\\n' \"${{MODEL_ARGS[@]}}\""
    model = subprocess.run(["bash", "-c", script], check=True, capture_output=True, text=True).stdout.split()
    hf = ("--hf-checkpoint", made / "model")
    call(ROOT / "tools/convert_hf_to_torch_dist.py", *model, *hf, "--save", made / "torch_dist")
    paths = (*hf, "--ref-load", made / "torch_dist", "--prompt-data", made / "train.jsonl")
    call(ROOT / "train.py", *model, *paths, *FLAGS.split(), "--num-rollout", steps)
    summary = json.loads((folder / "runs/leak/summary.json").read_text())
    return [step["memory"] for step in summary["steps"]]


def main() -> None:
    """Runs and prints one line per process."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--warm-up", type=int, default=40)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        steps = run(Path(name), options.steps)[options.warm_up :]
    print(
        f"memory after each of {len(steps)} steps, after {options.warm_up} to warm up; limit {LIMIT_MIB} MiB per step"
    )
    print(f"{'process':22} {'first MiB':>10} {'last MiB':>10} {'MiB per step':>13} {'of limit':>9}")
    for process in steps[0]:
        amounts = [1024 * step[process] for step in steps if process in step]
        grown = slope(amounts)
        shown = process.removesuffix("_rss_gib")
        print(f"{shown:22} {amounts[0]:10.1f} {amounts[-1]:10.1f} {grown:13.4f} {grown / LIMIT_MIB:8.2f}x")


if __name__ == "__main__":
    main()
