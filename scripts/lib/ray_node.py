"""One node of a Ray cluster, with complete cleanup: run by scripts/lib/ray.sh, ended with SIGTERM.

As head it runs ``ray start --head`` in the given folder, waits until all ``--nodes`` have joined, writes
``<folder>/address`` and waits. With ``--join`` it joins a head, with retries until the head responds, and ends when the
head is gone. On a signal, when its parent dies, or when Ray exits, it ends every process that Ray started, in whatever
session or group, and removes the folder. It does not use ``ray stop``, which would also end other clusters.

When the head ends on a signal it tells the other nodes the exit code in ``<folder>/outcome``, where its script has
written it. They end with code 75 if the same command may continue after it (`CONTINUED`), else with 0. A head that ends
without a word was lost: code 75.
"""

import argparse
import contextlib
import ctypes
import itertools
import os
import signal
import socket
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NoReturn

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
sys.path.insert(0, str(Path(__file__).resolve().parent))
import node_messages
from ray_cluster import (
    EXIT_RESUMABLE,
    HEAD_SILENT_S,
    PORT_LABEL,
    RANK_LABEL,
    HeadWatch,
    NotTogether,
    labelled_nodes,
    reachable,
    wait_for_nodes,
    wait_until_ready,
)

from slimrl.platform.launch_env import KEEP_SUBREAPERS, ON_LOOPBACK, kernel_cache
from slimrl.processes import stale_resources
from slimrl.processes.child_process import PortReservation, claim_port, claim_ports

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
START_ATTEMPTS = 3
# Ray's messages if it could not bind a port
PORT_TAKEN = ("Failed to start GCS", "ddress already in use", "already occupied")
POLITE_STOP_S = 10
LOST_STOP_S = 3  # without its head, to which Ray would report its end
# Ray makes its folder accessible to all users, so it gets a subfolder. A short name, because it contains sockets.
RAY_FOLDER = "r"
# EX_UNAVAILABLE of sysexits.h: no head within the time, which is no failure if the last one has done its work.
EXIT_NO_HEAD = 69
# Exit codes of the head's script after which scripts/resume.sh or a scheduler may start it again: resumable, killed, or
# ended by the scheduler's signal. Not after an interrupt.
CONTINUED = {EXIT_RESUMABLE, *(128 + number for number in (1, 6, 7, 9, 11, 15))}
OTHER_VERSION = "Version mismatch"  # Ray's message if the head has another Ray or Python
# Variables of the job that starts the nodes; removed for the processes that Ray starts.
LAUNCHER_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")


class Stopped(Exception):
    """This process received a signal to end."""


class Lost(RuntimeError):
    """Ray ended on this node while the cluster was in use; another try may succeed."""


class NoHead(RuntimeError):
    """This node could not join the head in time."""


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Parses our own flags; returns the other arguments for ``ray start``."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--folder", type=Path, required=True, help="for sockets and logs; a short path under /tmp")
    parser.add_argument("--host", help="address of this node (default: one that the other nodes reach)")
    parser.add_argument("--nodes", type=int, default=1, help="nodes of the cluster, with the head (default 1)")
    parser.add_argument("--port", type=int, default=0, help="port of the head (default: a free port)")
    parser.add_argument("--master", default="", help="name of the head's node for the other nodes")
    parser.add_argument("--rank", type=int, default=0, help="number of this node, 0 to --nodes - 1 (default 0)")
    parser.add_argument("--join", metavar="HOST:PORT", help="join the cluster of this head as a further node")
    parser.add_argument("--timeout-s", type=float, default=600, help="seconds for all nodes to join (default 600)")
    parser.add_argument("--head-timeout-s", type=float, default=HEAD_SILENT_S, help="without an answer of the head")
    return parser.parse_known_args(argv)


def own_address(master: str) -> str:
    """This node's address for other nodes: that of `master`, if it is a non-loopback address of this node.

    In a Kubernetes job `master` may be localhost, or the name of a service in front of this node.
    """
    with contextlib.suppress(OSError), socket.socket() as probe:
        address = socket.gethostbyname(master)
        if not address.startswith("127."):
            probe.bind((address, 0))
            return address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        route.connect(("8.8.8.8", 53))  # sends nothing: only selects the source address of the default route
        return route.getsockname()[0]


def own_every_descendant() -> None:
    """Makes this process the subreaper of all descendants, and ends it when its parent dies."""
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getppid()
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        raise Stopped
    # Leave the terminal's process group: the script handles Ctrl-C and ends this process in order.
    os.setsid()


def ray_start(
    folder: Path,
    flags: list[str],
    owner: stale_resources.Owner,
    agent: PortReservation,
    *,
    labels: dict[str, int],
    alone: bool = False,
) -> subprocess.Popen:
    """Runs ``ray start --block``, with its output in ``<folder>/ray.log``; Ray also owns the folder.

    `agent` are two ports for the node's agent; `labels` are those of this node; `alone`: no other node joins.
    """
    text = ",".join(f"{name}={value}" for name, value in labels.items())
    command = [
        str(Path(sys.executable).with_name("ray")),
        *("start", "--block", "--disable-usage-stats", "--log-color=false", f"--temp-dir={folder / RAY_FOLDER}"),
        *(f"--dashboard-agent-listen-port={agent.first}", f"--dashboard-agent-grpc-port={agent.first + 1}"),
        *("--min-worker-port=0", "--max-worker-port=0", f"--labels={text}"),
        *flags,
    ]
    environment = {
        **kernel_cache(os.environ),  # kept, unlike everything else in TMPDIR
        **(ON_LOOPBACK if alone and "--node-ip-address=127.0.0.1" in flags else {}),
        **{name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES},
        **KEEP_SUBREAPERS,
        "TMPDIR": str(folder),
    }
    if environment.get("CUDA_VISIBLE_DEVICES") == "":
        # Meant for the job, which runs without GPUs; Ray would reject logical GPUs.
        del environment["CUDA_VISIBLE_DEVICES"]
    with open(folder / "ray.log", "w") as log:
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            env=environment,
            pass_fds=(owner.fileno(),),
        )


def wait_for_end(ray: subprocess.Popen, gone: Callable[[], bool]) -> int | None:
    """Waits until Ray exits (returns its exit code) or `gone` is true (None).

    Also reaps orphans that exit earlier: until then Ray considers them alive.
    """
    while not gone():
        with contextlib.suppress(ChildProcessError):
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == ray.pid:
                    ray.returncode = os.waitstatus_to_exitcode(status)
                    return ray.returncode
                if pid == 0:
                    break
        time.sleep(1)
    return None


def stop_everything(ray: subprocess.Popen, polite_s: float = POLITE_STOP_S) -> None:
    """Terminates Ray, then kills the remaining descendants until this process has none."""
    if ray.poll() is None:
        ray.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            ray.wait(polite_s)
    while children := psutil.Process().children(recursive=True):
        for child in children:
            with contextlib.suppress(psutil.NoSuchProcess):
                child.kill()
        psutil.wait_procs(children, timeout=5)


class Node:
    """The Ray processes of this node, for as long as it is part of the cluster."""

    def __init__(self, args: argparse.Namespace, extra: list[str], owner: stale_resources.Owner) -> None:
        self.args = args
        self.extra = extra
        self.owner = owner
        self.ray: subprocess.Popen | None = None
        # Of the last `ray start`, which binds them seconds later. Ray binds the rest at once, to ports of the system.
        self._ports: list[PortReservation] = []
        self._token = os.environ.get("RAY_AUTH_TOKEN", "")
        self._job_address = ""  # of the head

    def be_head(self) -> NoReturn:
        """Starts the head, waits for the other nodes, writes the job address and waits; RuntimeError if Ray exits."""
        args = self.args
        host = args.host or ("127.0.0.1" if args.nodes == 1 else own_address(args.master))
        self._job_address = address = self._start_head(host)
        with self._refusals(host) as refused:
            wait_for_nodes(self.ray, address, args.nodes, args.timeout_s, refused)
        (args.folder / "address.new").write_text(address + "\n")
        (args.folder / "address.new").rename(args.folder / "address")
        code = wait_for_end(self.ray, gone=lambda: False)
        raise Lost(f"the Ray head exited unexpectedly with exit code {code}")

    @contextlib.contextmanager
    def _refusals(self, host: str) -> Iterator[Callable[[], list[str]]]:
        """Within the block, what nodes say that cannot join; nothing where the port after the head's is taken."""
        try:
            listener = node_messages.Listener(self._token, self.args.port + 1) if self.args.nodes > 1 else None
        except (OSError, OverflowError):
            listener = None
        if listener is None:
            yield list
            return
        with contextlib.closing(listener):
            yield listener.received

    def tell_outcome(self, code: int) -> threading.Thread:
        """Tells the other nodes the exit code of the head's script, in a thread: one of them may not answer.

        They wait for it longer than Ray takes to end (`HEAD_GONE_S`). Does nothing without a head that answers.
        """
        listeners: list[tuple[str, int]] = []
        if self._job_address and self.args.nodes > 1:
            with contextlib.suppress(urllib.error.URLError, OSError, ValueError):
                nodes = labelled_nodes(self._job_address, PORT_LABEL)
                listeners = [(host, int(port)) for port, host in nodes if port]
        telling = threading.Thread(target=node_messages.send, args=(self._token, str(code), listeners))
        telling.start()
        return telling

    def _start_head(self, host: str) -> str:
        """Starts the head; returns the job address once it responds. Raises RuntimeError if it does not.

        Ray binds its ports seconds after they were found free: if one was taken meanwhile, it retries with others.
        """
        for attempt in itertools.count(1):
            self._release_ports()
            port = self._head_port(host)
            dashboard, client, agent = self._claim(host), self._claim(host), self._claim(host, 2)
            flags = ["--head", "--include-dashboard=true", f"--node-ip-address={host}", f"--port={port}"]
            flags += [f"--dashboard-host={host}", f"--dashboard-port={dashboard.first}"]
            flags += [f"--ray-client-server-port={client.first}", *self.extra]
            labels, alone = {RANK_LABEL: 0}, self.args.nodes == 1
            self.ray = ray_start(self.args.folder, flags, self.owner, agent, labels=labels, alone=alone)
            address = f"http://{host}:{dashboard.first}"
            try:
                wait_until_ready(self.ray, address)
                return address
            except RuntimeError:
                if attempt == START_ATTEMPTS or not any(sign in self.log() for sign in PORT_TAKEN):
                    raise
                stop_everything(self.ray)

    def _head_port(self, host: str) -> int:
        """Reserves the port that the other nodes know, or any. Raises RuntimeError if it is taken."""
        port = self.args.port
        if not port:
            return self._claim(host).first
        try:
            self._ports.append(claim_port(port, host))
        except OSError:
            raise RuntimeError(f"port {port} of {host} is taken; set RAY_PORT to another one, on every node") from None
        return port

    def _claim(self, host: str = "127.0.0.1", count: int = 1) -> PortReservation:
        """Reserves `count` consecutive ports, below those that the system gives to outgoing connections."""
        self._ports.append(claim_ports(count, host))
        return self._ports[-1]

    def _release_ports(self) -> None:
        while self._ports:
            self._ports.pop().release()

    def be_worker(self) -> int:
        """Joins the head and waits for its end; returns the exit code.

        Raises RuntimeError if this node ends before the head, or loses it.
        """
        head, outcome = self.args.join, []
        with contextlib.closing(node_messages.Listener(self._token)) as listener:
            self._join(head, listener.port)
            print(f"slimrl: joined the Ray head at {head}; this node runs until the head ends", flush=True)
            watch = HeadWatch(head, self.args.head_timeout_s)

            def ended() -> bool:
                outcome.extend(listener.received())
                return bool(outcome) or watch.gone()

            code = wait_for_end(self.ray, ended)
            outcome.extend(listener.received())
        if outcome:
            may_continue = int(outcome[-1]) in CONTINUED
            then = f" with exit code {outcome[-1]}, after which the same command may continue" if may_continue else ""
            print(f"slimrl: the Ray head at {head} has ended{then}; ending this node", flush=True)
            deadline = time.monotonic() + POLITE_STOP_S
            while reachable(head) and time.monotonic() < deadline:  # another try of this node must not join it
                time.sleep(0.2)
            return EXIT_RESUMABLE if may_continue else 0
        if code is not None and reachable(head):
            raise Lost(f"Ray exited on this node with exit code {code} while the head is running")
        raise Lost(f"lost the Ray head at {head}: {watch.reason}")

    def _join(self, head: str, listens_at: int) -> None:
        """Retries until this node has joined. Raises NoHead on timeout, RuntimeError if the head has other versions."""
        args, reason = self.args, "no response from the head"
        flags = [f"--address={head}", *([f"--node-ip-address={args.host}"] if args.host else []), *self.extra]
        deadline = time.monotonic() + args.timeout_s
        while time.monotonic() < deadline:
            if reachable(head):
                self._release_ports()
                labels = {RANK_LABEL: args.rank, PORT_LABEL: listens_at}
                self.ray = ray_start(args.folder, flags, self.owner, self._claim(count=2), labels=labels)
                while self.ray.poll() is None and time.monotonic() < deadline:
                    if "Ray runtime started" in self.log():
                        return
                    time.sleep(0.2)
                stop_everything(self.ray)
                if OTHER_VERSION in self.log():
                    self._tell_refusal(head)
                    raise RuntimeError(
                        f"this node has other versions than the Ray head at {head}: install the same lock on every node"
                        " (docs/gpu-cluster.md)"
                    )
                reason = "`ray start` failed or did not finish"
            time.sleep(1)
        raise NoHead(
            f"this node could not join the Ray head at {head} (MASTER_ADDR, RAY_PORT) within {args.timeout_s:g} s: "
            f"{reason}; check that the node with RANK 0 is running, or set RAY_JOIN_TIMEOUT_S to wait longer"
        )

    def _tell_refusal(self, head: str) -> None:
        host, port = head.rsplit(":", 1)
        versions = self.log()[self.log().index(OTHER_VERSION) :].splitlines()[:8]
        text = f"the node with RANK={self.args.rank}, {socket.gethostname()}, has another Ray or Python than the head:"
        text += " install the same lock on every node (docs/gpu-cluster.md); "
        text += " ".join(line.strip() for line in versions if line.strip())
        node_messages.send(self._token, text, [(host, int(port) + 1)])

    def log(self) -> str:
        log = self.args.folder / "ray.log"
        return log.read_text(errors="replace") if log.exists() else ""


def main(argv: list[str]) -> int:
    args, extra = parse(argv)

    def stop(*_: object) -> None:
        raise Stopped

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    stale_resources.remove_stale(args.folder.parent)
    owner = stale_resources.own(args.folder)
    node, outcome, polite_s = Node(args, extra, owner), None, POLITE_STOP_S
    try:
        own_every_descendant()
        return node.be_worker() if args.join else node.be_head()
    except NotTogether as error:
        print(f"slimrl: {error}", file=sys.stderr)
        outcome = error.exit_code
        return outcome
    except RuntimeError as error:
        polite_s = LOST_STOP_S if isinstance(error, Lost) else POLITE_STOP_S
        lines = node.log().splitlines()[-15:]
        print(f"slimrl: {error}" + ("; Ray's last lines:" if lines else ""), *lines, sep="\n  ", file=sys.stderr)
        return {Lost: EXIT_RESUMABLE, NoHead: EXIT_NO_HEAD}.get(type(error), 1)
    except Stopped:
        with contextlib.suppress(OSError, ValueError):  # none if this process was stopped without its script
            outcome = int((args.folder / "outcome").read_text())
        return 0
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        telling = None if outcome is None else node.tell_outcome(outcome)
        if node.ray is not None:
            stop_everything(node.ray, polite_s)
        if telling is not None:
            telling.join()
        stale_resources.remove(args.folder)
        owner.release()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
