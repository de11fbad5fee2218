"""``forebay simulate``: how long a job takes under each policy, in virtual time.

A scenario is a TOML file; docs/simulator.md describes its keys and the model.
"""

from __future__ import annotations

import argparse
import difflib
import json
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from .._errors import ArgumentError, MissingError, UnsupportedError
from .._forebay import SimScenario, SimTier, Simulation, sim_policies
from .._forebay import simulate_peers as _native_peers
from .._internal.units import parse_bytes
from ..views.progress import counting

_MB = 1 << 20
_U32 = (1 << 32) - 1
BOUND = "lower_bound"
_UNITS = {"s": 1.0, "min": 60.0, "h": 3600.0}


@dataclass
class Scenario:
    """One scenario file: a simulator's input for each of its node counts."""

    file: str
    title: str
    nodes: list[int]
    policies: list[str]
    unit: str
    settings: dict[str, Any]  # as the file has them
    published: dict[str, float]  # by policy, in `unit`
    make: Callable[[int], SimScenario] = field(repr=False)


class _Section:
    """A table of the file; every complaint names the file and the key."""

    def __init__(self, file: str, name: str, values: object) -> None:
        self._file = file
        self._name = name
        if not isinstance(values, dict):
            raise ArgumentError(f"{file}: {name} is {values!r}; it must be a table, as [{name}]")
        self._values = dict(values)
        self._known: list[str] = []

    def _key(self, key: str) -> str:
        return f"{self._name}.{key}" if self._name else key

    def fail(self, key: str, value: object, wanted: str) -> ArgumentError:
        return ArgumentError(f"{self._file}: {self._key(key)} is {value!r}; {wanted}")

    def take(self, key: str, default: object = ...) -> Any:
        self._known.append(key)
        value = self._values.pop(key, default)
        if value is ...:
            raise ArgumentError(f"{self._file}: {self._key(key)} is missing")
        return value

    def whole(self, key: str, default: object = ..., low: int = 1, high: int = _U32) -> int:
        value = self.take(key, default)
        return self.check_whole(key, value, low, high)

    def check_whole(self, key: str, value: object, low: int = 1, high: int = _U32) -> int:
        if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
            raise self.fail(key, value, f"it must be a whole number from {low} to {high}")
        return value

    def rate(self, key: str, default: object = ...) -> float:
        return self.check_rate(key, self.take(key, default))

    def check_rate(self, key: str, value: object) -> float:
        number = isinstance(value, (int, float)) and not isinstance(value, bool)
        if not number or not 0 < value < float("inf"):  # type: ignore[operator]
            raise self.fail(key, value, "it must be a number above 0")
        return float(value)  # type: ignore[arg-type]

    def mb(self, key: str, default: object = ..., positive: bool = True) -> float:
        """A size, as bytes or as text such as "120G", in MB."""
        value = self.take(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float, str)):
            raise self.fail(key, value, 'it must be a size, such as 4096 or "120G"')
        try:
            size = parse_bytes(value, self._key(key))
        except (ArgumentError, ValueError, OverflowError) as error:
            raise ArgumentError(f"{self._file}: {error}") from None
        if positive and size == 0:
            raise self.fail(key, value, "it must be above 0")
        return size / _MB

    def text(self, key: str, default: object = ..., choices: Sequence[str] = ()) -> str:
        value = self.take(key, default)
        if not isinstance(value, str) or (choices and value not in choices):
            wanted = f"it must be one of: {', '.join(choices)}" if choices else "it must be text"
            raise self.fail(key, value, wanted)
        return value

    def table(self, key: str, default: object = ...) -> _Section:
        return _Section(self._file, self._key(key), self.take(key, default))

    def rest(self) -> dict[str, object]:
        rest, self._values = self._values, {}
        return rest

    def done(self) -> None:
        for key in self._values:
            close = difflib.get_close_matches(key, self._known, n=1)
            hint = f"did you mean {close[0]}?" if close else f"known: {', '.join(self._known)}"
            raise ArgumentError(f"{self._file}: {self._key(key)} is not a key; {hint}")


def _toml(path: Path) -> dict[str, Any]:
    try:
        import tomllib
    except ImportError:  # Python 3.10
        try:
            import tomli as tomllib  # type: ignore[no-redef]
        except ImportError:
            raise UnsupportedError(
                "scenarios are TOML, which Python reads from 3.11 on; try: pip install tomli"
            ) from None
    try:
        text = path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise MissingError(f"{path} does not exist; scenarios/ has some to start from") from None
    except IsADirectoryError:
        raise ArgumentError(f"{path} is a folder; name the .toml files in it") from None
    except UnicodeDecodeError as error:
        raise ArgumentError(f"{path}: not UTF-8 text: {error}") from None
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ArgumentError(f"{path}: {error}") from None


def _check_policy(section: _Section, key: str, name: object) -> str:
    known = sim_policies()
    if isinstance(name, str) and name in known:
        return name
    close = difflib.get_close_matches(str(name), known, n=1)
    hint = f"did you mean {close[0]}?" if close else f"there are: {', '.join(known)}"
    raise section.fail(key, name, f"it is no policy; {hint}")


def load(path: str | Path) -> Scenario:
    """Reads and checks a scenario; what is wrong is an ArgumentError with file and key."""
    file = str(path)
    settings = _toml(Path(path))
    top = _Section(file, "", settings)
    title = top.text("title", Path(path).stem)
    unit = top.text("unit", "s", tuple(_UNITS))

    names = top.take("policies", sim_policies())
    if not isinstance(names, list) or not names:
        raise top.fail("policies", names, "it must be a list of names")
    policies = [_check_policy(top, "policies", name) for name in names]
    policies = [BOUND, *dict.fromkeys(p for p in policies if p != BOUND)]

    cluster = top.table("cluster")
    nodes = cluster.take("nodes")
    counts = [
        cluster.check_whole("nodes", n) for n in (nodes if isinstance(nodes, list) else [nodes])
    ]
    if not counts:
        raise cluster.fail("nodes", nodes, "name at least one number")
    ranks = cluster.whole("ranks_per_node", 1)
    cluster.done()

    tiers = []
    tables = top.take("tiers", [])
    if not isinstance(tables, list):
        raise top.fail("tiers", tables, "write each tier as [[tiers]]")
    for i, table in enumerate(tables):
        tier = _Section(file, f"tiers[{i}]", table)
        tiers.append(
            SimTier(
                tier.text("name", f"tier {i}"),
                tier.mb("bytes", positive=False),
                tier.rate("mb_per_s"),
                tier.rate("threads", 1),
            )
        )
        tier.done()

    base = SimScenario()
    staging = top.table("staging")
    base.staging_mb = staging.mb("bytes")
    base.staging_mb_per_s = staging.rate("mb_per_s")
    base.staging_threads = staging.whole("threads", high=4096)
    staging.done()
    network = top.table("network")
    base.network_mb_per_s = network.rate("mb_per_s")
    network.done()

    source = top.table("source")
    readers = source.take("readers")
    rates = source.take("mb_per_s")
    if not isinstance(readers, list) or not isinstance(rates, list) or len(readers) != len(rates):
        raise source.fail("mb_per_s", rates, "readers and mb_per_s must be lists of one length")
    base.source = [
        (source.check_rate("readers", n), source.check_rate("mb_per_s", rate))
        for n, rate in zip(readers, rates, strict=True)
    ]
    source.done()

    dataset = top.table("dataset")
    base.samples = dataset.whole("samples")
    base.sample_mb = dataset.mb("sample_bytes")
    base.sample_sigma_mb = dataset.mb("sigma_bytes", 0, positive=False)
    dataset.done()

    job = top.table("job")
    base.compute_mb_per_s = job.rate("compute_mb_per_s")
    base.preprocess_mb_per_s = job.rate("preprocess_mb_per_s")
    base.batch = job.whole("batch")
    base.epochs = job.whole("epochs")
    base.seed = job.whole("seed", 0, low=0, high=(1 << 64) - 1)
    base.max_accesses = job.whole("max_accesses", 100_000_000, high=(1 << 63) - 1)
    job.done()

    model = top.table("model", {})
    accounting = model.text("accounting", "conserving", ("conserving", "study"))
    base.study_accounting = accounting == "study"
    model.done()

    table = top.table("published", {})
    published = {
        _check_policy(table, name, name): table.check_rate(name, value)
        for name, value in table.rest().items()
    }
    top.done()

    def make(count: int) -> SimScenario:
        base.nodes = count
        base.ranks_per_node = ranks
        base.tiers = tiers
        return base

    scenario = Scenario(file, title, counts, policies, unit, settings, published, make)
    for count in counts:
        try:
            make(count).validate()
        except ArgumentError as error:
            raise ArgumentError(f"{file}: {error}") from None
    return scenario


def simulate(
    scenarios: Sequence[Scenario], progress: Callable[[int, int], None] | None = None
) -> list[dict[str, Any]]:
    """Runs every policy of every scenario at every node count."""
    total = sum(len(s.nodes) * len(s.policies) for s in scenarios)
    finished = 0
    results = []

    def tick(done: int, accesses: int) -> None:
        if progress is not None:
            progress(1000 * finished + 1000 * done // max(1, accesses), 1000 * total)

    for scenario in scenarios:
        runs = []
        for count in scenario.nodes:
            simulation = Simulation(scenario.make(count))
            policies = []
            for name in scenario.policies:
                policies.append(simulation.run(name, tick))
                finished += 1
            _add_ratios(scenario, policies)
            runs.append({"nodes": count, "policies": policies})
        results.append(
            {
                "file": Path(scenario.file).as_posix(),
                "title": scenario.title,
                "unit": scenario.unit,
                "epochs": scenario.make(scenario.nodes[0]).epochs,
                "scenario": scenario.settings,
                "runs": runs,
            }
        )
    return results


_PEER_CASES: tuple[tuple[str, dict[str, Any]], ...] = (
    ("coordinated", {}),
    ("with locality", {"locality": True}),
    ("each for itself", {"coordinate": False}),
)


def simulate_peers(
    scenarios: Sequence[Scenario],
    hold: float | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> list[dict[str, Any]]:
    """What the nodes of every scenario read from the source and from each other."""
    total = sum(len(s.nodes) * len(_PEER_CASES) for s in scenarios)
    finished = 0
    results = []

    def tick(done: int, epochs: int) -> None:
        if progress is not None:
            progress(1000 * finished + 1000 * done // max(1, epochs), 1000 * total)

    for scenario in scenarios:
        runs = []
        for count in scenario.nodes:
            job = scenario.make(count)
            if hold is not None:
                each = hold * job.sample_mb * job.samples / count
                job.tiers = [SimTier("memory", each, 1000, 1)]
            simulation = Simulation(job)
            for name, rules in _PEER_CASES:
                epochs = _native_peers(simulation, [(count, job.epochs)], progress=tick, **rules)
                finished += 1
                last = epochs[-1]
                runs.append(
                    {
                        "nodes": count,
                        "case": name,
                        "source_vs_dataset": sum(e["source_vs_dataset"] for e in epochs),
                        "local_share": last["local_share"],
                        "hottest_link": last["hottest_link"],
                        "hottest_link_step": last["hottest_link_step"],
                        "epochs": epochs,
                    }
                )
        results.append(
            {
                "file": Path(scenario.file).as_posix(),
                "title": scenario.title,
                "epochs": len(runs[0]["epochs"]),
                "hold": hold,
                "runs": runs,
            }
        )
    return results


def _print_peers(console: Any, result: dict[str, Any]) -> None:
    from rich.table import Table

    table = Table(title=f"{result['title']} ({result['epochs']} epochs)")
    for name in ("nodes", "case"):
        table.add_column(name, no_wrap=True)
    for name in ("source ÷ data set", "local, last epoch", "hottest link", "in a step"):
        table.add_column(name, justify="right")
    for run in result["runs"]:
        links = (run["hottest_link"], run["hottest_link_step"])
        table.add_row(
            f"{run['nodes']:,}",
            run["case"],
            f"{run['source_vs_dataset']:.3f}",
            f"{100 * run['local_share']:.1f} %",
            *(f"{100 * link:.0f} %" if link else "–" for link in links),
        )
    console.print(table)


def _add_ratios(scenario: Scenario, policies: list[dict[str, Any]]) -> None:
    bound = next(p["seconds"] for p in policies if p["policy"] == BOUND)
    published_bound = scenario.published.get(BOUND)
    for outcome in policies:
        if "seconds" in outcome:
            outcome["vs_bound"] = outcome["seconds"] / bound
            outcome["time"] = outcome["seconds"] / _UNITS[scenario.unit]
        published = scenario.published.get(outcome["policy"])
        if published is not None:
            outcome["published_time"] = published
            if published_bound:
                outcome["published_vs_bound"] = published / published_bound


def _mark(outcome: dict[str, Any]) -> str:
    if outcome.get("read_share", 1) < 1:
        return "*"
    return "" if outcome.get("global_shuffle", True) else "†"


def _number(value: float) -> str:
    return f"{value:,.0f}" if value >= 1000 else f"{value:.3g}" if value < 1 else f"{value:.2f}"


def _print_single(console: Any, result: dict[str, Any]) -> None:
    from rich.table import Table

    run = result["runs"][0]
    published = any("published_time" in p for p in run["policies"])
    table = Table(title=f"{result['title']} ({run['nodes']} nodes, {result['epochs']} epochs)")
    table.add_column("policy", no_wrap=True)
    for name in (
        f"time, {result['unit']}",
        "× bound",
        *(("published", "× bound") if published else ()),
        "stall",
        "from source",
        "peers",
        "local",
    ):
        table.add_column(name, justify="right")
    for p in run["policies"]:
        name = p["title"] + _mark(p)
        theirs = [
            _number(p["published_time"]) if "published_time" in p else "–",
            f"{p['published_vs_bound']:.2f}" if "published_vs_bound" in p else "–",
        ]
        theirs = theirs if published else []
        if "infeasible" in p:
            table.add_row(name, "–", "–", *theirs, "–", "–", "–", "–")
            continue
        moved = p["source_mb"] + p["peer_mb"] + p["local_mb"]
        simulated = sum(p["epoch_seconds"])
        table.add_row(
            name,
            _number(p["time"]),
            f"{p['vs_bound']:.2f}",
            *theirs,
            f"{100 * p['stall_seconds'] / simulated:.0f} %",
            *(
                f"{100 * p[where] / moved:.0f} %" if moved else "–"
                for where in ("source_mb", "peer_mb", "local_mb")
            ),
        )
    console.print(table)


def _print_sweep(console: Any, result: dict[str, Any]) -> None:
    from rich.table import Table

    title = f"{result['title']}: time in {result['unit']} at nodes ({result['epochs']} epochs)"
    table = Table(title=title)
    table.add_column("policy", no_wrap=True)
    for run in result["runs"]:
        table.add_column(f"{run['nodes']:,}", justify="right")
    for row in zip(*(run["policies"] for run in result["runs"]), strict=True):
        table.add_row(
            row[0]["title"],
            *(_number(p["time"]) + _mark(p) if "time" in p else "–" for p in row),
            style="bold" if row[0]["policy"] == "forebay" else None,
        )
    console.print(table)


def _notes(results: list[dict[str, Any]]) -> list[str]:
    outcomes = [p for r in results for run in r["runs"] for p in run["policies"]]
    notes = []
    if any(_mark(p) == "*" for p in outcomes):
        notes.append("* does not read the whole data set")
    if any(_mark(p) == "†" for p in outcomes):
        notes.append("† a rank sees only its own part of the data set")
    for reason in dict.fromkeys(p["infeasible"] for p in outcomes if "infeasible" in p):
        notes.append(f"– cannot run: {reason}")
    for result in results:
        first = result["runs"][0]["policies"][0]
        simulated, epochs = first["simulated_epochs"], result["epochs"]
        if simulated < epochs:
            notes.append(
                f"{result['title']}: approximation: {simulated} of {epochs} epochs simulated; the "
                "last one stands for the rest"
            )
        planned = {
            p["planned_epochs"] for p in result["runs"][0]["policies"] if "planned_epochs" in p
        }
        if planned and min(planned) < epochs:
            notes.append(f"{result['title']}: frequencies counted over {min(planned)} epochs")
    if not any("approximation" in note for note in notes):
        notes.append("every access of every epoch simulated; LRU and MONARCH hits are drawn")
    return notes


def _plot(results: list[dict[str, Any]], file: str) -> None:
    try:
        import matplotlib
    except ImportError:
        raise UnsupportedError("--plot needs matplotlib; try: pip install matplotlib") from None
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    columns = min(3, len(results))
    rows = -(-len(results) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(5.6 * columns + 1.5, 4.6 * rows), squeeze=False
    )
    for axis in axes.flat[len(results) :]:
        axis.set_visible(False)
    for axis, result in zip(axes.flat, results, strict=False):
        (_plot_single if len(result["runs"]) == 1 else _plot_sweep)(axis, result)
    figure.tight_layout()
    try:
        figure.savefig(file, dpi=110)
    except ValueError as error:  # a suffix that is no picture
        raise ArgumentError(f"--plot {file}: {error}") from None
    finally:
        plt.close(figure)


def _plot_single(axis: Any, result: dict[str, Any]) -> None:
    policies = [p for p in result["runs"][0]["policies"] if "time" in p][::-1]
    where = range(len(policies))
    colors = [
        {"forebay": "#1b7837", BOUND: "#999999"}.get(p["policy"], "#7aa6c2") for p in policies
    ]
    axis.barh(where, [p["vs_bound"] for p in policies], color=colors, label="simulated")
    theirs = [
        (i, p["published_vs_bound"]) for i, p in enumerate(policies) if "published_vs_bound" in p
    ]
    if theirs:
        axis.plot([x for _, x in theirs], [i for i, _ in theirs], "k|", ms=12, label="published")
        axis.legend(loc="lower right", fontsize=8)
    axis.set_yticks(list(where), [p["title"] + _mark(p) for p in policies], fontsize=8)
    axis.set_xlabel("time ÷ lower bound")
    axis.set_title(result["title"], fontsize=10)
    axis.axvline(1, color="#555555", lw=0.8)


def _plot_sweep(axis: Any, result: dict[str, Any]) -> None:
    names = [p["policy"] for p in result["runs"][0]["policies"]]
    styles = {"forebay": ("#1b7837", 2.6), "nopfs": ("#d6604d", 1.8), BOUND: ("#555555", 1.2)}
    for i, name in enumerate(names):
        points = [
            (run["nodes"], run["policies"][i]["time"])
            for run in result["runs"]
            if "time" in run["policies"][i]
        ]
        if not points:
            continue
        color, width = styles.get(name, (None, 1.0))
        axis.plot(
            [n for n, _ in points], [seconds for _, seconds in points],
            marker="." if name != BOUND else None, lw=width, color=color,
            ls="--" if name == BOUND else "-", label=result["runs"][0]["policies"][i]["title"],
        )  # fmt: skip
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xlabel("nodes")
    axis.set_ylabel(f"time, {result['unit']}")
    axis.set_title(result["title"], fontsize=10)
    axis.legend(fontsize=6)


def run(arguments: argparse.Namespace) -> int:
    """Runs the command; errors of input are raised as ForebayError."""
    from .. import __version__

    scenarios = [load(path) for path in arguments.scenarios]
    if arguments.policies:
        chosen = [name.strip() for name in arguments.policies.split(",") if name.strip()]
        section = _Section("--policies", "", {})
        chosen = [_check_policy(section, "policy", name) for name in chosen]
        for scenario in scenarios:
            scenario.policies = [BOUND, *dict.fromkeys(p for p in chosen if p != BOUND)]
    if arguments.hold is not None and not (arguments.peers and arguments.hold > 0):
        raise ArgumentError("--hold is a share above 0, and needs --peers")
    if arguments.peers and (arguments.plot or arguments.policies):
        raise ArgumentError("--peers has neither policies nor a picture")
    with counting("simulating", enabled=None) as update:
        if arguments.peers:
            results = simulate_peers(scenarios, arguments.hold, update)
        else:
            results = simulate(scenarios, update)
    document = {"forebay": __version__, "scenarios": results}
    if arguments.json == "-":
        json.dump(document, sys.stdout, indent=1)
        print()
    else:
        from rich.console import Console

        console = Console(highlight=False, width=None if sys.stdout.isatty() else 120)
        for result in results:
            if arguments.peers:
                _print_peers(console, result)
                continue
            (_print_single if len(result["runs"]) == 1 else _print_sweep)(console, result)
        for note in [] if arguments.peers else _notes(results):
            console.print(note, markup=False)
        if arguments.json:
            Path(arguments.json).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
    if arguments.plot:
        _plot(results, arguments.plot)
    return 0
