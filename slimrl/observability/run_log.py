"""All reports of a run: log line per step, `summary.json`, TensorBoard, W&B and Prometheus.

Runs in the driver. The first report creates the files, so that a run which fails to start does not change an earlier
summary. Leaving the `with` block records the end of the run.

`make_private` creates the run folder with access for its user only: it contains prompts, answers, rewards and logs.
Entry points call it before they write anything there.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
import logging
import os
import shlex
import socket
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Protocol

from slimrl.arguments import Arguments
from slimrl.observability.metrics import axis_of, combine_steps
from slimrl.observability.metrics.prometheus import TARGETS_FILE, PrometheusEndpoint, Target, write_targets
from slimrl.observability.metrics.writers import TRAIN_AXIS, MetricWriter, TensorBoard, WandbRun, WandbSettings
from slimrl.observability.summary import Summary
from slimrl.observability.terminal import SHORT, short_evaluation, short_step
from slimrl.processes.files import OptionalFiles

logger = logging.getLogger("slimrl")

REWARD = "rollout/raw_reward"
PHASES = ("generate", "train", "update_weights", "total")


class Evaluated(Protocol):
    """The result of one evaluation set."""

    @property
    def mean_reward(self) -> float: ...

    def metrics(self) -> dict[str, float]:
        """Scalars under their full names, `eval/...`."""
        ...


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """One step of the loop. `rollout` has `rollout/raw_reward`; `train` has one dict per optimizer step."""

    step: int
    weight_version: str  # of the weights that generated the rollout
    rollout: dict[str, float]  # full names
    train: list[dict[str, float]]  # names without `train/`, and others of the ranks under their full names
    seconds: dict[str, float]  # by phase
    memory: dict[str, float] = dataclasses.field(default_factory=dict)  # GiB by process and kind


class RunLog:
    """`with RunLog(...) as log: log.evaluation(...); log.step(...)`."""

    def __init__(
        self,
        run_dir: str | Path,
        *,
        versions: dict[str, str],
        charts: Sequence[MetricWriter] = (),
        open_wandb: Callable[[str | None], WandbSettings | None] = lambda earlier_id: None,
        steps_per_rollout: int = 1,
        count_train_steps: bool = False,
        compares_groups: bool = False,
        supervised: bool = False,
        paths: dict[str, str] | None = None,
    ) -> None:
        """`open_wandb` gets the id of the W&B run to continue, if any. `paths` are additional paths in the summary.

        With `compares_groups` the step line reports if the rewards of every group are equal. The rewards of a
        `supervised` run have no meaning.

        `steps_per_rollout` is the number of optimizer steps assumed for rollouts that are not in the summary; with
        `count_train_steps` all axes count optimizer steps.
        """
        self.run_dir = Path(run_dir)
        self._charts = list(charts)
        self._open_wandb = open_wandb
        self._steps_per_rollout = steps_per_rollout
        self._count_train_steps = count_train_steps
        self._compares_groups = compares_groups
        self._supervised = supervised
        run = {
            "name": self.run_dir.name,
            "command": shlex.join(sys.argv),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": _now(),
            "ended": None,
            "supervised": supervised,
        }
        all_paths = {"run": str(self.run_dir), "logs": str(self.run_dir / "logs"), **(paths or {})}
        self._summary = Summary(self.run_dir / "summary.json", run=run, versions=versions, paths=all_paths)
        self._files = OptionalFiles(f"the summary {self._summary.path}")
        self._begun = False
        self._train_steps = 0  # before the step that comes next
        self._last_number = 0  # of the last step, on the axis of rollouts

    @classmethod
    def open(cls, args: Arguments, versions: dict[str, str]) -> RunLog:
        """The log of the run of these flags. Raises PrometheusError if its port cannot be opened."""
        places = {
            "hf_checkpoint": args.hf_checkpoint,
            "load": args.load,
            "checkpoints": args.save,
            "rollout_dumps": args.save_debug_rollout_data,
            "tensorboard": args.tensorboard_dir if args.use_tensorboard else None,
        }
        per_rollout = args.num_steps_per_rollout or 1
        supervised = args.is_supervised
        charts: list[MetricWriter] = []
        if args.use_tensorboard and args.tensorboard_dir is not None:
            one = args.wandb_always_use_train_step or per_rollout == 1
            charts.append(TensorBoard(Path(args.tensorboard_dir), axes_are_one=one))
        if args.prometheus_port is not None:
            charts.append(PrometheusEndpoint(args.prometheus_host, args.prometheus_port, Path(args.run_dir).name))
        return cls(
            args.run_dir,
            versions=versions,
            charts=charts,
            open_wandb=functools.partial(WandbSettings.from_args, args),
            steps_per_rollout=per_rollout,
            count_train_steps=args.wandb_always_use_train_step,
            compares_groups=args.n_samples_per_prompt > 1 and not supervised,
            supervised=supervised,
            paths={name: str(place) for name, place in places.items() if place},
        )

    def begin(self, first_step: int) -> None:
        """Start (0) or resume at `first_step`; see `Summary`. Implied by the first report, whose step it then is."""
        if self._begun:
            return
        self._begun = True
        self._summary.continue_from(first_step)
        wandb_settings = self._open_wandb(self._summary.run.get("wandb_id"))
        if wandb_settings is not None:
            self._summary.run["wandb_id"] = wandb_settings.id
            self._charts.append(WandbRun(wandb_settings))
        self._save()
        known = [step["optimizer_steps"] for step in self._summary.steps]
        self._train_steps = sum(known) + (first_step - len(known)) * self._steps_per_rollout
        starts = {axis: self._number(axis, first_step) for axis in (TRAIN_AXIS, "eval/step", "rollout/step")}
        for charts in self._charts:
            charts.begin(starts)

    def announce(self, targets: Sequence[Target]) -> None:
        """Write the list of Prometheus targets, if there are any, before `begin`."""
        if targets:
            path = self.run_dir / TARGETS_FILE
            if not OptionalFiles(f"the list {path}").attempt(lambda: write_targets(path, self.run_dir.name, targets)):
                return
            self._summary.paths["prometheus"] = str(path)

    def _save(self) -> None:
        """Write the summary now, or with the next report if the disk is full."""
        self._files.attempt(self._summary.save)

    def _number(self, axis: str, step: int) -> int:
        """The position of `step`, the next one, on an axis."""
        return self._train_steps if axis == TRAIN_AXIS or self._count_train_steps else step

    def _add(self, axis: str, number: int, values: Mapping[str, float]) -> None:
        for charts in self._charts:
            charts.add(axis, number, values)

    def expect(self, record: StepRecord) -> None:
        """Put a step that is about to be saved into the summary; `step` reports it later, with its last seconds."""
        self._put(record)

    def step(self, record: StepRecord) -> None:
        """Report a finished step: summary, TensorBoard, one line. Raises KeyError if the reward is missing."""
        train, seconds = self._put(record)
        self._chart(record, train, seconds)
        options = {"compares_groups": self._compares_groups, "supervised": self._supervised}
        line = step_line(record, train, seconds, **options)
        logger.info("%s", line, extra={SHORT: short_step(line)})

    def _put(self, record: StepRecord) -> tuple[dict[str, float], dict[str, float]]:
        """Write the step to the summary; returns its training metrics over all optimizer steps, and its seconds."""
        self.begin(record.step)
        steps, of_ranks = _split(record.train)
        train = combine_steps(steps)
        seconds = {**dict.fromkeys(PHASES, 0.0), **record.seconds}
        own = {
            "step": record.step,
            "reward": record.rollout[REWARD],
            "train_rollout_logprob_abs_diff_mean": train.get("train_rollout_logprob_abs_diff_mean"),
            "train_rollout_logprob_abs_diff_max": train.get("train_rollout_logprob_abs_diff_max"),
            "weight_version": record.weight_version,
            "seconds": seconds,
        }
        extra: dict[str, Any] = {
            **record.rollout,
            **of_ranks,
            **speeds(train, seconds),
            **train,
            "optimizer_steps": len(steps),
        }
        del extra[REWARD]
        if record.memory:
            extra["memory"] = record.memory
        if len(steps) > 1:
            extra["by_optimizer_step"] = steps
        self._summary.add_step({**own, **{name: value for name, value in extra.items() if name not in own}})
        self._save()
        return train, seconds

    def phase(self, step: int, name: str, seconds: float) -> None:
        """Report the duration of a phase after a reported step, such as "save"."""
        self._summary.add_seconds(step, name, seconds)
        self._save()
        self._add("rollout/step", self._last_number, {f"perf/{name}_time": seconds})

    def evaluation(self, when: str | int, step: int, results: Mapping[str, Evaluated]) -> None:
        """Report an evaluation of the weights after `step` rollouts; `when` is "before", "after" or a number."""
        self.begin(step)
        scores = {name: result.mean_reward for name, result in results.items()}
        metrics = {name: value for result in results.values() for name, value in result.metrics().items()}
        self._summary.add_evaluation(when if isinstance(when, str) else "between", step, scores, metrics)
        self._save()
        self._add("eval/step", self._number("eval/step", step), metrics)
        shown = " | ".join(evaluation_words(name, score, metrics) for name, score in scores.items())
        line = f"evaluation after {step} steps | {shown}"
        logger.info("%s", line, extra={SHORT: short_evaluation(line)})

    def close(self, status: str = "completed", error: str | None = None) -> None:
        """Record the end of the run ("completed", "failed" or "interrupted"); later calls have no effect."""
        if self._summary.status != "running":
            return
        self._summary.status, self._summary.error = status, error
        self._summary.run["ended"] = _now()
        # A run that never began must not replace the summary of an earlier one.
        with contextlib.ExitStack() as closing:  # a failing writer does not keep the others from closing
            for charts in reversed(self._charts):
                closing.callback(charts.close, failed=status != "completed")
            if self._begun or not self._summary.path.exists():
                self._save()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
            return
        interrupted = issubclass(kind, KeyboardInterrupt)
        try:
            self.close(*(("interrupted",) if interrupted else ("failed", f"{kind.__name__}: {error}")))
        except Exception:  # must not hide the original error
            logger.exception("the end of the run could not be reported to all metric writers")

    def _chart(self, record: StepRecord, train: dict[str, float], seconds: dict[str, float]) -> None:
        steps, of_ranks = _split(record.train)
        self._last_number = self._number("rollout/step", record.step)
        times = {f"perf/{phase}_time": value for phase, value in seconds.items()}
        memory = {f"memory/{name}": value for name, value in record.memory.items()}
        values = {**record.rollout, **of_ranks, **times, **speeds(train, seconds), **memory}
        by_axis: dict[str, dict[str, float]] = {}
        for name, value in values.items():
            by_axis.setdefault(axis_of(name), {})[name] = value
        for axis, part in by_axis.items():
            self._add(axis, self._number(axis, record.step), part)
        for step in steps:
            self._add(TRAIN_AXIS, self._train_steps, {f"train/{name}": value for name, value in step.items()})
            self._train_steps += 1


def speeds(train: dict[str, float], seconds: dict[str, float]) -> dict[str, float]:
    """Speeds and ratios from the seconds of a step's phases, under full names; see `registry.PERF`."""
    total, training = seconds["total"], seconds["train"]
    found = {"perf/step_time": total}
    if training > 0:
        found |= {"perf/train_wait_time": total - training, "perf/wait_time_ratio": (total - training) / total}
        if "tokens" in train:
            found["perf/train_tokens_per_second"] = train["tokens"] / training
    return found


def _split(train: list[dict[str, float]]) -> tuple[list[dict[str, float]], dict[str, float]]:
    """Splits off the metrics of the rollout, which ranks report under full names, from those of optimizer steps."""
    steps = [{name: value for name, value in step.items() if "/" not in name} for step in train]
    return steps, {name: value for step in train for name, value in step.items() if "/" in name}


def evaluation_words(name: str, score: float, metrics: Mapping[str, float]) -> str:
    """`aime 0.43 (pass@16 0.8, 812 tokens, 5% truncated)`: the results of one set, with the largest pass@k."""
    passes = [key for key in metrics if key.startswith(f"eval/{name}-pass@")]
    most = max(passes, key=lambda key: int(key.rpartition("@")[2]), default=None)
    known = [] if most is None or most.endswith("@1") else [f"{most.rpartition('-')[2]} {metrics[most]:.3g}"]
    known += [f"{kind} {metrics[key]:.3g}" for kind, key in _of_pairs(name).items() if key in metrics]
    if (length := metrics.get(f"eval/{name}/response_len/mean")) is not None:
        known.append(f"{length:.4g} tokens")
    if (truncated := metrics.get(f"eval/{name}-truncated_ratio")) is not None:
        known.append(f"{truncated:.0%} truncated")
    if failures := metrics.get(f"eval/{name}-reward_failures"):
        known.append(f"NO SCORE on {failures:g} answers")
    return f"{name} {score:.4g}" + (f" ({', '.join(known)})" if known else "")


def _of_pairs(name: str) -> dict[str, str]:
    return {"loss": f"eval/{name}-loss", "margin": f"eval/{name}-reward_margin"}


_SHOWN = {
    "loss": "loss",
    "perplexity": "ppl",
    "pair_accuracy": "accuracy",
    "label_accuracy": "accuracy",
    "reward_margin": "margin",
    "grad_norm": "grad",
    "critic-value_loss": "value loss",
    "kl_loss": "kl",
    "train_rollout_logprob_abs_diff_mean": "logprob diff",
}
_SHORT_PHASES = {"generate": "generate", "train": "train", "update_weights": "update", "total": "total"}
_SHOWN_SECONDS = 0.05  # a shorter phase of supervised training is left out


def step_line(
    record: StepRecord,
    train: dict[str, float],
    seconds: dict[str, float],
    *,
    compares_groups: bool = False,
    supervised: bool = False,
) -> str:
    """`step 12 | reward 0.83 | loss -0.0021 | grad 0.41 | kl 0.0003 | ... | generate 1.2s ... | version 12`.

    A `supervised` step has no reward, and only the phases that took time:
    `step 12 | loss 1.7 | ppl 5.47 | grad 0.41 | 8192 tokens | train 1.2s total 1.3s`.
    """
    parts = [f"step {record.step}", *([] if supervised else [f"reward {record.rollout[REWARD]:.4g}"])]
    parts += [f"{label} {train[name]:.3g}" for name, label in _SHOWN.items() if name in train]
    if supervised and "tokens" in train:
        parts.append(f"{train['tokens']:.0f} tokens")
    for name, whose in (("skipped", ""), ("critic-skipped", " of the critic")):
        if train.get(name):
            parts.append(f"SKIPPED {train[name]:g} of {len(record.train)} optimizer steps{whose}")
    parts += _sample_warnings(record.rollout, compares_groups)
    least = _SHOWN_SECONDS if supervised else 0.0
    phases = [phase for phase in _SHORT_PHASES if phase == "total" or seconds[phase] >= least]
    parts.append(" ".join(f"{_SHORT_PHASES[phase]} {seconds[phase]:.1f}s" for phase in phases))
    if record.weight_version or not supervised:
        parts.append(f"version {record.weight_version}")
    return " | ".join(parts)


def _sample_warnings(rollout: Mapping[str, float], compares_groups: bool) -> list[str]:
    """Warnings about a rollout's samples, and with fully asynchronous generation their staleness."""
    parts = []
    if compares_groups and rollout.get("rollout/zero_std/ratio") == 1.0:
        parts.append("NO SPREAD in any group")
    if failures := rollout.get("rollout/reward_failures"):
        parts.append(f"NO SCORE on {failures:g} answers")
    if failed := rollout.get("rollout/failed_samples"):
        parts.append(f"{failed:g} FAILED")
    if "rollout/staleness/dropped" in rollout and "rollout/staleness/mean" in rollout:
        mean, most = (rollout[f"rollout/staleness/{name}"] for name in ("mean", "max"))
        parts.append(f"age {mean:.2g}, at most {most:g}")
    if dropped := rollout.get("rollout/staleness/dropped"):
        parts.append(f"{dropped:g} too old")
    return parts


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


PRIVATE = 0o700


def make_private(folder: Path) -> str | None:
    """Creates the folder without access for other users; returns a warning if that fails, else None.

    Parent folders get the user's default permissions. Raises OSError if the folder cannot be created.
    """
    folder.parent.mkdir(parents=True, exist_ok=True)
    folder.mkdir(mode=PRIVATE, exist_ok=True)
    try:
        os.chmod(folder, PRIVATE)
    except OSError as error:  # another user's folder, or a file system without permissions
        return f"others may be able to read the run's folder {folder}: {error.strerror}"
    return None
