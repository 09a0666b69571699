"""Runs a command as a Ray job, shows what the command prints, and ends with its exit code; called by ray.sh.

    python3 scripts/lib/ray_job.py --address http://127.0.0.1:8265 --submission-id ID -- python3 train.py ...

`ray job submit` does the same with some thirty lines of its own around them, shows the end of a failed job twice, and
knows the exit codes 0 and 1 alone.
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
POLL_S = 1.0
CLUSTER_ERRORS = (OSError, RuntimeError, aiohttp.ClientError)  # what Ray's client raises where nobody answers it
# What Ray writes into the job's output about itself, below the level of a warning.
OF_RAY = re.compile(
    r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d+\s+(INFO|DEBUG) \S+\.py:\d+ -- |Running entrypoint for job \S+: "
)


class Lines:
    """Prints whole lines as they come in pieces, but for Ray's own."""

    def __init__(self) -> None:
        self._rest = ""

    def add(self, text: str) -> None:
        """A piece of output, which may end within a line."""
        *whole, self._rest = (self._rest + text).split("\n")
        for line in whole:
            if not OF_RAY.match(line):
                print(line, flush=True)

    def end(self) -> None:
        """What no line break followed."""
        if self._rest:
            self.add("\n")


async def show(client: JobSubmissionClient, job: str, lines: Lines) -> None:
    """The job's output until it ends."""
    async for text in client.tail_job_logs(job):
        lines.add(text)
    lines.end()


def wait_for_end(client: JobSubmissionClient, job: str) -> JobDetails:
    """What is known of the job once it has ended."""
    while not (details := client.get_job_info(job)).status.is_terminal():
        time.sleep(POLL_S)
    return details


def exit_code(details: JobDetails) -> int:
    """The command's own; 128 and the signal's number where one ended it, 143 where the job was stopped."""
    if details.status == JobStatus.SUCCEEDED:
        return 0
    if details.status == JobStatus.STOPPED:
        return EXIT_STOPPED
    code = details.driver_exit_code
    return EXIT_FAILED if not code else code if code > 0 else 128 - code


def main(argv: list[str]) -> int:
    """Submits, shows and waits; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--address", required=True, help="of the job server")
    parser.add_argument("--submission-id", required=True, help="name of the job in the cluster")
    parser.add_argument("command", nargs="+", help="behind --")
    options = parser.parse_args(argv)
    logging.getLogger(JobSubmissionClient.__module__).setLevel(logging.WARNING)  # it tells of its connection
    try:
        client = JobSubmissionClient(options.address)
        job = client.submit_job(entrypoint=shlex.join(options.command), submission_id=options.submission_id)
    except CLUSTER_ERRORS as error:
        print(f"slimrl: the Ray cluster at {options.address} takes no job: {error}", file=sys.stderr)
        return EXIT_FAILED
    try:
        asyncio.run(show(client, job, Lines()))
    except CLUSTER_ERRORS as error:
        print(f"slimrl: the job's output cannot be shown any longer: {error}", file=sys.stderr)
    try:
        details = wait_for_end(client, job)
    except CLUSTER_ERRORS as error:
        print(f"slimrl: the Ray cluster at {options.address} has ended, or is out of reach: {error}", file=sys.stderr)
        return EXIT_FAILED
    if details.status == JobStatus.FAILED and details.driver_exit_code is None:
        print(f"slimrl: the job ended before its command did: {details.message}", file=sys.stderr)
    return exit_code(details)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
