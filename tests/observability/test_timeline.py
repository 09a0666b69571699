"""The recorder of a process, and what is put together from the records of several: by hand-computed times and rows."""

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
    """The trace of these processes: lines by file name."""
    folder = run_dir / "timeline"
    folder.mkdir()
    for name, lines in records.items():
        text = "".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines)
        (folder / f"{name.replace('_', '-')}.jsonl").write_text(text)
    return read_trace(merge(run_dir).path)


def rows(trace: Trace) -> dict[str, str]:
    return {span.name: span.row for span in trace.spans}


# -- recording ---------------------------------------------------------------------------------------------------------


def test_blocks_parts_and_what_overlaps_come_back_with_their_times_facts_and_rows(tmp_path):
    timeline = Timeline(tmp_path / "timeline" / "train-rank-0.jsonl", "train rank 0")
    before = time.monotonic_ns()
    with timeline.span("train", rollout=3):
        timeline.mark("first")
        time.sleep(0.02)
        timeline.mark("second")
        with timeline.span("inner"):
            time.sleep(0.01)
    timeline.beside("requests", "sample 1", before, before + 5_000_000, tokens=7)
    timeline.beside("requests", "sample 2", before, before + 4_000_000, process="server 0")
    timeline.count("memory", 1.5)
    timeline.remark("3 of 5 are not shown")
    timeline.close()
    trace = read_trace(merge(tmp_path).path)
    train, first, second, inner, one, two = sorted(
        trace.spans, key=lambda s: ["train", "first", "second", "inner", "sample 1", "sample 2"].index(s.name)
    )
    assert train.facts == {"rollout": 3} and one.facts == {"tokens": 7}
    assert first.seconds == pytest.approx(0.02, abs=0.015) and first.end == second.start
    assert train.start <= first.start and second.end == train.end
    assert second.start <= inner.start and inner.end <= second.end and inner.seconds >= 0.0099
    assert (one.process, one.row, one.seconds) == ("train rank 0", "requests", 0.005)
    assert (two.process, two.row, two.seconds) == ("server 0", "requests", 0.004)
    assert trace.counters["train rank 0", "memory"][0][1] == 1.5
    assert trace.remarks == ["3 of 5 are not shown"]


def test_a_recorder_that_is_off_writes_nothing_and_leaves_every_call_valid(tmp_path):
    timeline = Timeline.off()
    with timeline.span("train"):
        timeline.mark("part")
    timeline.beside("requests", "sample", 0, 1)
    timeline.count("memory", 1.0)
    timeline.remark("text")
    timeline.close()
    assert not timeline.records and list(tmp_path.iterdir()) == []


def test_an_error_in_a_block_ends_the_block_and_goes_on(tmp_path):
    timeline = Timeline(tmp_path / "timeline" / "driver.jsonl", "driver")
    with pytest.raises(ValueError), timeline.span("outer"), timeline.span("inner"):
        raise ValueError
    timeline.close()
    done = merge(tmp_path)
    assert (done.spans, done.unfinished) == (2, 0)


def test_a_killed_process_shows_what_it_was_doing_and_its_next_start_goes_on_behind_the_line_that_was_cut(tmp_path):
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
    assert steps[0].end <= steps[1].start  # the first ended with the last sign of its launch


def test_a_process_keeps_its_latest_doings_within_twice_the_size_of_a_part(tmp_path):
    path = tmp_path / "timeline" / "rollout.jsonl"
    timeline = Timeline(path, "rollout", part_bytes=20_000)
    for number in range(5000):
        timeline.beside("requests", f"sample {number}", number, number + 1)
    timeline.close()
    sizes = sum(file.stat().st_size for file in path.parent.iterdir())
    assert sizes < 2 * (20_000 + 512 * 100)  # a part may be over by one write
    names = {span.name for span in read_trace(merge(tmp_path).path).spans}
    assert names == {f"sample {number}" for number in range(5000 - len(names), 5000)} and len(names) > 100


def test_two_launches_are_two_although_the_second_has_the_pid_of_the_first(tmp_path):
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


def test_a_disk_that_refuses_ends_the_record_with_a_warning_and_not_the_run(tmp_path, caplog):
    (tmp_path / "timeline").write_text("in the way")
    with caplog.at_level(logging.WARNING):
        timeline = Timeline(tmp_path / "timeline" / "driver.jsonl", "driver")
    with timeline.span("step 0"):
        timeline.count("memory", 1.0)
    assert not timeline.records and "the timeline of driver ends here: " in caplog.text


# -- putting together --------------------------------------------------------------------------------------------------


def test_no_text_that_a_model_writes_ends_the_run(tmp_path):
    with Timeline(tmp_path / "timeline" / "driver.jsonl", "driver") as timeline:
        with timeline.span("step", text="half \ud83d of it", large=2**70):
            timeline.remark("\udc80")
        with timeline.span("next"):
            pass
    done = merge(tmp_path)
    assert (done.spans, done.unfinished, done.broken_lines) == (2, 0, 0)
    assert read_trace(done.path).of("driver", "step")[0].facts == {"text": "half ? of it", "large": 2.0**70}


def test_a_record_that_ends_early_keeps_no_file_open(tmp_path, monkeypatch):
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


def test_overlapping_spans_lie_on_the_lowest_row_that_is_free(tmp_path):
    spans = [span(name, *times, "requests", True) for name, times in {"a": (0, 4), "b": (1, 2), "c": (2, 3)}.items()]
    trace = merged(tmp_path, x=[header("rollout manager"), *spans, span("d", 2.5, 5, "requests", True)])
    assert rows(trace) == {"a": "requests", "b": "requests 2", "c": "requests 2", "d": "requests 3"}


def test_as_many_rows_as_overlap_at_one_time_are_enough_whatever_the_order(tmp_path):
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


def test_waiting_requests_are_counted_from_when_they_asked(tmp_path):
    waited = span("a", 2, 3, "requests", True, waited_ms=1500)
    trace = merged(tmp_path, x=[header("rollout manager"), span("generate", 0, 5), waited])
    assert trace.counters["rollout manager", "requests waiting"] == [(0.5, 1), (2, 0)]
    assert trace.counters["rollout manager", "requests in flight"] == [(2, 1), (3, 0)]


def test_blocks_that_do_not_fit_into_one_another_get_rows_of_their_own(tmp_path):
    lines = [header("driver"), span("outer", 0, 4), span("inner", 1, 3), span("crossing", 2, 5)]
    assert rows(merged(tmp_path, driver=lines)) == {"outer": "main", "inner": "main", "crossing": "main 2"}


def test_processes_of_one_machine_compare_exactly_whatever_their_wall_clocks_said(tmp_path):
    trace = merged(
        tmp_path,
        driver=[header("driver", wall=1000, monotonic=10, pid=1), span("a", 10, 12)],
        rank=[header("train rank 0", wall=1777, monotonic=11, pid=2), span("b", 11, 12)],
    )
    assert trace.of("train rank 0")[0].start - trace.of("driver")[0].start == 1


def test_machines_are_set_side_by_side_by_their_wall_clocks(tmp_path):
    trace = merged(
        tmp_path,
        driver=[header("driver", wall=1000, monotonic=10), span("a", 10, 12)],
        rank=[header("train rank 0", wall=1003, monotonic=900, boot="b"), span("b", 901, 902)],
    )
    assert trace.of("train rank 0")[0].start - trace.of("driver")[0].start == 4


def test_an_unfinished_block_ends_with_the_last_sign_of_its_own_launch(tmp_path):
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


def test_processes_are_listed_from_the_driver_to_the_servers_by_their_numbers(tmp_path):
    names = ["server http://h:1", "train rank 10", "train rank 2", "rollout manager", "driver"]
    records = {f"p{place}": [header(name, pid=place), span("x", 0, 1)] for place, name in enumerate(names)}
    assert merged(tmp_path, **records).processes == [
        "driver",
        "rollout manager",
        "train rank 2",
        "train rank 10",
        "server http://h:1",
    ]


def test_the_tool_names_what_it_wrote_and_ends_with_2_where_nothing_is_recorded(tmp_path, capsys):
    assert main([str(tmp_path)]) == 2
    assert "timeline holds no recorded timeline" in capsys.readouterr().err
    merged(tmp_path, driver=[header("driver"), span("a", 0, 1)])
    assert main([str(tmp_path), "--output", str(tmp_path / "other.json.gz")]) == 0
    assert "other.json.gz: 1 spans of 1 processes" in capsys.readouterr().out
    assert merge_at_end(tmp_path).startswith("timeline: ")


def test_this_machine_says_which_boot_its_clock_belongs_to():
    assert len(boot_id()) == 36
