"""The last lines of every run: its outcome in one sentence, and the commands to inspect and continue it.

Generated from `summary.json`. Used by the driver at its end, and by the report.
"""

from __future__ import annotations

import datetime
import glob
import json
import math
import os
import re
import shlex
from pathlib import Path
from typing import Any

from slimrl.models.adapters import ADAPTER_NAME
from slimrl.models.peft_config import CONFIG_NAME
from slimrl.observability.rollout_dump import PLACEHOLDER
from slimrl.observability.summary import load_summary
from slimrl.processes.process_info import this_machine

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
