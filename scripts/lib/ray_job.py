"""Runs a command as a Ray job, shows its output, and exits with its exit code; called by ray.sh.

    python3 scripts/lib/ray_job.py --address http://127.0.0.1:8265 --submission-id ID -- python3 train.py ...

`ray job submit` adds some thirty lines of its own, shows the end of a failed job twice, and returns only the exit codes
0 and 1.
"""

import argparse
import asyncio
import logging
import re
import shlex
import sys
import time

import aiohttp
from ray.job_submission import JobDetails, JobStatus, JobSubmissionClient

EXIT_FAILED, EXIT_STOPPED = 1, 143
EXIT_RESUMABLE = 75  # that of slimrl.cluster.command_line: the cluster was lost, and the same command may succeed
POLL_S = 0.1  # the job has ended when its output has: its status follows at once
CLUSTER_ERRORS = (OSError, RuntimeError, aiohttp.ClientError)  # raised by Ray's client if the cluster does not respond
# Ray's own lines in the job's output, below the level of a warning.
OF_RAY = re.compile(
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+\s+(INFO|DEBUG) \S+\.py:\d+ -- |Running entrypoint for job \S+: "
)


class Lines:
    """Reassembles chunks of output and prints complete lines, except Ray's own."""

    def __init__(self) -> None:
        self._rest = ""

    def add(self, text: str) -> None:
        """Adds a chunk of output, which may end within a line."""
        *whole, self._rest = (self._rest + text).split("\n")
        for line in whole:
            if not OF_RAY.match(line):
                print(line, flush=True)

    def end(self) -> None:
        """Prints the last line if it has no line break."""
        if self._rest:
            self.add("\n")


async def show(client: JobSubmissionClient, job: str, lines: Lines) -> None:
    """Prints the job's output until it ends."""
    async for text in client.tail_job_logs(job):
        lines.add(text)
    lines.end()


def wait_for_end(client: JobSubmissionClient, job: str) -> JobDetails:
    """Waits until the job has ended; returns its details."""
    while not (details := client.get_job_info(job)).status.is_terminal():
        time.sleep(POLL_S)
    return details


def exit_code(details: JobDetails) -> int:
    """The command's exit code; 128 plus the signal number if a signal ended it, 143 if the job was stopped."""
    if details.status == JobStatus.SUCCEEDED:
        return 0
    if details.status == JobStatus.STOPPED:
        return EXIT_STOPPED
    code = details.driver_exit_code
    if code is None:  # its supervisor was lost
        return EXIT_RESUMABLE
    return EXIT_FAILED if not code else code if code > 0 else 128 - code


def main(argv: list[str]) -> int:
    """Submits the job, shows its output and waits for its end; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--address", required=True, help="of the job server")
    parser.add_argument("--submission-id", required=True, help="name of the job in the cluster")
    parser.add_argument("command", nargs="+", help="after --")
    options = parser.parse_args(argv)
    logging.getLogger(JobSubmissionClient.__module__).setLevel(logging.WARNING)  # it logs its connection at info
    try:
        client = JobSubmissionClient(options.address)
        job = client.submit_job(entrypoint=shlex.join(options.command), submission_id=options.submission_id)
    except CLUSTER_ERRORS as error:
        print(f"slimrl: the Ray cluster at {options.address} did not accept the job: {error}", file=sys.stderr)
        return EXIT_FAILED
    try:
        asyncio.run(show(client, job, Lines()))
    except CLUSTER_ERRORS as error:
        print(f"slimrl: lost the job's output: {error}", file=sys.stderr)
    try:
        details = wait_for_end(client, job)
    except CLUSTER_ERRORS as error:
        print(f"slimrl: the Ray cluster at {options.address} has ended or is unreachable: {error}", file=sys.stderr)
        return EXIT_RESUMABLE
    if details.status == JobStatus.FAILED and details.driver_exit_code is None:
        print(f"slimrl: the job ended before its command: {details.message}", file=sys.stderr)
    return exit_code(details)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
