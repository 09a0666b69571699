"""One node of a Ray cluster that leaves nothing behind: run by scripts/lib/ray.sh, ended with SIGTERM.

As head it starts ``ray start --head`` in the folder given, waits until all ``--nodes`` have joined, writes
``<folder>/address`` and waits. With ``--join`` it joins a head, tried again until it answers, and ends when that head
is gone. When it is told to end, when its parent dies or when Ray ends by itself, it ends every process that Ray
started, whatever session or group that process moved to, and removes the folder. It needs no ``ray stop``, which would
end other people's clusters too.
"""

import argparse
import contextlib
import ctypes
import itertools
import json
import os
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from pathlib import Path

import psutil

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
from slimrl.processes import stale_resources
from slimrl.processes.folders import kernel_cache
from slimrl.processes.ray_environment import ON_LOOPBACK

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
READY_TIMEOUT_S = 120
START_ATTEMPTS = 3
PORT_TAKEN = ("Failed to start GCS", "ddress already in use")  # what Ray says where it could not listen
POLITE_STOP_S = 10
# Ray opens the folder that it is given to everybody: it gets one inside of ours. Short, as sockets are in it.
RAY_FOLDER = "r"
# A head that cannot be reached for so long is gone: it answers from a thread of its own also when it is busy.
HEAD_GONE_S = 10
# Of the job that brings the nodes up, not of the processes that Ray starts.
LAUNCHER_VARIABLES = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")


class Stopped(Exception):
    """Somebody asked this process to end."""


class NotTogether(Exception):
    """The nodes did not come together in time; what Ray wrote on this one says nothing about it."""


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our own flags; whatever else is given goes to ``ray start`` unchanged."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--folder", type=Path, required=True, help="for sockets and logs; a short path under /tmp")
    parser.add_argument("--host", help="address of this node (default: one that the other nodes reach)")
    parser.add_argument("--nodes", type=int, default=1, help="nodes of the cluster, with the head (default 1)")
    parser.add_argument("--port", type=int, default=0, help="where the head listens (default: a free port)")
    parser.add_argument("--master", default="", help="name of the head's node, as the other nodes know it")
    parser.add_argument("--join", metavar="HOST:PORT", help="be a further node of the cluster of the head there")
    parser.add_argument("--timeout-s", type=float, default=600, help="for all nodes to come together (default 600)")
    return parser.parse_known_args(argv)


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on now, on any address, all different."""
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in listeners:
            listener.bind(("", 0))
        return [listener.getsockname()[1] for listener in listeners]


def own_address(master: str) -> str:
    """The address of this node that others reach: that of `master`, unless it is only a name of this node for itself.

    In a job of pods `master` may be localhost, or the name of a service in front of this node.
    """
    with contextlib.suppress(OSError), socket.socket() as probe:
        address = socket.gethostbyname(master)
        if not address.startswith("127."):
            probe.bind((address, 0))
            return address
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as route:
        route.connect(("8.8.8.8", 53))  # sends nothing: it only asks which of our addresses looks outwards
        return route.getsockname()[0]


def own_every_descendant() -> None:
    """Orphans of our children become our children, and we end with the process that started us."""
    libc = ctypes.CDLL(None, use_errno=True)
    parent = os.getppid()
    libc.prctl(PR_SET_CHILD_SUBREAPER, 1)
    libc.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent:
        raise Stopped
    # Out of the terminal's process group: Ctrl-C belongs to the script, which then ends us in order.
    os.setsid()


def ray_start(folder: Path, flags: list[str], owner: stale_resources.Owner, alone: bool = False) -> subprocess.Popen:
    """``ray start --block`` on free ports, with what it writes in ``<folder>/ray.log``; it owns the folder too.

    `alone`: no other node joins it.
    """
    agent, agent_grpc = free_ports(2)
    command = [
        str(Path(sys.executable).with_name("ray")),
        *("start", "--block", "--disable-usage-stats", "--log-color=false", f"--temp-dir={folder / RAY_FOLDER}"),
        *(f"--dashboard-agent-listen-port={agent}", f"--dashboard-agent-grpc-port={agent_grpc}"),
        *("--min-worker-port=0", "--max-worker-port=0"),
        *flags,
    ]
    environment = {
        **kernel_cache(os.environ),  # worth keeping, unlike what else is written into TMPDIR
        **(ON_LOOPBACK if alone and "--node-ip-address=127.0.0.1" in flags else {}),
        **{name: value for name, value in os.environ.items() if name not in LAUNCHER_VARIABLES},
        "TMPDIR": str(folder),
    }
    if environment.get("CUDA_VISIBLE_DEVICES") == "":
        # Meant for the job, which is to run without GPUs; Ray would refuse to count logical ones.
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


def get(url: str) -> bytes:
    """The answer of our own head; raises OSError where there is none."""
    token = os.environ.get("RAY_AUTH_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    # The address is ours: a proxy meant for the internet must not see it.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(url, headers=headers), timeout=5) as answer:
        return answer.read()


def wait_until_ready(ray: subprocess.Popen, address: str) -> None:
    """Return once the job server answers; raises RuntimeError when Ray ended or took too long."""
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        if ray.poll() is not None:
            raise RuntimeError(f"Ray did not start: it ended with exit code {ray.returncode}")
        try:
            get(f"{address}/api/jobs/")
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise RuntimeError(f"Ray did not start: no answer from its job server at {address} in {READY_TIMEOUT_S} s")


def alive_nodes(address: str) -> list[str]:
    """Addresses of the nodes that are up now."""
    nodes = json.loads(get(f"{address}/api/v0/nodes?limit=10000"))["data"]["result"]["result"]
    return sorted(node["node_ip"] for node in nodes if node["state"] == "ALIVE")


def wait_for_nodes(ray: subprocess.Popen, address: str, wanted: int, timeout_s: float) -> None:
    """Return once `wanted` nodes are up; raises NotTogether that says which came where they are too few."""
    deadline, seen = time.monotonic() + timeout_s, []
    while True:
        if ray.poll() is not None:
            raise RuntimeError(f"the Ray head ended by itself with exit code {ray.returncode}")
        with contextlib.suppress(urllib.error.URLError, OSError):
            nodes = alive_nodes(address)
            if len(nodes) != len(seen) and wanted > 1:
                print(f"slimrl: {len(nodes)} of {wanted} nodes are here: {', '.join(nodes)}", flush=True)
            seen = nodes
        if len(seen) >= wanted:
            return
        if time.monotonic() > deadline + (0 if seen else READY_TIMEOUT_S):  # it is late with its first answer
            raise NotTogether(
                f"{len(seen)} of {wanted} nodes (WORLD_SIZE) came within {timeout_s:g} s: {', '.join(seen)}; "
                "see why the others did not, or set RAY_JOIN_TIMEOUT_S to wait longer"
            )
        time.sleep(0.5)


def reachable(address: str) -> bool:
    """Whether somebody listens at HOST:PORT."""
    host, port = address.rsplit(":", 1)
    with contextlib.suppress(OSError), socket.create_connection((host, int(port)), timeout=5):
        return True
    return False


def wait_for_end(ray: subprocess.Popen, gone: Callable[[], bool]) -> int | None:
    """Wait until Ray ended (its exit code) or `gone` is true (None).

    Orphans that end before it are taken in: until then Ray holds them for alive.
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


def gone_for(address: str, seconds: float) -> Callable[[], bool]:
    """A question that is true once nobody was reachable at `address` for `seconds`."""
    last_seen = time.monotonic()

    def gone() -> bool:
        nonlocal last_seen
        if reachable(address):
            last_seen = time.monotonic()
        return time.monotonic() - last_seen > seconds

    return gone


def stop_everything(ray: subprocess.Popen) -> None:
    """Ask Ray to end, then end whatever of it is left, until this process has no descendants."""
    if ray.poll() is None:
        ray.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            ray.wait(POLITE_STOP_S)
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

    def be_head(self) -> None:
        """Start, wait for the others, tell the script where jobs go to, and stay; raises RuntimeError at the end."""
        args = self.args
        host = args.host or ("127.0.0.1" if args.nodes == 1 else own_address(args.master))
        address = self._start_head(host)
        wait_for_nodes(self.ray, address, args.nodes, args.timeout_s)
        (args.folder / "address.new").write_text(address + "\n")
        (args.folder / "address.new").rename(args.folder / "address")
        code = wait_for_end(self.ray, gone=lambda: False)
        raise RuntimeError(f"the Ray head ended by itself with exit code {code}")

    def _start_head(self, host: str) -> str:
        """Returns the address for jobs once it answers; raises RuntimeError where it does not.

        Ray binds its ports seconds after they were found free: where one was taken meanwhile, others are tried.
        """
        for attempt in itertools.count(1):
            free, dashboard, client = free_ports(3)
            port = self.args.port or free
            if reachable(f"{host}:{port}"):
                raise RuntimeError(f"port {port} of {host} is taken; set RAY_PORT to another one, on every node")
            flags = ["--head", "--include-dashboard=true", f"--node-ip-address={host}", f"--port={port}"]
            flags += [f"--dashboard-host={host}", f"--dashboard-port={dashboard}", f"--ray-client-server-port={client}"]
            self.ray = ray_start(self.args.folder, [*flags, *self.extra], self.owner, self.args.nodes == 1)
            address = f"http://{host}:{dashboard}"
            try:
                wait_until_ready(self.ray, address)
                return address
            except RuntimeError:
                if attempt == START_ATTEMPTS or not any(sign in self.log() for sign in PORT_TAKEN):
                    raise
                stop_everything(self.ray)

    def be_worker(self) -> None:
        """Join, and stay as long as the head does; raises RuntimeError where this node ends before it."""
        head = self.args.join
        self._join(head)
        print(f"slimrl: joined the Ray head at {head}; this node works for it until it ends", flush=True)
        code = wait_for_end(self.ray, gone_for(head, HEAD_GONE_S))
        if code is not None and reachable(head):
            raise RuntimeError(f"Ray ended on this node with exit code {code} while its head continues")
        print(f"slimrl: the Ray head at {head} has ended, and so does this node", flush=True)

    def _join(self, head: str) -> None:
        """Tries until the head took this node in; raises RuntimeError where that took too long."""
        args, reason = self.args, "nobody answers there"
        flags = [f"--address={head}", *([f"--node-ip-address={args.host}"] if args.host else []), *self.extra]
        deadline = time.monotonic() + args.timeout_s
        while time.monotonic() < deadline:
            if reachable(head):
                self.ray = ray_start(args.folder, flags, self.owner)
                while self.ray.poll() is None and time.monotonic() < deadline:
                    if "Ray runtime started" in self.log():
                        return
                    time.sleep(0.2)
                stop_everything(self.ray)
                reason = "`ray start` did not come to its end"
            time.sleep(1)
        raise RuntimeError(
            f"this node could not join the Ray head at {head} (MASTER_ADDR, RAY_PORT) within {args.timeout_s:g} s: "
            f"{reason}; see whether the node with RANK 0 runs, or set RAY_JOIN_TIMEOUT_S to wait longer"
        )

    def log(self) -> str:
        log = self.args.folder / "ray.log"
        return log.read_text(errors="replace") if log.exists() else ""


def main(argv: list[str]) -> int:
    args, extra = parse(argv)

    def stop(*_: object) -> None:
        raise Stopped

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    stale_resources.sweep(args.folder.parent)
    owner = stale_resources.own(args.folder)
    node = Node(args, extra, owner)
    try:
        own_every_descendant()
        node.be_worker() if args.join else node.be_head()
        return 0
    except NotTogether as error:
        print(f"slimrl: {error}", file=sys.stderr)
        return 1
    except RuntimeError as error:
        lines = node.log().splitlines()[-15:]
        print(f"slimrl: {error}" + ("; Ray's last lines:" if lines else ""), *lines, sep="\n  ", file=sys.stderr)
        return 1
    except Stopped:
        return 0
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        if node.ray is not None:
            stop_everything(node.ray)
        stale_resources.remove(args.folder)
        owner.release()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
