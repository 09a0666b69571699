#!/usr/bin/env python3
"""Memory and speed of the two converters, next to `cp`, on a generated checkpoint with the shape of Qwen3-0.6B.

    python benchmarks/converters.py [--rounds 5] [--folder DIR] [--json FILE]

Creates the checkpoint (random bf16 weights, tied, 1.19 GB), converts it there and back alternately with `cp` of the
same bytes, checks that every tensor is equal bit for bit, and prints medians. Each run is a separate process.

Measured is the conversion from opening the files to renaming the folder, without the start of Python and its imports;
`cp` as a process. Neither waits for the disk.
Memory is sampled every two milliseconds from /proc/<pid>/status, above what the process had before: RssAnon is memory
that only the process itself can give back, RssFile are pages of mapped files, which the kernel drops when it needs it,
VmRSS is all of it.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from ratios import add_json_option, write_ratios

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

LAYERS, HIDDEN, FFN, HEADS, GROUPS, HEAD, VOCAB = 28, 1024, 3072, 16, 8, 128, 151936
MODEL_ARGS = (
    f"--num-layers {LAYERS} --hidden-size {HIDDEN} --ffn-hidden-size {FFN} --num-attention-heads {HEADS}"
    f" --group-query-attention --num-query-groups {GROUPS} --kv-channels {HEAD} --vocab-size {VOCAB}"
    " --normalization RMSNorm --norm-epsilon 1e-6 --rotary-base 1000000 --swiglu --disable-bias-linear --qk-layernorm"
)
MIB = 1024**2
MEMORY = ("RssAnon", "RssFile", "VmRSS")
MEMORY_ROUNDS = 2


def shapes() -> dict[str, tuple[int, ...]]:
    """The tensors of the checkpoint."""
    named: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (VOCAB, HIDDEN), "model.norm.weight": (HIDDEN,)}
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}."
        named |= {
            prefix + "input_layernorm.weight": (HIDDEN,),
            prefix + "post_attention_layernorm.weight": (HIDDEN,),
            prefix + "self_attn.q_proj.weight": (HEADS * HEAD, HIDDEN),
            prefix + "self_attn.k_proj.weight": (GROUPS * HEAD, HIDDEN),
            prefix + "self_attn.v_proj.weight": (GROUPS * HEAD, HIDDEN),
            prefix + "self_attn.o_proj.weight": (HIDDEN, HEADS * HEAD),
            prefix + "self_attn.q_norm.weight": (HEAD,),
            prefix + "self_attn.k_norm.weight": (HEAD,),
            prefix + "mlp.gate_proj.weight": (FFN, HIDDEN),
            prefix + "mlp.up_proj.weight": (FFN, HIDDEN),
            prefix + "mlp.down_proj.weight": (HIDDEN, FFN),
        }
    return named


def make_checkpoint(folder: Path) -> None:
    """Writes config.json and model.safetensors."""
    import torch
    from safetensors.torch import save_file

    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "num_hidden_layers": LAYERS,
        "hidden_size": HIDDEN,
        "intermediate_size": FFN,
        "num_attention_heads": HEADS,
        "num_key_value_heads": GROUPS,
        "head_dim": HEAD,
        "vocab_size": VOCAB,
        "tie_word_embeddings": True,
        "rms_norm_eps": 1e-6,
        "rope_theta": 1000000,
        "max_position_embeddings": 40960,
        "hidden_act": "silu",
        "attention_bias": False,
        "torch_dtype": "bfloat16",
    }
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config, indent=2))
    draw = torch.Generator().manual_seed(0)
    # random bytes suffice, and are ten times as fast to generate as random numbers
    tensors = {
        name: torch.randint(-(2**15), 2**15, shape, dtype=torch.int16, generator=draw).view(torch.bfloat16)
        for name, shape in shapes().items()
    }
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


class Watch:
    """Samples the memory of a process in a thread of this one; `peaks` are bytes above those at the start."""

    def __init__(self, pid: int) -> None:
        self._status = Path(f"/proc/{pid}/status")
        self._first = self._now()
        self._highest = dict(self._first)
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while not self._stop.wait(0.002):
            for name, value in self._now().items():
                self._highest[name] = max(self._highest[name], value)

    def _now(self) -> dict[str, int]:
        fields = dict(line.split(":", 1) for line in self._status.read_text().splitlines())
        return {name: int(fields[name].split()[0]) * 1024 for name in MEMORY}

    def peaks(self) -> dict[str, int]:
        """Ends the sampling."""
        self._stop.set()
        self._thread.join()
        return {name: self._highest[name] - self._first[name] for name in MEMORY}


def load_tool(name: str):
    """A converter's program as a module."""
    spec = importlib.util.spec_from_file_location(name, ROOT / "tools" / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def one_run(direction: str, folder: Path) -> None:
    """Converts once in this process: waits for a line after the imports, and for another after the conversion."""
    import torch

    from slimrl.platform.collective_errors import ConversionGroup

    torch.set_num_threads(1)  # as the programs do
    if direction == "there":
        tool = load_tool("convert_hf_to_torch_dist")
        flags = [*MODEL_ARGS.split(), "--hf-checkpoint", str(folder / "hf"), "--save", str(folder / "torch_dist")]
        args, _ = tool.read_flags(flags)
        import slimrl.megatron.checkpoint.state  # noqa: F401  imported by the conversion

        def work() -> object:
            return tool.convert(args, ConversionGroup(), force=False)

    else:
        tool = load_tool("convert_torch_dist_to_hf")
        parsed = tool.parse(
            ["--input-dir", str(folder / "torch_dist"), "--output-dir", str(folder / "again")]
            + ["--origin-hf-dir", str(folder / "hf")]
        )

        def work() -> object:
            return tool.convert(parsed, ConversionGroup())

    print("ready", flush=True)
    sys.stdin.readline()
    begin = time.perf_counter()
    work()
    print(time.perf_counter() - begin, flush=True)
    sys.stdin.readline()


def measured(direction: str, folder: Path, *, memory: bool) -> dict[str, float]:
    """One conversion in a new process: its seconds, or with `memory` its peaks, because sampling costs time."""
    command = [sys.executable, "-W", "ignore", __file__, "--direction", direction, "--folder", str(folder)]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(command, text=True, **pipes) as process:
        if process.stdout.readline().strip() != "ready":
            sys.exit("the conversion did not start")
        watch = Watch(process.pid) if memory else None
        print(file=process.stdin, flush=True)
        seconds = float(process.stdout.readline())
        result = {"seconds": seconds} if watch is None else watch.peaks()
        print(file=process.stdin, flush=True)
    os.sync()
    if process.returncode:
        sys.exit("the conversion failed")
    return result


def copied(source: Path, target: Path) -> float:
    """Seconds of `cp`."""
    begin = time.perf_counter()
    subprocess.run(["cp", "-r", source, target], check=True)
    seconds = time.perf_counter() - begin
    shutil.rmtree(target)
    os.sync()  # so that the next measurement does not wait for these bytes
    return seconds


def same_tensors(first: Path, second: Path) -> bool:
    """Whether two checkpoints hold the same bytes under the same names."""
    import torch

    from slimrl.weights.hf_checkpoint import HfCheckpoint

    with HfCheckpoint(first) as one, HfCheckpoint(second) as other:
        return sorted(one.names) == sorted(other.names) and all(
            torch.equal(one.tensor(name).view(torch.int16), other.tensor(name).view(torch.int16)) for name in one.names
        )


Runs = dict[str, list[dict[str, float]]]


def report(nbytes: int, timed: Runs, sampled: Runs, copies: list[float]) -> dict[str, float]:
    """Prints medians of time and maxima of memory; returns the ratios."""
    copying = statistics.median(copies)
    print(f"model {nbytes / 1e9:.3f} GB; cp {copying:.2f} s (median of {len(copies)})")
    print(f"{'direction':<20}{'s':>7}{'GB/s':>7}{'of cp':>8}{'anonymous':>12}{'mapped':>9}{'total RSS':>12}")
    ratios = {}
    for direction in timed:
        seconds = statistics.median(run["seconds"] for run in timed[direction])
        share = {name: max(run[name] for run in sampled[direction]) / nbytes for name in MEMORY}
        print(
            f"{direction:<20}{seconds:>7.2f}{nbytes / 1e9 / seconds:>7.2f}{copying / seconds:>8.2f}"
            f"{share['RssAnon']:>11.1%}{share['RssFile']:>9.1%}{share['VmRSS']:>12.1%}"
        )
        ratios[f"{direction}: speed / cp"] = copying / seconds
        ratios[f"{direction}: memory / model"] = share["RssAnon"]
    return ratios


def main() -> int:
    """Measures; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="timed conversions in each direction")
    parser.add_argument("--folder", type=Path, help="where to work (default: a temporary folder, removed at the end)")
    add_json_option(parser)
    parser.add_argument("--direction", choices=("there", "back"), help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.direction is not None:
        one_run(args.direction, args.folder)
        return 0
    with tempfile.TemporaryDirectory(dir=args.folder) as scratch:
        folder = Path(scratch)
        make_checkpoint(folder / "hf")
        nbytes = (folder / "hf" / "model.safetensors").stat().st_size
        timed: Runs = {"HF -> torch_dist": [], "torch_dist -> HF": []}
        sampled: Runs = {"HF -> torch_dist": [], "torch_dist -> HF": []}
        copies = []
        for number in range(args.rounds + MEMORY_ROUNDS):
            memory = number < MEMORY_ROUNDS  # these come first and warm up, too
            for direction, runs in (sampled if memory else timed).items():
                if not memory:
                    copies.append(copied(folder / "hf", folder / "copy"))
                runs.append(measured("there" if direction.startswith("HF") else "back", folder, memory=memory))
            if not same_tensors(folder / "hf", folder / "again"):
                sys.exit("a tensor came back changed")
            shutil.rmtree(folder / "torch_dist")
            shutil.rmtree(folder / "again")
        ratios = report(nbytes, timed, sampled, copies)
    write_ratios(args.json, ratios)
    return 0


if __name__ == "__main__":
    sys.exit(main())
