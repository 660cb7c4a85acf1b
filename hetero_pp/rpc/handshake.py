"""Explains why a connection fails, because gRPC says only that it does."""

from __future__ import annotations

import ssl
import time
from datetime import UTC, datetime

from hetero_pp.config.links import EXCHANGE
from hetero_pp.core.errors import NewRun, Refused, WrongToken
from hetero_pp.core.proxies import DIRECT, Route
from hetero_pp.rpc.certificates import Identity, Shown, read_certificate
from hetero_pp.rpc.tickets import ticket_of

_SECONDS = 5.0
_SAME = "`exchange.insecure` has to be equal on all hosts"


def require_trust(address: str, identity: Identity | None, route: Route = DIRECT) -> None:
    """Connect to HOST:PORT once, as `route` says, and raise what is wrong with the certificates, if anything is.

    Raises WrongToken if the exchange there has another authority than a process with a token, NewRun if it has another
    one than a process with a ticket. Raises Refused if another program answers, if only one side speaks TLS, or if this
    process's own certificate is not valid. An exchange that does not answer raises nothing: it may come up.
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
        with route.connect(address, _SECONDS) as connection, context.wrap_socket(connection):
            pass
    except ssl.SSLCertVerificationError:
        assert identity is not None  # else nothing is verified
        raise _of_another_run(address, identity, route) from None
    except ssl.SSLError:
        if identity is not None:
            raise Refused(f"{address} does not use TLS, but this host does: {_SAME}") from None
    except OSError:
        pass
    else:
        if identity is None:
            raise Refused(f"{address} uses TLS, but this host does not: {_SAME}")


def new_run(address: str, yours: str, instead: str) -> NewRun:
    """Return the error after a new run has begun. `yours`: what this process shows; `instead`: what to do."""
    return NewRun(f"a new run has started at {address}; your {yours} belongs to the previous run; {instead}")


def _of_another_run(address: str, identity: Identity, route: Route) -> Refused:
    """Return the error for a certificate that the authority of this process's run did not sign."""
    if not _shows_exchange(address, route):
        return Refused(f"{address}: another program answers at this address, or an exchange of another version")
    if ticket_of(identity.shown.name) is not None:
        return new_run(address, "ticket", "ask for a new ticket")
    if identity.shown.holder:
        return new_run(address, "certificate", "ask for a new ticket")
    return WrongToken(f"the exchange at {address} was started with another token")


def _shows_exchange(address: str, route: Route) -> bool:
    """Return whether the certificate at an address, with any signature, names an exchange."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    context.set_alpn_protocols(["h2"])
    try:
        with route.connect(address, _SECONDS) as connection, context.wrap_socket(connection) as wrapped:
            shown = wrapped.getpeercert(binary_form=True) or b""
        return read_certificate(ssl.DER_cert_to_PEM_cert(shown).encode()).name == EXCHANGE
    except (OSError, ValueError):  # ssl.SSLError is an OSError
        return False


def _require_holds(own: Shown) -> None:
    if time.time() > own.until:
        raise Refused(
            f"the certificate of this host expired at {_moment(own.until)}; check the clock of this host, or "
            "join with a new ticket"
        )
    if time.time() < own.since:
        found = f"the certificate of this host is valid from {_moment(own.since)}"
        raise Refused(f"{found}: check the clock of this host, which shows {_moment(time.time())}")


def _moment(seconds: float) -> str:
    return f"{datetime.fromtimestamp(seconds, UTC):%Y-%m-%d %H:%M} UTC"
