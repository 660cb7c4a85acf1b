"""Why a connection does not come about, in words: gRPC says only that it does not."""

from __future__ import annotations

import socket
import ssl
import time
from datetime import UTC, datetime

from hetero_pp.errors import Refused, WrongToken
from hetero_pp.rpc.certificates import Identity, Shown

_SECONDS = 5.0
_SAME = "`exchange.insecure` has to be the same on all hosts"


def require_trust(address: str, identity: Identity | None) -> None:
    """Connect to HOST:PORT once. Raises WrongToken for who is of another run, Refused for who speaks without TLS where
    this process does not, or with it where it does not, or where this process's own certificate does not hold.

    Who does not answer raises nothing: it may come up.
    """
    if identity is not None:
        _require_holds(identity.shown)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False  # names are of the run, not of hosts
    context.set_alpn_protocols(["h2"])
    if identity is None:
        context.verify_mode = ssl.CERT_NONE
    else:
        context.load_verify_locations(cadata=identity.authority)
    try:
        with _connected(address) as connection, context.wrap_socket(connection):
            pass
    except ssl.SSLCertVerificationError:
        raise WrongToken(f"the exchange at {address} was started with another token") from None
    except ssl.SSLError:
        if identity is not None:
            raise Refused(f"{address} does not use TLS, and this host does: {_SAME}") from None
    except OSError:
        pass
    else:
        if identity is None:
            raise Refused(f"{address} uses TLS, and this host does not: {_SAME}")


def _require_holds(own: Shown) -> None:
    if time.time() > own.until:
        raise Refused(
            f"the certificate of this host expired at {_moment(own.until)}; check the clock of this host, or "
            "join with a new ticket"
        )
    if time.time() < own.since:
        found = f"the certificate of this host holds from {_moment(own.since)} on"
        raise Refused(f"{found}: check the clock of this host, which says {_moment(time.time())}")


def _moment(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"


def _connected(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host.strip("[]"), int(port)), _SECONDS)
