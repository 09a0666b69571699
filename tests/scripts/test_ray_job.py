"""scripts/lib/ray_job.py: which lines of a job are shown, and which exit code stands for its end."""

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
def test_the_lines_of_the_command_are_shown_whole_and_ray_s_own_only_from_a_warning_up(size, capsys):
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
        (JobStatus.FAILED, 2, 2),  # a refused command line
        (JobStatus.FAILED, -9, 137),  # SIGKILL
        (JobStatus.FAILED, None, 1),  # never began
        (JobStatus.STOPPED, None, 143),
    ],
)
def test_the_exit_code_is_that_of_the_command(status, code, expected):
    details = JobDetails(type=JobType.SUBMISSION, status=status, entrypoint="", driver_exit_code=code)
    assert ray_job.exit_code(details) == expected


class Client:
    """A cluster that takes a job, tells a part of its output and is gone, or continues without its output."""

    def __init__(self, statuses: list[JobStatus]) -> None:
        self.statuses = statuses
        self.submitted: dict[str, str] = {}

    def __call__(self, address: str) -> "Client":
        if address == "http://nobody":
            raise ConnectionError("nobody answers")
        return self

    def submit_job(self, **job: str) -> str:
        self.submitted = job
        return job["submission_id"]

    async def tail_job_logs(self, job: str):
        logging.getLogger("ray.dashboard.modules.job.sdk").info("WebSocket closed")  # as the real one does
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
        ("http://head", [JobStatus.RUNNING, JobStatus.SUCCEEDED], 0, ["the job's output cannot be shown any longer"]),
        ("http://head", [JobStatus.RUNNING], 1, ["the job's output cannot", "has ended, or is out of reach: gone"]),
        ("http://head", [JobStatus.FAILED], 1, ["the job's output cannot", "the job ended before its command did"]),
        ("http://nobody", [], 1, ["takes no job: nobody answers"]),
    ],
)
def test_a_cluster_that_is_lost_is_a_sentence_and_a_job_is_waited_for(
    address, statuses, code, said, capsys, caplog, monkeypatch
):
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
