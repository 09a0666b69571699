"""What a node learns of its Ray cluster from outside: which nodes have joined, and whether the head is still there.

Used by ray_node.py.
"""

import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable

READY_TIMEOUT_S = 120
EXIT_RESUMABLE = 75  # slimrl.cluster.command_line.EXIT_RESUMABLE: the same command may succeed
# A head whose machine refuses connections for this long has ended: even a busy head responds, from a separate thread.
HEAD_GONE_S = 10
# A head that does not answer at all may be behind a lost link, which may come back. The default of RAY_HEAD_TIMEOUT_S.
HEAD_SILENT_S = 20
HEAD_NAMED_S = 10  # a warning names it
PROBE_TIMEOUT_S = 2.5  # as slimrl.cluster.nodes.watch.ProbeIntervals
# A node that starts again has the RANK of the one before it, which Ray takes for alive for a while.
DOUBLED_S = 20
# Labels of a Ray node: the RANK that its script had, and where it listens for the outcome of the run.
RANK_LABEL, PORT_LABEL = "slimrl-rank", "slimrl-port"
ACCEPTS, REFUSES, SILENT = "accepts", "refuses", "silent"


class NotTogether(Exception):
    """The nodes that joined are not those of the cluster; Ray's log on this node is not relevant."""

    exit_code = 1


class NotInTime(NotTogether):
    """Nodes are missing after the time to join; they may come later."""

    exit_code = EXIT_RESUMABLE


def get(url: str) -> bytes:
    """The response of our own head. Raises OSError if there is none."""
    token = os.environ.get("RAY_AUTH_TOKEN")
    headers = {"Authorization": f"Bearer {token}"} if token else {}
    # A local address: requests must not go through a proxy for the internet.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(url, headers=headers), timeout=5) as answer:
        return answer.read()


def wait_until_ready(ray: subprocess.Popen, address: str) -> None:
    """Waits until the job server responds. Raises RuntimeError if Ray exits, or on timeout."""
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


def labelled_nodes(address: str, label: str) -> list[tuple[str, str]]:
    """(label, address) of the nodes that are alive now, sorted by address; label "" if no script started the node."""
    nodes = json.loads(get(f"{address}/api/v0/nodes?limit=10000"))["data"]["result"]["result"]
    alive = [node for node in nodes if node["state"] == "ALIVE"]
    found = [((node.get("labels") or {}).get(label, ""), node["node_ip"]) for node in alive]
    return sorted(found, key=lambda node: node[1])


def doubled_rank(nodes: list[tuple[str, str]]) -> str:
    """The reason that these nodes cannot be one cluster, "" if they can: two of them have the same RANK."""
    for rank, same in itertools.groupby(sorted(node for node in nodes if node[0]), key=lambda node: node[0]):
        addresses = [address for _, address in same]
        if len(addresses) > 1:
            return (
                f"{len(addresses)} nodes were started with RANK={rank}: {', '.join(addresses)}; give each node its own"
                " RANK, 0 to WORLD_SIZE - 1, and start the script once on each"
            )
    return ""


def wait_for_nodes(
    ray: subprocess.Popen, address: str, wanted: int, timeout_s: float, refused: Callable[[], list[str]]
) -> None:
    """Waits until `wanted` nodes are up; `refused` returns why other nodes could not join.

    Raises NotInTime with the nodes that joined if they are too few, NotTogether if one was refused or two have the same
    RANK.
    """
    deadline, seen, since = time.monotonic() + timeout_s, [], None
    while True:
        if ray.poll() is not None:
            raise RuntimeError(f"the Ray head exited unexpectedly with exit code {ray.returncode}")
        if reasons := refused():
            raise NotTogether("; ".join(reasons))
        with contextlib.suppress(urllib.error.URLError, OSError):
            ranks = labelled_nodes(address, RANK_LABEL)
            doubled = doubled_rank(ranks)
            if not doubled:
                since = None
            elif since is None:
                since = time.monotonic()
            elif time.monotonic() - since > DOUBLED_S:
                raise NotTogether(doubled)
            nodes = [node for _, node in ranks]
            if len(nodes) != len(seen) and wanted > 1:
                print(f"slimrl: {len(nodes)} of {wanted} nodes have joined: {', '.join(nodes)}", flush=True)
            seen = nodes
        if len(seen) >= wanted and since is None:
            return
        if time.monotonic() > deadline + (0 if seen else READY_TIMEOUT_S):  # the first response takes longer
            raise NotInTime(
                f"{len(seen)} of {wanted} nodes (WORLD_SIZE) joined within {timeout_s:g} s: {', '.join(seen)}; "
                "check the other nodes, or set RAY_JOIN_TIMEOUT_S to wait longer"
            )
        time.sleep(0.5)


def response(address: str, timeout_s: float = 5) -> str:
    """What happens to a connection to HOST:PORT: ACCEPTS, REFUSES, or SILENT for no answer."""
    host, port = address.rsplit(":", 1)
    try:
        with socket.create_connection((host, int(port)), timeout=timeout_s):
            return ACCEPTS
    except ConnectionRefusedError:
        return REFUSES
    except OSError:
        return SILENT


def reachable(address: str) -> bool:
    """Whether HOST:PORT accepts connections."""
    return response(address) == ACCEPTS


class HeadWatch:
    """Tells a head that has ended from one that does not answer."""

    def __init__(self, address: str, silent_s: float = HEAD_SILENT_S) -> None:
        """`silent_s`: seconds without an answer after which the head is lost."""
        self._address, self._limit_s = address, silent_s
        self._accepted = self._answered = time.monotonic()
        self._refused = False  # since it last accepted a connection: its Ray ended, and its machine may follow
        self._named = False

    def gone(self) -> bool:
        """Asks the head; whether it has ended or is lost. Prints a warning when it has not answered for a while."""
        said, now = response(self._address, PROBE_TIMEOUT_S), time.monotonic()
        if said == ACCEPTS:
            self._accepted, self._refused = now, False
        self._refused |= said == REFUSES
        self._answered = self._answered if said == SILENT else now
        if self.silent_s > HEAD_NAMED_S and not self._named:
            print(f"slimrl: the Ray head at {self._address}: {self._silence}", file=sys.stderr, flush=True)
        self._named = self.silent_s > HEAD_NAMED_S
        return now - self._accepted > HEAD_GONE_S if self._refused else self.lost

    @property
    def silent_s(self) -> float:
        """Seconds since the head's machine last answered."""
        return time.monotonic() - self._answered

    @property
    def lost(self) -> bool:
        """Whether the head has not answered for too long, without having ended first."""
        return not self._refused and self.silent_s > self._limit_s

    @property
    def reason(self) -> str:
        """Why a head that is gone, and that has not told the outcome of the run, is so."""
        if self.lost:
            return self._silence
        return "it ended before its script did: its processes were killed, or its machine went down"

    @property
    def _silence(self) -> str:
        return f"no answer on the network for {self.silent_s:.0f} s; look for a lost link, or a machine that is down"
