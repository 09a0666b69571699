"""The Ray cluster that a script starts: jobs return their exit code, and nothing of the cluster is left."""

import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.end_to_end import harness
from tests.scripts.launched_jobs import RAY_ERRORS

pytestmark = [pytest.mark.slow, pytest.mark.timeout(240)]
ROOT = Path(__file__).resolve().parents[2]
SCRIPT = """
set -euo pipefail
source scripts/lib/say.sh
source scripts/lib/ray.sh
ray_begin --num-gpus 2 --object-store-memory 100000000
echo "cluster at $RAY_ADDRESS"
ray_job python3 -c "$1" && code=0 || code=$?
exit $code
"""
# then, as a second job of the same cluster, a program that looks for its own secret where others could read it
WITH_SECRET = SCRIPT.replace(
    "exit $code",
    'ray_job python3 "$HOME/looks.py" --train-env-vars "$(<"$HOME/secret")" --folder "$RAY_FOLDER"; exit $code',
)
LOOKS = f"""
import sys
from pathlib import Path
sys.path.insert(0, {str(ROOT)!r})
from tests.end_to_end.harness import places_of
secret, folder = sys.argv[2], Path(sys.argv[4])
print("a secret of", len(secret), "letters is in", places_of(secret, folder))
shown = [Path(place).name for place in places_of("--train-env-vars '***'", folder)]
print("the log of the job", "shows it" if any(name.startswith("job-driver") for name in shown) else "does not")
print("mode", oct(folder.stat().st_mode & 0o777), "owned" if (folder / ".slimrl-owner").exists() else "")
"""
CLUSTER = "import ray; ray.init(logging_level='error'); print('GPUs', ray.cluster_resources()['GPU'], flush=True); "


def start(job: str, folder: Path, script: str = SCRIPT) -> harness.Started:
    """Starts a script, by default the one above, like an operator's shell, in its own process group."""
    return harness.launch(
        ["bash", "-c", script, "script", job],
        log=folder / "script.out",
        run_dir=folder,
        cwd=ROOT,
        path=f"{Path(sys.executable).parent}:/usr/local/bin:/usr/bin:/bin",
        home=folder,
    )


def ray_folders(started: harness.Started) -> list[Path]:
    """Folders of the clusters that this script started; other processes may have theirs at the same time."""
    return list(Path("/tmp").glob(f"slimrl-ray-{started.process.pid}-*"))


def test_job_has_the_gpus_and_the_script_returns_its_exit_code(tmp_path):
    """One that succeeds and one that fails, concurrently, each with its own cluster."""
    (tmp_path / "bad").mkdir()
    (tmp_path / "looks.py").write_text(LOOKS)
    (tmp_path / "secret").write_text("s3nt1nel" * 2)
    started = start(CLUSTER + "print('hello')", tmp_path, WITH_SECRET)
    failing = start("import sys; print('about to fail'); sys.exit(3)", tmp_path / "bad")
    good, bad = started.finish(150), failing.finish(150)
    assert good.code == 0, good.output
    assert "GPUs 2.0" in good.output and "hello" in good.output
    assert not RAY_ERRORS.search(good.output), good.output
    assert "a secret of 16 letters is in []\nthe log of the job shows it\nmode 0o700 owned\n" in good.output
    assert bad.code == 3 and bad.output.count("about to fail") == 1
    assert not re.search(r"INFO \S+\.py:\d+ -- |submitted successfully", good.output + bad.output)  # Ray's own lines
    assert (good.left, bad.left) == ([], [])
    assert ray_folders(started) == ray_folders(failing) == []
    (port,) = re.findall(r"cluster at http://127\.0\.0\.1:(\d+)", good.output)
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", int(port)), timeout=5)
    assert not list(tmp_path.glob(".ray*"))  # Ray would write its token into the home folder


def test_interrupted_script_ends_its_job_and_its_cluster(tmp_path):
    codes = {signal.SIGINT: 130, signal.SIGTERM: 143}
    scripts = {}
    for number in codes:
        (tmp_path / number.name).mkdir()
        scripts[number] = start(CLUSTER + "import time; time.sleep(600)", tmp_path / number.name)
    for started in scripts.values():
        started.wait_for_line("GPUs 2.0", 100)
    interrupted = time.monotonic()
    for number, started in scripts.items():
        (os.killpg if number == signal.SIGINT else os.kill)(started.process.pid, number)
    done = {number: started.finish(90) for number, started in scripts.items()}
    assert time.monotonic() - interrupted < 60
    assert {number: run.code for number, run in done.items()} == codes
    assert [run.left for run in done.values()] == [[], []]
    assert [ray_folders(started) for started in scripts.values()] == [[], []]


USES_ANOTHERS_CLUSTER = """
set -euo pipefail
source scripts/lib/say.sh
source scripts/lib/ray.sh
ray_begin --num-gpus 2 --object-store-memory 100000000
bash -c 'source scripts/lib/say.sh; source scripts/lib/ray.sh; ray_begin; ray_job python3 -c "$1"' guest "$1" &
until ray job list --address "$RAY_ADDRESS" 2>&1 | grep -q RUNNING; do sleep 0.5; done
kill -TERM $!
wait $! && code=0 || code=$?
echo "guest ended with $code"
ray job list --address "$RAY_ADDRESS" --log-color=false 2>&1 | grep -o 'status=<[^>]*>'
"""


def test_interrupted_script_ends_its_job_in_an_existing_cluster(tmp_path):
    started = start("import time; time.sleep(600)", tmp_path, USES_ANOTHERS_CLUSTER)
    done = started.finish(200)
    assert done.code == 0, done.output
    assert "guest ended with 143" in done.output  # and the cluster was still running to be queried
    assert re.findall(r"status=<JobStatus\.(\w+)", done.output) == ["STOPPED"]
    assert done.left == []


def test_cluster_of_a_killed_script_ends_by_itself(tmp_path):
    started = start("import time; print('at work', flush=True); time.sleep(600)", tmp_path)
    started.wait_for_line("at work", 100)
    started.process.send_signal(signal.SIGKILL)
    started.process.wait(10)
    deadline = time.monotonic() + 60
    heads = lambda: started.processes("ray_node.py") + started.processes("raylet")  # noqa: E731
    while heads() and time.monotonic() < deadline:
        time.sleep(0.5)
    assert heads() == []
    assert ray_folders(started) == []
    started.kill_everything()  # the waiting ray_job.py, whose script has ended


def test_ray_start_failure_is_one_message(tmp_path):
    command = "source scripts/lib/say.sh; source scripts/lib/ray.sh; ray_begin --no-such-flag"
    environment = {"PATH": f"{Path(sys.executable).parent}:/usr/bin:/bin", "HOME": str(tmp_path)}
    done = subprocess.run(
        ["bash", "-c", command], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=60
    )
    assert done.returncode == 1
    assert "no-such-flag" in done.stderr and "Ray did not start" in done.stderr


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may become somebody else")
def test_user_without_a_name_gets_a_cluster():
    """Like in a container run with `--user 54321`: no entry in /etc/passwd, no USER, no LOGNAME."""
    python, nameless = Path(sys.executable), {"user": 54321, "group": 54321, "extra_groups": []}
    home = Path(tempfile.mkdtemp(prefix="slimrl-nameless-", dir="/tmp"))
    try:
        os.chown(home, 54321, 54321)
        for part in ("scripts", "slimrl"):
            shutil.copytree(ROOT / part, home / part, ignore=shutil.ignore_patterns("__pycache__"))
        environment = {"PATH": f"{python.parent}:/usr/bin:/bin", "HOME": str(home)}
        try:
            subprocess.run([python, "-c", "import ray"], cwd=home, env=environment, check=True, timeout=60, **nameless)
        except (PermissionError, subprocess.CalledProcessError):
            pytest.skip("this environment lies where only its owner may read")
        command = ["bash", "-c", SCRIPT, "script", CLUSTER]
        options = {"cwd": home, "env": environment, "capture_output": True, "text": True, "timeout": 200}
        done = subprocess.run(command, **options, **nameless)
        assert done.returncode == 0, done.stdout + done.stderr
        assert "GPUs 2.0" in done.stdout
    finally:
        shutil.rmtree(home)
