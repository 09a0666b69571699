"""A store that is open on one address."""

import datetime

import psutil
from torch.distributed import TCPStore

from slimrl.weights.update.transport_distributed import listening_store

TIMEOUT = datetime.timedelta(seconds=20)


def listening() -> set[tuple[str, int]]:
    connections = psutil.Process().net_connections("inet")
    return {(one.laddr.ip, one.laddr.port) for one in connections if one.status == psutil.CONN_LISTEN}


def test_the_port_is_open_on_the_address_that_was_asked_for_alone():
    before = listening()
    store = listening_store("127.0.0.1", TIMEOUT, world_size=2)
    assert listening() - before == {("127.0.0.1", store.port)}
    store.set("word", "a")
    other = TCPStore("127.0.0.1", store.port, 2, is_master=False, timeout=TIMEOUT, wait_for_workers=False)
    assert other.get("word") == b"a"


def test_torchs_own_is_open_on_all_addresses():
    """What this module is for; when this fails, torch has changed and the module may go."""
    before = listening()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    assert {ip for ip, port in listening() - before if port == store.port} == {"::"}
