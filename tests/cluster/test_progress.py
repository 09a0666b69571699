"""The bar of a run that nobody answers: it stands, and the watchdog has its turn."""

from __future__ import annotations

from slimrl.cluster import run
from slimrl.cluster.run import Run


class Bar:
    """A bar that somebody watches."""

    enabled = True

    def __init__(self) -> None:
        self.shown: list[tuple[int, int]] = []

    def __enter__(self) -> Bar:
        return self

    def __exit__(self, *_: object) -> None: ...

    def update_to(self, done: int, total: int) -> None:
        self.shown.append((done, total))


def test_who_does_not_answer_in_time_leaves_the_bar_as_it_is(monkeypatch):
    bar, told = Bar(), {"generate of rollout 3": (3, 8)}
    monkeypatch.setattr(run, "ProgressBar", lambda *_, **__: bar)
    monkeypatch.setattr(run, "answers", lambda asked: [told.get(one) for one in asked])
    for question in ("generate of rollout 3", "nobody who answers", "generate of rollout 3"):
        with Run._progress(None, "generate", lambda question=question: question) as update:
            update()
    assert bar.shown == [(3, 8), (3, 8)]
