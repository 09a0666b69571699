"""scripts/lib/ray_job.py: which lines of a job are shown, and its exit code."""

import importlib.util
import logging
from pathlib import Path

import pytest
from ray.job_submission import JobDetails, JobStatus, JobType

PATH = Path(__file__).resolve().parents[2] / "scripts/lib/ray_job.py"
SPEC = importlib.util.spec_from_file_location("ray_job", PATH)
ray_job = importlib.util.module_from_spec(SPEC)
SPEC.loader.exec_module(ray_job)

OUTPUT = """2026-11-22 17:00:42,710\tINFO job_manager.py:581 -- Runtime env is setting up.
Running entrypoint for job slimrl-11988-119: python3 train.py --lr 1
17:00:53 starting 2 train workers and 2 rollout GPUs
2026-11-22 17:00:43,001\tINFO worker.py:1692 -- Using address 127.0.0.1:6379 set in the environment
2026-11-22 17:00:44,001\tWARNING worker.py:1 -- the disk is nearly full

17:02:25 step 0 | reward 0.58"""


@pytest.mark.parametrize("size", [1, 7, 1000])
def test_command_output_is_complete_and_ray_lines_only_from_warnings_up(size, capsys):
    lines = ray_job.Lines()
    for start in range(0, len(OUTPUT), size):
        lines.add(OUTPUT[start : start + size])
    lines.end()
    assert capsys.readouterr().out.splitlines() == [
        "17:00:53 starting 2 train workers and 2 rollout GPUs",
        "2026-11-22 17:00:44,001\tWARNING worker.py:1 -- the disk is nearly full",
        "",
        "17:02:25 step 0 | reward 0.58",
    ]


@pytest.mark.parametrize(
    ("status", "code", "expected"),
    [
        (JobStatus.SUCCEEDED, 0, 0),
        (JobStatus.FAILED, 2, 2),  # an invalid command line
        (JobStatus.FAILED, -9, 137),  # SIGKILL
        (JobStatus.FAILED, None, 75),  # its supervisor was lost
        (JobStatus.STOPPED, None, 143),
    ],
)
def test_exit_code_is_that_of_the_command(status, code, expected):
    details = JobDetails(type=JobType.SUBMISSION, status=status, entrypoint="", driver_exit_code=code)
    assert ray_job.exit_code(details) == expected


class Client:
    """A cluster that accepts a job, sends part of its output and disappears, or continues without output."""

    def __init__(self, statuses: list[JobStatus]) -> None:
        self.statuses = statuses
        self.submitted: dict[str, str] = {}

    def __call__(self, address: str) -> "Client":
        if address == "http://unreachable":
            raise ConnectionError("no server answers")
        return self

    def submit_job(self, **job: str) -> str:
        self.submitted = job
        return job["submission_id"]

    async def tail_job_logs(self, job: str):
        logging.getLogger("ray.dashboard.modules.job.sdk").info("WebSocket closed")  # like the real one
        yield "one line\n"
        raise RuntimeError("the connection broke")

    def get_job_info(self, job: str) -> JobDetails:
        if not self.statuses:
            raise ConnectionError("gone")
        code = 0 if self.statuses[0] == JobStatus.SUCCEEDED else None
        return JobDetails(type=JobType.SUBMISSION, status=self.statuses.pop(0), entrypoint="", driver_exit_code=code)


@pytest.mark.parametrize(
    ("address", "statuses", "code", "said"),
    [
        ("http://head", [JobStatus.RUNNING, JobStatus.SUCCEEDED], 0, ["lost the job's output"]),
        ("http://head", [JobStatus.RUNNING], 75, ["lost the job's output", "has ended or is unreachable: gone"]),
        ("http://head", [JobStatus.FAILED], 75, ["lost the job's output", "the job ended before its command"]),
        ("http://unreachable", [], 1, ["did not accept the job: no server answers"]),
    ],
)
def test_lost_cluster_is_one_error_and_a_job_is_awaited(address, statuses, code, said, capsys, caplog, monkeypatch):
    client = Client(statuses)
    client.__module__ = ray_job.JobSubmissionClient.__module__
    monkeypatch.setattr(ray_job, "JobSubmissionClient", client)
    monkeypatch.setattr(ray_job, "POLL_S", 0.0)
    command = ["python3", "a b.py", "--lr", "1"]
    assert ray_job.main(["--address", address, "--submission-id", "x", "--", *command]) == code
    shown = capsys.readouterr()
    assert "WebSocket closed" not in caplog.text
    assert [words in line for words, line in zip(said, shown.err.splitlines(), strict=True)] == [True] * len(said)
    if address == "http://head":
        assert shown.out == "one line\n"
        assert client.submitted == {"entrypoint": "python3 'a b.py' --lr 1", "submission_id": "x"}
