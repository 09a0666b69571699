"""Start-up time of --help, a misspelt flag and --dry-run, compared with an empty python.

    python benchmarks/startup.py [--rounds 15]
    python benchmarks/startup.py --run runs/quickstart


Runs the programs in interleaved rounds and prints the median wall time of each, its spread, and its ratio to
`python -c pass` on the same machine in the same rounds. None of them starts a run. With `--run` it measures nothing: it
prints the start of a finished run from its timeline, by process, until the first rollout.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from ratios import add_json_option, write_ratios
from step_table import print_start, spans_of

ROOT = Path(__file__).resolve().parent.parent
PEER = "python -c pass"
CONFIG = {
    "model_type": "qwen3",
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_theta": 1000000,
    "tie_word_embeddings": True,
    "vocab_size": 151936,
}
TOKENS = 151669
MODEL = """--swiglu --num-layers 36 --hidden-size 2560 --ffn-hidden-size 9728 --num-attention-heads 32
 --group-query-attention --num-query-groups 8 --kv-channels 128 --qk-layernorm --disable-bias-linear
 --normalization RMSNorm --norm-epsilon 1e-6 --rotary-base 1000000 --vocab-size 151936"""
RUN = """--input-key prompt --label-key label --apply-chat-template --rm-type deepscaler --num-rollout 100
 --rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 8192 --colocate --bf16
 --actor-num-gpus-per-node 8 --tensor-model-parallel-size 2 --sequence-parallel --use-dynamic-batch-size
 --max-tokens-per-gpu 9216 --sglang-mem-fraction-static 0.4 --gpu-memory-gib 80"""


def recipe(folder: Path) -> list[str]:
    """The flags of a Qwen3-4B run over files in `folder`, which this creates."""
    hf, reference = folder / "hf", folder / "ref"
    hf.mkdir()
    (hf / "config.json").write_text(json.dumps(CONFIG))
    (hf / "tokenizer.json").write_text(json.dumps({"model": {"vocab": {f"token {i}": i for i in range(TOKENS)}}}))
    (reference / "release").mkdir(parents=True)
    for name in ("metadata.json", ".metadata"):
        (reference / "release" / name).touch()
    (reference / "latest_checkpointed_iteration.txt").write_text("release")
    (folder / "train.jsonl").write_text(json.dumps({"prompt": [{"role": "user", "content": "1+1"}], "label": "2"}))
    paths = f"--hf-checkpoint {hf} --ref-load {reference} --prompt-data {folder}/train.jsonl"
    return f"{MODEL} {RUN} {paths}".split()


def seconds(line: list[str], folder: Path, expected: int) -> float:
    """Wall time of one program. Raises RuntimeError with its output for an unexpected exit code."""
    environment = {name: value for name, value in os.environ.items() if name != "RAY_ADDRESS"}
    started = time.perf_counter()
    done = subprocess.run(line, capture_output=True, text=True, cwd=folder, env=environment)
    taken = time.perf_counter() - started
    if done.returncode != expected:
        raise RuntimeError(f"{' '.join(line[:3])} ended with {done.returncode}: {done.stdout}{done.stderr}")
    return taken


def main() -> None:
    """Measures and prints one line per program."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--run", type=Path, metavar="FOLDER", help="print the start of this run instead")
    add_json_option(parser)
    options = parser.parse_args()
    rounds = options.rounds
    if options.run is not None:
        print_start(spans_of(options.run))
        return
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        flags, train = recipe(folder), [sys.executable, str(ROOT / "train.py")]
        programs = {
            PEER: ([sys.executable, "-c", "pass"], 0),
            "train.py --help": ([*train, "--help"], 0),
            "train.py, one flag misspelt": ([*train, *flags, "--rollout-batchsize", "32"], 2),
            "train.py --dry-run": ([*train, *flags, "--dry-run"], 0),
        }
        times: dict[str, list[float]] = {program: [] for program in programs}
        for _ in range(rounds + 1):
            for program, (line, expected) in programs.items():
                times[program].append(seconds(line, folder, expected))
    print(f"median wall time of {rounds} interleaved rounds, after one to warm up")
    peer = statistics.median(times[PEER][1:])
    ratios = {}
    for program, taken in times.items():
        kept = sorted(taken[1:])
        median = statistics.median(kept)
        spread = f"({kept[0] * 1000:.0f} to {kept[-1] * 1000:.0f})"
        ratios[f"time of {program} / {PEER}"] = median / peer
        print(f"{program:30} {median * 1000:7.0f} ms  {spread:16} {median / peer:5.1f} x")
    write_ratios(options.json, ratios)


if __name__ == "__main__":
    main()
