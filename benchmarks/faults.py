"""Fault tolerance: cost and correctness of the same run with and without losing servers and the router.

    python benchmarks/faults.py [--steps 30] [--seed 1] [--entry train.py] [--colocate]

Makes the tiny model and trains it with real SGLang and Megatron on two servers, undisturbed and then with
`--use-fault-tolerance` while servers and the router are killed (SIGKILL) and stopped (SIGSTOP) at random moments given
by the seed. Prints every fault, the run's log lines about losses and replacements, the counts, and the comparison:
samples per step, indices, tokens and rewards. Baseline: the undisturbed run. Target: no sample lost or duplicated, and
the same tokens and rewards if they were sampled from the same weights. Exit code 1 if that fails.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from slimrl.data.sample import Sample  # noqa: E402
from tests.end_to_end import faults, harness  # noqa: E402
from tests.end_to_end.conftest import Tiny  # noqa: E402

KINDS = [
    ("server", signal.SIGKILL),
    ("router", signal.SIGKILL),
    ("scheduler", signal.SIGSTOP),
    ("server", signal.SIGKILL),
    ("scheduler", signal.SIGKILL),
    ("router", signal.SIGSTOP),
    ("scheduler", signal.SIGSTOP),
]
TIMEOUT_S = 500.0


def prepared(folder: Path, *options: object) -> Tiny:
    """The tiny model and its checkpoint in `folder`; `options` are further ones of make_tiny_model.py."""
    tiny = Tiny(folder / "made", folder / "home", folder / "torch_dist")
    tiny.home.mkdir()
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    make = [ROOT / "tools/make_tiny_model.py", "--output-dir", tiny.folder, "--seed", "0", *options]
    subprocess.run([sys.executable, *map(str, make)], check=True, env=environment, stdout=subprocess.DEVNULL)
    convert = [ROOT / "tools/convert_hf_to_torch_dist.py", *tiny.model_args(), "--hf-checkpoint", tiny.model]
    words = [sys.executable, *map(str, convert), "--save", str(tiny.torch_dist)]
    subprocess.run(words, check=True, env=environment, stdout=subprocess.DEVNULL)
    return tiny


def run(
    tiny: Tiny, folder: Path, name: str, entry: str, steps: int, hits: list[faults.Hit], seed: int, *, colocate: bool
) -> tuple[harness.Finished, list[list[Sample]], list[str]]:
    """One run: its outcome, the samples of each step, and the injected faults."""
    gpus = {"colocate": True, "actor_num_gpus_per_node": 2}
    if not colocate:
        gpus = {"actor_num_gpus_per_node": 1, "rollout_num_gpus": 2}
    tolerance = {
        "use_fault_tolerance": True,
        "rollout_health_check_interval": 1,
        "rollout_health_check_timeout": 3,
    }
    dumps = folder / name / "{rollout_id}.jsonl"
    flags = tiny.flags(
        **gpus,
        **(tolerance if hits else {}),
        num_rollout=steps,
        rollout_shuffle=None,
        sglang_max_running_requests=2,
        save_debug_rollout_data=dumps,
    )
    started = harness.start(entry, flags, folder, name, tiny.home)
    try:
        done_to_it = faults.strike(started, hits, seed, TIMEOUT_S)
        done = started.finish(TIMEOUT_S)
    except BaseException:
        started.kill_everything()
        raise
    if done.code or done.left:
        raise SystemExit(
            f"the run {name} ended with exit code {done.code} and left {done.left}:\n{done.output[-6000:]}"
        )
    return done, faults.rollouts(dumps, steps), done_to_it


def print_table(runs: list[tuple[harness.Finished, list[list[Sample]]]]) -> None:
    """The figures of both runs, without and with faults."""
    rows: dict[str, list[str]] = {}

    def add(label: str, values: list[str]) -> None:
        rows[label] = values

    add("steps", [str(len(steps)) for _, steps in runs])
    add("samples", [str(sum(map(len, steps))) for _, steps in runs])
    add("samples in the smallest step", [str(min(map(len, steps))) for _, steps in runs])
    add("samples in the largest step", [str(max(map(len, steps))) for _, steps in runs])
    add("distinct samples", [str(len({(s.group_index, s.index) for step in steps for s in step})) for _, steps in runs])
    add("mean reward", [f"{statistics.fmean(s.reward for step in steps for s in step):.4f}" for _, steps in runs])
    gaps = [max(done.steps("train_rollout_logprob_abs_diff_max")) for done, _ in runs]
    add("largest |train - rollout logprob|", [f"{gap:.1e}" for gap in gaps])
    add("seconds", [f"{done.seconds:.0f}" for done, _ in runs])
    hit = runs[1][0]
    for count in ("servers_lost", "servers_replaced", "router_restarts", "requests_resent"):
        add(count.replace("_", " "), ["", f"{sum(hit.steps(f'rollout/faults/{count}')):g}"])
    print(f"\n{'':36}{'undisturbed':>14}{'hit':>14}")
    for label, (one, other) in rows.items():
        print(f"{label:36}{one:>14}{other:>14}")


def equal(expected: list[list[Sample]], found: list[list[Sample]]) -> bool:
    """Whether both runs trained on the same data; prints it. Compares tokens sampled from the same weights."""
    pairs = list(zip([s for step in expected for s in step], [s for step in found for s in step], strict=True))
    alike = [(one, other) for one, other in pairs if one.weight_versions == other.weight_versions]
    same = {
        "indices and prompts": all((a.index, a.prompt) == (b.index, b.prompt) for a, b in pairs),
        "tokens": all(a.tokens == b.tokens for a, b in alike),
        "rewards": all(a.reward == b.reward for a, b in alike),
    }
    print(f"\nof {len(pairs)} samples {len(alike)} were sampled by the same weights in both runs; equal: {same}")
    return all(same.values())


def main() -> None:
    """Runs both and prints the differences."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--entry", default="train.py", choices=("train.py", "train_async.py"))
    parser.add_argument("--colocate", action="store_true")
    options = parser.parse_args()
    kinds = KINDS[: max(min(len(KINDS), options.steps - 2), 0)]
    hits = faults.plan(options.seed, kinds, range(0, options.steps - 1), 0.5)
    with tempfile.TemporaryDirectory(prefix="slimrl-faults-") as name:
        folder = Path(name)
        tiny = prepared(folder)
        shape = (options.entry, options.steps)
        calm, expected, _ = run(tiny, folder, "calm", *shape, [], 0, colocate=options.colocate)
        hit, found, lines = run(tiny, folder, "hit", *shape, hits, options.seed, colocate=options.colocate)
        print("what was done to the run:", *lines, "", "what the run says:", *faults.fault_lines(hit.output), sep="\n")
        print_table([(calm, expected), (hit, found)])
    sys.exit(0 if equal(expected, found) else 1)


if __name__ == "__main__":
    main()
