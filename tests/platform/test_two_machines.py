"""Ranks on two machines whose host names map to 127.0.1.1, as on Debian, connect at the addresses Ray knows."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import slimrl
from tests.machines import ADDRESSES, two_machines, why_not

pytestmark = [pytest.mark.skipif(bool(why_not()), reason=f"two machines: {why_not()}"), pytest.mark.timeout(180)]

RANK = """
import datetime, os, socket, sys
from slimrl.platform.launch_env import network_environment
from slimrl.platform.launch_env import network_of
rank, own, master = int(sys.argv[1]), sys.argv[2], sys.argv[3]
assert socket.gethostbyname(socket.gethostname()) == "127.0.1.1"
os.environ |= network_environment(network_of(own), os.environ)
import torch, torch.distributed as dist
patience = datetime.timedelta(seconds=80)
store = dist.TCPStore(master, 29778, world_size=2, is_master=rank == 0, timeout=patience)
dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=patience)
total = torch.tensor([2.0 ** rank])
dist.all_reduce(total)
print("together", total.item(), flush=True)
dist.destroy_process_group()
"""


def test_two_machines_form_a_group(tmp_path: Path):
    chosen = {name: value for name, value in os.environ.items() if not name.endswith("_SOCKET_IFNAME")}
    environment = chosen | {"PYTHONPATH": str(Path(slimrl.__file__).parent.parent), "OMP_NUM_THREADS": "1"}
    with two_machines(tmp_path) as machines:
        ranks = [
            subprocess.Popen(
                machines.command(rank, sys.executable, "-c", RANK, str(rank), ADDRESSES[rank], ADDRESSES[0]),
                env=environment,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
            )
            for rank in range(2)
        ]
        try:
            outputs = [rank.communicate(timeout=100)[0] for rank in ranks]
        finally:
            for rank in ranks:
                rank.kill()
    assert ["together 3.0" in output for output in outputs] == [True, True], "\n".join(outputs)
