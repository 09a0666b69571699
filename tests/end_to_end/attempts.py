"""Attempts of a stranger to access a live run: as another user of its machine, and from another machine.

Needs root, for the other user id, and for a network namespace that simulates the other machine.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import dataclasses
import encodings.idna  # noqa: F401 (a stranger cannot read the library of Python any more)
import json
import os
import pickle
import shutil
import socket
import subprocess
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import grpc
import psutil

from slimrl.engines.http import KEY_VARIABLE
from tests.end_to_end.harness import Started, shared_memory_of

OTHER_USER = 65534
CLONE_NEWNET = 0x40000000
HERE, ELSEWHERE = "198.18.77.1", "198.18.77.2"  # from a range reserved for network tests
PATIENCE_S = 2.0
REFUSED = (401, 403, 404, 405)
IS_ROOT = os.getuid() == 0


@dataclasses.dataclass(frozen=True)
class Listener:
    """A TCP port that a process of the run listens on."""

    ip: str
    port: int
    process: str


@dataclasses.dataclass
class Attempts:
    """The attempts and their results; everything except the controls should be empty."""

    listeners: list[Listener]
    answers: dict[str, int]  # with the key, by address and path: proves that the server answers
    read: list[str] = dataclasses.field(default_factory=list)
    written: list[str] = dataclasses.field(default_factory=list)
    called: list[str] = dataclasses.field(default_factory=list)  # by another user of the machine
    metrics: list[str] = dataclasses.field(default_factory=list)  # of the router, which needs no key for them
    ray_answer: str = ""  # for a call without Ray's token
    reached: list[str] | None = None  # from another machine; None when no second network can be created here
    control_reached: bool = False  # a port that the test opened to other machines, as the control
    executed: bool = False
    key_seen: list[str] = dataclasses.field(default_factory=list)  # command lines and files


class _Call:
    """Unpickles as the result of a call."""

    def __init__(self, function: Any, *arguments: Any) -> None:
        self._reduced = (function, arguments)

    def __reduce__(self) -> tuple[Any, tuple[Any, ...]]:
        return self._reduced

    def __call__(self) -> None:
        """pickle requires a callable."""


def harmful_pickle(marker: Path) -> str:
    """Base64 of a pickle that writes `marker` through names that SGLang's own unpickler allows."""
    system = _Call(getattr, _Call(__import__, "os"), "system")
    return base64.b64encode(pickle.dumps(_Call(system, f"touch '{marker}'"))).decode()


def requests(marker: Path) -> list[tuple[str, str, dict[str, Any] | None]]:
    """Method, path and body of calls that an unprotected server, router or Ray daemon would execute."""
    payload = [harmful_pickle(marker)]
    return [
        ("GET", "/server_info", None),
        ("POST", "/generate", {"input_ids": [5], "sampling_params": {"max_new_tokens": 1}}),
        ("POST", "/update_weights_from_tensor", {"serialized_named_tensors": payload, "flush_cache": False}),
        ("POST", "/flush_cache", {}),
        ("POST", "/abort_request", {"abort_all": True}),
        ("GET", "/workers", None),
        ("POST", "/workers", {"url": "http://198.18.77.2:1"}),
        ("GET", "/metrics", None),
        ("GET", "/api/jobs/", None),
        ("POST", "/get_or_create_runtime_env", {}),
    ]


def try_everything(run: Started, folder: Path) -> Attempts:
    """Runs all attempts on a live run; `folder` is for the marker of the harmful pickle."""
    processes = _processes(run)
    listeners = sorted({one for process in processes for one in _listeners(process)}, key=str)
    key = next(key for process in processes if (key := _environment(process).get(KEY_VARIABLE)))
    marker = folder / "executed"
    local = [("127.0.0.1" if one.ip in ("0.0.0.0", "::") else one.ip, one.port) for one in listeners]
    # of the subreapers above servers and router, whose command lines are unchanged
    commands = [words for process in processes if "--parent" in (words := process.cmdline())]
    found = Attempts(listeners, _with_key(commands, key))
    without_key = {int(_option(words, "prometheus-port")) for words in commands if "router" in words}
    pids = [process.pid for process in processes]
    memory = [f"/dev/shm/{name}" for name in shared_memory_of(pids)]
    found.read, found.written = _in_child(_as_other, _files, [run.run_dir, *_entries(run.temporary), *memory], pids)
    found.called = _in_child(_as_other, _calls, [one for one in local if one[1] not in without_key], requests(marker))
    found.metrics = [_http(one, "GET", "/metrics", None)[1].decode() for one in local if one[1] in without_key]
    found.ray_answer = _ask_ray(next(one for one in listeners if one.process == "gcs_server"))
    if _may_make_networks():
        _try_from_elsewhere(found)
    found.executed = marker.exists()
    found.key_seen = [*_command_lines_with(key), *_files_with(key, [run.run_dir, run.temporary, run.log])]
    return found


def _try_from_elsewhere(found: Attempts) -> None:
    others = {address for address in _own_addresses() if not address.startswith("127.")} | {HERE}
    with socket.create_server(("0.0.0.0", 0)) as opened:
        control = (HERE, opened.getsockname()[1])
        targets = [(address, one.port) for address in sorted(others) for one in found.listeners]
        reached = _in_child(_on_another_machine, _reached, [control, *targets])
    found.control_reached = control in reached
    found.reached = [f"{host}:{port}" for host, port in reached if (host, port) != control]


# -- the run, as seen by its user --------------------------------------------------------------------------------------


def _processes(run: Started) -> list[psutil.Process]:
    """The run's processes; SGLang's schedulers overwrite their environment with their title and are found by parent."""
    found: dict[int, psutil.Process] = {}
    for process in run.processes():
        with contextlib.suppress(psutil.NoSuchProcess):
            found |= {one.pid: one for one in [process, *process.children(recursive=True)]}
    return list(found.values())


def _listeners(process: psutil.Process) -> Iterator[Listener]:
    with contextlib.suppress(psutil.NoSuchProcess):
        name = process.name()
        for one in process.net_connections("tcp"):
            if one.status == psutil.CONN_LISTEN:
                yield Listener(one.laddr.ip.removeprefix("::ffff:"), one.laddr.port, name)


def _environment(process: psutil.Process) -> dict[str, str]:
    with contextlib.suppress(psutil.NoSuchProcess):
        return process.environ()
    return {}


def _with_key(commands: Iterable[list[str]], key: str) -> dict[str, int]:
    """Statuses of calls with the key to every server and the router: the control for the attempts."""
    answers = {}
    for words in commands:
        paths = {"slimrl.engines.sglang.cpu_patches": "/server_info", "slimrl.engines.sglang.entry": "/workers"}
        path = next((path for module, path in paths.items() if module in words), None)
        if path is not None:
            host, port = _option(words, "host"), int(_option(words, "port"))
            answers[f"{host}:{port}{path}"] = _http((host, port), "GET", path, None, key)[0] or 0
    return answers


def _option(words: Iterable[str], name: str) -> str:
    return next(word.partition("=")[2] for word in words if word.startswith(f"--{name}="))


def _entries(folder: Path) -> list[Path]:
    return [Path(entry.path) for entry in os.scandir(folder)]


def _own_addresses() -> set[str]:
    held = [one for addresses in psutil.net_if_addrs().values() for one in addresses]
    return {one.address for one in held if one.family == socket.AF_INET}


def _command_lines_with(key: str) -> list[str]:
    found = []
    for process in psutil.process_iter():
        with contextlib.suppress(psutil.NoSuchProcess, psutil.AccessDenied):
            if key in " ".join(process.cmdline()):
                found.append(f"command line of {process.pid} ({process.name()})")
    return found


def _files_with(key: str, places: Iterable[Path]) -> list[str]:
    files = subprocess.run(
        ["grep", "-rlsF", "--devices=skip", "--", key, *map(str, places)], capture_output=True, text=True
    )
    return files.stdout.splitlines()


def _ask_ray(gcs: Listener) -> str:
    """The name of the status that Ray's head returns for a call without its token."""
    with grpc.insecure_channel(f"127.0.0.1:{gcs.port}") as channel:
        keys = channel.unary_unary("/ray.rpc.InternalKVGcsService/InternalKVKeys")
        try:
            keys(b"", timeout=5 * PATIENCE_S)
        except grpc.RpcError as refusal:
            return refusal.code().name
    return "OK"


# -- the strangers ---------------------------------------------------------------------------------------------------


def _in_child(become: Callable[[], None], function: Callable[..., Any], *arguments: Any) -> Any:
    """Runs `function(*arguments)` in a process that `become` turns into a stranger."""
    reader, writer = os.pipe()
    pid = os.fork()
    if pid == 0:
        result: tuple[str, Any]
        try:
            become()
            result = ("value", function(*arguments))
        except BaseException:
            result = ("error", traceback.format_exc())
        with open(writer, "wb") as pipe:
            pipe.write(pickle.dumps(result))
        os._exit(0)
    os.close(writer)
    trouble = _connect_to_namespace_of(pid) if become is _on_another_machine else ""
    with open(reader, "rb") as pipe:
        kind, value = pickle.loads(pipe.read())
    os.waitpid(pid, 0)
    assert kind == "value", f"{value}\n{trouble}"
    return value


def _as_other() -> None:
    os.setgroups([])
    os.setgid(OTHER_USER)
    os.setuid(OTHER_USER)


def _on_another_machine() -> None:
    """Moves this process into a new network namespace, which the parent connects to this one."""
    if ctypes.CDLL(None, use_errno=True).unshare(CLONE_NEWNET) != 0:
        raise OSError(ctypes.get_errno(), "no network namespace")
    deadline = time.monotonic() + PATIENCE_S * 5
    while subprocess.run(["ip", "addr", "add", f"{ELSEWHERE}/30", "dev", "slimrl-b"], capture_output=True).returncode:
        assert time.monotonic() < deadline  # until the parent has moved its end of the link here
    subprocess.run(["ip", "link", "set", "slimrl-b", "up"], check=True)
    subprocess.run(["ip", "route", "add", "default", "via", HERE], check=True)
    _as_other()


def _connect_to_namespace_of(pid: int) -> str:
    """Connects the namespace of a process to this one; returns the error, "" on success."""
    own, deadline = os.readlink("/proc/self/ns/net"), time.monotonic() + PATIENCE_S * 5
    while os.readlink(f"/proc/{pid}/ns/net") == own and time.monotonic() < deadline:
        time.sleep(0.01)
    pair = ["link", "add", "slimrl-a", "type", "veth", "peer", "name", "slimrl-b", "netns", str(pid)]
    steps = (pair, ["addr", "add", f"{HERE}/30", "dev", "slimrl-a"], ["link", "set", "slimrl-a", "up"])
    return "".join(subprocess.run(["ip", *step], capture_output=True, text=True).stderr for step in steps)


def _may_make_networks() -> bool:
    """Whether the `ip` command exists and this process may use it; a container may lack both."""
    if shutil.which("ip") is None:
        return False
    pair = ["ip", "link", "add", "slimrl-a", "type", "veth", "peer", "name", "slimrl-b"]
    made = subprocess.run(pair, capture_output=True).returncode == 0
    subprocess.run(["ip", "link", "del", "slimrl-a"], capture_output=True)
    return made and subprocess.run(["unshare", "-n", "true"], capture_output=True).returncode == 0


def _reached(targets: list[tuple[str, int]]) -> list[tuple[str, int]]:
    def reached(target: tuple[str, int]) -> bool:
        with contextlib.suppress(OSError), socket.create_connection(target, PATIENCE_S):
            return True
        return False

    with ThreadPoolExecutor(16) as pool:
        return [target for target, came in zip(targets, pool.map(reached, targets), strict=True) if came]


def _calls(targets: list[tuple[str, int]], wanted: list[tuple[str, str, dict[str, Any] | None]]) -> list[str]:
    """The calls that were not rejected."""

    def obeyed(target: tuple[str, int]) -> list[str]:
        found = []
        for method, path, body in wanted:
            status, words = _http(target, method, path, body)
            if status is None:
                break  # not HTTP
            if status not in REFUSED:
                found.append(f"{method} {target[0]}:{target[1]}{path}: HTTP {status} {words[:200]!r}")
        return found

    with ThreadPoolExecutor(16) as pool:
        return [line for lines in pool.map(obeyed, targets) for line in lines]


def _http(
    target: tuple[str, int], method: str, path: str, body: dict[str, Any] | None, key: str | None = None
) -> tuple[int | None, bytes]:
    """Status and text of the response; None if it is not HTTP."""
    content = b"" if body is None else json.dumps(body).encode()
    shown = f"Authorization: Bearer {key}\r\n" if key else ""
    head = f"{method} {path} HTTP/1.1\r\nHost: {target[0]}\r\nConnection: close\r\n{shown}"
    head += f"Content-Type: application/json\r\nContent-Length: {len(content)}\r\n\r\n"
    answer = b""
    with contextlib.suppress(OSError), socket.create_connection(target, PATIENCE_S) as connection:
        connection.sendall(head.encode() + content)
        while piece := connection.recv(1 << 16):
            answer += piece
    first = answer.split(b" ", 2)
    if not answer.startswith(b"HTTP/1.") or len(first) < 3:
        return None, answer
    return int(first[1]), answer.partition(b"\r\n\r\n")[2]


def _files(places: list[Path | str], pids: list[int]) -> tuple[list[str], list[str]]:
    """Files that can be read or written below `places` and in /proc."""
    read, written = [], []
    for place in map(str, places):
        for path in _below(place):
            if _opens(path, os.O_RDONLY) or _connects(path):
                read.append(path)
            flags = os.O_TMPFILE | os.O_WRONLY if os.path.isdir(path) else os.O_WRONLY
            if _opens(path, flags):
                written.append(path)
    for pid in pids:
        read += [path for name in ("environ", "mem", "maps") if _reads(path := f"/proc/{pid}/{name}")]
    return read, written


def _below(place: str) -> Iterator[str]:
    yield place
    for folder, folders, files in os.walk(place):  # empty when the folder may not be entered
        yield from (os.path.join(folder, name) for name in [*folders, *files])


def _opens(path: str, flags: int) -> bool:
    try:
        os.close(os.open(path, flags | os.O_NONBLOCK))
    except OSError:
        return False
    return True


def _connects(path: str) -> bool:
    """Whether it is a socket that accepts connections."""
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as connection:
        connection.connect(path)
        return True
    return False


def _reads(path: str) -> bool:
    try:
        with open(path, "rb") as file:
            return bool(file.read(1))
    except OSError:
        return False
