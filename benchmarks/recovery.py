"""Seconds from the loss of a process to full speed, against a restart of the whole run from its checkpoint.

    python benchmarks/recovery.py [--rounds 3] [--steps 24] [--kinds NAME ...] [--json FILE]

Makes the tiny model and trains it on two servers and one rank, with a checkpoint after every second step. In each round
every kind of process is killed once (SIGKILL) in a run of its own, after a third of the steps: a server, the router, a
training rank, with --use-fault-tolerance; and the driver, whose run `scripts/resume.sh` starts again. Where two data-
parallel ranks train without the distributed optimizer, the new ranks get the state of the other one. A node is a Ray
node of one rank, which a spare one replaces; its server is on another node. The peer is the loss of the only rank
without --use-fault-tolerance under `scripts/resume.sh`. A run is at full speed again when a step takes at most 1.5
times the median of the steps before the loss. Prints per kind the seconds until then (medians of the rounds), prompts
lost and samples doubled in the rollouts of the finished run (target: 0), and the part of its time in which a run trains
if it loses such a process once in 100 steps of a minute.
"""

from __future__ import annotations

import argparse
import dataclasses
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from faults import prepared
from ratios import add_json_option, write_ratios

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.end_to_end import faults, harness  # noqa: E402
from tests.end_to_end.conftest import Tiny  # noqa: E402
from tests.end_to_end.ray_nodes import SPLIT, add_spare, launch_on, two_nodes  # noqa: E402

TIMEOUT_S = 600.0
FULL_SPEED = 1.5  # times the median step before the loss
SAVE_INTERVAL = 2
PER_STEP = 32  # samples
STEP_LINE = re.compile(r"step (\d+) \|")
STEPS_BETWEEN, STEP_S = 100, 60.0


@dataclasses.dataclass(frozen=True)
class Kind:
    """The process that is killed, or the node; `restarts`: by scripts/resume.sh, without --use-fault-tolerance.

    `flags` replace those of the run; `says` is in the output of a run that recovers in this way.
    """

    name: str
    target: str
    restarts: bool = False
    flags: dict[str, object] = dataclasses.field(default_factory=dict)
    says: str = ""


NODE = "node"
FROM_PEERS = "continue from the state of their data-parallel peers"
WITH_PEERS = {"actor_num_gpus_per_node": 2, "no_use_distributed_optimizer": True}
KINDS = (
    Kind("server", "server"),
    Kind("router", "router"),
    Kind("rank", "rank", says="continue from the checkpoint"),
    Kind("rank with a peer", "rank", flags=WITH_PEERS, says=FROM_PEERS),
    Kind(NODE, NODE, flags=SPLIT, says="training continues on "),
    Kind("driver, started again", "driver", restarts=True),
    Kind("rank, the run started again", "rank", restarts=True),
)


@dataclasses.dataclass(frozen=True)
class Recovery:
    """Seconds until full speed, and what was lost or doubled of the samples trained on."""

    seconds: float
    lost: int
    doubled: int


def flags_of(tiny: Tiny, folder: Path, steps: int, kind: Kind) -> list[str]:
    """The flags of one run, whose files are in `folder`."""
    flags: dict[str, object] = dict(
        actor_num_gpus_per_node=1,
        rollout_num_gpus=2,
        num_rollout=steps,
        rollout_shuffle=None,
        save=folder / "checkpoints",
        load=folder / "checkpoints",
        save_interval=SAVE_INTERVAL,
        save_debug_rollout_data=folder / "{rollout_id}.jsonl",
    )
    if not kind.restarts:
        flags |= {"use_fault_tolerance": True, "rollout_health_check_interval": 1}
    return tiny.flags(**flags | kind.flags)


def begin(tiny: Tiny, folder: Path, kind: Kind, steps: int) -> harness.Started:
    """Starts the run in which a process of `kind` will be killed."""
    words = [sys.executable, str(ROOT / "train.py"), *flags_of(tiny, folder, steps, kind)]
    words += ["--runs-dir", str(folder), "--run-name", "run"]
    if kind.restarts:
        words = ["bash", str(ROOT / "scripts" / "resume.sh"), "--", *words]
    path = f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin"
    return harness.launch(words, log=folder / "output", run_dir=folder / "run", cwd=folder, path=path, home=tiny.home)


def recover(tiny: Tiny, folder: Path, kind: Kind, steps: int) -> Recovery:
    """One run with one loss. Raises SystemExit if it does not end well."""
    folder.mkdir(parents=True)
    if kind.target != NODE:

        def kill_process() -> bool:
            victims = faults.victims(started, kind.target)
            if victims:
                victims[0].kill()
            return bool(victims)

        started = begin(tiny, folder, kind, steps)
        return watched(started, folder, kind, steps, kill_process)
    with two_nodes() as (cluster, of_training):
        add_spare(cluster)
        on_cluster = launch_on(cluster, tiny, folder, "run", flags_of(tiny, folder, steps, kind))

        def kill_node() -> bool:
            cluster.remove_node(of_training, allow_graceful=False)
            return True

        return watched(on_cluster, folder, kind, steps, kill_node)


def watched(started: harness.Started, folder: Path, kind: Kind, steps: int, kill: Callable[[], bool]) -> Recovery:
    """Calls `kill`, which is False while there is nothing to kill, after a third of the steps."""
    ends: dict[int, float] = {}  # of each step; a repeated one counts when it is done again
    killed, seen = 0.0, 0
    try:
        while started.process.poll() is None:
            text = started.log.read_text()
            now = time.monotonic()
            ends |= dict.fromkeys((int(step) for step in STEP_LINE.findall(text[seen:])), now)
            seen = text.rfind("\n") + 1
            if not killed and len(ends) > steps // 3:
                before, now = [ends[step] - ends[step - 1] for step in range(2, len(ends))], time.monotonic()
                killed = now if kill() else 0.0
            time.sleep(0.01)
        done = started.finish(TIMEOUT_S)
    except BaseException:
        started.kill_everything()
        raise
    if done.code or not killed or kind.says not in done.output:
        raise SystemExit(f"the run with a lost {kind.name} ended with exit code {done.code}:\n{done.output[-4000:]}")
    usual = statistics.median(before)
    whole = [step for step in sorted(ends) if ends.get(step - 1, 0.0) > killed]  # steps that began after the loss
    fast = [step for step in whole if ends[step] - ends[step - 1] <= FULL_SPEED * usual]
    if not fast:
        raise SystemExit(f"after a lost {kind.name} no step was as fast as before: give more --steps")
    indices = [sample.index for samples in faults.rollouts(folder / "{rollout_id}.jsonl", steps) for sample in samples]
    return Recovery(
        ends[fast[0]] - usual - killed,
        steps * PER_STEP - len(set(indices)),
        len(indices) - len(set(indices)),
    )


def main() -> None:
    """Runs the rounds and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=24)
    parser.add_argument("--kinds", nargs="+", metavar="NAME", help="only these, and the peer")
    add_json_option(parser)
    options = parser.parse_args()
    chosen = [kind for kind in KINDS if options.kinds is None or kind.name in options.kinds or kind is KINDS[-1]]
    found: dict[str, list[Recovery]] = {kind.name: [] for kind in chosen}
    with tempfile.TemporaryDirectory(prefix="slimrl-recovery-") as name:
        tiny = prepared(Path(name))
        for number in range(options.rounds):
            for index, kind in enumerate(chosen):
                found[kind.name].append(recover(tiny, Path(name) / f"{number}-{index}", kind, options.steps))
    seconds = {name: statistics.median(one.seconds for one in of) for name, of in found.items()}
    peer = seconds[KINDS[-1].name]
    columns = ("seconds", "least", "most", "/ restart", "lost", "doubled", "training")
    print(f"{'lost process':30}" + "".join(f"{column:>11}" for column in columns))
    for name, of in found.items():
        spread = [one.seconds for one in of]
        useful = STEPS_BETWEEN * STEP_S / (STEPS_BETWEEN * STEP_S + seconds[name])
        print(
            f"{name:30}{seconds[name]:11.1f}{min(spread):11.1f}{max(spread):11.1f}{seconds[name] / peer:11.2f}"
            f"{sum(one.lost for one in of):11}{sum(one.doubled for one in of):11}{useful:11.2%}"
        )
    write_ratios(options.json, {f"{name} / restart": seconds[name] / peer for name in list(seconds)[:-1]})


if __name__ == "__main__":
    main()
