"""Overhead of a training step besides the model: driver, Ray and the round trip to the rank, with a minimal model.

    python benchmarks/step_overhead.py [--rounds 40] [--no-timeline]

One rank trains on the same recorded batch (8 samples of 12 tokens, a model of one layer of width 32), called
alternately
- directly: `MegatronTrainer.train` in this process, without Ray: the baseline, packing and optimizer included,
- through a train worker: pickled, through Ray's object store and the rank's socket, watched as in a run.
Prints the median of interleaved rounds of each, and the difference, which is the framework's overhead per step.
Target: at most 10 ms, one percent of the shortest step of a real model.
"""

from __future__ import annotations

import argparse
import os
import pickle
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
os.environ["OMP_NUM_THREADS"] = "1"

import torch
from ratios import add_json_option, write_ratios

from slimrl.arguments import Arguments
from slimrl.data.batch_schedule import schedule_batch
from slimrl.data.train_batch import RolloutBatch
from slimrl.platform.launch_env import prepare_ray_environment

TARGET_MS = 10.0
SAMPLES, PROMPT, RESPONSE, VOCABULARY = 8, 4, 8, 64


def arguments(folder: Path, timeline: bool) -> Arguments:
    """One layer of width 32, trained from the checkpoint in `folder`."""
    return Arguments(
        timeline=timeline,
        num_layers=1,
        hidden_size=32,
        ffn_hidden_size=32,
        num_attention_heads=2,
        group_query_attention=True,
        num_query_groups=2,
        kv_channels=16,
        vocab_size=VOCABULARY,
        padded_vocab_size=VOCABULARY,
        normalization="RMSNorm",
        swiglu=True,
        add_bias_linear=False,
        max_position_embeddings=64,
        expert_tensor_parallel_size=1,
        actor_num_gpus_per_node=1,
        colocate=True,
        rollout_num_gpus=1,
        num_rollout=10000,
        num_steps_per_rollout=1,
        lr=1e-6,
        lr_decay_style="constant",
        ref_load=str(folder / "model"),
        run_dir=str(folder / "run"),
    )


def batch() -> RolloutBatch:
    """The one batch of all steps, scheduled for one rank."""
    tokens = torch.arange(SAMPLES * (PROMPT + RESPONSE)) % VOCABULARY
    rewards = torch.linspace(-1, 1, SAMPLES)
    whole = RolloutBatch(
        tokens=tokens,
        total_lengths=torch.full((SAMPLES,), PROMPT + RESPONSE),
        response_lengths=torch.full((SAMPLES,), RESPONSE),
        loss_mask=torch.ones(SAMPLES * RESPONSE),
        rollout_log_probs=torch.full((SAMPLES * RESPONSE,), -4.0),
        raw_rewards=rewards,
        rewards=rewards,
        group_ids=torch.arange(SAMPLES),
        sample_ids=torch.arange(SAMPLES),
        truncated=torch.zeros(SAMPLES, dtype=torch.bool),
    )
    return schedule_batch(
        whole,
        data_parallel_size=1,
        context_parallel_size=1,
        micro_batch_group=1,
        global_batch_size=SAMPLES,
        micro_batch_size=SAMPLES,
        max_tokens_per_micro_batch=None,
        balance=False,
    )[0]


def save_model(args: Arguments, folder: Path) -> None:
    """The first checkpoint, of random weights."""
    from slimrl.megatron import parallel
    from slimrl.megatron.checkpoint import state as checkpoint
    from slimrl.megatron.model import model_builder

    with tempfile.TemporaryDirectory() as store:
        state = parallel.initialize(args, rank=0, world_size=1, init_method=f"file://{store}/store")
        checkpoint.save_model_only(model_builder.build_model(args, state), folder / "model")
        parallel.shutdown()


def milliseconds(work: Callable[[], object]) -> float:
    """Wall time of one call."""
    started = time.perf_counter()
    work()
    return 1000 * (time.perf_counter() - started)


def measure(folder: Path, rounds: int, timeline: bool) -> dict[str, list[float]]:
    """Milliseconds of every round, by call method."""
    import ray

    from slimrl.cluster.launch import Launch
    from slimrl.cluster.placement import GpuBundles, plan_gpus
    from slimrl.cluster.ray_session import ray_session
    from slimrl.cluster.supervisor import Supervisor
    from slimrl.cluster.training.train_group import TrainGroup
    from slimrl.cluster.watchdog import WatchdogConfig
    from slimrl.megatron.training.trainer import MegatronTrainer

    args, share = arguments(folder, timeline), batch()
    save_model(args, folder)
    direct = MegatronTrainer(args, rank=0, world_size=1, local_rank=0, init_method=f"file://{folder}/store")
    plan = plan_gpus(args)
    times: dict[str, list[float]] = {name: [] for name in ("directly", "pickle and object store", "through Ray")}
    with ray_session(plan.total):
        gpus = GpuBundles(plan)
        group = TrainGroup(args, gpus, Supervisor(WatchdogConfig(120.0, None)), Launch.of_run(args))
        group.initialize()
        for step in range(rounds):
            times["directly"].append(milliseconds(lambda step=step: direct.train(step, share)))
            placed = []
            put = milliseconds(lambda placed=placed: placed.append(ray.put(pickle.dumps(share, protocol=5))))
            times["pickle and object store"].append(put)
            times["through Ray"].append(put + milliseconds(lambda s=step, p=placed: group.train(s, [p])))
        group.close()
        gpus.release()
    direct.close()
    return times


def main() -> None:
    """Measures and prints one line per way."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--no-timeline", action="store_true", help="do not record the rank's timeline")
    add_json_option(parser)
    options = parser.parse_args()
    rounds = options.rounds
    prepare_ray_environment()
    with tempfile.TemporaryDirectory() as folder:
        times = measure(Path(folder), rounds + 5, not options.no_timeline)
    medians = {name: statistics.median(taken[5:]) for name, taken in times.items()}
    print(f"median of {rounds} interleaved rounds, after 5 to warm up")
    for name, median in medians.items():
        kept = sorted(times[name][5:])
        print(f"{name:26} {median:7.1f} ms  ({kept[0]:.1f} to {kept[-1]:.1f})  {median / medians['directly']:5.2f} x")
    added = medians["through Ray"] - medians["directly"]
    print(f"{'added by the framework':26} {added:7.1f} ms  {added / TARGET_MS:.2f} of the target of {TARGET_MS:g} ms")
    write_ratios(options.json, {"step through Ray / direct call": medians["through Ray"] / medians["directly"]})


if __name__ == "__main__":
    main()
