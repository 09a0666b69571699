"""What the pass for old log-probabilities costs: training time of a rollout with it and without it.

    OMP_NUM_THREADS=1 python benchmarks/old_log_probs.py [--rounds 12] [--steps 1] [--samples 16] [--length 256]

Two ranks of a process each train on the same recorded rollout from the same weights, in turn, round by round, with the
order of the two changed every round: one with `--compute-old-log-probs always`, one with `auto`. The time is that of
`MegatronTrainer.train`: packing, passes, optimizer steps and metrics. Six layers of width 256 without a reference
model; a GPU is used where there is one. Prints the medians and their ratio. Both must report the same losses, bit for
bit. Target at one optimizer step per rollout: at most 0.78 of the time with the pass.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import statistics
import sys
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from checkpoints import model_flags

from slimrl.arguments import Arguments
from slimrl.data.batch_schedule import schedule_batch
from slimrl.data.train_batch import RolloutBatch

TARGET = 0.78
VOCABULARY, PROMPT, WARM_UP = 2048, 32, 2
MODES = ("always", "auto")


def arguments(folder: Path, mode: str, steps: int) -> Arguments:
    """The model and its training, from the checkpoint in `folder`."""
    return Arguments(
        compute_old_log_probs=mode,
        **model_flags(hidden=256, layers=6, vocabulary=VOCABULARY, positions=4096),
        expert_tensor_parallel_size=1,
        num_rollout=10000,
        num_steps_per_rollout=steps,
        lr=1e-5,
        lr_decay_style="constant",
        ref_load=str(folder / "model"),
        run_dir=str(folder / mode),
    )


def batch(samples: int, length: int, steps: int, seed: int) -> RolloutBatch:
    """Random samples of `length` tokens, packed four at a time."""
    generator = torch.Generator().manual_seed(seed)
    response = length - PROMPT
    rewards = torch.randn(samples, generator=generator)
    whole = RolloutBatch(
        tokens=torch.randint(VOCABULARY, (samples * length,), generator=generator),
        total_lengths=torch.full((samples,), length),
        response_lengths=torch.full((samples,), response),
        loss_mask=torch.ones(samples * response),
        rollout_log_probs=torch.full((samples * response,), -7.6),
        raw_rewards=rewards,
        rewards=rewards,
        group_ids=torch.arange(samples) // 4,
        sample_ids=torch.arange(samples),
        truncated=torch.zeros(samples, dtype=torch.bool),
    )
    return schedule_batch(
        whole,
        data_parallel_size=1,
        context_parallel_size=1,
        micro_batch_group=1,
        global_batch_size=samples // steps,
        micro_batch_size=1,
        max_tokens_per_micro_batch=4 * length,
        balance=False,
    )[0]


def save_model(args: Arguments, folder: Path) -> None:
    """The first checkpoint, of random weights."""
    from slimrl.megatron import parallel
    from slimrl.megatron.checkpoint import state as checkpoint
    from slimrl.megatron.model import model_builder

    state = parallel.initialize(args, rank=0, world_size=1, init_method=f"file://{folder}/store")
    checkpoint.save_model_only(model_builder.build_model(args, state), folder / "model")
    parallel.shutdown()


def rank(args: Arguments, share: RolloutBatch, store: str, connection: Connection) -> None:
    """Trains once per message, and answers with the seconds and the losses."""
    from slimrl.megatron.training.trainer import MegatronTrainer

    trainer = MegatronTrainer(args, rank=0, world_size=1, local_rank=0, init_method=f"file://{store}")
    while (rollout_id := connection.recv()) is not None:
        started = time.perf_counter()
        metrics = trainer.train(rollout_id, share)  # reads the losses: the device is done
        connection.send((time.perf_counter() - started, [step["loss"] for step in metrics]))
    trainer.close()


def measure(options: argparse.Namespace, folder: Path) -> dict[str, list[float]]:
    """Seconds of every round by mode, the first rounds left out. Raises RuntimeError where losses differ."""
    context = multiprocessing.get_context("spawn")
    share = batch(options.samples, options.length, options.steps, options.seed)
    maker = context.Process(target=save_model, args=(arguments(folder, "auto", options.steps), folder))
    maker.start()
    maker.join()
    ends, processes = {}, []
    for mode in MODES:
        ends[mode], theirs = context.Pipe()
        args = arguments(folder, mode, options.steps)
        processes.append(context.Process(target=rank, args=(args, share, str(folder / f"{mode}.store"), theirs)))
        processes[-1].start()
        theirs.close()
    seconds: dict[str, list[float]] = {mode: [] for mode in MODES}
    for number in range(WARM_UP + options.rounds):
        losses = {}
        for mode in MODES if number % 2 else reversed(MODES):
            ends[mode].send(number)
            taken, losses[mode] = ends[mode].recv()
            seconds[mode].append(taken)
        if losses["always"] != losses["auto"]:
            raise RuntimeError(f"the losses of round {number} differ: {losses}")
    for end, process in zip(ends.values(), processes, strict=True):
        end.send(None)
        process.join()
    return {mode: taken[WARM_UP:] for mode, taken in seconds.items()}


def main() -> None:
    """Measures and prints one line per mode, and the ratio."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--steps", type=int, default=1, help="optimizer steps per rollout")
    parser.add_argument("--samples", type=int, default=16)
    parser.add_argument("--length", type=int, default=256, help="tokens of a sample")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        seconds = measure(options, Path(folder))
    print(
        f"{options.samples} samples of {options.length} tokens, {options.steps} optimizer steps per rollout; median of"
        f" {options.rounds} interleaved rounds, after {WARM_UP} to warm up"
    )
    medians = {mode: statistics.median(taken) for mode, taken in seconds.items()}
    for mode, median in medians.items():
        fastest, slowest = min(seconds[mode]), max(seconds[mode])
        print(f"--compute-old-log-probs {mode:8}{median:8.3f} s  ({fastest:.3f} to {slowest:.3f})")
    ratios = [auto / always for auto, always in zip(seconds["auto"], seconds["always"], strict=True)]
    print(
        f"without / with the pass: {medians['auto'] / medians['always']:.3f}, rounds {min(ratios):.3f} to"
        f" {max(ratios):.3f}" + (f"; target {TARGET}" if options.steps == 1 else "")
    )


if __name__ == "__main__":
    main()
