"""Jobs that the tests of links run in processes: ranks 0 and 1 send to ranks 2 and 3."""

from __future__ import annotations

import datetime
import time

import torch
from torch.distributed import FileStore, PrefixStore

from slimrl.weights.point_to_point.links import Buffers, Link, LinkError, MooncakeLink, ProcessGroupLink
from tests.mooncake import use_here

LENGTH = 100_000
SENDERS, RECEIVERS = (0, 1), (2, 3)


def rounds(sender: int, most: int) -> int:
    """How many messages a sender has."""
    return most - 2 * sender


def contents(sender: int, receiver: int, number: int) -> torch.Tensor:
    """Bytes of one message."""
    generator = torch.Generator().manual_seed(100 * number + 10 * sender + receiver)
    return torch.randint(0, 256, (LENGTH - 1000 * number,), dtype=torch.uint8, generator=generator)


def open_link(rank: int, init_method: str, kind: str, environment: dict[str, str]) -> Link:
    """This rank's end."""
    use_here(environment)
    store = FileStore(init_method.removeprefix("file://"), 4)
    store.set_timeout(datetime.timedelta(seconds=60))
    sends = dict.fromkeys(RECEIVERS if rank in SENDERS else (), LENGTH)
    receives = dict.fromkeys(SENDERS if rank in RECEIVERS else (), LENGTH)
    host, own = torch.device("cpu"), PrefixStore("link", store)
    buffers = Buffers(sends, receives, host)
    if kind == "mooncake":
        return MooncakeLink(own, rank, "127.0.0.1", buffers, timeout_s=60, protocol="tcp")
    return ProcessGroupLink(own, rank, 4, buffers, host, timeout_s=60)


def send(link: Link, rank: int, number: int) -> None:
    """Packs and starts a round."""
    for receiver in RECEIVERS:
        message = contents(rank, receiver, number)
        link.outbox(receiver, number)[: len(message)] = message
    link.start(number, {receiver: len(contents(rank, receiver, number)) for receiver in RECEIVERS}, {})


def receive(link: Link, number: int, most: int) -> None:
    """Starts a round."""
    present = [sender for sender in SENDERS if number < rounds(sender, most)]
    link.start(number, {}, {sender: LENGTH - 1000 * number for sender in present})


def exchange(
    rank: int, world_size: int, init_method: str, kind: str, environment: dict[str, str], most: int
) -> dict[int, list[list[int]]]:
    """All rounds; the messages that this rank has received, by sender."""
    link = open_link(rank, init_method, kind, environment)
    found: dict[int, list[list[int]]] = {sender: [] for sender in SENDERS}
    if rank in SENDERS:
        for number in range(rounds(rank, most)):
            if number > 1:
                link.wait(number - 2)
            send(link, rank, number)
        link.wait(rounds(rank, most) - 2)
        link.wait(rounds(rank, most) - 1)
    else:
        receive(link, 0, most)
        for number in range(most):
            receive(link, number + 1, most)
            link.wait(number)
            for sender in SENDERS:
                if number < rounds(sender, most):
                    found[sender].append(link.inbox(sender, number)[: LENGTH - 1000 * number].tolist())
    link.close(failed=False)
    return found


def exchange_until_one_fails(
    rank: int, world_size: int, init_method: str, kind: str, environment: dict[str, str]
) -> tuple[int | None, float]:
    """Rank 2 closes its end after a round; the others go on until an error: its peer, and the seconds until then."""
    link = open_link(rank, init_method, kind, environment)
    started, peer = time.monotonic(), None
    try:
        for number in range(50):
            if rank in SENDERS:
                send(link, rank, number)
            else:
                receive(link, number, 100)
            link.wait(number)
            if rank == 2:
                break
    except LinkError as error:
        peer = error.peer
    link.close(failed=True)
    return peer, time.monotonic() - started
