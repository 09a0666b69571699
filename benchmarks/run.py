"""Runs a set of benchmarks, and compares their ratios with those that were kept.

    python benchmarks/run.py [--only startup grader] [--output FILE] [--keep]

Runs each benchmark of the table below one after the other, with few rounds: about ten minutes on two quiet cores.
Prints every ratio beside the kept one (benchmarks/kept_ratios.json) and the change as a factor. A ratio that leaves the
band of its benchmark on either side is marked, and the exit code is then 1: a ratio that improved is also a change to
look at, and to keep. A benchmark that fails is named at the end. `--keep` replaces the kept ratios of those that ran.
Ratios compare two ways in the same rounds on one machine, so they hold for other machines as well, as far as the band
goes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from ratios import read_ratios

FOLDER = Path(__file__).resolve().parent
KEPT = FOLDER / "kept_ratios.json"

Ratios = dict[str, dict[str, float]]  # of each benchmark, by name


@dataclasses.dataclass(frozen=True)
class Benchmark:
    """One row of the set. A ratio may change by a factor of `band` in both directions before it is marked."""

    program: str
    options: Sequence[str]
    band: float
    timeout_s: float = 300


# Bands come from repeated runs on a shared machine: twice the largest spread seen, and at least 1.1.
BENCHMARKS = (
    Benchmark("scheduler", ["--seeds", "1"], 1.1),
    Benchmark("startup", ["--rounds", "7"], 1.3),
    Benchmark("log_probs", ["--tokens", "1536"], 1.3),
    Benchmark("packed_training", [], 1.3),
    Benchmark("long_sequences", ["--tokens", "1024", "4096", "16384", "--rounds", "1"], 1.3),
    Benchmark("grader", ["--seconds", "2"], 1.5),
    Benchmark("dataset", ["--rows", "200000"], 1.6),
    Benchmark("step_overhead", [], 1.4),
    Benchmark("rollout_driver", ["--rounds", "2", "--prompts", "256"], 1.4),
    Benchmark("converters", ["--rounds", "3"], 1.6),
    Benchmark("weight_update", ["--parts", "buckets", "--rounds", "4"], 1.5),
    Benchmark("checkpoints", ["--rounds", "2"], 1.8),
)


@dataclasses.dataclass(frozen=True)
class Change:
    """A ratio beside the kept one, None where none was kept or measured."""

    name: str
    kept: float | None
    now: float | None
    band: float

    @property
    def outside(self) -> bool:
        """Whether the ratio is new, gone, or left its band."""
        if self.kept is None or self.now is None:
            return True
        return not 1 / self.band <= self.now / self.kept <= self.band


def compare(kept: Ratios, now: Ratios, bands: dict[str, float]) -> list[Change]:
    """Every ratio of the benchmarks in `now`, in order, with those that are kept and were not measured again."""
    changes = []
    for program, measured in now.items():
        before = kept.get(program, {})
        for name in [*measured, *(name for name in before if name not in measured)]:
            changes.append(Change(f"{program}: {name}", before.get(name), measured.get(name), bands[program]))
    return changes


def measure(benchmark: Benchmark, folder: Path) -> dict[str, float]:
    """Runs one benchmark, with its output on the terminal. Raises RuntimeError if it fails or takes too long."""
    file = folder / f"{benchmark.program}.json"
    line = [sys.executable, str(FOLDER / f"{benchmark.program}.py"), *benchmark.options, "--json", str(file)]
    print(f"\n== {' '.join(line[1:-2])}", flush=True)
    try:
        code = subprocess.run(line, timeout=benchmark.timeout_s, check=False).returncode
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{benchmark.program} took more than {benchmark.timeout_s:g} s") from None
    if code:
        raise RuntimeError(f"{benchmark.program} ended with exit code {code}")
    return read_ratios(file)


def measure_all(benchmarks: Sequence[Benchmark]) -> tuple[Ratios, list[str]]:
    """The ratios of those that succeed, and the errors of the others."""
    ratios, failures = {}, []
    with tempfile.TemporaryDirectory() as folder:
        for benchmark in benchmarks:
            try:
                ratios[benchmark.program] = measure(benchmark, Path(folder))
            except RuntimeError as error:
                failures.append(str(error))
    return ratios, failures


def show(changes: Sequence[Change]) -> None:
    """Prints one line per ratio; an asterisk marks those outside their band."""
    print(f"\n{'ratio':84}{'kept':>9}{'now':>9}{'change':>9}{'band':>7}")
    for change in changes:
        kept, now = (f"{value:.3f}" if value is not None else "-" for value in (change.kept, change.now))
        factor = f"{change.now / change.kept:.2f}" if change.kept and change.now else "-"
        print(f"{change.name:84}{kept:>9}{now:>9}{factor:>9}{change.band:>7.2f}{' *' if change.outside else ''}")


def main() -> int:
    """Returns the exit code: 1 where a ratio is outside its band, 0 otherwise."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    names = [benchmark.program for benchmark in BENCHMARKS]
    parser.add_argument("--only", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the ratios to this JSON file")
    parser.add_argument("--keep", action="store_true", help=f"keep the ratios in {KEPT.name}")
    options = parser.parse_args()
    chosen = [benchmark for benchmark in BENCHMARKS if benchmark.program in options.only]
    started = time.monotonic()
    now, failures = measure_all(chosen)
    if options.output is not None:
        _write(options.output, now)
    kept: Ratios = json.loads(KEPT.read_text(encoding="utf-8")) if KEPT.exists() else {}
    changes = compare(kept, now, {benchmark.program: benchmark.band for benchmark in chosen})
    show(changes)
    outside = sum(change.outside for change in changes)
    print(f"{len(changes)} ratios, {outside} outside their band, {(time.monotonic() - started) / 60:.1f} minutes")
    for failure in failures:
        print(f"not measured: {failure}")
    if options.keep:
        _write(KEPT, {name: (kept | now)[name] for name in names if name in kept | now})
        return int(bool(failures))
    return int(outside > 0 or bool(failures))


def _write(path: Path, ratios: Ratios) -> None:
    rounded = {program: {name: float(f"{ratio:.4g}") for name, ratio in one.items()} for program, one in ratios.items()}
    path.write_text(json.dumps(rounded, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    sys.exit(main())
