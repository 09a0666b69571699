"""The one place a run reports to: a line per step in the log, TensorBoard scalars, and `summary.json`.

Lives in the driver. Files appear with the first report, so a run that fails to start leaves an earlier
summary untouched. Leaving the `with` block records how the run ended.
"""

from __future__ import annotations

import dataclasses
import datetime
import logging
import os
import shlex
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Protocol

from slimrl.arguments import Arguments
from slimrl.observability.metrics import combine_steps
from slimrl.observability.summary import Summary

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter

logger = logging.getLogger("slimrl")

REWARD = "rollout/raw_reward"
PHASES = ("generate", "train", "update_weights", "total")


class Evaluated(Protocol):
    """One data set's outcome."""

    @property
    def mean_reward(self) -> float: ...

    def metrics(self) -> dict[str, float]:
        """Scalars under their full names, `eval/...`."""
        ...


@dataclasses.dataclass(frozen=True)
class StepRecord:
    """One turn of the loop. `rollout` must hold `rollout/raw_reward`; `train` one dict per optimizer step."""

    step: int
    weight_version: str  # of the weights that generated the rollout
    rollout: dict[str, float]  # full names
    train: list[dict[str, float]]  # names without prefix, see `metric_table.TRAIN`
    seconds: dict[str, float]  # by phase
    memory: dict[str, float] = dataclasses.field(default_factory=dict)  # GiB by process and kind


class RunLog:
    """`with RunLog(...) as log: log.evaluation(...); log.step(...)`."""

    def __init__(
        self,
        run_dir: str | Path,
        *,
        versions: dict[str, str],
        use_tensorboard: bool,
        tensorboard_dir: str | Path | None = None,
        paths: dict[str, str] | None = None,
    ) -> None:
        """`tensorboard_dir` defaults to `<run_dir>/tensorboard`; `paths` are further places to name in the summary."""
        self.run_dir = Path(run_dir)
        self._tensorboard_dir = Path(tensorboard_dir or self.run_dir / "tensorboard") if use_tensorboard else None
        all_paths = {"run": str(self.run_dir), "logs": str(self.run_dir / "logs"), **(paths or {})}
        if self._tensorboard_dir is not None:
            all_paths["tensorboard"] = str(self._tensorboard_dir)
        run = {
            "name": self.run_dir.name,
            "command": shlex.join(sys.argv),
            "host": socket.gethostname(),
            "pid": os.getpid(),
            "started": _now(),
            "ended": None,
        }
        self._summary = Summary(self.run_dir / "summary.json", run=run, versions=versions, paths=all_paths)
        self._begun = False
        self._writer: SummaryWriter | None = None

    @classmethod
    def open(cls, args: Arguments, versions: dict[str, str]) -> RunLog:
        """The log of the run that these flags describe."""
        places = {
            "hf_checkpoint": args.hf_checkpoint,
            "load": args.load,
            "checkpoints": args.save,
            "rollout_dumps": args.save_debug_rollout_data,
        }
        return cls(
            args.run_dir,
            versions=versions,
            use_tensorboard=args.use_tensorboard,
            tensorboard_dir=args.tensorboard_dir,
            paths={name: str(place) for name, place in places.items() if place},
        )

    def begin(self, first_step: int) -> None:
        """Start (0) or resume at `first_step`; see `Summary`. Implied by the first report, whose step it then is."""
        if self._begun:
            return
        self._begun = True
        self._summary.continue_from(first_step)
        self._summary.save()
        if self._tensorboard_dir is not None:
            self._writer = _open_writer(self._tensorboard_dir, first_step)

    def log(self, metrics: Mapping[str, float], step: int) -> None:
        """TensorBoard scalars under their full names; nothing where TensorBoard is off."""
        self.begin(step)
        if self._writer is not None:
            for name, value in metrics.items():
                self._writer.add_scalar(name, value, step)

    def expect(self, record: StepRecord) -> None:
        """Put a step that is about to be saved into the summary; `step` reports it later, with its last seconds."""
        self._put(record)

    def step(self, record: StepRecord) -> None:
        """Report a finished step: summary, TensorBoard, one line. Raises KeyError where the reward is missing."""
        train, seconds = self._put(record)
        self._chart(record, train, seconds)
        logger.info("%s", step_line(record, train, seconds))

    def _put(self, record: StepRecord) -> tuple[dict[str, float], dict[str, float]]:
        """The step in the summary, which is written; its training metrics over all optimizer steps, and seconds."""
        self.begin(record.step)
        train = combine_steps(record.train)
        seconds = {**dict.fromkeys(PHASES, 0.0), **record.seconds}
        own = {
            "step": record.step,
            "reward": record.rollout[REWARD],
            "train_rollout_logprob_abs_diff_mean": train.get("train_rollout_logprob_abs_diff_mean"),
            "train_rollout_logprob_abs_diff_max": train.get("train_rollout_logprob_abs_diff_max"),
            "weight_version": record.weight_version,
            "seconds": seconds,
        }
        extra = {**record.rollout, **train, "optimizer_steps": len(record.train)}
        del extra[REWARD]
        if record.memory:
            extra["memory"] = record.memory
        if len(record.train) > 1:
            extra["by_optimizer_step"] = record.train
        self._summary.add_step({**own, **{name: value for name, value in extra.items() if name not in own}})
        self._summary.save()
        return train, seconds

    def phase(self, step: int, name: str, seconds: float) -> None:
        """Report how long something took that follows a reported step, such as "save"."""
        self._summary.add_seconds(step, name, seconds)
        self._summary.save()
        self.log({f"perf/{name}_time": seconds}, step)

    def evaluation(self, when: str | int, step: int, results: Mapping[str, Evaluated]) -> None:
        """Report an evaluation of the weights after `step` rollouts; `when` is "before", "after" or a number."""
        self.begin(step)
        scores = {name: result.mean_reward for name, result in results.items()}
        metrics = {name: value for result in results.values() for name, value in result.metrics().items()}
        self._summary.add_evaluation(when if isinstance(when, str) else "between", step, scores, metrics)
        self._summary.save()
        self.log(metrics, step)
        shown = " | ".join(evaluation_words(name, score, metrics) for name, score in scores.items())
        logger.info("evaluation after %d steps | %s", step, shown)

    def close(self, status: str = "completed", error: str | None = None) -> None:
        """Record how the run ended ("completed", "failed" or "interrupted"); later calls change nothing."""
        if self._summary.status != "running":
            return
        self._summary.status, self._summary.error = status, error
        self._summary.run["ended"] = _now()
        # A run that never began must not replace the summary of an earlier one.
        if self._begun or not self._summary.path.exists():
            self._summary.save()
        if self._writer is not None:
            self._writer.close()

    def __enter__(self) -> RunLog:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.close()
        elif issubclass(kind, KeyboardInterrupt):
            self.close("interrupted")
        else:
            self.close("failed", f"{kind.__name__}: {error}")

    def _chart(self, record: StepRecord, train: dict[str, float], seconds: dict[str, float]) -> None:
        self.log(record.rollout, record.step)
        self.log({f"train/{name}": value for name, value in train.items()}, record.step)
        perf = {f"perf/{phase}_time": value for phase, value in seconds.items()}
        if seconds["train"] > 0 and "tokens" in train:
            perf["perf/train_tokens_per_second"] = train["tokens"] / seconds["train"]
        self.log(perf, record.step)
        self.log({f"memory/{name}": value for name, value in record.memory.items()}, record.step)


def evaluation_words(name: str, score: float, metrics: Mapping[str, float]) -> str:
    """`aime 0.43 (pass@16 0.8, 812 tokens, 5% truncated)`: what is known of one set, the largest pass@k."""
    passes = [key for key in metrics if key.startswith(f"eval/{name}-pass@")]
    most = max(passes, key=lambda key: int(key.rpartition("@")[2]), default=None)
    known = [] if most is None or most.endswith("@1") else [f"{most.rpartition('-')[2]} {metrics[most]:.3g}"]
    if (length := metrics.get(f"eval/{name}/response_len/mean")) is not None:
        known.append(f"{length:.4g} tokens")
    if (truncated := metrics.get(f"eval/{name}-truncated_ratio")) is not None:
        known.append(f"{truncated:.0%} truncated")
    return f"{name} {score:.4g}" + (f" ({', '.join(known)})" if known else "")


def step_line(record: StepRecord, train: dict[str, float], seconds: dict[str, float]) -> str:
    """`step 12 | reward 0.83 | loss -0.0021 | grad 0.41 | kl 0.0003 | ... | generate 1.2s ... | version 12`."""
    shown = {
        "loss": "loss",
        "grad_norm": "grad",
        "kl_loss": "kl",
        "train_rollout_logprob_abs_diff_mean": "logprob diff",
    }
    parts = [f"step {record.step}", f"reward {record.rollout[REWARD]:.4g}"]
    parts += [f"{label} {train[name]:.3g}" for name, label in shown.items() if name in train]
    short = {"generate": "generate", "train": "train", "update_weights": "push", "total": "total"}
    if train.get("skipped"):
        parts.append(f"SKIPPED {train['skipped']:g} of {len(record.train)} optimizer steps")
    parts.append(" ".join(f"{label} {seconds[phase]:.1f}s" for phase, label in short.items()))
    return " | ".join([*parts, f"version {record.weight_version}"])


def _now() -> str:
    return datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")


def _open_writer(folder: Path, first_step: int) -> SummaryWriter:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ModuleNotFoundError as error:
        raise ModuleNotFoundError(
            f"--use-tensorboard needs the package tensorboard ({error}): pip install tensorboard, or leave the flag out"
        ) from error
    # TensorBoard hides points of an earlier process at or after purge_step: they are about to be repeated.
    return SummaryWriter(str(folder), purge_step=first_step, flush_secs=10)
