"""Speed of saving and loading a training state, compared with plain files of the same bytes; blocking of --async-save.

    python benchmarks/checkpoints.py [--ranks 2] [--hidden 768] [--layers 8] [--rounds 6] [--folder /tmp]

Each rank of a real trainer (float32, distributed optimizer) takes part: it saves in the way of training, saves in the
background, and loads. The baseline is the optimum with plain files: every rank writes its part of the same bytes from
memory into one file and waits for the disk, as `dd conv=fsync` does (which runs once at the end), and reads it into new
memory. Reading is from the page cache on both sides. "preparing" is the time for which --async-save blocks training;
"copying" is how long afterwards weights and optimizer state must not change yet, which training waits for only if its
next step begins before; "writing" is the rest.
Every round also saves and loads without checksums, before or after by turns, each into an empty folder. The second of a
round finds other memory and page cache than the first, so a ratio is the geometric mean over two rounds, one of each
order; also of rank 0's CPU time, which says more on a machine that does other work too. The last lines are the targets:
a save at 0.7 of the plain files' speed or more, a load at 0.6 or more, preparing in at most 0.1 of a save; checksums at
most 5 % of a save.
"""

from __future__ import annotations

import argparse
import contextlib
import datetime
import logging
import math
import multiprocessing
import os
import shutil
import statistics
import subprocess
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any
from unittest import mock

from ratios import add_json_option, write_ratios

if TYPE_CHECKING:
    from slimrl.megatron.training.trainer import MegatronTrainer

CHUNK = 8 * 1024**2


def main() -> None:
    """Measures and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--hidden", type=int, default=768)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--folder", type=Path, default=Path(tempfile.gettempdir()))
    add_json_option(parser)
    options = parser.parse_args()
    if options.rounds < 2:
        parser.error("--rounds: a ratio takes two rounds")
    os.environ["OMP_NUM_THREADS"] = "1"
    root = Path(tempfile.mkdtemp(prefix="checkpoints-", dir=options.folder))
    try:
        save_model(root / "hf", options.hidden, options.layers)
        context = multiprocessing.get_context("spawn")
        results = context.SimpleQueue()
        ranks = [
            context.Process(target=measure, args=(rank, options.ranks, root, options, results))
            for rank in range(options.ranks)
        ]
        for process in ranks:
            process.start()
        for process in ranks:
            process.join()
        if any(process.exitcode for process in ranks):
            raise SystemExit("a rank failed")
        report(*results.get(), options)
    finally:
        shutil.rmtree(root)


def model_flags(
    hidden: int, layers: int, *, head_size: int = 64, vocabulary: int = 16384, positions: int = 512
) -> dict[str, Any]:
    """A Qwen3 of these sizes, with two query heads per KV head."""
    heads = hidden // head_size
    return dict(
        num_layers=layers,
        hidden_size=hidden,
        ffn_hidden_size=4 * hidden,
        num_attention_heads=heads,
        group_query_attention=True,
        num_query_groups=heads // 2,
        kv_channels=head_size,
        vocab_size=vocabulary,
        padded_vocab_size=vocabulary,
        normalization="RMSNorm",
        norm_epsilon=1e-6,
        qk_layernorm=True,
        swiglu=True,
        add_bias_linear=False,
        rotary_base=10000,
        max_position_embeddings=positions,
    )


def save_model(folder: Path, hidden: int, layers: int) -> None:
    """The same model with random weights, as a Hugging Face folder."""
    from transformers import Qwen3Config, Qwen3ForCausalLM

    flags = model_flags(hidden, layers)
    config = Qwen3Config(
        vocab_size=flags["vocab_size"],
        hidden_size=hidden,
        intermediate_size=flags["ffn_hidden_size"],
        num_hidden_layers=layers,
        num_attention_heads=flags["num_attention_heads"],
        num_key_value_heads=flags["num_query_groups"],
        head_dim=64,
        max_position_embeddings=512,
        tie_word_embeddings=True,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def open_trainer(rank: int, size: int, root: Path, options: argparse.Namespace) -> MegatronTrainer:
    """One rank's trainer of that model, with its optimizer state sharded over all ranks."""
    from slimrl.arguments import Arguments
    from slimrl.megatron.training.trainer import MegatronTrainer

    args = Arguments(
        **model_flags(options.hidden, options.layers),
        ref_load=str(root / "hf"),
        hf_checkpoint=str(root / "hf"),
        use_distributed_optimizer=True,
        expert_tensor_parallel_size=1,
        num_rollout=1,
        num_steps_per_rollout=1,
        lr_decay_style="constant",
    )
    return MegatronTrainer(args, rank=rank, world_size=size, local_rank=0, init_method=f"file://{root}/store")


def measure(rank: int, size: int, root: Path, options: argparse.Namespace, results: Any) -> None:
    """One rank: `rounds` interleaved rounds after one to warm up; rank 0 reports the times."""
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    import torch.distributed as dist

    from slimrl.megatron.checkpoint import folder as folders
    from slimrl.megatron.checkpoint import start
    from slimrl.megatron.checkpoint import state as checkpoint
    from slimrl.megatron.checkpoint.folder import Retention
    from slimrl.megatron.checkpoint.saver import CheckpointSaver

    trainer = open_trainer(rank, size, root, options)
    state = checkpoint.TrainingState(
        trainer.stages, trainer.optimizer, trainer.scheduler, trainer.parallel, "every weight trained"
    )
    wait = datetime.timedelta(minutes=10)
    savers = {later: CheckpointSaver(background=later, retention=Retention(), timeout=wait) for later in (False, True)}
    timed: dict[str, list[float]] = {}

    def clock(name: str, step: Callable[[], object]) -> None:
        dist.barrier()
        started, busy = time.perf_counter(), time.process_time()
        step()
        timed.setdefault(f"{name}: CPU", []).append(time.process_time() - busy)
        dist.barrier()
        timed.setdefault(name, []).append(time.perf_counter() - started)

    def save(later: bool) -> None:
        def take() -> checkpoint.Snapshot:
            return checkpoint.take_snapshot(state, 0, {}, with_optimizer=True)

        savers[later].save(root / "save", 0, take)

    def load() -> None:
        found = folders.find_checkpoint(root / "save")
        start.load_stages(trainer.stages, found.path)
        checkpoint.load_training_state(state, found, load_optimizer=True, load_random_state=True)

    def both(name: str, step: Callable[[], object], first: bool) -> None:
        """With checksums and without, in this order or the other."""
        for hashed in (first, not first):
            clear(root / "save") if name == "save" else None
            with contextlib.nullcontext() if hashed else without_checksums():
                clock(name if hashed else f"{name} without checksums", step)

    for number in range(options.rounds + 1):
        both("save", lambda: save(False), number % 2 == 0)
        save(False)  # its checksums are used by the loads
        dist.barrier()
        both("load", load, number % 2 == 0)
        total = sum(path.stat().st_size for path in (root / "save" / "iter_0000000").iterdir())
        time_plain_file(clock, root / f"plain{rank}", total // size)
        shutil.rmtree(root / "save", ignore_errors=True)
        clock("preparing", lambda: save(True))
        clock("copying", savers[True].release)
        clock("writing", savers[True].finish)
        shutil.rmtree(root / "save", ignore_errors=True)
    if rank == 0:
        clock("dd", lambda: dd(root, total))
    else:
        dist.barrier()
        dist.barrier()
    if rank == 0:
        results.put(({name: taken[not name.startswith("dd") :] for name, taken in timed.items()}, total))
    savers[True].close()
    trainer.close()


def time_plain_file(clock: Callable[[str, Callable[[], object]], None], path: Path, size: int) -> None:
    """Writes and reads a file of `size` bytes."""
    import torch

    content = torch.ones(size, dtype=torch.uint8).numpy()
    clock("plain write", lambda: write(path, content))
    clock("plain read", lambda: read(path))
    path.unlink()


@contextlib.contextmanager
def without_checksums() -> Iterator[None]:
    """Disables computing and loading checksums."""
    from slimrl.weights.checkpoint_checksums import BlockHasher, CheckedFolder

    with (
        mock.patch.object(BlockHasher, "update", lambda self, data: None),
        mock.patch.object(CheckedFolder, "open", lambda folder: None),
    ):
        yield


def clear(folder: Path) -> None:
    """Removes the folder; all ranks see that when this returns."""
    import torch.distributed as dist

    dist.barrier()
    shutil.rmtree(folder, ignore_errors=True)
    dist.barrier()


def write(path: Path, content: Any) -> None:
    """Writes `content` to a file and waits for the disk."""
    view = memoryview(content)
    with path.open("wb", buffering=0) as file:
        for begin in range(0, len(view), CHUNK):
            file.write(view[begin : begin + CHUNK])
        os.fsync(file.fileno())


def read(path: Path) -> None:
    """Reads the file into new memory."""
    content = memoryview(bytearray(path.stat().st_size))
    with path.open("rb", buffering=0) as file:
        begin = 0
        while begin < len(content):
            begin += file.readinto(content[begin : begin + CHUNK])


def dd(root: Path, size: int) -> None:
    """Writes as many zero bytes with `dd`, including its wait for the disk."""
    line = ["dd", "if=/dev/zero", f"of={root}/dd", "bs=8M", f"count={size // CHUNK}", "conv=fsync", "status=none"]
    subprocess.run(line, check=True)


def report(seconds: dict[str, list[float]], size: int, options: argparse.Namespace) -> None:
    """The table."""
    median = {name: statistics.median(taken) for name, taken in seconds.items()}
    spread = {name: f"({min(taken):.2f} to {max(taken):.2f})" for name, taken in seconds.items()}
    kept = {}
    print(f"{size / 1e9:.2f} GB of state, {options.ranks} ranks; medians of {options.rounds} interleaved rounds")
    print(f"{'':36}{'seconds':>8}  {'spread':18}{'MB/s':>7}  ratio to the plain files")
    peers = {"save": "plain write", "writing": "plain write", "load": "plain read", "dd": "plain write"}
    for name in ("plain write", "dd", "save", "writing", "plain read", "load"):
        ratio = median[peers[name]] / median[name] if name in peers else 1.0
        if name in peers:
            kept[f"speed of {name} / {peers[name]}"] = ratio
        print(f"{name:36}{median[name]:8.2f}  {spread[name]:18}{size / 1e6 / median[name]:7.0f}  {ratio:.2f}")
    for name in ("save", "load"):
        for what in ("", ": CPU"):
            label = f"{name} without checksums{what}"
            pairs = zip(seconds[name + what], seconds[label], strict=True)
            single = [ours / theirs for ours, theirs in pairs]
            ratios = sorted(math.sqrt(one * other) for one, other in zip(single[::2], single[1::2], strict=False))
            kept[f"{name}{what} with checksums / without"] = statistics.median(ratios)
            print(
                f"{label:36}{median[label]:8.2f}  {spread[label]:18}{size / 1e6 / median[label]:7.0f}  with / without:"
                f" {statistics.median(ratios):.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
            )
    for name, what in (("preparing", "--async-save blocks"), ("copying", "until the state may change")):
        kept[f"{name} / save"] = ratio = median[name] / median["save"]
        print(f"{f'{name}: {what}':36}{median[name]:8.2f}  {spread[name]:18}{'':7}  {ratio:.2f} of a save")
    print()
    for label, name, target in (
        ("save / plain write and fsync", "speed of save / plain write", "at least 0.7"),
        ("load / cached read", "speed of load / plain read", "at least 0.6"),
        ("--async-save blocks / save", "preparing / save", "at most 0.1"),
    ):
        print(f"{label:36}{kept[name]:8.2f}  target: {target}")
    write_ratios(options.json, kept)


if __name__ == "__main__":
    main()
