"""Flags of the run's name, folder, log and charts, and of a file of flags."""

from __future__ import annotations

import dataclasses

from slimrl.arguments.flag import flag


@dataclasses.dataclass
class LoggingArguments:
    """What is written down and where."""

    run_name: str | None = flag(None, "name of the run (date-time-process id)")
    runs_dir: str = flag("runs", "folder of all runs (path); this run writes to <runs dir>/<run name>")
    log_level: str = flag("INFO", "least important log line shown", choices=("DEBUG", "INFO", "WARNING", "ERROR"))
    use_tensorboard: bool = flag(False, "write TensorBoard scalars")
    tensorboard_dir: str | None = flag(
        None, "folder for TensorBoard (path; <run folder>/tensorboard, or tensorboard_log with the two names below)"
    )
    tb_project_name: str | None = flag(None, "first folder level below the TensorBoard folder (none)")
    tb_experiment_name: str | None = flag(None, "second folder level below the TensorBoard folder (none)")
    timeline: bool = flag(
        True,
        "do not record what every process does when (<run folder>/timeline.json.gz, for Perfetto)",
        only_off=True,
        off=("--no-timeline",),
    )
    timeline_requests: int = flag(
        2048,
        "requests of each rollout and of each evaluation that the timeline shows one by one, and likewise rewards and"
        " tool calls (count of each)",
        at_least=0,
    )
    custom_config_path: str | None = flag(
        None,
        "YAML file of flags (path), which win over the command line; settings of your own hooks stand in it under"
        " custom: and reach them as args.custom",
    )
