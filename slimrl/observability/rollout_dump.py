"""Rollouts on disk: a header line, then one sample per line as JSON; readable by any tool, replayable bit for bit.

Written by the rollout manager on `--save-debug-rollout-data`, read on `--load-debug-rollout-data` and by `show`.
"""

from __future__ import annotations

import asyncio
import dataclasses
import functools
import glob
import itertools
import json
import re
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, Protocol, runtime_checkable

from slimrl.data.routed_experts import as_plain
from slimrl.data.sample import Sample
from slimrl.processes.files import OptionalFiles, atomic_file

PLACEHOLDER = "{rollout_id}"
_FORMAT = "slimrl-rollout-1"


class RolloutDump(NamedTuple):
    """A rollout dump; `header` has `rollout_id`, `evaluation`, `samples` (their number) and `metrics`."""

    header: dict[str, Any]
    samples: list[Sample]

    def reward_keys(self) -> list[str | None]:
        """For each sample the entry of its reward that counts where that is a dict, as far as the dump says it."""
        known = [key for key, count in self.header.get("reward_keys", []) for _ in range(count)]
        return known or [None] * len(self.samples)


@runtime_checkable
class _ArrayLike(Protocol):
    """NumPy and torch values, which users put into the metadata."""

    def tolist(self) -> Any: ...


def dump_path(template: str, rollout_id: int, *, evaluation: bool = False) -> Path:
    """The file of one rollout: `{rollout_id}` becomes `7`, or `eval_7` for an evaluation.

    Raises ValueError if the template has no `{rollout_id}`: every rollout would overwrite the one before.
    """
    if PLACEHOLDER not in template:
        raise ValueError(f"the dump path {template!r} has no {PLACEHOLDER}: put it where the rollout's number belongs")
    return Path(template.replace(PLACEHOLDER, f"eval_{rollout_id}" if evaluation else str(rollout_id)))


def save_rollout(
    template: str,
    rollout_id: int,
    samples: list[Sample],
    *,
    metrics: dict[str, float] | None = None,
    evaluation: bool = False,
    reward_keys: Sequence[str | None] = (),
    limit: int | None = None,
) -> Path:
    """Write a rollout and return its path. A file of that name is replaced in one move, as when a run is resumed.

    `reward_keys` are one per sample, or none where rewards are no dicts. Of this and earlier rollouts the newest
    `limit` are kept, and likewise of evaluations; None keeps all.

    Raises TypeError, naming the sample, where one holds something that JSON cannot express.
    """
    path = dump_path(template, rollout_id, evaluation=evaluation)
    path.parent.mkdir(parents=True, exist_ok=True)
    header = {
        "format": _FORMAT,
        "rollout_id": rollout_id,
        "evaluation": evaluation,
        "samples": len(samples),
        "metrics": metrics or {},
    }
    if any(reward_keys):
        header["reward_keys"] = [[key, len(list(same))] for key, same in itertools.groupby(reward_keys)]
    with atomic_file(path) as unfinished, open(unfinished, "w", encoding="utf-8") as file:
        file.write(json.dumps(header) + "\n")
        for sample in samples:
            file.write(_line(sample) + "\n")
    if limit is not None:
        _delete_old(template, rollout_id, evaluation, limit)
    return path


class RolloutDumps:
    """Writes the dumps of a run in a thread, one after another; none without a `template`.

    A dump that cannot be written, as on a full disk, is left out with a warning.
    """

    def __init__(self, template: str | None, limit: int | None) -> None:
        """`template` and `limit` as in `save_rollout`."""
        self._template, self._limit = template, limit
        self._files = OptionalFiles(f"the rollout dump {template}")
        self._thread = ThreadPoolExecutor(1, "rollout dump")
        self._written: Future[bool] | None = None

    def start(
        self,
        rollout_id: int,
        samples: list[Sample],
        metrics: dict[str, float],
        reward_keys: Sequence[str | None],
        *,
        evaluation: bool = False,
    ) -> None:
        """Begins to write; the samples must not be changed or unpacked before `finish`."""
        if self._template is not None:
            write = functools.partial(save_rollout, self._template, rollout_id, samples, metrics=metrics)
            write = functools.partial(write, evaluation=evaluation, reward_keys=reward_keys, limit=self._limit)
            self._written = self._thread.submit(self._files.attempt, write)

    async def finish(self) -> None:
        """Waits until everything is written. Raises TypeError once, naming the sample that JSON cannot express."""
        written, self._written = self._written, None
        if written is not None:
            await asyncio.shield(asyncio.wrap_future(written))


def _delete_old(template: str, rollout_id: int, evaluation: bool, limit: int) -> None:
    """Keeps later dumps: they belong to an earlier run that got further, and this run will overwrite them."""
    kind = "eval_" if evaluation else ""
    template = str(Path(template))
    first, *rest = map(re.escape, template.split(PLACEHOLDER))
    named = re.compile(rf"{first}{kind}(\d+)" + rf"{kind}\1".join(rest))
    found = (named.fullmatch(path) for path in glob.glob(glob.escape(template).replace(PLACEHOLDER, "*")))
    written = sorted(int(match[1]) for match in found if match is not None and int(match[1]) <= rollout_id)
    for number in written[:-limit]:
        dump_path(template, number, evaluation=evaluation).unlink(missing_ok=True)


def load_rollout(template: str, rollout_id: int, *, evaluation: bool = False) -> RolloutDump:
    """The rollout with this number, as `save_rollout` wrote it. Raises as `read_dump`."""
    return read_dump(dump_path(template, rollout_id, evaluation=evaluation))


def read_dump(path: str | Path) -> RolloutDump:
    """A dump by its file name.

    Raises FileNotFoundError if there is none, ValueError if it is something else or was cut off.
    """
    if not Path(path).is_file():
        raise FileNotFoundError(f"there is no rollout dump {path}: it is written with --save-debug-rollout-data")
    with open(path, encoding="utf-8") as file:
        try:
            header = json.loads(file.readline())
            known = header["format"] == _FORMAT
        except (ValueError, TypeError, KeyError):
            known = False
        if not known:
            raise ValueError(f"{path} is no rollout dump: its first line must be a header of format {_FORMAT!r}")
        samples = [Sample.from_dict(json.loads(line)) for line in file]
    if len(samples) != header["samples"]:
        raise ValueError(f"{path} holds {len(samples)} samples and its header says {header['samples']}: it was cut off")
    return RolloutDump(header, samples)


def _line(sample: Sample) -> str:
    """As JSON of `sample.to_dict()`, without its deep copy: that takes four times as long as the JSON itself."""
    try:
        fields = {field.name: getattr(sample, field.name) for field in dataclasses.fields(sample)}
        fields |= {"status": sample.status.value, "multimodal_train_inputs": None}
        return json.dumps(as_plain(fields), default=_plain, ensure_ascii=False)
    except TypeError as error:
        raise TypeError(f"sample {sample.index} cannot be written to a rollout dump: {error}") from error


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return dataclasses.asdict(value)
    if isinstance(value, _ArrayLike):
        return value.tolist()
    raise TypeError(f"a {type(value).__name__} is no JSON value: keep numbers, strings, lists and dicts in metadata")
