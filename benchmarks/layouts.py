"""Numerical error of every parallel layout against plain float64 autograd: a table of layout x model type.

    OMP_NUM_THREADS=1 python benchmarks/layouts.py [--bf16] [--only "TP2 SP"] [--ranks 4]

Trains one recorded rollout in two optimizer steps (clipped policy loss, KL, entropy, gradient clipping, AdamW) in each
layout of tests/megatron/layouts.py, in float32, on as many processes as the layout has ranks, and compares losses,
gradient norms and updated weights with those of transformers' model, trained in float64 by torch alone. Target: every
relative difference below 1e-5. With --bf16 the weights are bfloat16 with float32 main weights, one step is taken, and
the whole gradient is compared too; the baseline, in the first rows, is transformers' own model in bfloat16.
Target: loss and gradient norm within 2^-5 (eight units of rounding), weights within 0.01, the gradient within 2^-5 or,
with experts, 2^-3. Exit code 1 if a target is missed.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.megatron import layouts  # noqa: E402
from tests.megatron.launch import RankPool  # noqa: E402

FP32_LIMIT = 1e-5
KINDS = {"dense": "dense", "MoE": "MoE", "MLA": "MLA with experts"}


def shown(found: layouts.Differences, with_gradient: bool) -> str:
    """The differences in the order of the table's heading."""
    numbers = [found.loss, found.grad_norm, found.weights]
    if with_gradient:
        numbers.append(found.gradients)
    return " · ".join("–" if number is None else f"{number:.1e}".replace("e-0", "e-") for number in numbers)


def measure(models: layouts.Models, layout: layouts.Layout, kind: str, bf16: bool) -> tuple[layouts.Differences, bool]:
    """The errors of one layout, and whether they meet the target."""
    settings = layouts.BF16 if bf16 else layouts.SETTINGS
    args = models.args(layout, kind, settings)
    with RankPool(layout.ranks) as pool:
        result = layouts.train(pool, args, models.rollout)
    found = layouts.differences(args, result, models.truth(kind, layout.layers, settings))
    if bf16:
        return found, layouts.within_bf16(found, kind)
    return found, max(found.loss, found.grad_norm, found.weights) < FP32_LIMIT


def rows(models: layouts.Models, chosen: dict[str, layouts.Layout], bf16: bool) -> bool:
    """Prints the table; returns whether every target is met."""
    good, worst = True, 0.0
    heading = "loss · gradient norm · " + ("main weights · gradient" if bf16 else "weights")
    print(f"each cell: {heading}, as relative differences\n")
    print(f"| layout | ranks | layers | {' | '.join(KINDS.values())} |")
    print("| --- | --- | --- | --- | --- | --- |")
    if bf16:
        for depth in sorted({layout.layers for layout in chosen.values()}):
            peers = [shown(models.peer(kind, depth), True) for kind in KINDS]
            print(f"| *transformers in bfloat16* | | {depth} | {' | '.join(peers)} |", flush=True)
    for name, layout in chosen.items():
        cells = []
        for kind in KINDS:
            if kind not in layout.kinds:
                cells.append("")
                continue
            found, on_target = measure(models, layout, kind, bf16)
            good, worst = good and on_target, max(worst, found.loss, found.grad_norm, found.weights)
            cells.append(shown(found, bf16) + ("" if on_target else " **off**"))
        print(f"| {name} | {layout.ranks} | {layout.layers} | {' | '.join(cells)} |", flush=True)
    print(f"\nworst of loss, gradient norm and weights: {worst:.1e}")
    return good


def main() -> int:
    """Measures the selected layouts; returns 1 if a target is missed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bf16", action="store_true")
    parser.add_argument("--only", default="", help="layouts whose name holds this")
    parser.add_argument("--ranks", type=int, help="layouts of that many ranks")
    options = parser.parse_args()
    logging.disable(logging.WARNING)
    chosen = {
        name: layout
        for name, layout in layouts.LAYOUTS.items()
        if options.only in name and options.ranks in (None, layout.ranks)
    }
    begun = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        good = rows(layouts.Models(Path(folder)), chosen, options.bf16)
    print(f"{len(chosen)} layouts in {time.monotonic() - begun:.0f} s")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
