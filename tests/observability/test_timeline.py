"""The tracer of a process, and the merged timeline of several: against hand-computed times and rows."""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest

from slimrl.observability.timeline import main, merge, merge_at_end
from slimrl.observability.tracer import FORMAT, Timeline, boot_id
from tests.observability.trace_format import Trace, read_trace

ROOT = Path(__file__).resolve().parents[2]
SECOND = 1_000_000_000


def header(process: str, *, wall: float = 1000.0, monotonic: float = 0.0, boot: str = "a", pid: int = 1) -> dict:
    times = {"wall_ns": int(wall * SECOND), "monotonic_ns": int(monotonic * SECOND)}
    names = {"process": process, "token": f"{process} {pid}", "host": "h", "pid": pid, "boot": boot}
    return {"slimrl_timeline": FORMAT, **names, **times}


def span(name: str, start: float, end: float, track: str = "main", overlaps: bool = False, **facts) -> list:
    return ["s", "", track, overlaps, name, int(start * SECOND), int(end * SECOND), facts]


def merged(run_dir: Path, **records: list) -> Trace:
    """The merged trace of these processes: lines by file name."""
    folder = run_dir / "timeline"
    folder.mkdir()
    for name, lines in records.items():
        text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
        (folder / f"{name.replace('_', '-')}.jsonl").write_text(text)
    return read_trace(merge(run_dir).path)


def rows(trace: Trace) -> dict[str, str]:
    return {span.name: span.row for span in trace.spans}


# -- recording ---------------------------------------------------------------------------------------------------------


def test_nested_and_overlapping_blocks_round_trip_with_times_args_and_rows(tmp_path):
    timeline = Timeline(tmp_path / "timeline" / "train-rank-0.jsonl", "train rank 0")
    before = time.monotonic_ns()
    with timeline.span("train", rollout=3):
        timeline.mark("first")
        slept = time.monotonic()
        time.sleep(0.02)
        slept = time.monotonic() - slept  # longer on a busy machine
        timeline.mark("second")
        with timeline.span("inner"):
            time.sleep(0.01)
    timeline.add_span("requests", "sample 1", before, before + 5_000_000, tokens=7)
    timeline.add_span("requests", "sample 2", before, before + 4_000_000, process="server 0")
    timeline.count("memory", 1.5)
    timeline.annotate("3 of 5 are not shown")
    timeline.close()
    trace = read_trace(merge(tmp_path).path)
    train, first, second, inner, one, two = sorted(
        trace.spans, key=lambda s: ["train", "first", "second", "inner", "sample 1", "sample 2"].index(s.name)
    )
    assert train.facts == {"rollout": 3} and one.facts == {"tokens": 7}
    assert slept >= 0.02 and first.seconds == pytest.approx(slept, abs=0.015) and first.end == second.start
    assert train.start <= first.start and second.end == train.end
    assert second.start <= inner.start and inner.end <= second.end and inner.seconds >= 0.0099
    assert (one.process, one.row, one.seconds) == ("train rank 0", "requests", 0.005)
    assert (two.process, two.row, two.seconds) == ("server 0", "requests", 0.004)
    assert trace.counters["train rank 0", "memory"][0][1] == 1.5
    assert trace.remarks == ["3 of 5 are not shown"]


def test_disabled_recorder_writes_nothing_and_accepts_every_call(tmp_path):
    timeline = Timeline.off()
    with timeline.span("train"):
        timeline.mark("part")
    timeline.add_span("requests", "sample", 0, 1)
    timeline.count("memory", 1.0)
    timeline.annotate("text")
    timeline.close()
    assert not timeline.records and list(tmp_path.iterdir()) == []


def test_error_in_a_block_ends_the_block_and_propagates(tmp_path):
    timeline = Timeline(tmp_path / "timeline" / "driver.jsonl", "driver")
    with pytest.raises(ValueError), timeline.span("outer"), timeline.span("inner"):
        raise ValueError
    timeline.close()
    done = merge(tmp_path)
    assert (done.spans, done.unfinished) == (2, 0)


def test_killed_process_shows_its_open_block_and_its_restart_appends(tmp_path):
    path = tmp_path / "timeline" / "driver.jsonl"
    program = f"""
        import os, signal, time
        from slimrl.observability.tracer import Timeline
        from pathlib import Path
        timeline = Timeline(Path({str(path)!r}), "driver")
        with timeline.span("step 0"):
            with timeline.span("train"):
                timeline.flush()
                os.write(timeline._file, b'["e", 12')
                os.kill(os.getpid(), signal.SIGKILL)
    """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(program)], cwd=ROOT, timeout=60)
    assert done.returncode == -9
    with Timeline(path, "driver") as timeline, timeline.span("step 0"):
        pass
    result = merge(tmp_path)
    assert (result.unfinished, result.broken_lines) == (2, 1)
    steps = read_trace(result.path).of("driver", "step 0")
    assert [step.facts for step in steps] == [{"unfinished": True}, {}]
    assert steps[0].end <= steps[1].start  # the first ended with the last event of its launch


def test_process_keeps_its_latest_events_within_twice_the_part_size(tmp_path):
    path = tmp_path / "timeline" / "rollout.jsonl"
    timeline = Timeline(path, "rollout", part_bytes=20_000)
    for number in range(5000):
        timeline.add_span("requests", f"sample {number}", number, number + 1)
    timeline.close()
    sizes = sum(file.stat().st_size for file in path.parent.iterdir())
    assert sizes < 2 * (20_000 + 512 * 100)  # a part may exceed its size by one write
    names = {span.name for span in read_trace(merge(tmp_path).path).spans}
    assert names == {f"sample {number}" for number in range(5000 - len(names), 5000)} and len(names) > 100


def test_two_launches_with_the_same_pid_are_distinguished(tmp_path):
    for _ in range(2):
        timeline = Timeline(tmp_path / "timeline" / "driver.jsonl", "driver")
        with timeline.span("step 0"):  # of this process, both times
            if timeline.records:
                os.close(timeline._file)  # killed within the step
                timeline._file = None
        time.sleep(0.01)
    first, second = read_trace(merge(tmp_path).path).of("driver", "step 0")
    assert first.facts == second.facts == {"unfinished": True}
    assert first.end < second.start  # and not only with the end of the second


def test_full_disk_ends_the_trace_with_a_warning_and_not_the_run(tmp_path, caplog):
    (tmp_path / "timeline").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        timeline = Timeline(tmp_path / "timeline" / "driver.jsonl", "driver")
    with timeline.span("step 0"):
        timeline.count("memory", 1.0)
    assert not timeline.records and "the timeline of driver ends here: " in caplog.text


# -- merging ----------------------------------------------------------------------------------------------------------


def test_model_text_never_ends_the_run(tmp_path):
    with Timeline(tmp_path / "timeline" / "driver.jsonl", "driver") as timeline:
        with timeline.span("step", text="half \ud83d of it", large=2**70):
            timeline.annotate("\udc80")
        with timeline.span("next"):
            pass
    done = merge(tmp_path)
    assert (done.spans, done.unfinished, done.broken_lines) == (2, 0, 0)
    assert read_trace(done.path).of("driver", "step")[0].facts == {"text": "half ? of it", "large": 2.0**70}


def test_trace_that_ends_early_leaves_no_file_open(tmp_path, monkeypatch):
    timeline = Timeline(tmp_path / "timeline" / "driver.jsonl", "driver")
    held = timeline._file

    def full(*_):
        raise OSError("no space left")

    monkeypatch.setattr(os, "write", full)
    with timeline.span("step"):
        pass
    assert not timeline.records
    with pytest.raises(OSError):
        os.fstat(held)


def test_overlapping_spans_use_the_lowest_free_row(tmp_path):
    spans = [span(name, *times, "requests", True) for name, times in {"a": (0, 4), "b": (1, 2), "c": (2, 3)}.items()]
    trace = merged(tmp_path, x=[header("rollout manager"), *spans, span("d", 2.5, 5, "requests", True)])
    assert rows(trace) == {"a": "requests", "b": "requests 2", "c": "requests 2", "d": "requests 3"}


def test_number_of_rows_is_the_maximum_overlap(tmp_path):
    chance = random.Random(0)
    starts = [chance.uniform(0, 100) for _ in range(400)]
    times = [(start, start + chance.uniform(0, 10)) for start in starts]
    trace = merged(
        tmp_path, x=[header("rollout manager"), *(span(f"{n}", *t, "requests", True) for n, t in enumerate(times))]
    )
    most = max(sum(start <= moment < end for start, end in times) for moment, _ in times)
    assert len(set(rows(trace).values())) == most
    in_flight = trace.counters["rollout manager", "requests in flight"]
    assert max(value for _, value in in_flight) == most and in_flight[-1][1] == 0


def test_queued_requests_count_from_their_submission(tmp_path):
    waited = span("a", 2, 3, "requests", True, waited_ms=1500)
    trace = merged(tmp_path, x=[header("rollout manager"), span("generate", 0, 5), waited])
    assert trace.counters["rollout manager", "requests waiting"] == [(0.5, 1), (2, 0)]
    assert trace.counters["rollout manager", "requests in flight"] == [(2, 1), (3, 0)]


def test_blocks_that_do_not_nest_get_separate_rows(tmp_path):
    lines = [header("driver"), span("outer", 0, 4), span("inner", 1, 3), span("crossing", 2, 5)]
    assert rows(merged(tmp_path, driver=lines)) == {"outer": "main", "inner": "main", "crossing": "main 2"}


def test_processes_of_one_machine_are_aligned_regardless_of_wall_clocks(tmp_path):
    trace = merged(
        tmp_path,
        driver=[header("driver", wall=1000, monotonic=10, pid=1), span("a", 10, 12)],
        rank=[header("train rank 0", wall=1777, monotonic=11, pid=2), span("b", 11, 12)],
    )
    assert trace.of("train rank 0")[0].start - trace.of("driver")[0].start == 1


def test_machines_are_aligned_by_their_wall_clocks(tmp_path):
    trace = merged(
        tmp_path,
        driver=[header("driver", wall=1000, monotonic=10), span("a", 10, 12)],
        rank=[header("train rank 0", wall=1003, monotonic=900, boot="b"), span("b", 901, 902)],
    )
    assert trace.of("train rank 0")[0].start - trace.of("driver")[0].start == 4


def test_unfinished_block_ends_with_the_last_event_of_its_launch(tmp_path):
    def begun(process, at, pid):
        return header(process, wall=1000 + at, monotonic=at, pid=pid)

    trace = merged(
        tmp_path,
        driver=[begun("driver", 0, 1), ["b", 1, "main", "step 0", 1 * SECOND, {}], begun("driver", 100, 3)],
        rank=[
            begun("train rank 0", 1, 2),
            ["b", 1, "main", "train", 2 * SECOND, {}],
            span("part", 2, 7),
            begun("train rank 0", 103, 4),
            span("later", 104, 105),
        ],
    )
    assert [span.end - span.start for span in trace.of("driver", "step 0")] == [6]
    assert [span.end - span.start for span in trace.of("train rank 0", "train")] == [5]


def test_processes_are_listed_from_the_driver_to_the_servers_by_number(tmp_path):
    names = ["server http://h:1", "train rank 10", "train rank 2", "rollout manager", "driver"]
    records = {f"p{place}": [header(name, pid=place), span("x", 0, 1)] for place, name in enumerate(names)}
    assert merged(tmp_path, **records).processes == [
        "driver",
        "rollout manager",
        "train rank 2",
        "train rank 10",
        "server http://h:1",
    ]


def test_tool_prints_its_output_path_and_exits_with_2_without_a_trace(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "timeline holds no recorded timeline" in capsys.readouterr().err
    merged(tmp_path, driver=[header("driver"), span("a", 0, 1)])
    assert main([str(tmp_path), "--output", str(tmp_path / "other.json.gz")]) == 0
    assert "other.json.gz: 1 spans of 1 processes" in capsys.readouterr().out
    assert merge_at_end(tmp_path).startswith("timeline: ")


def test_machine_reports_its_boot_id():
    assert len(boot_id()) == 36
