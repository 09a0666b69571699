"""Rendezvous of the ranks: through a private file on one machine, else at the one address the others need."""

import datetime
import stat
import tempfile
from pathlib import Path

import psutil
import pytest

from slimrl.cluster.launch import create_store, join_store

TIMEOUT = datetime.timedelta(seconds=20)


@pytest.fixture(autouse=True)
def own_temporary_folder(tmp_path, monkeypatch):
    """A temporary folder as the subreaper gives one to a rank."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


def listening() -> set[str]:
    connections = psutil.Process().net_connections("inet")
    return {f"{one.laddr.ip}:{one.laddr.port}" for one in connections if one.status == psutil.CONN_LISTEN}


@pytest.mark.parametrize("host", [None, "127.0.0.1"])
def test_ranks_read_what_other_ranks_write(host):
    rendezvous, store = create_store(host, 2, TIMEOUT)
    other = join_store(rendezvous, 2, TIMEOUT)
    store.set("word", "a")
    assert other.get("word") == b"a"


def test_single_machine_opens_no_port_and_admits_only_this_user():
    before = listening()
    rendezvous, _store = create_store(None, 2, TIMEOUT)
    assert listening() == before
    assert stat.S_IMODE(Path(rendezvous.path).parent.stat().st_mode) == 0o700


def test_multi_node_port_is_bound_only_to_the_node_address():
    before = listening()
    rendezvous, _store = create_store("127.0.0.1", 2, TIMEOUT)
    assert listening() - before == {f"127.0.0.1:{rendezvous.port}"}
