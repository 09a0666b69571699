"""Where the ranks meet: in a private file on one machine, else on the one address that the others need."""

import datetime
import stat
import tempfile
from pathlib import Path

import psutil
import pytest

from slimrl.cluster.launch import join_meeting, open_meeting

TIMEOUT = datetime.timedelta(seconds=20)


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path, monkeypatch):
    """As a guardian gives one to the process of a rank."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def listening() -> set[str]:
    connections = psutil.Process().net_connections("inet")
    return {f"{one.laddr.ip}:{one.laddr.port}" for one in connections if one.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("host", [None, "127.0.0.1"])
def test_what_one_rank_writes_another_reads(host):
    meeting, store = open_meeting(host, 2, TIMEOUT)
    other = join_meeting(meeting, 2, TIMEOUT)
    store.set("word", "a")
    assert other.get("word") == b"a"


def test_on_one_machine_nothing_listens_and_nobody_else_may_enter():
    before = listening()
    meeting, _store = open_meeting(None, 2, TIMEOUT)
    assert listening() == before
    assert stat.S_IMODE(Path(meeting.path).parent.stat().st_mode) == 0o700


def test_on_several_the_port_is_open_on_the_address_of_the_node_alone():
    before = listening()
    meeting, _store = open_meeting("127.0.0.1", 2, TIMEOUT)
    assert listening() - before == {f"127.0.0.1:{meeting.port}"}
