"""The timeline of a train rank shows where a kill hit, even if its last line is truncated."""

from __future__ import annotations

from tests.end_to_end import kills
from tests.end_to_end.kills import Call

HEADER = '{"slimrl_timeline": 2, "process": "train rank 0"}\n'


def test_trace_calls_are_read_with_durations_and_without_nested_calls(tmp_path):
    timeline = tmp_path / "train-rank-0.jsonl"
    first = HEADER + (
        '["b", 1, "main", "train", 10, {"about": 0}]\n["b", 2, "main", "optimizer step", 11, {}]\n["e", 2, 12]\n'
        '["e", 1, 13]\n["b", 3, "main", "save", 20, {"about": 0}]\n["b", 4, "main", "copy", 21, {}]\n'
    )
    second = HEADER + '["b", 5, "main", "update_weights", 100, {"about": "0"}]\n["e", 5, 130]\n["b", 6, "main", "sa'
    timeline.write_text(first + second)
    save, update = Call("save", 0, 20, None), Call("update_weights", "0", 100, 130)
    assert kills.calls(timeline) == [Call("train", 0, 10, 13), save, update]
    assert kills.calls(timeline, since_ns=90) == [update]
    assert kills.calls(tmp_path / "none") == [] and str(save) == "save 0"


def test_durations_cover_only_finished_calls(tmp_path):
    timeline = tmp_path / "train-rank-0.jsonl"
    lines = []
    for number, name in enumerate(["save", "update_weights", "save", "update_weights", "save"]):
        lines += [f'["b", {number}, "main", "{name}", {number}, {{}}]\n']
        lines += [f'["e", {number}, {number + (number + 1) * 10**9}]\n']
    timeline.write_text(HEADER + "".join(lines) + '["b", 9, "main", "save", 9, {}]\n')
    assert kills.usual_lengths(timeline) == {"save": 3.0, "update_weights": 3.0}


def test_kill_plan_has_every_kind_and_is_reproducible_by_seed():
    aims = kills.plan(1, 40)
    assert aims == kills.plan(1, 40) != kills.plan(2, 40)
    kinds = [aim.kind for aim in aims]
    assert (kinds.count("save"), kinds.count("update_weights"), kinds.count("anywhere")) == (16, 12, 12)
    assert 10 < sum(aim.tree for aim in aims) < 30 and all(aim.nth > 0 for aim in aims if aim.tree)


def test_unfinished_folders_are_unrenamed_saves_of_the_current_launch(tmp_path):
    for name in ("iter_0000001", "iter_0000002.tmp", "release.tmp"):
        (tmp_path / name).mkdir()
    changed = (tmp_path / "iter_0000002.tmp").stat().st_ctime
    assert kills.unfinished(tmp_path, changed) == ["iter_0000002.tmp"]
    assert kills.unfinished(tmp_path, changed + 1) == kills.unfinished(tmp_path / "none", 0.0) == []
