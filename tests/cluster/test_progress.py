"""The progress bar of a run whose processes do not answer: it stays unchanged and the watchdog runs."""

from __future__ import annotations

from slimrl.cluster import run
from slimrl.cluster.run import Run


class Bar:
    """A bar on a terminal."""

    enabled = True

    def __init__(self) -> None:
        self.shown: list[tuple[int, int]] = []

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None: ...

    def update_to(self, done: int, total: int) -> None:
        self.shown.append((done, total))


def test_unresponsive_process_leaves_the_progress_bar_unchanged(monkeypatch):
    bar, progress = Bar(), {"generation of rollout 3": (3, 8)}
    monkeypatch.setattr(run, "ProgressBar", lambda *_, **__: bar)
    monkeypatch.setattr(run, "poll_actors", lambda asked: [progress.get(one) for one in asked])
    for question in ("generation of rollout 3", "no answer", "generation of rollout 3"):
        with Run._progress(None, "generate", lambda question=question: question) as update:
            update()
    assert bar.shown == [(3, 8), (3, 8)]
