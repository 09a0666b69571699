"""A Ray head that leaves nothing behind: run by scripts/lib/ray.sh, ended with SIGTERM.

Starts ``ray start --head`` on free ports in the folder given, writes ``<folder>/address`` once jobs can be submitted,
and waits. When it is told to end, when its parent dies or when Ray ends by itself, it ends every process that Ray
started, whatever session or group that process moved to, and removes the folder. It needs no ``ray stop``, which would
end other people's clusters too.
"""

import argparse
import contextlib
import ctypes
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from pathlib import Path

import psutil

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
READY_TIMEOUT_S = 120
POLITE_STOP_S = 10


class Stopped(Exception):
    """Somebody asked this process to end."""


def parse(argv: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Our own flags; whatever else is given goes to ``ray start`` unchanged."""
    parser = argparse.ArgumentParser(description=__doc__, allow_abbrev=False)
    parser.add_argument("--folder", type=Path, required=True, help="for sockets and logs; a short path under /tmp")
    parser.add_argument("--host", default="127.0.0.1", help="address of this node (default 127.0.0.1)")
    return parser.parse_known_args(argv)


def free_ports(count: int) -> list[int]:
    """Ports nobody listens on now, on any address, all different."""
    with contextlib.ExitStack() as stack:
        listeners = [stack.enter_context(socket.socket()) for _ in range(count)]
        for listener in listeners:
            listener.bind(("", 0))
        return [listener.getsockname()[1] for listener in listeners]


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


def start_ray(folder: Path, host: str, extra: list[str]) -> tuple[subprocess.Popen, str]:
    """Start the head; returns it and the address that jobs are submitted to."""
    head, dashboard, agent, agent_grpc, client = free_ports(5)
    command = [
        str(Path(sys.executable).with_name("ray")),
        *("start", "--head", "--block", "--disable-usage-stats", "--include-dashboard=true", "--log-color=false"),
        *(f"--temp-dir={folder}", f"--node-ip-address={host}", f"--port={head}"),
        *(f"--dashboard-host={host}", f"--dashboard-port={dashboard}", f"--dashboard-agent-listen-port={agent}"),
        *(f"--dashboard-agent-grpc-port={agent_grpc}", f"--ray-client-server-port={client}"),
        *("--min-worker-port=0", "--max-worker-port=0"),
        *extra,
    ]
    # By number: in a container the user may have no name.
    compiled = Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}"
    environment = {
        "TORCHINDUCTOR_CACHE_DIR": str(compiled),  # worth keeping, unlike what else is written into TMPDIR
        **os.environ,
        "TMPDIR": str(folder),
    }
    if environment.get("CUDA_VISIBLE_DEVICES") == "":
        # Meant for the job, which is to run without GPUs; Ray would refuse to count logical ones.
        del environment["CUDA_VISIBLE_DEVICES"]
    with open(folder / "head.log", "w") as log:
        ray = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=subprocess.STDOUT, env=environment)
    return ray, f"http://{host}:{dashboard}"


def wait_until_ready(ray: subprocess.Popen, address: str) -> None:
    """Return once the job server answers; raises RuntimeError when Ray ended or took too long."""
    headers = {"Authorization": f"Bearer {os.environ['RAY_AUTH_TOKEN']}"} if "RAY_AUTH_TOKEN" in os.environ else {}
    request = urllib.request.Request(f"{address}/api/jobs/", headers=headers)
    # The address is ours: a proxy meant for the internet must not see it.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    deadline = time.monotonic() + READY_TIMEOUT_S
    while time.monotonic() < deadline:
        if ray.poll() is not None:
            raise RuntimeError(f"Ray did not start: it ended with exit code {ray.returncode}")
        try:
            opener.open(request, timeout=5).close()
            return
        except (urllib.error.URLError, OSError):
            time.sleep(0.2)
    raise RuntimeError(f"Ray did not start: no answer from its job server at {address} in {READY_TIMEOUT_S} s")


def wait_for_end(ray: subprocess.Popen) -> int:
    """Wait for Ray, and take in orphans that end before it: until then Ray holds them for alive."""
    while True:
        pid, status = os.waitpid(-1, 0)
        if pid == ray.pid:
            ray.returncode = os.waitstatus_to_exitcode(status)
            return ray.returncode


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


def main(argv: list[str]) -> int:
    args, extra = parse(argv)

    def stop(*_: object) -> None:
        raise Stopped

    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, stop)
    ray = None
    try:
        own_every_descendant()
        ray, address = start_ray(args.folder, args.host, extra)
        wait_until_ready(ray, address)
        (args.folder / "address.new").write_text(address + "\n")
        (args.folder / "address.new").rename(args.folder / "address")
        raise RuntimeError(f"the Ray head ended by itself with exit code {wait_for_end(ray)}")
    except RuntimeError as error:
        log = (args.folder / "head.log").read_text(errors="replace").splitlines()
        print(f"{error}. Its last lines:", *log[-15:], sep="\n  ", file=sys.stderr)
        return 1
    except Stopped:
        return 0
    finally:
        for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
            signal.signal(number, signal.SIG_IGN)
        if ray is not None:
            stop_everything(ray)
        shutil.rmtree(args.folder, ignore_errors=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
