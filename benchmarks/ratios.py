"""The `--json` option of the benchmarks: their ratios by name, for a program to read.

    python benchmarks/ratios.py FILE

Prints the ratios of one file that a benchmark wrote. `benchmarks/run.py` runs the benchmarks and compares their ratios
with kept ones.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Mapping
from pathlib import Path


def add_json_option(parser: argparse.ArgumentParser) -> None:
    """Adds `--json FILE`, whose value goes to `write_ratios`."""
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the ratios to this file")


def write_ratios(path: Path | None, ratios: Mapping[str, float]) -> None:
    """Writes ratios by name, none where `path` is None. Raises ValueError if a ratio is not positive and finite."""
    wrong = {name: ratio for name, ratio in ratios.items() if not (ratio > 0 and math.isfinite(ratio))}
    if wrong:
        raise ValueError(f"ratios must be positive and finite: {wrong}")
    if path is not None:
        path.write_text(json.dumps(dict(ratios), indent=2) + "\n", encoding="utf-8")


def read_ratios(path: Path) -> dict[str, float]:
    """What `write_ratios` wrote."""
    ratios: dict[str, float] = json.loads(path.read_text(encoding="utf-8"))
    return ratios


def main() -> None:
    """Prints one line per ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path)
    for name, ratio in read_ratios(parser.parse_args().file).items():
        print(f"{name:60} {ratio:10.3f}")


if __name__ == "__main__":
    main()
