"""Time and memory until a large data set returns its first prompts, compared with loading the whole file.

    python benchmarks/dataset.py [--rows 1000000] [--rounds 3] [--tokenizer FOLDER]

Writes a .jsonl file of about 500 bytes per row, then measures each in a separate process: slimrl's data source up to
its first 32 shuffled prompts; json.loads of every line into a list, the usual way to read such files; and Hugging
Face's `datasets.load_dataset`, once with an empty and once with a filled cache. Prints the median wall time and the
peak memory above that of the imports, each with its ratio to slimrl's. The file is in the page cache for all of them.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from ratios import add_json_option, write_ratios

ROOT = Path(__file__).resolve().parent.parent
OURS = "slimrl"
WAYS = {
    OURS: "slimrl: shuffled, first 32 prompts as tokens",
    "checked": "slimrl: the same, and every row checked",
    "json": "json.loads of every line",
    "datasets": "datasets.load_dataset, cache empty",
    "datasets again": "datasets.load_dataset, cache filled",
}


def make_file(path: Path, rows: int) -> None:
    """Chat prompts of about 500 bytes with a label."""
    generator = random.Random(0)
    words = [f"word{number}" for number in range(1000)]
    with path.open("w") as file:
        for number in range(rows):
            text = " ".join(generator.choices(words, k=54))
            file.write(json.dumps({"prompt": [{"role": "user", "content": text}], "label": str(number)}) + "\n")


def own_source(path: str, tokenizer_folder: str) -> Callable[[], Any]:
    """slimrl's data source, up to its first prompts."""
    from slimrl.arguments import Arguments
    from slimrl.rollout.dataset.data_source import RolloutDataSource

    tokenizer = make_tokenizer(tokenizer_folder)
    args = Arguments(
        prompt_data=path,
        input_key="prompt",
        label_key="label",
        apply_chat_template=True,
        rollout_shuffle=True,
        num_rollout=1,
        n_samples_per_prompt=8,
    )

    def work() -> Any:
        source = RolloutDataSource(args, tokenizer)
        assert len(source.get_samples(32)) == 32
        return source

    return work


def make_tokenizer(folder: str) -> Any:
    """The tokenizer of a folder, else one of single bytes."""
    if folder:
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(folder)
    from slimrl.tiny.models import build_tokenizer

    return build_tokenizer(max_length=32768)


def prepared(way: str, path: str, tokenizer_folder: str, cache: str) -> Callable[[], Any]:
    """The work of one method, after importing everything that it needs."""
    if way == OURS:
        return own_source(path, tokenizer_folder)
    if way == "checked":
        first = own_source(path, tokenizer_folder)

        def checked() -> Any:
            source = first()
            source.state_dict()
            return source

        return checked
    if way == "json":

        def load() -> Any:
            with open(path, "rb") as file:
                return [json.loads(line) for line in file]

        return load
    import datasets

    datasets.disable_progress_bars()
    return lambda: datasets.load_dataset("json", data_files=path, cache_dir=cache, split="train")


def resident() -> int:
    """Memory of this process now (bytes)."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def measure(way: str, path: str, tokenizer_folder: str, cache: str) -> None:
    """Prints the seconds and the peak memory increase (bytes) of one method as JSON."""
    work = prepared(way, path, tokenizer_folder, cache)
    before, highest, done = resident(), 0, threading.Event()

    def watch() -> None:
        nonlocal highest
        while not done.wait(0.005):
            highest = max(highest, resident())

    watcher = threading.Thread(target=watch)
    watcher.start()
    started = time.perf_counter()
    kept = work()
    seconds = time.perf_counter() - started
    highest = max(highest, resident())
    done.set()
    watcher.join()
    del kept
    print(json.dumps({"seconds": seconds, "bytes": highest - before}), flush=True)


def in_new_process(way: str, path: Path, tokenizer_folder: str, cache: str) -> dict[str, float]:
    """What `measure` finds there."""
    line = [sys.executable, __file__, "--measure", way, str(path), tokenizer_folder, cache]
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "TOKENIZERS_PARALLELISM": "false"}
    done = subprocess.run(line, env=environment, capture_output=True, text=True, timeout=900)
    if done.returncode != 0:
        raise RuntimeError(f"{way} ended with code {done.returncode}:\n{done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def compare(path: Path, rounds: int, tokenizer_folder: str) -> dict[str, list[dict[str, float]]]:
    """Every way in turn, round by round."""
    found: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as cache:
            for way in WAYS:
                found[way].append(in_new_process(way, path, tokenizer_folder, cache))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--tokenizer", default="", help="folder of a tokenizer (default: one of single bytes)")
    parser.add_argument("--measure", nargs=4, help=argparse.SUPPRESS)
    add_json_option(parser)
    args = parser.parse_args()
    if args.measure:
        measure(*args.measure)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        make_file(path, args.rows)
        print(f"{args.rows:,} rows, {path.stat().st_size / 1e6:.0f} MB, median of {args.rounds}")
        found = compare(path, args.rounds, args.tokenizer)
    numbers = {
        way: {unit: statistics.median(result[unit] for result in results) for unit in ("seconds", "bytes")}
        for way, results in found.items()
    }
    print(f"{'':46} {'seconds':>8} {'ratio':>7} {'MB':>8} {'ratio':>7}")
    kept = {}
    for way, text in WAYS.items():
        seconds, size = numbers[way]["seconds"], numbers[way]["bytes"]
        ratios = seconds / numbers[OURS]["seconds"], size / max(numbers[OURS]["bytes"], 1)
        if way != OURS:
            kept |= {f"time of {text} / slimrl": ratios[0], f"memory of {text} / slimrl": ratios[1]}
        print(f"{text:46} {seconds:8.2f} {ratios[0]:6.1f}x {size / 1e6:8.0f} {ratios[1]:6.1f}x")
    write_ratios(args.json, kept)


if __name__ == "__main__":
    main()
