"""An etcd that asks by TLS and password who one is, under a policy and a daemon."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import forebay
import pytest
from data_sets import DataSet
from forebay import cli
from forebay_testing import Etcd
from test_daemon import _await, _daemons

pytestmark = pytest.mark.skipif(not Etcd.available()[0], reason=Etcd.available()[1])


@pytest.fixture
def etcd(monkeypatch: pytest.MonkeyPatch):
    with Etcd(secured=True) as etcd:
        for name, value in etcd.variables.items():
            monkeypatch.setenv(name, value)
        yield etcd


def _call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = cli.main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def test_a_policy_is_set_by_tls_and_password(
    etcd: Etcd,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    (tmp_path / "r").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "r"))
    site = tmp_path / "site.toml"
    site.write_text('[[job]]\nmatch = "imagenet-*"\nshare = 3\n')
    password = tmp_path / "password"
    password.write_text(etcd.variables["FOREBAY_ETCD_PASSWORD"] + "\n")
    password.chmod(0o600)
    monkeypatch.delenv("FOREBAY_ETCD_PASSWORD")
    monkeypatch.setenv("FOREBAY_ETCD_PASSWORD_FILE", str(password))
    code, _, err = _call(capsys, "policy", "set", site, "--etcd", etcd.endpoint)
    assert code == 0, err
    show = ("policy", "show", "--etcd", etcd.endpoint)
    code, out, _ = _call(capsys, *show)
    assert code == 0 and "imagenet-*" in out

    password.chmod(0o644)
    code, _, err = _call(capsys, *show)
    assert code != 0 and str(password) in err and "chmod 600" in err
    password.chmod(0o600)
    password.write_text("a wrong one")
    code, _, err = _call(capsys, *show)
    assert code != 0 and "FOREBAY_ETCD_PASSWORD" in err and "a wrong one" not in err
    monkeypatch.delenv("FOREBAY_ETCD_CERT")
    monkeypatch.delenv("FOREBAY_ETCD_KEY")
    code, _, err = _call(capsys, *show)
    assert code == 1 and "FOREBAY_ETCD_CERT" in err and etcd.endpoint in err
    monkeypatch.delenv("FOREBAY_ETCD_CACERT")
    code, _, err = _call(capsys, *show)
    assert code == 1 and "FOREBAY_ETCD_CACERT" in err and etcd.endpoint in err


class _Node:
    """A daemon, and who trains by it."""

    def __init__(self, place: Path, data: DataSet) -> None:
        self.place = place
        self.engine = forebay.SharedEngine(memory="64M", linger=0, folder=place)
        self.loader = forebay.DataLoader(data.root, 4, engine=self.engine)

    def status(self) -> dict[str, Any]:
        said = self.engine._describe()
        return said if isinstance(said, dict) else {"control": {"state": "gone"}}

    def log(self) -> str:
        return (self.place / "forebayd.log").read_text()

    def reaches(self, state: str) -> None:
        def reached() -> bool:
            assert len(next(iter(self.loader))) == 4
            return self.status()["control"]["state"] == state

        _await(reached, f"its control is not '{state}'", 30)

    def close(self) -> None:
        del self.loader, self.engine
        _await(lambda: not _daemons(self.place), "the daemon stays", 30)


def test_a_daemon_follows_by_tls_and_tells_nobody_the_password(
    etcd: Etcd, folder: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It has the variables from the client that started it."""
    monkeypatch.setenv("FOREBAY_ETCD", etcd.endpoint)
    node = _Node(tmp_path / "d", folder)
    node.reaches("following")
    etcd.kill()
    node.reaches("no store")
    etcd.launch()
    assert etcd.wait()
    node.reaches("following")

    word = etcd.variables["FOREBAY_ETCD_PASSWORD"]
    [pid] = _daemons(node.place)
    told = {
        "command line": Path(f"/proc/{pid}/cmdline").read_text(),
        "log": node.log(),
        "status": json.dumps(node.status()),
        "metrics": json.dumps(node.engine.metrics()),
        "report": str(node.loader.report()),
    }
    assert etcd.endpoint in told["log"] and etcd.endpoint in told["status"]
    for where, text in told.items():
        assert word not in text, where
    node.close()


def test_a_daemon_says_why_etcd_refuses_it(
    etcd: Etcd, folder: DataSet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FOREBAY_ETCD", etcd.endpoint)
    monkeypatch.setenv("FOREBAY_ETCD_PASSWORD", "a wrong one")
    node = _Node(tmp_path / "d", folder)
    node.reaches("no store")
    _await(lambda: "FOREBAY_ETCD_PASSWORD" in node.log(), "the log does not say why")
    assert "FOREBAY_ETCD_PASSWORD" in node.status()["control"]["sentence"]
    assert "a wrong one" not in node.log() + json.dumps(node.status())
    node.close()
