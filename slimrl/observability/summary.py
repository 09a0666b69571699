"""`summary.json`: the results of a run, in one file that is always complete, and as the last lines of a run's output.

Defines the file's content and how a resumed run continues it. `RunLog` writes it, `report` reads it. `package_versions`
reads installed metadata and imports none of the packages. `final_message` is the outcome in one sentence, with the
commands to inspect and continue the run. Schema: docs/summary.md.
"""

from __future__ import annotations

import datetime
import glob
import json
import math
import os
import platform
import re
import shlex
import shutil
import statistics
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from slimrl import __version__
from slimrl.models.adapters import ADAPTER_NAME, CONFIG_NAME
from slimrl.observability.rollout_dump import PLACEHOLDER
from slimrl.processes.files import atomic_file
from slimrl.processes.process_info import this_machine

SCHEMA_VERSION = 1


class Summary:
    """The content of one `summary.json`, written out whole and moved into place by every `save`.

    A new run (`first_step` 0) in a folder with a summary moves that one to `summary.1.json` (or 2, 3, ...). A
    resumed run keeps the steps and evaluations before `first_step`; where it drops later ones, about to be
    repeated, it leaves a copy of the whole in the same way.
    """

    def __init__(self, path: Path, *, run: dict[str, Any], versions: dict[str, str], paths: dict[str, str]) -> None:
        self.path = path
        self.run = dict(run)
        self.status = "running"
        self.error: str | None = None
        self.evaluations: list[dict[str, Any]] = []  # {"step", "when", "scores": {dataset: mean reward}, "metrics"}
        self.steps: list[dict[str, Any]] = []
        self.versions = versions
        self.paths = paths
        # the steps as they are in the file, all but the last, so that a save costs no more than writing them
        self._settled = bytearray()
        self._last = b""

    def continue_from(self, first_step: int) -> None:
        """Take over what is in the file, as the class says. Call once, before the first `save`."""
        if not self.path.exists():
            return
        old = _read(self.path) if first_step > 0 else None
        steps = [step for step in old["steps"] if step["step"] < first_step] if old else []
        if old is None or not steps:
            os.replace(self.path, _free_name(self.path))
            return
        if len(steps) < len(old["steps"]):
            shutil.copyfile(self.path, _free_name(self.path))
        self.run["started"] = old["run"]["started"]
        if "wandb_id" in old["run"]:
            self.run["wandb_id"] = old["run"]["wandb_id"]
        self.run["resumed_at"] = [*old["run"].get("resumed_at", []), first_step]
        for entry in old["eval"]["history"]:
            if entry["step"] <= first_step:
                self.evaluations.append({**entry, "when": "between" if entry["when"] == "after" else entry["when"]})
        for step in steps:
            self.add_step(step)

    def add_step(self, step: dict[str, Any]) -> None:
        """Append one step, or put it in place of the last one where it is the same step again.

        Infinite and NaN values become null, which JSON has no number for.
        """
        clean = _finite(step)
        if self.steps and self.steps[-1]["step"] == step["step"]:
            self.steps.pop()
        elif self.steps:
            self._settled += self._last + b",\n    "
        self.steps.append(clean)
        self._last = json.dumps(clean, allow_nan=False).encode()

    def add_seconds(self, step: int, phase: str, seconds: float) -> None:
        """Record a phase that follows a step already added. Raises KeyError if that step is not the last one."""
        if not self.steps or self.steps[-1]["step"] != step:
            raise KeyError(f"step {step} is not the last one of the summary")
        self.steps[-1]["seconds"][phase] = seconds
        self._last = json.dumps(self.steps[-1], allow_nan=False).encode()

    def add_evaluation(self, when: str, step: int, scores: dict[str, float], metrics: dict[str, float]) -> None:
        """Record an evaluation ("before", "between" or "after"), in place of one of the same step and kind.

        The "before" of a resumed run is not the untrained model's: where there is one already, it counts as "between".
        """
        if when == "before" and self._scores("before") is not None:
            when = "between"
        self.evaluations = [entry for entry in self.evaluations if (entry["step"], entry["when"]) != (step, when)]
        self.evaluations.append({"step": step, "when": when, "scores": _finite(scores), "metrics": _finite(metrics)})

    def save(self) -> None:
        """Write the file and move it into place: a reader sees the old or the new one, never a part."""
        head = {
            "schema_version": SCHEMA_VERSION,
            "run": self.run,
            "status": self.status,
            "error": self.error,
            "eval": self._eval_block(),
        }
        tail = {"versions": self.versions, "paths": self.paths}
        before = json.dumps(head, indent=2, allow_nan=False).removesuffix("\n}") + ',\n  "steps": ['
        after = "],\n" + json.dumps(tail, indent=2, allow_nan=False).removeprefix("{\n") + "\n"
        if self.steps:
            before, after = before + "\n    ", "\n  " + after
        with atomic_file(self.path) as unfinished, open(unfinished, "wb") as file:
            file.writelines((before.encode(), self._settled, self._last, after.encode()))

    def _scores(self, when: str) -> dict[str, float] | None:
        return next((entry["scores"] for entry in reversed(self.evaluations) if entry["when"] == when), None)

    def _eval_block(self) -> dict[str, Any]:
        before, after = self._scores("before"), self._scores("after")
        names = dict.fromkeys([*(before or {}), *(after or {})])
        return {
            "before": _mean(before),
            "after": _mean(after),
            "datasets": {
                name: {"before": (before or {}).get(name), "after": (after or {}).get(name)} for name in names
            },
            "history": self.evaluations,
        }


def load_summary(path: str | Path) -> dict[str, Any]:
    """A summary as plain data; for a folder, the `summary.json` in it.

    Raises FileNotFoundError or ValueError with a sentence where there is none, or something else.
    """
    file = Path(path) / "summary.json" if Path(path).is_dir() else Path(path)
    if not file.is_file():
        raise FileNotFoundError(f"there is no summary {file}: give the folder of a run, or its summary.json")
    data = _read(file)
    if data is None:
        raise ValueError(f"{file} is no summary of schema version {SCHEMA_VERSION}")
    return data


def _read(path: Path) -> dict[str, Any] | None:
    """The content, or None if it is no summary of this version."""
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
    except ValueError:
        return None
    return data if isinstance(data, dict) and data.get("schema_version") == SCHEMA_VERSION else None


def _free_name(path: Path) -> Path:
    number = 1
    while (candidate := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    return candidate


def _mean(scores: Mapping[str, float | None] | None) -> float | None:
    values = [value for value in (scores or {}).values() if value is not None]
    return statistics.fmean(values) if values else None


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(entry) for key, entry in value.items()}
    if isinstance(value, list):
        return [_finite(entry) for entry in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


_PACKAGES = (
    "torch",
    "megatron-core",
    "sglang",
    "sglang-router",
    "ray",
    "transformers",
    "transformer-engine",
    "numpy",
    "safetensors",
)


def package_versions() -> dict[str, str]:
    """Distribution name -> version, slimrl and Python first; packages that are not installed are left out."""
    versions = {"slimrl": __version__, "python": platform.python_version()}
    for name in _PACKAGES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return versions


_RESUMED = "resumed_at"


def final_message(run_dir: str | Path, pid: int) -> str:
    """The final message of process `pid` for its run in `run_dir`; several lines.

    The summary of an earlier run in the folder is ignored.
    """
    try:
        summary = load_summary(run_dir)
    except (OSError, ValueError):
        summary = None
    if summary is None or summary["run"]["pid"] != pid:
        logs = Path(run_dir) / "logs"
        return f"ended before its first step; the reason is above, logs of all processes are in {shown_path(logs)}"
    return "\n".join([outcome_line(summary), *next_commands(summary)])


def outcome_line(summary: dict[str, Any]) -> str:
    """`completed: evaluation addition from 0.398 to 1.000, reward from 0.586 to 0.973, over 30 steps in 1.4 min`."""
    status, steps = summary["status"], len(summary["steps"])
    said = "still running, or killed" if status == "running" else status
    learned = _learned(summary)
    where = "over" if learned else "after"
    length = f"{where} {steps} {'step' if steps == 1 else 'steps'} in {_minutes(summary)}"
    return f"{said}: {', '.join([*learned, length])}"


def next_commands(summary: dict[str, Any], model: str | Path | None = None) -> list[str]:
    """The next commands, one per line; `model` is a Hugging Face folder of the trained model."""
    run, paths = Path(summary["paths"]["run"]), summary["paths"]
    lines = {"report": f"python -m slimrl.observability.report {_word(run)}"}
    if summary["status"] == "failed":
        lines = {"logs": f"tail -n 50 {_word(Path(paths['logs']))}/*.log", **lines}
    if "tensorboard" in paths:
        lines["charts"] = f"tensorboard --logdir {_word(paths['tensorboard'])}"
    newest = newest_dump(paths.get("rollout_dumps"))
    if newest is not None:
        tokenizer = f" --tokenizer {_word(paths['hf_checkpoint'])}" if "hf_checkpoint" in paths else ""
        lines["rollouts"] = f"python tools/show_rollouts.py {_word(newest)}{tokenizer}"
    if (run / "timeline.json.gz").is_file():
        lines["timeline"] = f"open {_word(run / 'timeline.json.gz')} at https://ui.perfetto.dev"
    lines |= _to_serve(summary, model)
    return [f"  {name:<8}  {command}" for name, command in lines.items()]


def newest_dump(template: str | None) -> Path | None:
    """The dump of the last rollout recorded under `template`, without evaluations; None if there is none."""
    if template is None:
        return None
    first, *rest = map(re.escape, str(Path(template)).split(PLACEHOLDER))
    named = re.compile(first + r"(\d+)" + r"\1".join(rest))
    found = glob.glob(glob.escape(str(Path(template))).replace(PLACEHOLDER, "*"))
    numbered = [(int(match[1]), path) for path in found if (match := named.fullmatch(path)) is not None]
    return Path(max(numbered)[1]) if numbered else None


def shown_path(path: str | Path) -> str:
    """The path relative to the current folder if it is below it, else absolute."""
    absolute, here = Path(path).absolute(), Path.cwd()
    return str(absolute.relative_to(here)) if absolute.is_relative_to(here) else str(absolute)


def _to_serve(summary: dict[str, Any], model: str | Path | None) -> dict[str, str]:
    paths = summary["paths"]
    if model is not None:
        on_gpu = this_machine().gpus and os.environ.get("CUDA_VISIBLE_DEVICES") != ""
        server = "sglang.launch_server" if on_gpu else "slimrl.engines.sglang.cpu_patches"
        peft = Path(model) / CONFIG_NAME
        if not peft.is_file():
            return {"serve": f"python -m {server} --model-path {_word(model)} --port 30000"}
        base = json.loads(peft.read_text(encoding="utf-8"))["base_model_name_or_path"]
        adapter = f"--enable-lora --lora-paths {ADAPTER_NAME}={_word(model)}"
        return {"serve": f"python -m {server} --model-path {_word(base)} {adapter} --port 30000"}
    saved = sorted(Path(paths["checkpoints"]).glob("iter_*[0-9]")) if "checkpoints" in paths else []
    adapters_alone = "--lora-rank" in summary["run"].get("command", "")
    if not saved or "hf_checkpoint" not in paths or adapters_alone:
        return {}
    output, origin = Path(paths["run"]) / "hf", paths["hf_checkpoint"]
    command = f"python tools/convert_torch_dist_to_hf.py --input-dir {_word(saved[-1])} --output-dir {_word(output)}"
    return {"export": f"{command} --origin-hf-dir {_word(origin)}"}


def _word(path: str | Path) -> str:
    return shlex.quote(shown_path(path))


def _learned(summary: dict[str, Any]) -> list[str]:
    """First and last value of evaluations and reward, or of the loss for supervised training."""
    known = []
    history = [entry["scores"] for entry in summary["eval"]["history"]]
    for name in dict.fromkeys(name for scores in history for name in scores):
        known += _moved(f"evaluation {name}", [scores.get(name) for scores in history])
    rewards = [step["reward"] for step in summary["steps"]]
    supervised = summary["run"].get("supervised", not any(rewards))  # summaries of earlier versions do not say
    known += _moved("loss", [s.get("loss") for s in summary["steps"]]) if supervised else _moved("reward", rewards)
    return known


def _moved(what: str, values: list[float | None]) -> list[str]:
    known = [value for value in values if value is not None]
    if not known:
        return []
    return [f"{what} {known[0]:.3f}" if len(known) == 1 else f"{what} from {known[0]:.3f} to {known[-1]:.3f}"]


def _minutes(summary: dict[str, Any]) -> str:
    """Time from start to end; for a resumed or unfinished run, the time of the steps only."""
    run, steps = summary["run"], summary["steps"]
    if run["ended"] is None or _RESUMED in run:
        seconds = math.fsum(step["seconds"]["total"] for step in steps)
    else:
        started, ended = (datetime.datetime.fromisoformat(run[name]) for name in ("started", "ended"))
        seconds = (ended - started).total_seconds()
    if seconds < 60:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.1f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"
