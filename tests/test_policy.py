"""Policies as people write them: TOML in, clear words out."""

from __future__ import annotations

import gc
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from forebay import ArgumentError, DataLoader, SharedEngine, _forebay, cli
from forebay.policy import BUILT_IN, JobRule, Policy, from_json, knobs_of, load_policy, parse_policy
from forebay.slowfs import SlowFs
from forebay_testing import Etcd

_usable, _reason = SlowFs.available()

SITE = """\
# Two teams.
[tiers]
memory = "64G"
folder = "1T"

[tuner]
on = false
knobs = { source_reads_in_flight = 32 }

[[job]]
match = "imagenet-*"
share = 3
priority = 1
min_bandwidth = "200M"
max_bandwidth = "1.5GiB"
min_operations = 100
max_operations = 5000.5
memory = "8G"
folder = 0

[[job]]
match = "*"
"""
KNOBS = [("parallelism", 1, 256), ("read_ahead_bytes", 0, 1 << 40)]


def call(capsys: pytest.CaptureFixture[str], *arguments: object) -> tuple[int, str, str]:
    code = cli.main([str(a) for a in arguments])
    captured = capsys.readouterr()
    return code, captured.out, captured.err


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    # No daemon of a test that runs beside this one is asked for its knobs.
    (tmp_path / "r").mkdir(mode=0o700)
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path / "r"))
    file = tmp_path / "site.toml"
    file.write_text(SITE)
    return file


def test_every_key_is_read(site: Path) -> None:
    policy = load_policy(site, BUILT_IN)
    assert policy.jobs == (
        JobRule(
            match="imagenet-*", share=3, priority=1, min_bandwidth=200 << 20,
            max_bandwidth=3 << 29, min_operations=100, max_operations=5000.5, memory=8 << 30,
            folder=0,
        ),
        JobRule("*"),
    )  # fmt: skip
    assert (policy.memory, policy.folder) == (64 << 30, 1 << 40)
    assert not policy.tuner and policy.knobs == {"source_reads_in_flight": 32}
    assert policy.rule_for("imagenet-22k") == policy.jobs[0]
    assert policy.rule_for("other") == policy.jobs[1]


def test_the_canonical_form_is_the_same_policy(site: Path) -> None:
    policy = load_policy(site)
    assert from_json(policy.json) == policy
    spaced = json.dumps(json.loads(policy.json), indent=2)
    assert from_json(spaced) == policy
    assert parse_policy("") == Policy()
    assert parse_policy("").rule_for("any") is None


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("[[jobs]]\n", "p.toml:1: jobs is not a key; did you mean job?"),
        ("x = 1\n", "p.toml:1: x is not a key; there are: job, tiers, tuner"),
        ("[job]\nmatch = 'a'\n", "p.toml:1: job is a table; it must be rules, each under [[job]]"),
        ("[[job]]\nshare = 2\n", "p.toml:1: job[0].match is missing; name the jobs"),
        ("[[job]]\nmatch = 'a'\n\nshares = 2\n", "p.toml:4: job[0].shares is not a key; did you"),
        ("[[job]]\nmatch = 'a'\nshare = 'x'\n", "p.toml:3: job[0].share is 'x'; it must be a num"),
        ("[[job]]\nmatch = 'a'\nshare = 0\n", "p.toml:3: job[0].share must be from 0.001 to"),
        ("[[job]]\nmatch = 'a'\nshare = nan\n", "p.toml:3: job[0].share is nan; it must be"),
        ("[[job]]\nmatch = 'a'\nshare = true\n", "p.toml:3: job[0].share is true; it must be"),
        ("[[job]]\nmatch = 'a'\nmax_bandwidth = 'fast'\n",
         "p.toml:3: job[0].max_bandwidth is 'fast'; it must be bytes a second, such as \"200M\""),
        ("[[job]]\nmatch = 'a'\nmin_bandwidth = -1\n", "p.toml:3: job[0].min_bandwidth is -1; it"),
        ("[[job]]\nmatch = 'a'\n[[job]]\nmatch = 'b'\nmin_bandwidth = '2G'\nmax_bandwidth = '1G'",
         "p.toml:5: job[1].min_bandwidth is above max_bandwidth; lower one of the two"),
        ("[[job]]\nmatch = '*'\n[[job]]\nmatch = 'b'\n",
         "p.toml:4: job[1].match is never reached: job[0]"),
        ("[[job]]\nmatch = 'a'\npriority = 1.5\n", "p.toml:3: job[0].priority is 1.5; it must be"),
        ("[[job]]\nmatch = 'a'\npriority = 101\n", "p.toml:3: job[0].priority must be from -100"),
        ("[[job]]\nmatch = 'a'\npriority = 99999999999999999999\n", "p.toml"),
        ("[tiers]\nnvme = 1\n", "p.toml:2: tiers.nvme is not a key; there are: memory, folder"),
        ("[tiers]\nmemory = []\n", "p.toml:2: tiers.memory is []; it must be a size in bytes"),
        ("tiers = 3\n", "p.toml:1: tiers is 3; it must be a table: [tiers]"),
        ("[tuner]\non = 1\n", "p.toml:2: tuner.on is 1; it must be true or false"),
        ("[tuner.knobs]\nparalelism = 1\n",
         "p.toml:2: tuner.knobs.paralelism is not a key; did you mean parallelism?"),
        ("[tuner]\nknobs = { parallelism = 0 }\n",
         "p.toml:2: tuner.knobs.parallelism is 0; it must be from 1 to 256"),
        ("[tuner.knobs]\nparallelism = 'many'\n", "p.toml:2: tuner.knobs.parallelism is 'many'"),
        ("[tiers]\nmemory = \n", "p.toml:2: "),
    ],
)  # fmt: skip
def test_complaints_name_file_line_key_and_remedy(text: str, said: str) -> None:
    with pytest.raises(ArgumentError) as error:
        parse_policy(text, "p.toml", KNOBS)
    assert str(error.value).startswith(said)


def test_check_says_what_it_means(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = call(capsys, "policy", "check", site, "--job", "imagenet-1")
    assert code == 0
    assert "ok, 2 rules" in out
    assert "200.0 MiB/s to 1.5 GiB/s" in out and "8.0 GiB" in out
    assert "imagenet-* 100%" in out  # it has the higher priority
    assert "tuner: off; source_reads_in_flight = 32" in out
    assert "within the built-in limits" in out
    assert "match = 'imagenet-*'" in out
    code, out, _ = call(capsys, "policy", "check", site, "--json")
    assert (code, json.loads(out)["version"]) == (0, 1)


def test_shares_are_shown_as_parts(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "p.toml"
    file.write_text("[[job]]\nmatch='a'\nshare=3\n[[job]]\nmatch='*'\n")
    code, out, _ = call(capsys, "policy", "check", file)
    assert code == 0 and "a 75%, * 25%" in out


def test_check_fails_for_what_is_wrong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "p.toml"
    file.write_text("[[job]]\nmatsh = 'a'\n")
    code, _, err = call(capsys, "policy", "check", file)
    assert code == 2 and f"{file}:2: job[0].matsh is not a key; did you mean match?" in err
    code, _, err = call(capsys, "policy", "check", tmp_path / "none.toml")
    assert code == 2 and "does not exist" in err
    code, _, err = call(capsys, "policy", "check", tmp_path)
    assert code == 2 and "is a folder" in err
    file.write_bytes(b"\xff")
    code, _, err = call(capsys, "policy", "check", file)
    assert code == 2 and "not UTF-8" in err


def test_without_a_daemon_set_and_show_say_so(
    site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    for arguments in (("set", site), ("show",)):
        code, _, err = call(capsys, "policy", *arguments)
        assert code == 1 and "no daemon is running" in err and "--etcd" in err


def test_a_daemon_follows_its_policy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    data = tmp_path / "data"
    data.mkdir()
    for i in range(300):  # more than read-ahead over an epoch's end could hold
        (data / f"{i:03}.bin").write_bytes(bytes(100_000))
    file = tmp_path / "node.toml"
    file.write_text(
        '[[job]]\nmatch = "slow-*"\nmax_bandwidth = "512K"\n'
        "[tuner.knobs]\nsource_reads_in_flight = 3\n"
    )
    engine = SharedEngine("12M", keep=False, linger=0, job="slow-one")
    code, out, _ = call(capsys, "policy", "show")
    assert code == 0 and "no policy is in force" in out
    code, out, err = call(capsys, "policy", "set", file)
    assert code == 0 and "is in force on this node" in out, err
    code, out, _ = call(capsys, "policy", "show")
    assert code == 0 and "slow-*" in out and "source_reads_in_flight = 3" in out
    loader = DataLoader(data, 5, shuffle=True, engine=engine, rank=0, world_size=1)

    def job() -> dict[str, Any]:
        jobs = json.loads(engine.native.describe())["control"]["jobs"]
        return next((j for j in jobs if j["job"] == "slow-one"), {})

    def consume(seconds: float) -> int:
        took, end = 0, time.monotonic() + seconds
        while time.monotonic() < end:
            for batch in loader:
                took += len(batch) * 100_000 if time.monotonic() < end else 0
                if time.monotonic() > end:
                    break
        return took

    # A good deal is read before the first decision.
    until = time.monotonic() + 30
    while not job().get("limit_bytes_per_s"):
        assert time.monotonic() < until
        consume(0.1)
    assert job()["limit_bytes_per_s"] == pytest.approx(512 << 10, rel=1e-3)
    consume(0.5)
    assert consume(1.5) < 3e6  # without a limit it would be a gigabyte
    while job()["held_share"] <= 0.5:
        assert time.monotonic() < until, job()
        time.sleep(0.05)
    assert engine.knobs()["source_reads_in_flight"][0] == 3
    assert loader.stats()[-1].main_cause == "share"
    assert "share" in loader.report()
    code, out, _ = call(capsys, "status")
    assert code == 0 and "slow-one" in out and "waits for its share" in out
    # All or nothing: a knob that the daemon does not have.
    file.write_text("[tuner.knobs]\nnonsense = 3\n")
    code, _, err = call(capsys, "policy", "set", file)
    assert code == 2 and "tuner.knobs.nonsense" in err and "source_reads_in_flight" in err
    code, out, _ = call(capsys, "policy", "show", "--json")
    assert "slow-*" in out
    loader.close()


def test_check_asks_no_daemon_but_the_one_that_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    file = tmp_path / "node.toml"
    file.write_text("[tuner.knobs]\nsource_reads_in_flight = 200\nread_ahead_bytes = 1000000000\n")
    code, _, err = call(capsys, "policy", "check", file, "--folder", tmp_path / "none")
    assert code == 1 and "no daemon is running" in err
    engine = SharedEngine("12M", linger=0)
    said = json.loads(engine.native.describe())
    code, out, err = call(capsys, "policy", "check", file)
    assert code == 0 and "within the built-in limits" in out, err
    folder = tmp_path / "forebay"
    code, _, err = call(capsys, "policy", "check", file, "--folder", folder)
    assert code == 2 and "node.toml:" in err and "it must be from 0 to" in err
    file.write_text("[tuner.knobs]\nsource_reads_in_flight = 3\n")
    code, out, _ = call(capsys, "policy", "check", file, "--folder", folder)
    assert code == 0 and f"the limits of forebayd {said['pid']} in {folder}" in out
    # What a daemon has is among the built-in ones, and within.
    known = {name: (low, high) for name, low, high in BUILT_IN}
    for name, low, high in knobs_of(said):
        assert known[name][0] == low and high <= known[name][1], name
    file.write_text("[tuner.knobs]\nsource_read_in_flight = 3\n")
    code, _, err = call(capsys, "policy", "check", file)
    assert code == 2 and "did you mean source_reads_in_flight?" in err


@pytest.mark.skipif(not Etcd.available()[0], reason=Etcd.available()[1])
def test_a_clusters_policy_lies_in_etcd(site: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with Etcd() as etcd:
        code, out, err = call(capsys, "policy", "show", "--etcd", etcd.endpoint)
        assert code == 0 and "no policy is in force" in out, err
        code, _, err = call(capsys, "policy", "set", site, "--etcd", etcd.endpoint)
        assert code == 0, err
        code, out, _ = call(capsys, "policy", "show", "--etcd", etcd.endpoint)
        assert code == 0 and "imagenet-*" in out
        etcd.kill()
        code, _, err = call(capsys, "policy", "show", "--etcd", etcd.endpoint)
        assert code == 1 and etcd.endpoint in err
        etcd.launch()
        assert etcd.wait()
        code, out, _ = call(capsys, "policy", "show", "--etcd", etcd.endpoint)
        assert code == 0 and "imagenet-*" in out
        code, _, err = call(capsys, "policy", "remove", "--etcd", etcd.endpoint)
        assert code == 0, err
        code, out, _ = call(capsys, "policy", "show", "--etcd", etcd.endpoint)
        assert code == 0 and "no policy is in force" in out
    code, _, err = call(capsys, "policy", "show", "--etcd", "ftp://a:1")
    assert code == 2 and "https://host:port" in err


def test_division_from_python() -> None:
    inf = float("inf")
    given = _forebay.divide_fairly(100, [(inf, 3, 0, inf, 0), (inf, 1, 0, inf, 0)])
    assert given == [75, 25]


def test_the_documents_example_is_a_policy() -> None:
    page = (Path(__file__).parent.parent / "docs" / "policies.md").read_text()
    example = page.split("```toml\n")[1].split("```")[0]
    policy = parse_policy(example, "docs/policies.md")
    assert [rule.match for rule in policy.jobs] == ["imagenet-*", "nightly-*"]


def test_a_policy_outlives_its_daemon(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_RUNTIME_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    file = tmp_path / "node.toml"
    file.write_text('[[job]]\nmatch = "kept-*"\nshare = 3\n')

    running = [SharedEngine("12M", linger=0)]

    def end(kill: bool = False) -> None:
        pid = int(json.loads(running[0].native.describe())["pid"])
        if kill:
            os.kill(pid, signal.SIGKILL)
        running.clear()
        gc.collect()
        until = time.monotonic() + 30
        while _runs(pid):
            assert time.monotonic() < until
            time.sleep(0.02)

    code, out, err = call(capsys, "policy", "set", file)
    assert code == 0 and "kept for the next daemon in" in out, err
    (kept,) = (tmp_path / "state" / "forebay").iterdir()
    assert str(kept) in out and kept.stat().st_mode & 0o777 == 0o600
    code, out, _ = call(capsys, "status")
    assert code == 0 and str(kept) in out
    # Whether it ends by itself or is killed.
    for kill in (False, True):
        end(kill)
        code, out, err = call(capsys, "policy", "show")
        assert code == 0 and "kept-*" in out and "no daemon is running" in err
        running.append(SharedEngine("12M", linger=0))
        code, out, err = call(capsys, "policy", "show")
        assert code == 0 and "kept-*" in out and not err
    # What somebody else may have written is not believed, and that is said.
    end()
    kept.chmod(0o666)
    running.append(SharedEngine("12M", linger=0))
    code, out, _ = call(capsys, "policy", "show")
    assert code == 0 and "no policy is in force" in out
    code, out, _ = call(capsys, "status")
    assert code == 0 and str(kept) in out and "remove it" in out
    code, out, err = call(capsys, "policy", "set", file)
    assert code == 0 and "kept for the next daemon in" in out, err
    # Removed, by the daemon or where none runs.
    code, out, err = call(capsys, "policy", "remove")
    assert code == 0 and "no policy is in force" in out and not kept.exists(), err
    code, out, err = call(capsys, "policy", "set", file)
    assert code == 0 and kept.exists(), err
    end()
    code, out, err = call(capsys, "policy", "remove")
    assert code == 0 and "no daemon is running" in out and not kept.exists(), err
    running.append(SharedEngine("12M", linger=0))
    code, out, _ = call(capsys, "policy", "show")
    assert code == 0 and "no policy is in force" in out
    end()


def _runs(pid: int) -> bool:
    """Whether it does: a dead one may still be waited for by who adopted it."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Etcd.available()[0], reason=Etcd.available()[1])
@pytest.mark.skipif(not _usable, reason=_reason)
def test_limits_outlive_the_controller(tmp_path: Path) -> None:
    shares = {"a": 3, "b": 2, "c": 1}
    data = tmp_path / "data"
    data.mkdir()
    for i in range(60):
        (data / f"{i:03}.bin").write_bytes(bytes(200_000))
    ended = threading.Event()

    def consume(engine: SharedEngine) -> None:
        loader = DataLoader(mount.path, 4, shuffle=True, engine=engine, rank=0, world_size=1)
        while not ended.is_set():
            for _ in loader:
                if ended.is_set():
                    break
        loader.close()

    # A source that all want more of than there is: only such a one is divided.
    with Etcd() as etcd, SlowFs(data, open_ms=0.2, read_ms=1, bandwidth_mb=30) as mount:
        rules = [{"match": job, "share": share} for job, share in shares.items()]
        policy = json.dumps({"version": 1, "job": rules})
        _forebay.store_policy([etcd.endpoint], "/forebay/", policy)
        engines = {}
        for job in shares:
            (tmp_path / job).mkdir(mode=0o700)
            engines[job] = SharedEngine(
                "8M", keep=False, linger=0, job=job, folder=tmp_path / job, etcd=etcd.endpoint
            )
        threads = [threading.Thread(target=consume, args=(e,)) for e in engines.values()]
        for thread in threads:
            thread.start()

        def control(job: str) -> dict[str, Any]:
            said: dict[str, Any] = json.loads(engines[job].native.describe())["control"]
            return said

        def limits() -> dict[str, float | None]:
            return {
                of["job"]: of["limit_bytes_per_s"] for job in engines for of in control(job)["jobs"]
            }

        try:
            until = time.monotonic() + 60
            while set(found := limits()) != set(shares) or None in found.values():
                assert time.monotonic() < until, found
                time.sleep(0.05)
            (leader,) = (job for job in engines if control(job)["leads"])
            dead = control(leader)["node"]
            os.kill(json.loads(engines[leader].native.describe())["pid"], signal.SIGKILL)
            del engines[leader]
            # At no time are the others without limits, whoever decides.
            while any(control(job)["leader"] in ("", dead) for job in engines):
                assert time.monotonic() < until
                found = limits()
                assert set(found) == set(engines) and None not in found.values()
                time.sleep(0.02)
            while not all(control(job)["state"] == "following" for job in engines):
                assert time.monotonic() < until
                assert None not in limits().values()
                time.sleep(0.02)
        finally:
            ended.set()
            for thread in threads:
                thread.join()
            engines.clear()
            gc.collect()
