"""A store that binds one address."""

import datetime

import psutil
from torch.distributed import TCPStore

from slimrl.weights.update.transport_distributed import listening_store

TIMEOUT = datetime.timedelta(seconds=20)


def listening() -> set[tuple[str, int]]:
    connections = psutil.Process().net_connections("inet")
    return {(one.laddr.ip, one.laddr.port) for one in connections if one.status == psutil.CONN_LISTEN}


def test_port_is_bound_only_to_the_requested_address():
    before = listening()
    store = listening_store("127.0.0.1", TIMEOUT, world_size=2)
    assert listening() - before == {("127.0.0.1", store.port)}
    store.set("word", "a")
    other = TCPStore("127.0.0.1", store.port, 2, is_master=False, timeout=TIMEOUT, wait_for_workers=False)
    assert other.get("word") == b"a"


def test_torch_store_is_bound_to_all_addresses():
    """The reason for this module; if this test fails, torch has changed and the module may be removed."""
    before = listening()
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=TIMEOUT)
    assert {ip for ip, port in listening() - before if port == store.port} == {"::"}
