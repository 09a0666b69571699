"""Samples per second of GRPO, against TRL: same model, prompts, batch and response lengths, in interleaved rounds.

    python benchmarks/against_trl.py --trl-python /path/to/trl/bin/python [--rounds 3] [--steps 8] [--rows NAME ...]

TRL needs an environment of its own: `python -m venv DIR && DIR/bin/pip install torch==2.13.0 trl==1.16.0`. It trains in
one process and generates with transformers (benchmarks/trl_grpo.py); torch uses all cores in it. slimrl runs train.py
with two colocated ranks and servers, and with log-normal lengths train_async.py with a rank, a server and
`--max-weight-staleness 2`; torch uses one core in each process. Both take one optimizer step per rollout of 8 samples a
prompt, and sample i of a run has the same number of tokens in both. slimrl trains on 4096 tokens at a time, whose
activations stay in the cache; TRL on the whole batch, which a quarter of it at a time did not make faster. Prints the
medians over rounds of the samples that are generated and trained per second after the first steps, and their ratio.
Both use the whole machine: run it on a quiet one. Targets: 1.0 in the first three rows, 1.3 at 512 tokens, 2 with
log-normal lengths.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from asynchrony import model_flags
from ratios import add_json_option, write_ratios

ROOT = Path(__file__).resolve().parent.parent
GROUP = 8  # samples per prompt
WARM_UP = 2  # uncounted steps
TAIL = 2  # uncounted steps at the end of an asynchronous run, where no new rollout starts
TIMEOUT_S = 1200
GENERATE = """
from slimrl.data.sample import SampleStatus
from slimrl.rollout.generation.multi_turn import append_generation

LENGTHS = [int(line) for line in open({lengths!r})]

async def generate(args, sample, sampling_params, *, engine):
    length = LENGTHS[sample.index % len(LENGTHS)]
    answer = await engine.generate(sample.tokens, {{**sampling_params, "max_new_tokens": length, "ignore_eos": True}})
    append_generation(sample, answer)
    sample.response, sample.status = answer.text, SampleStatus.COMPLETED
    return sample
"""
FLAGS = f"""--input-key prompt --label-key label --apply-chat-template --rm-type random
 --n-samples-per-prompt {GROUP} --num-steps-per-rollout 1 --use-dynamic-batch-size --max-tokens-per-gpu 4096
 --advantage-estimator grpo --eps-clip 0.2 --eps-clip-high 0.28 --optimizer adam --lr 1e-5 --lr-decay-style constant
 --weight-decay 0 --custom-generate-function-path exact_lengths.generate --run-name one"""
SYNCHRONOUS = "--actor-num-gpus-per-node 2 --colocate --no-offload-train --no-offload-rollout --rollout-num-gpus 2"
ASYNCHRONOUS = (  # SGLang continues requests over an update; before 0.5.21 its radix cache keeps KV of old weights
    "--actor-num-gpus-per-node 1 --rollout-num-gpus 1 --max-weight-staleness 2 --sglang-disable-radix-cache"
)


@dataclasses.dataclass(frozen=True)
class Row:
    """A model and a batch. `median` is that of log-normal lengths of at most `longest` tokens; None: all `longest`."""

    hidden: int
    layers: int
    batch: int  # samples per optimizer step
    longest: int  # tokens
    median: int | None = None

    def lengths(self, count: int) -> list[int]:
        """Tokens of each sample of a run; seed 0."""
        if self.median is None:
            return [self.longest] * count
        chance = random.Random(0)
        return [min(self.longest, 1 + int(self.median * chance.lognormvariate(0, 1))) for _ in range(count)]


ROWS = {
    "h128-16": Row(128, 4, 256, 16),
    "h128-128": Row(128, 4, 256, 128),
    "h512-128": Row(512, 8, 64, 128),
    "h512-512": Row(512, 8, 64, 512),
    "h512-lognormal": Row(512, 8, 64, 512, median=64),
}


def make_model(row: Row, folder: Path) -> None:
    """A random model with its prompts and its checkpoint for training, in `folder`."""
    sizes = f"--hidden-size {row.hidden} --ffn-hidden-size {4 * row.hidden} --num-layers {row.layers}"
    _tool("make_tiny_model.py", "--output-dir", str(folder), "--warm-start-steps", "0", *sizes.split())
    save = ("--hf-checkpoint", str(folder / "model"), "--save", str(folder / "torch_dist"))
    _tool("convert_hf_to_torch_dist.py", *model_flags(folder), *save)


def _tool(name: str, *options: str) -> None:
    subprocess.run(
        [sys.executable, str(ROOT / "tools" / name), *options], check=True, capture_output=True, timeout=TIMEOUT_S
    )


def trl_rate(row: Row, steps: int, model: Path, lengths: Path, python: Path) -> float:
    """Samples per second of one run."""
    program = [str(python), str(ROOT / "benchmarks/trl_grpo.py"), "--model", str(model / "model")]
    options = f"--prompts {model}/train.jsonl --lengths {lengths} --batch {row.batch} --steps {steps}".split()
    output = _output([*program, *options], model, threads=os.cpu_count() or 1)
    seconds: list[float] = json.loads(output.splitlines()[-1])["seconds"]
    return row.batch / statistics.fmean(seconds[WARM_UP:])


def slimrl_rate(row: Row, steps: int, model: Path, lengths: Path, folder: Path) -> float:
    """Samples per second of one run, which writes into `folder`."""
    folder.mkdir()
    (folder / "exact_lengths.py").write_text(GENERATE.format(lengths=str(lengths)), encoding="utf-8")
    entry, layout = ("train.py", SYNCHRONOUS) if row.median is None else ("train_async.py", ASYNCHRONOUS)
    paths = f"--hf-checkpoint {model}/model --ref-load {model}/torch_dist --prompt-data {model}/train.jsonl"
    sizes = f"--rollout-batch-size {row.batch // GROUP} --rollout-max-response-len {row.longest} --num-rollout {steps}"
    line = f"{FLAGS} {layout} {paths} {sizes}".split()
    _output([sys.executable, str(ROOT / entry), *model_flags(model), *line], folder, threads=1)
    summary = json.loads((folder / "runs/one/summary.json").read_text(encoding="utf-8"))
    seconds = [step["seconds"]["total"] for step in summary["steps"]]
    return row.batch / statistics.fmean(seconds[WARM_UP:] if row.median is None else seconds[WARM_UP:-TAIL])


def _output(line: list[str], folder: Path, *, threads: int) -> str:
    """What a program prints. Raises RuntimeError with the end of it if it fails."""
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "CUDA_VISIBLE_DEVICES": ""}
    done = subprocess.run(
        line, cwd=folder, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    if done.returncode:
        raise RuntimeError(f"{line[1]} ended with {done.returncode}: {done.stdout[-3000:]}{done.stderr[-3000:]}")
    return done.stdout


def main() -> None:
    """Measures, and prints one line per row."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", type=Path, required=True, help="python of an environment with TRL")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=8, help=f"optimizer steps of a run, of which {WARM_UP} warm up")
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS), metavar="NAME", help=", ".join(ROWS))
    add_json_option(parser)
    args = parser.parse_args()
    if args.steps < WARM_UP + TAIL + 1:
        parser.error(f"--steps {args.steps} leaves nothing to measure: give at least {WARM_UP + TAIL + 1}")
    ratios = {}
    print(f"medians of {args.rounds} interleaved rounds of {args.steps} steps, samples/s (range)")
    for name in args.rows:
        row, trl, own = ROWS[name], [], []
        with tempfile.TemporaryDirectory() as folder:
            model, lengths = Path(folder) / "model", Path(folder) / "lengths"
            make_model(row, model)
            lengths.write_text("\n".join(map(str, row.lengths(row.batch * args.steps))), encoding="utf-8")
            for number in range(args.rounds):
                trl.append(trl_rate(row, args.steps, model, lengths, args.trl_python))
                own.append(slimrl_rate(row, args.steps, model, lengths, Path(folder) / f"round_{number}"))
                print(f"{name}, round {number}: TRL {trl[-1]:.1f}, slimrl {own[-1]:.1f}", file=sys.stderr, flush=True)
        ratio = statistics.median(mine / theirs for mine, theirs in zip(own, trl, strict=True))
        shown = (f"{statistics.median(one):8.1f} ({min(one):.1f} to {max(one):.1f})" for one in (trl, own))
        print(f"{name:16} TRL {next(shown)}   slimrl {next(shown)}   ratio {ratio:.2f}", flush=True)
        ratios[f"{name}: samples/s against TRL"] = ratio
    write_ratios(args.json, ratios)


if __name__ == "__main__":
    main()
