"""Cost and accuracy of grading math answers, compared with the math-verify library alone.

    OMP_NUM_THREADS=1 python benchmarks/grader.py [--pairs tests/rollout/math_pairs.jsonl ...] [--seconds 5]

"Easy" are the pairs of the labelled set that need no algebra, "plain" are numbers and fractions, as most answers are.
The baseline is math-verify's `parse` and `verify` on the same pairs, in the same process, without a time limit on
either side. It caches parsed expressions, so repeated pairs cost it less than they would in a run.
"""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import psutil
from ratios import add_json_option, write_ratios

from slimrl.data.sample import Sample
from slimrl.rollout.rm_hub.grader_pool import GraderPool
from slimrl.rollout.rm_hub.math_equivalence import answers_equal, sympy_equal
from slimrl.rollout.rm_hub.rule_reward import grade

Pair = tuple[str, str, bool]
_TESTS = Path(__file__).resolve().parents[1] / "tests" / "rollout"
PAIRS = [_TESTS / "math_pairs.jsonl", _TESTS / "math_pairs_fresh.jsonl"]


class NeedsAlgebra(Exception):
    """The pair is not an easy one."""


def main() -> None:
    """Measures and prints one line per figure."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pairs", type=Path, nargs="+", default=PAIRS)
    parser.add_argument("--seconds", type=float, default=5.0, help="for each measurement")
    add_json_option(parser)
    options = parser.parse_args()
    logging.disable(logging.CRITICAL)
    ratios = {}
    files = {path.name: _read(path) for path in options.pairs}
    pairs = [pair for own in files.values() for pair in own]
    sympy_equal.warm_up()
    plain = _plain_pairs(6 * 950)
    easy = [pair for pair in pairs if _is_easy(pair)]
    print(f"pairs                              {len(pairs):10d}   of which easy {len(easy)}")
    for name, own in files.items():
        ours, theirs = (_accuracy(judge, own) for judge in (_judge, _judge_by_library))
        passed = sum(_judge(answer, label) for answer, label, equal in own if not equal)
        print(
            f"{name:34s} {ours:10.1%}   math-verify alone {theirs:8.1%}   of {len(own)}, wrong answers passed {passed}"
        )
    for name, part in (("plain answers", plain), ("easy pairs", easy), ("all pairs", pairs)):
        rate, peer = (_rate(judge, part, options.seconds) for judge in (_judge, _judge_by_library))
        ratios[f"grades per second of {name} / math-verify"] = rate / peer
        print(
            f"{name + ', grades/s/core':34s} {rate:10,.0f}   math-verify alone {peer:8,.0f}   ratio {rate / peer:6.1f}"
        )
    wall, share = asyncio.run(_pool_rate(plain[2::6], options.seconds))
    print(f"{'plain answers through the pool':34s} {wall:10,.0f} /s   of one core in the caller's process {share:.0%}")
    wall, share = asyncio.run(_pool_rate(plain[1::6], options.seconds))
    print(f"{'whole numbers, decided at sight':34s} {wall:10,.0f} /s   of one core in the caller's process {share:.0%}")
    write_ratios(options.json, ratios)


def _read(path: Path) -> list[Pair]:
    rows = map(json.loads, path.read_text().splitlines())
    return [(row["answer"], row["label"], row["equal"]) for row in rows]


def _judge(answer: str, label: str) -> bool:
    return answers_equal(answer, label, sympy_equal.equal)


def _judge_by_library(answer: str, label: str) -> bool:
    from math_verify import LatexExtractionConfig, parse, verify

    config = [LatexExtractionConfig(boxed_match_priority=0)]
    parsed = [parse(f"\\boxed{{{text}}}", config, parsing_timeout=None) for text in (label, answer)]
    return bool(all(parsed) and verify(*parsed, timeout_seconds=None))


def _plain_pairs(count: int) -> list[Pair]:
    """Typical answers: numbers and fractions, all pairs different."""
    pairs: list[Pair] = []
    for one in range(2, count // 6 + 2):
        pairs += [
            (f"{one}", f"{one}.0", True),
            (f"{one}", f"{one + 1}", False),
            (f"\\frac{{{2 * one}}}{{{one + 1}}}", f"{2 * one}/{one + 1}", True),
            (f"1,{one:03d}", f"{1000 + one}", True),
            (f"\\dfrac{{{one}}}{{7}}", f"\\frac{{{one}}}{{9}}", False),
            (f"$-{one}.50$", f"-{2 * one + 1}/2", True),
        ]
    return pairs


def _is_easy(pair: Pair) -> bool:
    def refuse(answer: str, label: str) -> bool:
        raise NeedsAlgebra

    try:
        answers_equal(pair[0], pair[1], refuse)
    except NeedsAlgebra:
        return False
    return True


def _accuracy(judge: Callable[[str, str], bool], pairs: Sequence[Pair]) -> float:
    return sum(judge(answer, label) is equal for answer, label, equal in pairs) / len(pairs)


def _rate(judge: Callable[[str, str], bool], pairs: Sequence[Pair], seconds: float) -> float:
    """Grades per second of this process's own processor time: other load on the machine does not count."""
    for answer, label, _ in pairs:
        judge(answer, label)
    started = time.process_time()
    for done, (answer, label, _) in enumerate(itertools.cycle(pairs), start=1):
        judge(answer, label)
        if (used := time.process_time() - started) > seconds:
            return done / used
    raise AssertionError("an infinite loop ended")


async def _pool_rate(pairs: Sequence[Pair], seconds: float) -> tuple[float, float]:
    """Grades per second of wall time through the whole path of a rollout, and the caller's processor share."""
    pool = GraderPool(time_limit_s=60.0)
    samples = [
        Sample(prompt="q", index=index, response=f"so \\boxed{{{answer}}}", label=label)
        for index, (answer, label, _) in enumerate(pairs)
    ]

    async def batch(count: int) -> None:
        await asyncio.gather(*(grade("math", samples[one % len(samples)], pool) for one in range(count)))

    await batch(64)
    me = psutil.Process()
    started, used, done = time.perf_counter(), sum(me.cpu_times()[:2]), 0
    while time.perf_counter() - started < seconds:
        await batch(512)
        done += 512
    wall, used = time.perf_counter() - started, sum(me.cpu_times()[:2]) - used
    pool.close()
    return done / wall, used / wall


if __name__ == "__main__":
    main()
