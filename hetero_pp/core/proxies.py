"""Decide whether a connection uses a proxy of the environment: never to this machine or to a private network.

gRPC, urllib and object stores each read `http_proxy` and its relatives, and would use a proxy even for loopback.
"""

from __future__ import annotations

import http.client
import ipaddress
import os
import re
import socket
from base64 import b64encode
from contextlib import closing, suppress
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit
from urllib.request import getproxies_environment

from hetero_pp.core.sockets import host_and_port

PROBE_SECONDS = 5.0  # time limit of each step of trying a proxy: to connect, and to answer

PRIVATE_NETWORKS = (
    "0.0.0.0/32",
    "127.0.0.0/8",
    "10.0.0.0/8",
    "172.16.0.0/12",
    "192.168.0.0/16",
    "169.254.0.0/16",
    "100.64.0.0/10",
    "::/128",
    "::1/128",
    "fc00::/7",
    "fe80::/10",
)
"""Loopback, RFC 1918, link-local, carriers' NAT (RFC 6598, as Tailscale uses it) and unique local (RFC 4193)."""

_NETWORKS = tuple(ipaddress.ip_network(network) for network in PRIVATE_NETWORKS)
_GRPC_VARIABLES = ("grpc", "https", "http")
"""Order of gRPC: `grpc_proxy` wins over `https_proxy`, which wins over `http_proxy`."""
_SERVER_ERROR = re.compile(r"Tunnel connection failed: 5\d\d ")

_Address = ipaddress.IPv4Address | ipaddress.IPv6Address


@dataclass(frozen=True)
class Proxy:
    """Proxy that an environment variable names."""

    variable: str
    url: str  # URL in gRPC's form: `http://[USER:PASSWORD@]HOST:PORT`

    def __str__(self) -> str:
        """Return the URL without the password, and the variable, for messages."""
        parts = urlsplit(self.url)
        user = f"{parts.username}@" if parts.username else ""
        return f"{parts.scheme}://{user}{parts.netloc.rpartition('@')[2]} ({self.variable})"

    def connect(self, address: str, seconds: float) -> socket.socket:
        """Open a tunnel to HOST:PORT. Raises OSError. Each step may take `seconds`."""
        parts, (host, port) = urlsplit(self.url), host_and_port(address)
        if parts.scheme != "http":
            raise OSError("is not an `http://` proxy, the only kind that gRPC supports")
        headers = {}
        if parts.username is not None:
            secret = f"{unquote(parts.username)}:{unquote(parts.password or '')}".encode()
            headers["Proxy-Authorization"] = f"Basic {b64encode(secret).decode()}"
        try:
            connection = http.client.HTTPConnection(parts.hostname or "", parts.port or 80, timeout=seconds)
            connection.set_tunnel(host, port, headers)
            connection.connect()
        except http.client.HTTPException as error:
            raise OSError(f"does not speak HTTP: {type(error).__name__}") from error
        except ValueError as error:
            raise OSError(f"is not a URL: {error}") from error
        assert connection.sock is not None
        return connection.sock


@dataclass(frozen=True)
class Route:
    """Route of connections to one address."""

    proxy: Proxy | None = None
    note: str = ""  # text that errors append, with a leading blank, if the environment names a proxy for the address

    def connect(self, address: str, seconds: float) -> socket.socket:
        """Open a connection to HOST:PORT on this route. Raises OSError."""
        if self.proxy is not None:
            return self.proxy.connect(address, seconds)
        return socket.create_connection(host_and_port(address), seconds)


DIRECT = Route()


def route_to(address: str) -> Route:
    """Decide how gRPC reaches HOST:PORT, or a Unix socket: through the environment's proxy only if that works.

    Tries the proxy, which takes up to PROBE_SECONDS for each step; does nothing if no proxy is set.
    """
    if address.startswith("unix"):
        return DIRECT
    proxy = grpc_proxy(host_and_port(address)[0])
    if proxy is None:
        return DIRECT
    through = Route(proxy, f" (through the proxy {proxy})")
    try:
        with closing(proxy.connect(address, PROBE_SECONDS)):
            return through
    except OSError as error:
        reason = error.strerror or str(error) or type(error).__name__
    if _SERVER_ERROR.match(reason):
        try:
            with DIRECT.connect(address, PROBE_SECONDS):
                pass
        except OSError:  # the exchange may start later, and then only the proxy reaches it
            return through
    return Route(None, f" (dialled without the proxy {proxy}, which failed: {reason})")


def is_private(host: str) -> bool:
    """Return whether a host is this machine, or has an address in a private network, by number or by name."""
    addresses = [numeric_address(host)]
    if addresses == [None]:
        try:
            found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
        except (OSError, UnicodeError):  # the name is not known here
            return False
        addresses = [numeric_address(str(one[4][0])) for one in found]
    return any(one in network for one in addresses if one is not None for network in _NETWORKS)


def needs_no_proxy(url: str) -> bool:
    """Return whether a URL has a private host although the environment names proxies."""
    return bool(getproxies_environment()) and is_private(urlsplit(url).hostname or "")


def grpc_proxy(host: str) -> Proxy | None:
    """Return the proxy that the environment names for gRPC to a host. None for private hosts and for `no_proxy`."""
    found = getproxies_environment()
    if os.environ.get("grpc_proxy") == "":  # noqa: SIM112 (gRPC's own name: empty, it switches proxies off for gRPC)
        return None
    variable = next((one for one in _GRPC_VARIABLES if one in found), None)
    if variable is None or is_private(host):
        return None
    # `no_proxy` names hosts, domains with all their hosts, or networks (10.0.0.0/8).
    address = numeric_address(host)
    for entry in found.get("no_grpc", found.get("no", "")).lower().split(","):
        name = entry.strip().removeprefix("*").lstrip(".")
        if entry.strip() == "*" or (name and f".{host.lower()}".endswith(f".{name}")):
            return None
        with suppress(ValueError):  # a name, and no network
            if address is not None and address in ipaddress.ip_network(entry.strip(), strict=False):
                return None
    url = found[variable]
    return Proxy(f"{variable}_proxy", url if "://" in url else f"http://{url}")


def numeric_address(host: str) -> _Address | None:
    """Return a numeric host's address, or the IPv4 address that is mapped into IPv6; None for a name."""
    try:
        found = ipaddress.ip_address(host.partition("%")[0])
    except ValueError:
        return None
    mapped = found.ipv4_mapped if isinstance(found, ipaddress.IPv6Address) else None
    return mapped or found
