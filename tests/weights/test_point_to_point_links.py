"""Messages between processes by a process group and by Mooncake: order, bytes, and ends that fail."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.megatron.launch import RankPool
from tests.mooncake import mooncake
from tests.weights import links

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pool() -> Iterator[RankPool]:
    with RankPool(4) as four:
        yield four


@pytest.fixture
def environment(kind: str, tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    return mooncake(tmp_path_factory) if kind == "mooncake" else {}


@pytest.mark.parametrize("kind", ["gloo", "mooncake"])
def test_messages_of_every_round_and_pair_arrive_whole_and_in_order(kind, environment, pool):
    """Two senders, two receivers; one pair has fewer rounds, and the messages have other lengths in each."""
    results = pool.run(links.exchange, kind, environment, 7)
    for receiver in (2, 3):
        assert results[receiver] == {
            sender: [links.contents(sender, receiver, number).tolist() for number in range(links.rounds(sender, 7))]
            for sender in (0, 1)
        }


@pytest.mark.parametrize("kind", ["gloo", "mooncake"])
def test_end_that_fails_is_an_error_of_its_peers_within_seconds(kind, environment, pool):
    """The first receiver fails after one round: both senders notice, close, and so the other receiver does."""
    results = pool.run(links.exchange_until_one_fails, kind, environment)
    for rank, (peer, seconds) in enumerate(results):
        assert seconds < 20, results
        assert rank == 2 or peer is not None, results
