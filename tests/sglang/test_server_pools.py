"""Requests to the servers themselves: balanced, one server per session, and none to a server that is not reached."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from slimrl.engines import server_pools
from slimrl.engines.server_pools import ServerPools

URLS = [f"http://127.0.0.1:{port}" for port in (1, 2, 3)]


def pools() -> ServerPools:
    return ServerPools({}, connect_timeout_s=1.0)


def chosen(of: ServerPools, session: str | None = None, urls: list[str] = URLS) -> str:
    with of.chosen(urls, session) as (url, _):
        return url


def test_request_goes_to_the_server_with_the_fewest_in_flight():
    async def main() -> list[str]:
        own, found = pools(), []
        with contextlib.ExitStack() as stack:
            for _ in range(6):
                url, _ = stack.enter_context(own.chosen(URLS, None))
                found.append(url)
        await own.close()
        return found

    assert sorted(asyncio.run(main())) == sorted(URLS * 2)


def test_session_stays_on_its_server_until_that_is_gone():
    async def main() -> None:
        own = pools()
        homes = {session: chosen(own, session) for session in map(str, range(40))}
        assert set(homes.values()) == set(URLS)
        assert homes == {session: chosen(own, session) for session in homes}
        left = URLS[1:]
        moved = {session: chosen(own, session, left) for session in homes}
        assert all(moved[session] == home for session, home in homes.items() if home in left)

    asyncio.run(main())


def test_server_that_is_not_reached_is_avoided_for_a_while(monkeypatch: pytest.MonkeyPatch):
    async def main() -> None:
        own = pools()
        with pytest.raises(ConnectionResetError), own.chosen(URLS, None) as (lost, _):
            raise ConnectionResetError
        assert lost not in [chosen(own) for _ in range(4)]
        assert chosen(own, urls=[lost]) == lost  # better than none
        monkeypatch.setattr(server_pools, "AVOIDED_S", 0.0)
        assert chosen(own) == lost
        with pytest.raises(ConnectionRefusedError, match="no server"):
            chosen(own, urls=[])

    asyncio.run(main())
