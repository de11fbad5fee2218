"""The web page of `forebay top --web`, whether the daemon has a port or not."""

from __future__ import annotations

import contextlib
import hmac
import secrets
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from .. import _forebay, files
from .._errors import ForebayError

_POLICY = (
    "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "connect-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)


class _Daemon:
    """The node's daemon, found again after it was gone."""

    def __init__(self, folder: str) -> None:
        self._folder = folder
        self._client: _forebay.SharedEngine | None = None
        self._lock = threading.Lock()

    def ask(self, what: str) -> bytes:
        with self._lock:
            try:
                if self._client is None:
                    self._client = files.attach_running(self._folder, 2.0)
                return getattr(self._client, what)().encode()
            except ForebayError:
                self._client = None
                raise


def _handler(daemon: _Daemon, secret: str) -> type[BaseHTTPRequestHandler]:
    pages: dict[str, tuple[str, Callable[[], bytes]]] = {
        "": ("text/html; charset=utf-8", _forebay.status_page),
        "status.json": ("application/json", lambda: daemon.ask("describe")),
        "metrics": ("text/plain; version=0.0.4; charset=utf-8", lambda: daemon.ask("prometheus")),
    }

    class Handler(BaseHTTPRequestHandler):
        timeout = 5  # seconds for a request
        server_version, sys_version = "forebay", ""

        def do_GET(self) -> None:
            host = self.headers.get("Host", "").partition(":")[0]
            _, given, name = (*self.path.partition("?")[0].split("/", 2), "", "")[:3]
            # Whoever does not know the address does not get in: other users of this machine, or a
            # web site that leads its own name here.
            known = hmac.compare_digest(given.encode(), secret.encode())
            if host not in ("127.0.0.1", "localhost") or not known:
                self.send_error(403)
            elif name not in pages:
                self.send_error(404)
            else:
                self._answer(*pages[name])

        def _answer(self, kind: str, body: Callable[[], bytes]) -> None:
            try:
                content = body()
            except ForebayError:
                self.send_error(503, "no daemon")
                return
            self.send_response(200)
            self.send_header("Content-Type", kind)
            self.send_header("Content-Length", str(len(content)))
            self.send_header("Content-Security-Policy", _POLICY)
            self.send_header("Cache-Control", "no-store")
            self.send_header("Referrer-Policy", "no-referrer")
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    return Handler


def serve(folder: str, port: int) -> int:
    """Until Ctrl-C; ``port`` 0: any free one."""
    secret = secrets.token_urlsafe(12)
    with ThreadingHTTPServer(("127.0.0.1", port), _handler(_Daemon(folder), secret)) as server:
        server.daemon_threads = True
        print(f"http://127.0.0.1:{server.server_port}/{secret}/\nCtrl-C ends it.", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            server.serve_forever()
    return 0
