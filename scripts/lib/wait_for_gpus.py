"""Waits until a running Ray cluster has its GPUs; for schedulers that start a job before all nodes have joined.

python3 scripts/lib/wait_for_gpus.py --gpus 16 --timeout-s 600      # the cluster of RAY_ADDRESS
"""

import argparse
import os
import sys
import threading
import time

import ray

POLL_S = 2.0
EXIT_RESUMABLE = 75  # slimrl.cluster.command_line.EXIT_RESUMABLE


def connect(timeout_s: float) -> None:
    """Connects to the cluster. Ends this process with code 75 if it does not answer: Ray would try on for minutes."""

    def give_up() -> None:
        print(f"slimrl: no answer from the Ray cluster within {timeout_s:g} s", file=sys.stderr, flush=True)
        os._exit(EXIT_RESUMABLE)

    limit = threading.Timer(timeout_s, give_up)
    limit.daemon = True
    limit.start()
    ray.init("auto", log_to_driver=False, logging_level="error")
    limit.cancel()


def main(argv: list[str]) -> int:
    """Exit code 0, or 75 if the GPUs are not there in time."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--gpus", type=int, required=True, help="GPUs that the cluster must have")
    parser.add_argument("--timeout-s", type=float, required=True, help="seconds to wait for them")
    options = parser.parse_args(argv)
    # The address of the job server is not that of the cluster, and on the head Ray finds its own.
    if os.environ.get("RAY_ADDRESS", "").startswith("http"):
        del os.environ["RAY_ADDRESS"]
    deadline = time.monotonic() + options.timeout_s
    connect(options.timeout_s)
    while (present := int(ray.cluster_resources().get("GPU", 0))) < options.gpus:
        if time.monotonic() > deadline:
            nodes = ", ".join(sorted(node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]))
            missing = f"{present} of {options.gpus} GPUs after {options.timeout_s:g} s"
            print(f"slimrl: the Ray cluster has {missing}; its nodes: {nodes}", file=sys.stderr)
            return EXIT_RESUMABLE
        time.sleep(POLL_S)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
