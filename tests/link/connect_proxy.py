"""An HTTP proxy on loopback that opens tunnels by CONNECT, or refuses to."""

from __future__ import annotations

import http.server
import socket
import threading
from contextlib import suppress


class ConnectProxy:
    """Listens on its own port until it is closed."""

    def __init__(self, status: int = 200) -> None:
        """Start to listen. The proxy answers with `status`, and only 200 opens a tunnel."""
        self.asked: list[tuple[str, str]] = []
        """The address and the `Proxy-Authorization` of each request."""
        proxy = self

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_CONNECT(self) -> None:
                proxy.asked.append((self.path, self.headers.get("Proxy-Authorization", "")))
                self.send_response(status)
                self.end_headers()
                if status == 200:
                    _join(self.connection, self.path)

            def log_message(self, *_: object) -> None:
                """Log nothing."""

        self._server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.address = f"127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


def _join(client: socket.socket, address: str) -> None:
    """Forward bytes in both directions until one side ends."""
    host, _, port = address.rpartition(":")
    with socket.create_connection((host, int(port))) as target:
        back = threading.Thread(target=_pass_on, args=(target, client), daemon=True)
        back.start()
        _pass_on(client, target)
        back.join()


def _pass_on(source: socket.socket, sink: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            sink.sendall(data)
    with suppress(OSError):
        sink.shutdown(socket.SHUT_WR)
