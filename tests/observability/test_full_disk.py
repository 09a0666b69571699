"""A full disk below the run's folder causes a warning, not the end of the run; writing resumes once there is space."""

from __future__ import annotations

import json
import logging
import sys
from pathlib import Path

import pytest

from tests.processes.small_disk import filled, on_small_disk

STEPS = 6


def report_a_run(folder: Path) -> None:
    """Six steps, two of them with a full disk, with all writers enabled."""
    from slimrl.observability.metrics.writers import TensorBoard
    from slimrl.observability.rollout_dump import save_rollout
    from slimrl.observability.run_log import RunLog, StepRecord
    from slimrl.observability.terminal import setup_logging
    from slimrl.processes.files import OptionalFiles

    class Result:
        mean_reward = 0.5

        def metrics(self) -> dict[str, float]:
            return {"eval/x": 0.5}

    run, dumps = folder / "run", OptionalFiles("the rollout dump")
    setup_logging("info", run)
    charts = [TensorBoard(run / "tensorboard", axes_are_one=False)]

    def step(number: int) -> None:
        wide = {f"rollout/metric_{column}": float(number) for column in range(200)}
        record = StepRecord(number, str(number), {"rollout/raw_reward": 1.0, **wide}, [{"loss": 1.0}], {"total": 1.0})
        log.expect(record)
        log.step(record)
        log.phase(number, "save", 0.1)
        log.evaluation(number, number + 1, {"x": Result()})
        dumps.attempt(lambda: save_rollout(str(run / "dump_{rollout_id}.jsonl"), number, []))

    with RunLog(run, versions={}, charts=charts) as log:
        step(0)
        with filled(folder):
            step(1)
            step(2)
        for number in range(3, STEPS):
            step(number)
        with filled(folder):
            step(STEPS)
    charts[0].close(failed=False)


@pytest.mark.slow
def test_run_continues_to_report_on_a_full_disk(tmp_path: Path):
    output = on_small_disk(report_and_look, tmp_path / "disk", 1024)
    for what in ("the summary", "TensorBoard's folder", "the rollout dump"):
        assert output.count(f"{what}") >= 2, output
    failed = "summary.json; the run continues without it and retries at the next write: [Errno 28] No space left"
    assert output.count(failed) == 2
    assert output.count("summary.json works again") == 2
    assert "Logging error" not in output
    assert output.count("Traceback") <= 4  # TensorBoard's own threads, one for each of two files and times


def report_and_look(folder: Path) -> None:
    report_a_run(folder)
    summary = json.loads((folder / "run" / "summary.json").read_text())
    assert [step["step"] for step in summary["steps"]] == list(range(STEPS + 1))
    assert summary["status"] == "completed"
    assert not list((folder / "run").glob(".*tmp"))
    dumps = sorted(path.name for path in (folder / "run").glob("dump_*"))
    assert dumps == [f"dump_{number}.jsonl" for number in (0, 3, 4, 5)]
    text = (folder / "run" / "logs" / "main.log").read_text()
    assert "step 0 |" in text and "step 5 |" in text
    assert scalars(folder / "run" / "tensorboard") >= {0, 3, 4, 5}


def scalars(folder: Path) -> set[int]:
    """The steps in TensorBoard's files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    found = set()
    for file in folder.glob("events*"):
        events = EventAccumulator(str(file))
        events.Reload()
        if "rollout/metric_7" in events.Tags()["scalars"]:
            found |= {event.step for event in events.Scalars("rollout/metric_7")}
    return found


def print_through_a_full_disk(folder: Path) -> None:
    from slimrl.cluster.ray_session import redirect_to

    redirect_to(folder / "logs" / "rank0.log", "info")
    print("before")
    with filled(folder):
        for number in range(3000):
            print(f"a reward function prints {number}")
            logging.getLogger("slimrl").info("a record %d", number)
        sys.stdout.flush()
    print("after")
    logging.getLogger("slimrl").info("a record after")
    text = (folder / "logs" / "rank0.log").read_text()
    assert "before" in text and text.rstrip().endswith("a record after") and "\nafter\n" in text


@pytest.mark.slow
def test_print_on_a_full_disk_does_not_end_a_process(tmp_path: Path):
    on_small_disk(print_through_a_full_disk, tmp_path / "disk", 256)


def write_checkpoints(folder: Path) -> None:
    """Writes with the trainer's writer and with the converter's, on a disk with too little space."""
    import torch
    import torch.distributed.checkpoint as torch_checkpoint

    from slimrl.megatron.checkpoint.folder import write_bytes
    from slimrl.weights.checkpoint_checksums import ChecksummingWriter
    from slimrl.weights.convert.torch_dist_writer import Blueprint, Piece, Weight, write_torch_dist

    values = torch.ones(2, 300_000)
    weight = Weight("decoder.w", (Piece("decoder.w", (0, 0), (2, 300_000), (2, 300_000), values.dtype),), lambda x: [x])
    output = []
    for write in (
        lambda: write_torch_dist(folder, Blueprint((weight,), {}), lambda _: values),
        lambda: torch_checkpoint.save({"w": values}, storage_writer=ChecksummingWriter(folder), no_dist=True),
        lambda: write_bytes(folder / "common.pt", bytes(2_000_000)),
    ):
        try:
            write()
        except OSError as error:
            output.append(str(error))
        except torch_checkpoint.api.CheckpointException as error:
            output += [str(cause) for cause, _ in error.failures.values()]
        for path in folder.iterdir():
            path.unlink()
    assert len(output) == 3, output
    names = ("__0_0.distcp", "__0_0.distcp", "common.pt")
    assert [text.startswith("[Errno 28] No space left on device: ") for text in output] == [True] * 3, output
    assert all(text.endswith(f"/{name}'") for text, name in zip(output, names, strict=True)), output


@pytest.mark.slow
def test_checkpoint_without_disk_space_reports_the_path(tmp_path: Path):
    on_small_disk(write_checkpoints, tmp_path / "disk", 1024)
