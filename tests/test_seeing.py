"""What people see of a running job: status, top, web page, Prometheus, Grafana, the log."""

from __future__ import annotations

import json
import logging
import os
import pty
import re
import shutil
import signal
import socket
import subprocess
import sys
import textwrap
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import browser
import forebay
import pytest
from data_sets import DataSet
from forebay import _forebay
from forebay.cli import main
from forebay.views import top, watch
from forebay.views.report import CAUSES, EpochReport, log_epoch

_ROOT = Path(__file__).resolve().parent.parent
_SLOW = "open_ms=20,bandwidth_mb=2"  # far too slow for whoever asks without a pause


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def _await(condition, complaint: str | Callable[[], str], limit: float = 30.0) -> None:
    until = time.monotonic() + limit
    while not condition():
        assert time.monotonic() < until, complaint() if callable(complaint) else complaint
        time.sleep(0.02)


@pytest.fixture
def run_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A place for a daemon of this test's own, which must be gone at the end."""
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    yield tmp_path / "forebay"
    _await(lambda: not (tmp_path / "forebay").exists(), "the daemon stays")


def _status(folder: Path) -> dict[str, Any]:
    return json.loads(_forebay.SharedEngine.attach_running(str(folder)).describe())


# ---- the daemon's own account


def test_the_status_of_a_stream(folder: DataSet, run_folder: Path) -> None:
    engine = forebay.SharedEngine(memory="64M", linger=0)
    loader = forebay.DataLoader(folder.root, 8, shuffle=True, rank=1, world_size=2, engine=engine,
                                _delay=_SLOW)  # fmt: skip
    taken = sum(len(batch) for batch in loader)
    (batches, samples) = (len(loader), taken)
    iterator = iter(loader)
    next(iterator)
    next(iterator)
    said = _status(run_folder)
    (stream,) = [s for _, s in watch.streams(said)]
    assert (stream["rank"], stream["world"], stream["epoch"], stream["batches"]) == (1, 2, 1, 2)
    assert stream["epoch_batches"] == batches
    assert stream["batches_total"] == batches + 2
    assert stream["samples_total"] == samples + 16
    assert stream["bytes_total"] > 0
    assert 0 <= stream["epoch_stall_ns"]["source"] < stream["stall_ns"]["source"]
    assert stream["recent_stall_share"] > 0
    # The daemon learns of a wait after it has begun, and ends it before the client wakes up.
    waited = sum(r.stall for r in loader.stats())
    assert 0 < sum(stream["stall_ns"].values()) * 1e-9 <= waited + 0.05
    assert said["source"]["reads"] == said["metrics"]["forebay_source_reads_total"] > 0
    assert [t["name"] for t in said["tiers"]] == ["memory"]
    assert 0 < said["tiers"][0]["used"] <= said["tiers"][0]["limit"]
    assert "of it for" in watch.why_idle(said)
    knobs = {k["name"]: k for m in said["mechanisms"] for k in m["knobs"]}
    assert knobs["daemon_linger_seconds"]["value"] == 0


def test_who_looks_on_does_not_keep_the_daemon(run_folder: Path) -> None:
    engine = forebay.SharedEngine(memory="64M", linger=0)
    viewer = _forebay.SharedEngine.attach_running(str(run_folder))
    viewer.describe()
    del engine
    _await(lambda: not run_folder.exists(), "the daemon stays for a viewer")
    with pytest.raises(forebay.ForebayError):
        viewer.describe()


# ---- forebay top


def _stream(**changes: Any) -> dict[str, Any]:
    none = dict.fromkeys(("source", "memory", "decode", "plan", "copy", "tier"), 0)
    return {
        "stream": 0, "job": "resnet", "dataset": 0, "batch_size": 8, "rank": 0, "world": 2,
        "seed": 0, "epoch": 3, "batches": 5, "epoch_batches": 63, "ready": 4, "batches_total": 100,
        "samples_total": 800, "bytes_total": 8000, "stall_ns": none, "epoch_stall_ns": none,
        "recent_stall_ns": none, "recent_ns": 10**10, "recent_stall_share": 0.0, **changes,
    }  # fmt: skip


def _said(**changes: Any) -> dict[str, Any]:
    waits = {**_stream()["stall_ns"], "source": 3 * 10**9, "memory": 10**9}
    return {
        "pid": 7, "time_ms": 5000, "uptime_ms": 5000, "budget": 1 << 30, "arena_bytes": 1 << 29,
        "settings": "", "url": "http://127.0.0.1:9095/", "cache_status": "", "datasets": [],
        "clients": [
            {"pid": 11, "leases": 0, "streams": [_stream()]},
            {"pid": 12, "leases": 0, "streams": [
                _stream(rank=1, recent_stall_ns=waits, recent_stall_share=0.4)]},
            {"pid": 13, "leases": 0, "streams": []},
        ],
        "source": {"reads": 100, "bytes": 10**6, "requests": 100, "errors": 0, "in_flight": 8,
                   "in_flight_limit": 16},
        "tiers": [{"name": "memory", "used": 3 << 27, "kept": 1 << 27, "limit": 1 << 29,
                   "status": ""}],
        "mechanisms": [{"name": "prefetch", "meaning": "", "metrics": [], "knobs": [
            {"name": "source_reads_in_flight", "value": 0, "type": "count", "minimum": 0,
             "maximum": 256, "meaning": ""}]}],
        "metrics": {}, **changes,
    }  # fmt: skip


def test_a_frame() -> None:
    before = _said()
    after = _said(time_ms=7000, source={**before["source"], "reads": 300, "bytes": 5 * 10**6})
    after["clients"][1]["streams"][0]["samples_total"] += 5000
    now = watch.rates(before, after)
    assert now is not None and now.samples == 2500 and now.source_reads == 100
    lines = top.frame(after, now, width=120)
    page = "\n".join(lines)
    assert lines[0].startswith("forebay top  forebayd 7, for 5 s, memory 1.0 GiB")
    assert "http://127.0.0.1:9095/" in lines[0]
    assert lines[1:3] == [
        "The rank that waits most (resnet, rank 1) waited 40% of the last 10 s, 75% of it for "
        "reads from storage (1.9 MiB/s, 8",
        "reads in flight).",
    ]
    assert "in flight 8 of 16" in page and "100 reads/s" in page
    assert "[##################......]  75%  384.0 MiB of 512.0 MiB" in page
    (row,) = [line for line in lines if re.match(r"resnet\s+1/2", line)]
    assert re.search(r"\b3\s+5/63\s+2,500\s+4\s+40%\s+reads from storage", row)
    assert "source_reads_in_flight 0" in page
    assert "control" not in page
    said = {**after, "control": {"sentence": "etcd is gone; the last decision holds"}}
    assert "etcd is gone" in "\n".join(top.frame(said, now))
    # Whatever the window, no line is longer and there are no more of them.
    for width in range(1, 140, 7):
        for height in (1, 2, 5, 40):
            lines = top.frame(after, now, width=width, height=height)
            assert len(lines) <= height and all(len(line) <= width for line in lines)
    # A job's name moves no cursor.
    nasty = _said(clients=[{"pid": 1, "leases": 0, "streams": [_stream(job="a\x1b[2Jb\n")]}])
    assert "\x1b" not in "".join(top.frame(nasty, None))


def test_a_sentence_for_each_state() -> None:
    assert watch.why_idle(_said(clients=[])) == "No job reads through this daemon now."
    calm = _said(clients=[{"pid": 1, "leases": 0, "streams": [_stream()]}])
    assert watch.why_idle(calm).startswith("Not for want of data: training has waited 0.0%")
    assert watch.rates(None, calm) is None
    assert watch.rates(calm, {**calm, "time_ms": calm["time_ms"] + 10}) is None
    assert watch.rates(calm, {**calm, "pid": 8, "time_ms": 9000}) is None


def test_top_once_and_in_a_pipe(
    folder: DataSet, run_folder: Path, capsys: pytest.CaptureFixture
) -> None:
    assert main(["top", "--once"]) == 1
    assert "No forebayd runs" in capsys.readouterr().out
    engine = forebay.SharedEngine(memory="64M", linger=0)
    loader = forebay.DataLoader(folder.root, 8, engine=engine)
    next(iter(loader))
    assert main(["top", "--once", "--interval", "0.3"]) == 0
    process = subprocess.Popen([sys.executable, "-m", "forebay.cli", "top", "--interval", "0.3"],
                               stdout=subprocess.PIPE, text=True)  # fmt: skip
    assert process.stdout is not None
    with process.stdout:
        seen = [process.stdout.readline() for _ in range(30)]
        process.send_signal(signal.SIGINT)
        process.stdout.read()
    assert process.wait(10) == 0
    assert sum("forebay top" in line for line in seen) >= 2
    assert any("0/1" in line for line in seen) and not any("\x1b" in line for line in seen)


def test_top_on_a_terminal(folder: DataSet, run_folder: Path) -> None:
    import fcntl
    import struct
    import termios

    outside, inside = pty.openpty()
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 30, 100, 0, 0))
    before = termios.tcgetattr(inside)
    process = subprocess.Popen(
        [sys.executable, "-m", "forebay.cli", "top", "--interval", "0.2"],
        stdin=inside, stdout=inside, start_new_session=True,
    )  # fmt: skip
    screen = ""

    def wait_for(text: str) -> None:
        nonlocal screen
        until = time.monotonic() + 30
        while text not in screen:
            assert time.monotonic() < until, (text, screen)
            screen += os.read(outside, 65536).decode()

    wait_for("Waiting for one.")
    engine = forebay.SharedEngine(memory="64M", linger=0)  # found as soon as it is there
    loader = forebay.DataLoader(folder.root, 8, engine=engine)
    next(iter(loader))
    wait_for("0/1")
    screen = ""
    fcntl.ioctl(inside, termios.TIOCSWINSZ, struct.pack("HHHH", 4, 60, 0, 0))
    process.send_signal(signal.SIGWINCH)
    wait_for("more lines")
    os.write(outside, b"q")
    assert process.wait(10) == 0
    wait_for("\x1b[?1049l")
    assert termios.tcgetattr(inside) == before
    os.close(outside)
    os.close(inside)


# ---- over HTTP


def _get(url: str, **headers: str) -> str:
    request = urllib.request.Request(url, headers=headers)
    with urllib.request.urlopen(request, timeout=10) as answer:
        return answer.read().decode()


def test_an_engine_of_the_process_has_a_port(
    folder: DataSet, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    port = _free_port()
    engine = forebay.Engine(memory="64M", metrics_port=port)
    assert sum(len(b) for b in forebay.DataLoader(folder.root, 8, engine=engine)) == len(folder)
    url = f"http://127.0.0.1:{port}/metrics"
    assert f"\nforebay_stage_samples_total {len(folder)}\n" in _get(url)
    with pytest.raises(urllib.error.HTTPError, match="403"):
        _get(url, Host="attacker.example")
    child = os.fork()
    if child == 0:
        del engine  # its thread is its parent's
        os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
    assert "forebay_stage_samples_total" in _get(url)
    other = forebay.Engine(memory="64M", metrics_port=port)
    assert other.metrics() and "no metrics over HTTP" in caplog.text
    monkeypatch.setenv("FOREBAY_METRICS_PORT", "what")
    with pytest.raises(forebay.ArgumentError, match="FOREBAY_METRICS_PORT is what"):
        forebay.Engine(memory="64M")


_JOB = textwrap.dedent("""\
    import sys, time, forebay
    root, rank, world, pause = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), float(sys.argv[4])
    engine = forebay.SharedEngine(memory="8M", linger=0, keep=False)
    loader = forebay.DataLoader(root, 8, shuffle=True, rank=rank, world_size=world, engine=engine,
                                _delay=sys.argv[5])
    while True:
        for batch in loader:
            time.sleep(pause)  # the step
            batch.release()
""")


@pytest.fixture
def jobs(large_folder: DataSet, run_folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Two ranks that train from slow storage, and the address of their daemon's page."""
    port = _free_port()
    monkeypatch.setenv("FOREBAY_METRICS_PORT", str(port))
    job = [sys.executable, "-c", _JOB, str(large_folder.root)]
    running = [subprocess.Popen([*job, str(rank), "2", "0.02", _SLOW]) for rank in range(2)]
    url = f"http://127.0.0.1:{port}/"

    def up() -> bool:
        try:
            return len(list(watch.streams(json.loads(_get(f"{url}status.json"))))) == 2
        except OSError:
            return False

    try:
        _await(up, "the daemon's page does not come up")
        yield url
    finally:
        for process in running:
            process.kill()
            process.wait()


def test_prometheus_scrapes_the_daemon(jobs: str, tmp_path: Path) -> None:
    program = shutil.which("prometheus")
    if program is None:
        pytest.skip("Debian's prometheus is not installed")
    text = _get(f"{jobs}metrics")
    names = re.findall(r"^# TYPE (\S+) (?:counter|gauge)$", text, re.M)
    assert names == re.findall(r"^# HELP (\S+) \S", text, re.M)
    assert len(names) == len(set(names))
    documented = (_ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    assert [name for name in names if f"`{name}`" not in documented] == []

    config = tmp_path / "prometheus.yml"
    target = urllib.parse.urlparse(jobs).netloc
    config.write_text(
        "scrape_configs:\n- job_name: forebay\n  honor_labels: true\n  scrape_interval: 500ms\n"
        f"  scrape_timeout: 500ms\n  static_configs: [{{targets: ['{target}']}}]\n"
    )
    port = _free_port()
    with (tmp_path / "log").open("wb") as log:
        process = subprocess.Popen(
            [program, f"--config.file={config}", f"--storage.tsdb.path={tmp_path / 'tsdb'}",
             f"--web.listen-address=127.0.0.1:{port}", "--log.level=warn"],
            stdout=log, stderr=log, cwd=tmp_path,
        )  # fmt: skip

    def ask(query: str) -> list[dict[str, Any]]:
        question = urllib.parse.urlencode({"query": query})
        try:
            answer = _get(f"http://127.0.0.1:{port}/api/v1/query?{question}")
        except urllib.error.HTTPError as error:
            assert error.code != 400, (query, error.read())  # not PromQL
            return []
        except OSError:
            return []
        return json.loads(answer)["data"]["result"]

    def comes(query: str, wanted: Callable[[list[dict[str, Any]]], bool]) -> None:
        """A busy machine misses a scrape now and then, and has nothing until the next."""
        said: list[dict[str, Any]] = []

        def there() -> bool:
            said[:] = ask(query)
            return wanted(said)

        _await(there, lambda: f"{query}: {said}; {(tmp_path / 'log').read_text()}")

    def are_waits(rows: list[dict[str, Any]]) -> bool:
        waits = {row["metric"]["cause"]: float(row["value"][1]) for row in rows}
        return set(waits) == set(CAUSES) and waits["source"] > 0

    try:
        rate = "sum by (rank) (rate(forebay_rank_samples_total[5s])) > 0"
        comes(rate, lambda rows: {row["metric"]["rank"] for row in rows} == {"0", "1"})
        comes('up{job="forebay"}', lambda rows: [row["value"][1] for row in rows] == ["1"])
        comes('sum by (cause) (forebay_rank_stall_nanoseconds_total{rank="0"})', are_waits)
        for query in _dashboard():
            query = query.replace("$__rate_interval", "5s")
            ask(re.sub(r"\$(instance|job)", ".*", query))
        comes(
            'forebay_knob_value{knob="daemon_linger_seconds"}',
            lambda rows: (
                [(r["metric"]["mechanism"], r["value"][1]) for r in rows] == [("daemon", "0")]
            ),
        )
    finally:
        process.terminate()
        process.wait(20)


def test_the_page_in_a_browser(
    jobs: str, tmp_path: Path, large_folder: DataSet, capsys: pytest.CaptureFixture
) -> None:
    assert main(["status"]) == 0
    assert f"web page: {jobs} " in capsys.readouterr().out
    if browser.program() is None:
        pytest.skip("no Chromium is installed (Debian: chromium-headless-shell)")
    with pytest.raises(urllib.error.HTTPError, match="403"):
        _get(f"{jobs}status.json", Host="attacker.example")
    chromium = browser.Browser(tmp_path / "profile")
    try:
        chromium.open(jobs)
        chromium.wait_for("Number(document.body?.dataset.looks) >= 3")
        value = chromium.evaluate
        # Each look shows what happened since the last one: on a busy machine, nothing perhaps.
        chromium.wait_for(
            r"/^The rank that waits most \(.+, rank [01]\) waited \d+ % of/"
            ".test(document.getElementById('answer').textContent)"
        )
        chromium.wait_for("document.getElementById('state-text').textContent === 'live'")
        rows: list[list[str]] = []

        def both_train() -> bool:
            rows[:] = value("[...document.querySelectorAll('#jobs tbody tr')].map(r => "
                            "[...r.cells].map(c => c.textContent))")  # fmt: skip
            return (
                sorted(row[1] for row in rows) == ["0 of 2", "1 of 2"]
                and all(float(row[4].replace(",", "")) > 0 for row in rows)  # samples a second
                and all(row[7] in CAUSES.values() for row in rows)
            )

        _await(both_train, lambda: str(rows))
        assert all(row[3] == str(large_folder.root) for row in rows)
        plots: list[list[Any]] = []

        def all_drawn() -> bool:
            plots[:] = value(
                "[...document.querySelectorAll('.plot')].map(p => [p.querySelector('h2')"
                ".textContent, p.querySelectorAll('path').length, p.querySelector('.legend')"
                ".textContent])"
            )
            return all(paths >= 1 and re.search(r"\d", legend) for _, paths, legend in plots)

        _await(all_drawn, lambda: str(plots))
        assert len(plots) == 6
        assert value("document.querySelectorAll('#knobs tbody tr').length") >= 5
        # It shrinks with the window instead of being cut off.
        metrics = dict(width=400, height=800, deviceScaleFactor=1, mobile=True)
        chromium.call("Emulation.setDeviceMetricsOverride", **metrics)
        assert value("document.documentElement.scrollWidth") <= 400
        for scheme in ("light", "dark"):
            chromium.scheme(scheme)
            chromium.screenshot(tmp_path / f"{scheme}.png")
            assert (tmp_path / f"{scheme}.png").stat().st_size > 20_000
        assert value("document.body.dataset.error ?? ''") == "" and chromium.errors == []
        assert {urllib.parse.urlparse(r).netloc for r in chromium.requests if r[:4] == "http"} == {
            urllib.parse.urlparse(jobs).netloc
        }
    finally:
        chromium.close()


def test_a_page_of_ones_own(run_folder: Path) -> None:
    process = subprocess.Popen([sys.executable, "-m", "forebay.cli", "top", "--web"],
                               stdout=subprocess.PIPE, text=True)  # fmt: skip
    assert process.stdout is not None
    with process.stdout:
        url = process.stdout.readline().strip()
        assert re.fullmatch(r"http://127\.0\.0\.1:\d+/[\w-]{16}/", url)
        assert "<!doctype html>" in _get(url)
        with pytest.raises(urllib.error.HTTPError, match="503"):
            _get(f"{url}status.json")
        engine = forebay.SharedEngine(memory="64M", linger=0)
        assert json.loads(_get(f"{url}status.json"))["pid"] == _status(run_folder)["pid"]
        assert "forebay_daemon_clients" in _get(f"{url}metrics") and engine.client() is not None
        stranger = url.rsplit("/", 2)[0]
        for wrong in (f"{stranger}/", f"{stranger}/status.json", f"{url[:-2]}/", stranger):
            with pytest.raises(urllib.error.HTTPError, match="403"):
                _get(wrong)
        with pytest.raises(urllib.error.HTTPError, match="403"):
            _get(url, Host="attacker.example")
        with pytest.raises(urllib.error.HTTPError, match="404"):
            _get(f"{url}other")
        process.send_signal(signal.SIGINT)
    assert process.wait(10) == 0


def _board() -> dict[str, Any]:
    return json.loads((_ROOT / "contrib" / "grafana" / "forebay.json").read_text("utf-8"))


def _dashboard() -> list[str]:
    return [target["expr"] for panel in _board()["panels"] for target in panel["targets"]]


def test_the_dashboard_names_real_metrics() -> None:
    board = _board()
    documented = (_ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    variables = [v["query"] for v in board["templating"]["list"] if v["type"] == "query"]
    assert len(_dashboard()) >= 8
    for query in [*_dashboard(), *variables]:
        named = re.findall(r"forebay_[a-z_]+", query)
        assert named
        assert [name for name in named if f"`{name}`" not in documented] == [], query
    ids = [p["id"] for p in board["panels"]]
    assert len(ids) == len(set(ids))


# ---- the log


def _lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if "Epoch" in r.getMessage()]


@pytest.mark.parametrize(
    "kind", ["embedded", "daemon", "decoded", "decoded through the daemon", "accelerated"]
)
def test_a_line_at_each_epochs_end(
    kind: str, tmp_path: Path, run_folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    import numpy as np

    for i in range(24):
        (tmp_path / "data" / "a").mkdir(parents=True, exist_ok=True)
        np.save(tmp_path / "data" / "a" / f"{i}.npy", np.full(100, i, np.float32))
    loader: Any
    options: dict[str, Any] = dict(batch_size=4, _delay="open_ms=200")
    if "daemon" in kind:
        options["engine"] = forebay.SharedEngine(memory="64M", linger=0)
    else:
        options["engine"] = forebay.Engine(memory="64M")
    if kind == "accelerated":
        import torch.utils.data

        class Files(torch.utils.data.Dataset):
            def __init__(self) -> None:
                self.files = [str(p) for p in sorted((tmp_path / "data" / "a").iterdir())]

            def __len__(self) -> int:
                return len(self.files)

            def __getitem__(self, i: int) -> bytes:
                with open(self.files[i], "rb") as file:
                    return file.read()

        plain = torch.utils.data.DataLoader(Files(), 4, collate_fn=list)
        loader = forebay.accelerate(plain, engine=options["engine"])
    else:
        loader = forebay.DataLoader(
            tmp_path / "data", **options, **({"decode": "npy"} if "decoded" in kind else {})
        )
    with caplog.at_level(logging.INFO, "forebay"):
        for _ in range(2):
            assert len(list(loader)) == 6
    if "daemon" in kind:
        # What the consumer waited for, not those who decode ahead of it.
        (stream,) = [s for _, s in watch.streams(_status(run_folder))]
        waited = sum(r.stall for r in loader.stats())
        assert 0.02 < sum(stream["stall_ns"].values()) * 1e-9 <= waited + 0.05
    first, second = _lines(caplog)
    where = "Files" if kind == "accelerated" else str(tmp_path / "data")
    assert first.startswith(f"forebay: {where}: Epoch 0: 24 samples in ")
    assert second.startswith(f"forebay: {where}: Epoch 1: 24 samples in ")
    if kind != "accelerated":
        assert re.search(r"of it for reads from storage \(2[34] reads", first)
    assert loader.report().splitlines()[0] in second
    caplog.clear()
    list(loader)  # nobody listens: nothing is said
    assert _lines(caplog) == []


def test_only_rank_0_speaks_to_everybody(caplog: pytest.LogCaptureFixture) -> None:
    import numpy as np

    report = EpochReport(epoch=2, seconds=10.0, batches=1, samples=10, bytes=10,
                         wait={"source": 3.0, "decode": 1.0}, source_reads=5, source_bytes=5,
                         batch_seconds=np.zeros(1))  # fmt: skip
    with caplog.at_level(logging.INFO, "forebay"):
        log_epoch("/data", 0, lambda: report)
        log_epoch("/data", 1, lambda: pytest.fail("nobody asked for it"))
    with caplog.at_level(logging.DEBUG, "forebay"):
        log_epoch("/data", 1, lambda: report)
    assert _lines(caplog) == [
        "forebay: /data: Epoch 2: 10 samples in 10.00 s; training waited 40% of the time, 75% of "
        "it for reads from storage (5 reads, 0 B/s).",
        "forebay: /data, rank 1: Epoch 2: 10 samples in 10.00 s; training waited 40% of the time, "
        "75% of it for reads from storage (5 reads, 0 B/s).",
    ]
