"""Synchronous, one-step off-policy and fully asynchronous: seconds per step and idle GPUs on a long-tailed length
distribution.

    python benchmarks/asynchrony.py [--rounds 3] [--steps 16] [--model FOLDER]

Each mode trains the same tiny model on the same prompts, with 2 training GPUs and 2 engines of 16 requests each, over
the real servers and router. Response lengths are sampled from a log-normal distribution (median 50, sigma 1.1, at most
1200 tokens), one per sample and the same in every mode. All modes run in interleaved rounds; the table has medians over
rounds of

- seconds per step, from one rollout's hand-over to training to the next one's, over the middle of the run;
- the fraction of that time in which training GPUs are idle: 1 - seconds in training / seconds per step;
- the average fraction of the engines' 32 request slots that are empty over that time;
- the staleness of the trained samples in rollouts (see docs/asynchrony.md), with their fractions.

The baseline is the first line, train.py with separate GPUs. Target: fully asynchronous takes at most half of its time.
`--model` names a folder of tools/make_tiny_model.py with a converted `torch_dist` in it; by default one is created.
"""

from __future__ import annotations

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from collections import Counter
from pathlib import Path

from slimrl.observability.rollout_dump import read_dump
from slimrl.rollout.async_rollout import oldest_version

ROOT = Path(__file__).resolve().parent.parent
PLACES = 16  # per engine
ENGINES = 2
WARM_UP = 5  # uncounted steps at the start, and TAIL at the end, where no new rollout starts
TAIL = 4
MODES = {
    "train.py": ("train.py", ""),
    "one-step off-policy": ("train_async.py", ""),
    "one-step off-policy, in flight": ("train_async.py", "--update-weights-in-flight"),
    "fully asynchronous, staleness <= 1": ("train_async.py", "--max-weight-staleness 1"),
    "fully asynchronous, staleness <= 2": ("train_async.py", "--max-weight-staleness 2"),
    "fully asynchronous, staleness <= 4": ("train_async.py", "--max-weight-staleness 4"),
    "fully asynchronous, staleness <= 2, drained": (
        "train_async.py",
        "--max-weight-staleness 2 --no-update-weights-in-flight",
    ),
}
GENERATE = """
import random
import time
from slimrl.data.sample import SampleStatus
from slimrl.rollout.generation.multi_turn import append_generation

async def generate(args, sample, sampling_params, *, engine):
    length = min(1 + int(random.Random(sample.index).lognormvariate(3.9, 1.1)), args.rollout_max_response_len)
    asked = time.time()
    answer = await engine.generate(sample.tokens, {**sampling_params, "max_new_tokens": length, "ignore_eos": True})
    append_generation(sample, answer)
    sample.metadata["asked"], sample.metadata["answered"] = asked, time.time()
    sample.response, sample.status = answer.text, SampleStatus.COMPLETED
    return sample
"""
FLAGS = f"""--input-key prompt --label-key label --apply-chat-template --rm-type random --rollout-batch-size 8
 --n-samples-per-prompt 8 --rollout-max-response-len 1200 --use-dynamic-batch-size --max-tokens-per-gpu 4096
 --advantage-estimator grpo --optimizer adam --lr 1e-5 --lr-decay-style constant --actor-num-gpus-per-node 2
 --rollout-num-gpus {ENGINES} --sglang-server-concurrency {PLACES} --sglang-disable-radix-cache
 --custom-generate-function-path long_tail.generate"""


def make_model(folder: Path) -> Path:
    """A tiny model with its checkpoint for training, in `folder`."""
    tool = lambda name, *more: subprocess.run([sys.executable, str(ROOT / "tools" / name), *more], check=True)  # noqa: E731
    tool("make_tiny_model.py", "--output-dir", str(folder), "--seed", "0")
    save = ("--hf-checkpoint", str(folder / "model"), "--save", str(folder / "torch_dist"))
    tool("convert_hf_to_torch_dist.py", *model_flags(folder), *save)
    return folder


def model_flags(folder: Path) -> list[str]:
    """MODEL_ARGS as bash reads them."""
    script = f"source '{folder}/model_args.sh'; printf '%s\\n' \"${{MODEL_ARGS[@]}}\""
    return subprocess.run(["bash", "-c", script], check=True, capture_output=True, text=True).stdout.split()


def run(mode: str, steps: int, model: Path, folder: Path) -> dict[str, float | Counter[int]]:
    """One run's figures. Raises RuntimeError with its output if it fails."""
    entry, more = MODES[mode]
    folder.mkdir()
    (folder / "long_tail.py").write_text(GENERATE)
    paths = f"--hf-checkpoint {model}/model --ref-load {model}/torch_dist --prompt-data {model}/train.jsonl"
    line = f"{FLAGS} {more} {paths} --num-rollout {steps} --run-name one".split()
    dumps = ["--save-debug-rollout-data", str(folder / "dump_{rollout_id}.jsonl")]
    done = subprocess.run(
        [sys.executable, str(ROOT / entry), *model_flags(model), *line, *dumps],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    if done.returncode:
        raise RuntimeError(f"{mode} ended with {done.returncode}: {done.stdout[-4000:]}{done.stderr[-4000:]}")
    return numbers(folder, steps)


def numbers(folder: Path, steps: int) -> dict[str, float | Counter[int]]:
    """From the run's dumps, which are written when a rollout is handed over, and its summary."""
    import json

    files = [folder / f"dump_{number}.jsonl" for number in range(steps)]
    first, last = WARM_UP, steps - TAIL
    begin, end = files[first].stat().st_mtime, files[last].stat().st_mtime
    summary = json.loads((folder / "runs/one/summary.json").read_text())
    training = sum(step["seconds"]["train"] for step in summary["steps"][first:last])
    in_flight, ages = 0.0, Counter()
    for number, file in enumerate(files):
        for sample in read_dump(file).samples:
            asked, answered = sample.metadata["asked"], sample.metadata["answered"]
            in_flight += max(0.0, min(answered, end) - max(asked, begin))
            if first <= number < last:
                ages[number - oldest_version(sample)] += 1
    # queued requests count as in flight but not in an engine, so the number is capped at all slots
    taken = min(in_flight / (end - begin), PLACES * ENGINES)
    return {
        "seconds": (end - begin) / (last - first),
        "training idle": 1 - training / (end - begin),
        "engines idle": 1 - taken / (PLACES * ENGINES),
        "ages": ages,
    }


def main() -> None:
    """Measures and prints one line per mode."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--model", type=Path, help="folder of a tiny model")
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    args = parser.parse_args()
    if args.steps < WARM_UP + TAIL + 2:
        parser.error(f"--steps {args.steps} leaves nothing to measure: give at least {WARM_UP + TAIL + 2}")
    with tempfile.TemporaryDirectory() as name:
        model = (args.model or make_model(Path(name) / "model")).absolute()
        found: dict[str, list[dict]] = {mode: [] for mode in args.modes}
        for number in range(args.rounds):
            for place, mode in enumerate(args.modes):
                one = run(mode, args.steps, model, Path(name) / f"run_{number}_{place}")
                found[mode].append(one)
                print(f"round {number}, {mode}: {one['seconds']:.2f} s/step", file=sys.stderr)
    print(f"medians of {args.rounds} interleaved rounds of {args.steps} steps")
    print(f"{'':40} s/step  {'ratio':>6} {'training idle':>14} {'engines idle':>13}  age: share of samples")
    peer = statistics.median(one["seconds"] for one in found[args.modes[0]])
    for mode, rounds in found.items():
        seconds, training, engines = (
            statistics.median(one[key] for one in rounds) for key in ("seconds", "training idle", "engines idle")
        )
        ages = sum((one["ages"] for one in rounds), Counter())
        shares = ", ".join(f"{age}: {count / ages.total():.0%}" for age, count in sorted(ages.items()))
        print(f"{mode:40} {seconds:6.2f} {seconds / peer:6.2f} {training:14.0%} {engines:13.0%}  {shares}")


if __name__ == "__main__":
    main()
