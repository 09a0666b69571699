"""Compares a run that is repeatedly killed and resumed with the same undisturbed run, bit for bit.

    python benchmarks/kills.py [--kills 10] [--seed 1] [--layout split] [--async-save]
                              [--minutes 11] [--folder DIR]

Creates the tiny model and trains it with real SGLang and Megatron, once undisturbed, and once with `--kills` SIGKILLs
at random moments, one per launch: aimed at saves (4 of 10), at weight updates (3 of 10) and at anything else; half of
them kill only the driver, whose processes must then exit by themselves, half kill all processes. Prints for each kill
the phase that it hit, according to the timeline of train rank 0 and the unfinished folder, and the first rollout of
that launch. Baseline: the undisturbed run. Target: the last checkpoint, the samples of every rollout, and loss,
gradient norm and reward of every step are equal, bit for bit. Exit code 1 if they are not, if a process is left over,
or if fewer than a quarter of the kills hit a save or fewer than an eighth a weight update. `--minutes` limits the time
for kills; `--folder` keeps the model and the undisturbed run for the next time.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import math
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from benchmarks.faults import prepared  # noqa: E402
from slimrl.observability.rollout_dump import load_rollout  # noqa: E402
from tests.end_to_end import checkpoints, harness, kills  # noqa: E402
from tests.end_to_end.conftest import Tiny  # noqa: E402

TIMEOUT_S = 300.0
LAYOUTS = {
    "split": {"actor_num_gpus_per_node": 1, "rollout_num_gpus": 1},
    "colocated": {"colocate": True, "actor_num_gpus_per_node": 2, "rollout_num_gpus": 2},
}
COMPARED = ("loss", "grad_norm", "reward")


@dataclasses.dataclass(frozen=True)
class Job:
    """One run: its folder and its command line."""

    tiny: Tiny
    folder: Path
    steps: int
    layout: str
    async_save: bool

    @property
    def saved(self) -> Path:
        """The checkpoints' folder."""
        return self.folder / "checkpoints"

    @property
    def dumps(self) -> str:
        """The pattern of the recorded rollouts."""
        return str(self.folder / "dumps/{rollout_id}.jsonl")

    @property
    def timeline(self) -> Path:
        """The timeline of train rank 0."""
        return self.folder / "runs/run/timeline/train-rank-0.jsonl"

    def start(self) -> harness.Started:
        """One launch, which resumes from what is saved."""
        self.folder.mkdir(parents=True, exist_ok=True)
        flags = self.tiny.flags(
            **LAYOUTS[self.layout],
            num_rollout=self.steps,
            save=self.saved,
            load=self.saved,
            save_interval=1,
            update_weight_buffer_size=16
            * 2**10,  # many buckets: a weight update of the tiny model would be over at once
            # one request at a time: on a CPU the last digits of a log-probability depend on who shares its batch
            sglang_max_running_requests=1,
            rollout_batch_size=4,
            save_debug_rollout_data=self.dumps,
            async_save=self.async_save,
        )
        return harness.start("train.py", flags, self.folder, "run", self.tiny.home)

    def finish(self) -> harness.Finished:
        """A launch without a kill. Raises SystemExit if it fails."""
        started = self.start()
        try:
            done = started.finish(TIMEOUT_S)
        except BaseException:
            started.kill_everything()
            raise
        if done.code or done.left:
            raise SystemExit(f"{self.folder} ended with {done.code} and left {done.left}:\n{done.output[-6000:]}")
        return done


def begins_at(output: str) -> str:
    """The first rollout of a launch, from its log."""
    _, found, rest = output.partition("rollouts ")
    return rest.split()[0] if found else "-"


def killed(
    job: Job, aims: list[kills.Aim], lengths: dict[str, float], until: float
) -> tuple[harness.Finished, list[kills.Kill]]:
    """The run with a kill in each launch but the last, none after `until` (time.monotonic); prints a line for each."""
    print(f"{'kill':>4}  {'aimed at':16}{'killed':8}{'it hit':22}{'half written':20}{'left torn':20}launch began at")
    hits: list[kills.Kill] = []
    for number, aim in enumerate(aims, start=1):
        if time.monotonic() > until:
            print(f"{number:4}  no time is left (--minutes)")
            break
        started = job.start()
        try:
            hit = kills.strike(started, aim, job.saved, lengths, TIMEOUT_S)
        except BaseException:
            started.kill_everything()
            raise
        if hit is None:
            print(f"{number:4}  the run was over before")
            break
        hits.append(hit)
        who = "all" if aim.tree else "driver"
        within = str(hit.within or "generation or start")
        left = f"  LEFT {hit.left}" if hit.left else ""
        line = f"{number:4}  {aim.kind:16}{who:8}{within:22}{' '.join(hit.seen):20}{' '.join(hit.torn):20}"
        print(f"{line}rollout {begins_at(started.log.read_text())}{left}", flush=True)
    done = job.finish()
    print(f" end  undisturbed, from rollout {begins_at(done.output)}")
    return done, hits


def differences(one: Job, other: Job, steps: tuple[harness.Finished, harness.Finished]) -> list[str]:
    """The differences of two runs: checkpoints, samples and steps."""
    last = f"iter_{one.steps - 1:07d}"
    found = checkpoints.differences(*(checkpoints.read(job.saved / last) for job in (one, other)), last)
    for step in range(one.steps):
        samples = [[sample.to_dict() for sample in load_rollout(job.dumps, step).samples] for job in (one, other)]
        found += checkpoints.differences(*samples, f"rollout {step}")
    for name in ("step", *COMPARED):
        found += checkpoints.differences(*(done.steps(name) for done in steps), name)
    return found


@contextlib.contextmanager
def _folder(given: str | None) -> Iterator[Path]:
    if given is not None:
        yield Path(given).absolute()
        return
    with tempfile.TemporaryDirectory(prefix="slimrl-kills-") as name:
        yield Path(name)


def main() -> None:
    """Runs both and prints the results."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--layout", choices=LAYOUTS, default="split")
    parser.add_argument("--async-save", action="store_true")
    parser.add_argument("--minutes", type=float, default=11.0, help="time limit for kills")
    parser.add_argument("--folder", help="kept, with the model and the undisturbed run (default: removed at the end)")
    options = parser.parse_args()
    begun = time.monotonic()
    steps = 2 * options.kills + 2
    with _folder(options.folder) as folder:
        tiny = Tiny(folder / "made", folder / "home", folder / "torch_dist")
        if not tiny.torch_dist.is_dir():
            folder.mkdir(exist_ok=True)
            prepared(folder)
        shape = (steps, options.layout, options.async_save)
        name = f"{options.layout}{'-async' if options.async_save else ''}-{steps}"
        calm, hit = Job(tiny, folder / name, *shape), Job(tiny, folder / f"{name}-seed{options.seed}", *shape)
        expected = calm.finish()  # one that is there already says so, and keeps its summary
        lengths = kills.usual_lengths(calm.timeline)
        usual = ", ".join(f"{kind} {seconds:.2f} s" for kind, seconds in lengths.items())
        print(f"undisturbed: {steps} steps in {expected.seconds:.0f} s; {usual}")
        done, hits = killed(hit, kills.plan(options.seed, options.kills), lengths, begun + 60 * options.minutes)
        found = differences(calm, hit, (expected, done))
    saves, updates = sum(one.in_a_save for one in hits), sum(one.in_an_update for one in hits)
    print(f"\n{len(hits)} kills, {saves} in a save, {updates} in a weight update; {time.monotonic() - begun:.0f} s")
    print("equal to the undisturbed run, bit for bit" if not found else "DIFFERENT:\n" + "\n".join(found[:20]))
    enough = hits and saves >= math.ceil(len(hits) / 4) and updates >= len(hits) // 8
    sys.exit(0 if enough and not found and not any(one.left for one in hits) else 1)


if __name__ == "__main__":
    main()
