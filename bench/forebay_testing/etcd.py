"""A real etcd on loopback, with ports and a data folder of its own."""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import os
import shutil
import signal
import socket
import ssl
import subprocess
import tempfile
import time
import urllib.error
import urllib.request

from forebay._errors import StorageError, UnsupportedError

_START_S = 30


_libc = ctypes.CDLL(None)  # before a fork: other threads may hold the loader's locks then


def _die_with_parent() -> None:
    _libc.prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _certificate(folder: str, name: str, *more: str) -> None:
    subprocess.run(
        [
            "openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256",
            "-nodes", "-config", "/dev/null", "-days", "2", "-keyout", f"{folder}/{name}.key",
            "-out", f"{folder}/{name}.pem", *more,
        ],
        check=True, capture_output=True,
    )  # fmt: skip
    os.chmod(f"{folder}/{name}.key", 0o600)


class Etcd:
    """Starts when made; ``with`` or ``close()`` stops it and removes its data.

    ``secured``: by TLS, with certificates of both sides and a user; ``variables`` has what Forebay
    needs to be told for it.
    """

    @staticmethod
    def available() -> tuple[bool, str]:
        """Whether there is one, and what to do otherwise."""
        found = shutil.which("etcd") is not None
        return found, "" if found else "etcd is not installed; try: apt install etcd-server"

    def __init__(self, *options: str, secured: bool = False) -> None:
        usable, reason = self.available()
        if not usable:
            raise UnsupportedError(reason)
        self._options = options
        self._folder = tempfile.mkdtemp(prefix="forebay-etcd-")
        self._process: subprocess.Popen[bytes] | None = None
        self._tls: ssl.SSLContext | None = None
        self.variables: dict[str, str] = {}
        try:
            if secured:
                self._make_certificates()
            for _ in range(5):  # a free port may be taken by another before etcd has it
                self._ports = (_free_port(), _free_port())
                self.launch()
                if self.wait():
                    if secured:
                        self._make_users()
                    return
                self.kill()
            raise StorageError(f"etcd did not start: {self.log()[-2000:]}")
        except BaseException:
            self.close()
            raise

    @property
    def endpoint(self) -> str:
        return f"http{'s' if self._tls else ''}://127.0.0.1:{self._ports[0]}"

    def _make_certificates(self) -> None:
        at = self._folder
        _certificate(at, "ca", "-subj", "/O=forebay test ca", "-addext",
                     "basicConstraints=critical,CA:TRUE", "-addext",
                     "keyUsage=critical,keyCertSign,cRLSign")  # fmt: skip
        for name in ("server", "client"):
            _certificate(at, name, "-subj", "/O=forebay test", "-CA", f"{at}/ca.pem", "-CAkey",
                         f"{at}/ca.key", "-addext", "basicConstraints=critical,CA:FALSE",
                         "-addext", "extendedKeyUsage=serverAuth,clientAuth",
                         "-addext", "subjectAltName=IP:127.0.0.1")  # fmt: skip
        self._options = (
            *self._options, f"--cert-file={at}/server.pem", f"--key-file={at}/server.key",
            "--client-cert-auth", f"--trusted-ca-file={at}/ca.pem", "--bcrypt-cost=4",
        )  # fmt: skip
        self._tls = ssl.create_default_context(cafile=f"{at}/ca.pem")
        self._tls.load_cert_chain(f"{at}/client.pem", f"{at}/client.key")
        self.variables = {
            "FOREBAY_ETCD_CACERT": f"{at}/ca.pem",
            "FOREBAY_ETCD_CERT": f"{at}/client.pem",
            "FOREBAY_ETCD_KEY": f"{at}/client.key",
        }

    def _make_users(self) -> None:
        every = base64.b64encode(b"\0").decode()
        asked: list[tuple[str, dict[str, object]]] = [
            ("user/add", {"name": "root", "password": "root's"}),
            ("role/add", {"name": "root"}),
            ("user/grant", {"user": "root", "role": "root"}),
            ("user/add", {"name": "forebay", "password": "forebay's word"}),
            ("role/add", {"name": "keys"}),
            ("role/grant", {"name": "keys", "perm": {"permType": "READWRITE", "key": every,
                                                     "range_end": every}}),
            ("user/grant", {"user": "forebay", "role": "keys"}),
            ("enable", {}),
        ]  # fmt: skip
        for path, body in asked:
            data = json.dumps(body).encode()
            request = urllib.request.Request(f"{self.endpoint}/v3/auth/{path}", data, method="POST")
            with urllib.request.urlopen(request, timeout=20, context=self._tls):
                pass
        self.variables["FOREBAY_ETCD_USER"] = "forebay"
        self.variables["FOREBAY_ETCD_PASSWORD"] = "forebay's word"

    def launch(self) -> None:
        """Starts it, with the same ports and data as before; does not wait for it."""
        peer = f"http://127.0.0.1:{self._ports[1]}"
        command = [
            "etcd",
            f"--data-dir={self._folder}/data",
            f"--listen-client-urls={self.endpoint}",
            f"--advertise-client-urls={self.endpoint}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
            *self._options,
        ]
        with open(f"{self._folder}/log", "ab") as log:
            self._process = subprocess.Popen(
                command, stdout=log, stderr=log, preexec_fn=_die_with_parent
            )

    def wait(self) -> bool:
        """Until it answers; False when it ended, or did not answer for long."""
        end = time.monotonic() + _START_S
        while time.monotonic() < end:
            if self._process is None or self._process.poll() is not None:
                return False
            with contextlib.suppress(OSError, urllib.error.URLError):
                with urllib.request.urlopen(
                    f"{self.endpoint}/health", timeout=2, context=self._tls
                ) as answer:
                    if b'"true"' in answer.read():
                        return True
            time.sleep(0.02)
        return False

    def log(self) -> str:
        with contextlib.suppress(OSError), open(f"{self._folder}/log") as log:
            return log.read()
        return ""

    def kill(self) -> None:
        """kill -9; its data stays."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None

    def close(self) -> None:
        self.kill()
        shutil.rmtree(self._folder, ignore_errors=True)

    def __enter__(self) -> Etcd:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
