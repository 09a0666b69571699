"""A Ray cluster of several nodes, each started by its own script: they connect and end, or report missing nodes."""

import contextlib
import importlib.util
import os
import re
import socket
import subprocess
import sys
import time
import types
from collections.abc import Sequence
from pathlib import Path

import pytest

from slimrl.processes import child_process
from tests.end_to_end import harness
from tests.scripts.launched_jobs import RAY_ERRORS

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("ray_node", ROOT / "scripts" / "lib" / "ray_node.py")
ray_node = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(ray_node)
ray_cluster, node_messages = sys.modules["ray_cluster"], ray_node.node_messages
ACCEPTS, REFUSES, SILENT = ray_cluster.ACCEPTS, ray_cluster.REFUSES, ray_cluster.SILENT
SCRIPT = """
set -euo pipefail
source scripts/lib/say.sh
source scripts/lib/ray.sh
ray_begin --host 127.0.0.1 --num-gpus 2 --object-store-memory 100000000
ray_job python3 -c "$1"
"""
TOKEN = os.urandom(32).hex()
GPUS = "import ray; ray.init(logging_level='error'); print('GPUs', ray.cluster_resources()['GPU'], flush=True)"


def node(rank: int, folder: Path, job: str = GPUS, *, by: Sequence[str] = (), **variables: str) -> harness.Started:
    """The script of one node, whose job is this Python code, run by the command `by`; all nodes are on this machine."""
    (folder / str(rank)).mkdir()
    return harness.launch(
        [*by, "bash", "-c", SCRIPT, "script", job],
        log=folder / f"{rank}.out",
        run_dir=folder,
        cwd=ROOT,
        path=f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
        home=folder / str(rank),
        more={"WORLD_SIZE": "2", "RANK": str(rank), "MASTER_ADDR": "127.0.0.1", "RAY_AUTH_TOKEN": TOKEN, **variables},
    )


def free_port() -> str:
    reservation = child_process.claim_ports()
    reservation.release()
    return str(reservation.first)


def given_ports(started: harness.Started) -> list[int]:
    """The ports that this node's `ray start` was told to bind."""
    (ray,) = started.processes("ray start --block")
    given = [re.fullmatch(r"--[a-z-]*port=([1-9]\d*)", word) for word in ray.cmdline()]
    return [int(one[1]) for one in given if one]


def test_message_arrives_only_with_the_token_and_at_its_port():
    with contextlib.closing(node_messages.Listener("secret")) as one:
        with contextlib.closing(node_messages.Listener("secret")) as other:
            node_messages.send("secret", "75", [("127.0.0.1", one.port), ("127.0.0.1", other.port)])
            node_messages.send("guessed", "0", [("127.0.0.1", one.port)])
            with socket.create_connection(("127.0.0.1", one.port)) as silent, contextlib.suppress(OSError):
                silent.sendall(b"0" * 5000)
            assert (one.received(), other.received()) == (["75"], ["75"])
            assert one.received() == []
            port = other.port
        for text in (
            b"",
            b"75",
            "\N{LATIN SMALL LETTER E WITH ACUTE} 75".encode(),
            b"\xff\xfe \xff",
            b"0" * 64 + b" 75",
        ):
            with socket.create_connection(("127.0.0.1", one.port)) as other_program:
                other_program.sendall(text)
            assert one.received() == []
        began = time.monotonic()
        with contextlib.ExitStack() as stack:  # they say nothing, and cost a second together
            for _ in range(20):
                stack.enter_context(socket.create_connection(("127.0.0.1", one.port)))
            assert one.received() == [] and time.monotonic() - began < 1.5
        while one.received() or time.monotonic() - began < 1.5:
            pass  # the rest of those that have closed
        began = time.monotonic()
        node_messages.send("secret", "0", [("127.0.0.1", port), ("127.0.0.1", one.port)])  # one has ended
        assert one.received() == ["0"] and time.monotonic() - began < 2


@pytest.mark.slow
@pytest.mark.timeout(240)
@pytest.mark.parametrize("code", [1, 75, 143])
def test_other_node_ends_with_the_outcome_of_the_head(code: int, tmp_path):
    """75, so that scripts/resume.sh joins again, only where the head may be started again."""
    port = free_port()
    command = (
        f"import os, signal, sys; {'os.kill(os.getpid(), signal.SIGTERM)' if code == 143 else f'sys.exit({code})'}"
    )
    head, worker = (node(rank, tmp_path, command, RAY_PORT=port) for rank in (0, 1))
    done, worked = head.finish(150), worker.finish(60)
    assert done.code == code, done.output
    assert worked.code == (75 if code > 1 else 0), worked.output
    then = f" with exit code {code}, after which the same command may continue" if code > 1 else ""
    assert f"the Ray head at 127.0.0.1:{port} has ended{then}; ending this node" in worked.output
    assert (done.left, worked.left) == ([], [])


def ray_folders(started: harness.Started) -> list[Path]:
    return list(Path("/tmp").glob(f"slimrl-ray-{started.process.pid}-*"))


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_two_nodes_start_and_end_together(tmp_path):
    (tmp_path / "token").write_text(TOKEN + "\n")
    variables = {"RAY_PORT": free_port()}
    # before its head: it has to retry
    worker = node(1, tmp_path, RAY_AUTH_TOKEN="", RAY_AUTH_TOKEN_PATH=str(tmp_path / "token"), **variables)
    time.sleep(2)
    head = node(0, tmp_path, **variables)
    head.wait_for_line("2 of 2", 120)
    ports = given_ports(head) + given_ports(worker)
    done, worked = head.finish(150), worker.finish(60)
    assert (done.code, worked.code) == (0, 0), done.output + worked.output
    # head: its own, dashboard, client; both: two of the agent. Outgoing connections cannot take them before Ray does.
    assert len(set(ports)) == len(ports) == 3 + 2 + 2
    first_ephemeral = int(child_process.EPHEMERAL_RANGE_FILE.read_text().split()[0])
    assert min(ports) > 1024 and max(ports) < first_ephemeral
    assert "2 of 2 nodes have joined" in done.output
    assert "GPUs 4.0" in done.output
    assert f"the Ray head at 127.0.0.1:{variables['RAY_PORT']} has ended" in worked.output
    assert not RAY_ERRORS.search(done.output + worked.output)
    assert (done.left, worked.left) == ([], [])
    assert ray_folders(head) == ray_folders(worker) == []
    for rank in "01":
        assert not list((tmp_path / rank).glob(".ray*"))


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_head_that_times_out_reports_the_number_of_nodes_and_may_be_started_again(tmp_path):
    head = node(0, tmp_path, RAY_PORT=free_port(), RAY_JOIN_TIMEOUT_S="2").finish(90)
    assert head.code == ray_node.EXIT_RESUMABLE
    assert re.search(r"1 of 2 nodes \(WORLD_SIZE\) joined within 2 s: [\d.]+; check the other nodes", head.output)
    assert head.left == []


@pytest.mark.slow
@pytest.mark.timeout(450)
def test_head_that_missed_a_node_is_started_again_and_runs_with_it(tmp_path):
    port = free_port()
    head = node(0, tmp_path, by=["bash", "scripts/resume.sh", "--"], RAY_PORT=port, RAY_JOIN_TIMEOUT_S="20")
    head.wait_for_line("exit code 75: restart 1 of at most 10", 120)
    # on a busy machine the head may give up more than once
    worker = node(1, tmp_path, RAY_PORT=port, RAY_JOIN_TIMEOUT_S="240")
    done, worked = head.finish(240), worker.finish(60)
    assert (done.code, worked.code) == (0, 0), done.output + worked.output
    assert "1 of 2 nodes (WORLD_SIZE) joined within 20 s" in done.output and "GPUs 4.0" in done.output
    assert (done.left, worked.left) == ([], [])


@pytest.mark.parametrize(
    ("answers", "gone_after", "lost"),
    [
        ([ACCEPTS] * 60, None, False),
        ([ACCEPTS] * 5 + [REFUSES] * 40, 5 + 10, False),  # it has ended
        ([ACCEPTS] * 5 + [REFUSES] * 2 + [SILENT] * 40, 5 + 10, False),  # and its machine with it, as a pod does
        ([ACCEPTS] * 5 + [SILENT] * 40, 5 + 20, True),  # the link is cut
        ([ACCEPTS] * 5 + [SILENT] * 18 + [ACCEPTS] * 40, None, False),  # and comes back
        ([ACCEPTS] * 5 + [REFUSES] * 8 + [ACCEPTS] * 40, None, False),  # Ray was started again
    ],
    ids=["up", "ended", "ended with its machine", "cut", "back", "again"],
)
def test_head_that_has_ended_differs_from_one_behind_a_lost_link(answers, gone_after, lost, monkeypatch):
    now = [100.0]
    monkeypatch.setattr(ray_cluster, "time", types.SimpleNamespace(monotonic=lambda: now[0]))
    monkeypatch.setattr(ray_cluster, "response", lambda *_: next(remaining))
    remaining, watch, seconds = iter(answers), ray_cluster.HeadWatch("10.0.0.1:6379"), None
    for second in range(len(answers)):
        now[0] += 1
        if watch.gone():
            seconds = second
            break
    assert seconds == gone_after
    assert watch.lost is lost


def test_two_nodes_with_one_rank_are_named():
    assert ray_cluster.doubled_rank([("0", "a"), ("1", "b"), ("", "c"), ("", "d")]) == ""
    doubled = ray_cluster.doubled_rank([("0", "a"), ("1", "b"), ("1", "c")])
    assert doubled.startswith("2 nodes were started with RANK=1: b, c; give each node its own RANK")


def test_worker_without_a_head_gives_up_with_one_message(tmp_path):
    port = free_port()
    worker = node(1, tmp_path, RAY_PORT=port, RAY_JOIN_TIMEOUT_S="1")
    done = worker.finish(30)
    assert done.code == ray_node.EXIT_NO_HEAD
    assert (
        f"this node could not join the Ray head at 127.0.0.1:{port} (MASTER_ADDR, RAY_PORT) within 1 s" in done.output
    )
    assert done.left == [] and ray_folders(worker) == []


def test_head_with_an_occupied_port_reports_it(tmp_path):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        done = node(0, tmp_path, RAY_PORT=port).finish(30)
    assert done.code == 1
    assert f"port {port} of 127.0.0.1 is taken; set RAY_PORT to another one, on every node" in done.output


@pytest.mark.parametrize(
    ("variables", "sentence"),
    [
        ({"WORLD_SIZE": "two"}, "WORLD_SIZE=two is not a number of nodes"),
        (
            {"WORLD_SIZE": "2", "RANK": "2", "MASTER_ADDR": "a"},
            "RANK=2 is not in 0 to 1, as WORLD_SIZE=2 requires",
        ),
        ({"RANK": "1"}, "RANK=1 is not in 0 to 0, as WORLD_SIZE=1 requires"),
        ({"WORLD_SIZE": "2"}, "WORLD_SIZE=2 needs MASTER_ADDR, the address of the node with RANK 0"),
        ({"RAY_PORT": "http"}, "RAY_PORT=http is not a port"),
        (
            {"WORLD_SIZE": "2", "RANK": "1", "MASTER_ADDR": "a"},
            "several nodes need a token, or anyone who reaches their ports can run commands as you. Create one",
        ),
        (
            {"WORLD_SIZE": "2", "MASTER_ADDR": "a", "RAY_AUTH_MODE": "disabled"},
            "sha256sum | cut -d ' ' -f 1 > TOKEN_FILE) and set RAY_AUTH_TOKEN_PATH=TOKEN_FILE on every node",
        ),
        (
            {"WORLD_SIZE": "2", "MASTER_ADDR": "a", "RAY_AUTH_TOKEN_PATH": "/nowhere/token"},
            "RAY_AUTH_TOKEN_PATH=/nowhere/token cannot be read",
        ),
        ({"RAY_JOIN_TIMEOUT_S": "1m"}, "RAY_JOIN_TIMEOUT_S=1m is not a number of seconds"),
        ({"RAY_HEAD_TIMEOUT_S": "1m"}, "RAY_HEAD_TIMEOUT_S=1m is not a number of seconds; give one such as 20"),
    ],
)
def test_invalid_variables_are_rejected_at_startup(variables, sentence):
    environment = {"PATH": "/usr/bin:/bin", **variables}
    command = "source scripts/lib/say.sh; source scripts/lib/ray.sh; ray_begin"
    options = {"cwd": ROOT, "env": environment, "capture_output": True, "text": True, "timeout": 30}
    done = subprocess.run(["bash", "-c", command], **options)
    assert done.returncode == 2
    assert sentence in done.stderr and done.stderr.count("\n") == 1
