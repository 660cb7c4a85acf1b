"""Where the nodes of a replica meet: on one address only, in any order, and no more of them than there should be."""

from __future__ import annotations

import socket
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta

import psutil
import pytest
from torch.distributed.elastic.rendezvous import RendezvousInfo

from hetero_pp.errors import HeteroPPError
from hetero_pp.program.launch.rendezvous import NodeRendezvous, interface_towards

SOON = timedelta(seconds=30)


def _listening() -> set[tuple[str, int]]:
    found = psutil.Process().net_connections("inet")
    return {(one.laddr.ip, one.laddr.port) for one in found if one.status == psutil.CONN_LISTEN}


def _free_port(host: str) -> int:
    with socket.create_server((host, 0)) as server:
        return server.getsockname()[1]


def test_one_node_listens_on_loopback_only() -> None:
    before = _listening()
    met = NodeRendezvous("", 1, "run", SOON).next_rendezvous()
    assert met.bootstrap_store_info is not None
    assert (met.rank, met.world_size) == (0, 1)
    assert _listening() - before == {("127.0.0.1", met.bootstrap_store_info.master_port)}


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
    with pytest.raises(HeteroPPError, match="found a node beside the 3 that met"):
        meet()


def test_a_node_that_waits_in_vain_says_so() -> None:
    endpoint = f"127.0.0.1:{_free_port('127.0.0.1')}"
    with pytest.raises(HeteroPPError, match=f"2 nodes did not meet at {endpoint}"):
        NodeRendezvous(endpoint, 2, "run", timedelta(seconds=1)).next_rendezvous()


def test_an_address_that_is_no_address() -> None:
    with pytest.raises(HeteroPPError, match=r"rendezvous nowhere\.invalid"):
        NodeRendezvous("nowhere.invalid:1", 2, "run", SOON).next_rendezvous()
    with pytest.raises(HeteroPPError, match=r"rendezvous nowhere\.invalid"):
        interface_towards("nowhere.invalid:1")


def test_ranks_listen_where_the_rendezvous_is_reached() -> None:
    addresses = {one.address for one in psutil.net_if_addrs()[interface_towards("")]}
    assert "127.0.0.1" in addresses
    assert interface_towards("127.0.0.9:1") == interface_towards("")
