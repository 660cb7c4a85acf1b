"""The rendezvous of a replica's nodes: on one address only, in any order, and with no more nodes than expected."""

from __future__ import annotations

import ipaddress
import platform
import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from types import SimpleNamespace

import psutil
import pytest
from torch.distributed.elastic.rendezvous import RendezvousInfo

from hetero_pp.core.errors import HeteroPPError, Refused
from hetero_pp.program.launch.ranks import NodeRendezvous, interface_towards, meeting_place

SOON = timedelta(seconds=30)


def _listening() -> set[tuple[str, int]]:
    found = psutil.Process().net_connections("inet")
    return {(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN}


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as server:
        return server.getsockname()[1]


def test_one_node_listens_on_loopback_only() -> None:
    # One node listens on loopback only.
    before = _listening()
    met = NodeRendezvous("", 1, "run", SOON).next_rendezvous()
    assert met.bootstrap_store_info is not None
    assert (met.rank, met.world_size) == (0, 1)
    assert _listening() - before == {("127.0.0.1", met.bootstrap_store_info.master_port)}

    # Ranks listen where the rendezvous is reached.
    addresses = {one.address for one in psutil.net_if_addrs()[interface_towards("")]}
    assert "127.0.0.1" in addresses
    assert interface_towards("127.0.0.9:1") == interface_towards("")


def test_several_nodes_meet_at_the_address_that_is_named() -> None:
    before, port = _listening(), _free_port("127.0.0.2")

    def meet() -> RendezvousInfo:
        return NodeRendezvous(f"127.0.0.2:{port}", 3, "run", SOON).next_rendezvous()

    with ThreadPoolExecutor(3) as pool:
        met = [future.result() for future in [pool.submit(meet) for _ in range(3)]]
    assert sorted(one.rank for one in met) == [0, 1, 2]
    assert _listening() - before == {("127.0.0.2", port)}
    for one in met:
        assert one.bootstrap_store_info is not None
        assert one.bootstrap_store_info.master_addr == "127.0.0.2"
    met[0].store.set("key", "value")
    assert met[2].store.get("key") == b"value"
    with pytest.raises(Refused, match="found more nodes than the 3 of the replica"):
        meet()


def test_a_node_that_waits_in_vain_says_so() -> None:
    endpoint = f"127.0.0.1:{_free_port('127.0.0.1')}"
    who = f"2 nodes did not meet at {endpoint} within 1 s .*: only {platform.node()} joined"
    with pytest.raises(HeteroPPError, match=who):
        NodeRendezvous(endpoint, 2, "run", timedelta(seconds=1)).next_rendezvous()


class Machine:
    """A machine that resolves some host names and has some addresses."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, names: dict[str, str], *own: str) -> None:
        self._names = names
        monkeypatch.setattr(socket, "getaddrinfo", self._resolve)
        cards = {f"of {one}": [SimpleNamespace(family=socket.AF_INET, address=one)] for one in own}
        monkeypatch.setattr(psutil, "net_if_addrs", lambda: cards)
        monkeypatch.setattr(psutil, "net_if_stats", lambda: {name: SimpleNamespace(isup=True) for name in cards})

    def _resolve(self, host: str, port: object, **_: object) -> list[tuple[object, ...]]:
        try:
            found = str(ipaddress.ip_address(host))
        except ValueError:
            if host not in self._names:
                raise socket.gaierror from None
            found = self._names[host]
        return [(socket.AF_INET, socket.SOCK_STREAM, 6, "", (found, 0))]


def test_a_name_that_is_loopback_on_its_own_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian writes such names into /etc/hosts. Other names and all numeric addresses are unchanged."""
    names = {"nodea": "127.0.1.1", "nodeb": "10.9.0.2", "localhost": "127.0.0.1"}
    Machine(monkeypatch, names, "127.0.0.1", "10.9.0.1", "169.254.3.4")
    assert meeting_place("nodea:5") == "10.9.0.1:5"
    for same in ("nodeb:5", "localhost:5", "127.0.0.7:5", "10.9.0.9:5"):
        assert meeting_place(same) == same
    Machine(monkeypatch, names, "10.9.0.1", "192.168.7.1")
    with pytest.raises(HeteroPPError, match=r"nodea is .*; use one of `10\.9\.0\.1:5`, `192\.168\.7\.1:5`"):
        meeting_place("nodea:5")
    Machine(monkeypatch, names, "127.0.0.1")
    with pytest.raises(HeteroPPError, match="use an address of a network"):
        meeting_place("nodea:5")
    with pytest.raises(HeteroPPError, match="the host name nodec cannot be resolved on this machine"):
        meeting_place("nodec:5")
