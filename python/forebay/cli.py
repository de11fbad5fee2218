"""The ``forebay`` command.

Exit codes: 0 done, 1 something failed or was found wrong, 2 wrong input, 130 Ctrl-C.
"""

from __future__ import annotations

import argparse
import difflib
import importlib
import importlib.util
import os
import sys
from collections.abc import Callable, Sequence
from typing import NoReturn

from ._errors import AccessError, ArgumentError, ForebayError, MissingError

_COMMANDS = {
    "demo": "watch Forebay feed a training loop from slow storage",
    "doctor": "what this machine has; what Forebay would gain on your folder",
    "index": "list a data set and save the list; --verify checks every file",
    "plan": "what Forebay would gain on your data set; what more NVMe would buy",
    "run": "run any program, its data folders' files from local copies; no line changes",
    "simulate": "how long a job would take under each policy, in virtual time",
    "status": "what this node's daemon does: data sets, processes, knobs, metrics",
    "top": "the same, live: jobs and ranks, why they wait, tiers, source, knobs",
    "cache": "list, fill, check or empty a folder of cache_dir=",
    "mount": "show a data folder through FUSE, for static programs and containers",
    "unmount": "end such a mount",
    "policy": "shares and limits of jobs: check a file, put it in force, show it",
    "tune": "replay what the tuner saw and decided, from a recorded log",
    "bench": "measure Forebay against its limits and its rivals",
}

_EXAMPLES = """\
examples:
  forebay demo                       a training run from slow storage, in about a minute
  forebay doctor                     what this build and this machine have
  forebay doctor /data/train         measure your own folder and predict the gain
  forebay index /data/train          list it once; loaders then open in milliseconds
  forebay index /data/train --verify check every file against the list
  forebay plan /data/train --memory 64G --nvme 1T --nodes 8
  forebay run -- python train.py --data /data/train      your script as it is
  forebay simulate job.toml          your cluster and data set under every policy
  forebay status                     what the daemon that ranks share does
  forebay top                        watch it: who waits, and for what
  forebay cache ls /nvme/forebay     what a folder of cache_dir= holds
  forebay policy check site.toml     what a policy means, or what is wrong with it
  forebay bench epoch --quick        epoch times beside PyTorch's DataLoader

'forebay COMMAND --help' explains one command. In Python: import forebay; help(forebay.DataLoader)
"""

Run = Callable[[argparse.Namespace], int]


class _Parser(argparse.ArgumentParser):
    """Errors in two lines: what is wrong, and where help is."""

    def error(self, message: str) -> NoReturn:
        complain(f"{message}\ntry: {self.prog} --help")
        raise SystemExit(2)


def complain(message: str) -> None:
    """Says on standard error what went wrong."""
    print(f"forebay: {message}", file=sys.stderr)


def _overview() -> str:
    width = max(map(len, _COMMANDS))
    lines = [f"  {name:<{width}}  {meaning}" for name, meaning in _COMMANDS.items()]
    return "commands:\n" + "\n".join(lines)


def _main_parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="forebay",
        usage="forebay [--help] [--version] COMMAND ...",
        description="Forebay has every sample in memory before the training step asks for it.\n\n"
        + _overview(),
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="store_true", help="print the version and exit")
    parser.add_argument("command", nargs="?", help=argparse.SUPPRESS)
    return parser


def _command_parser(name: str, description: str, epilog: str) -> argparse.ArgumentParser:
    return _Parser(
        prog=f"forebay {name}",
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _version() -> str:
    from . import __version__

    return f"forebay {__version__} (Python {sys.version.split()[0]})"


def _count(low: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"'{text}' is not a whole number") from None
        if value < low:
            raise argparse.ArgumentTypeError(f"{value} is too small; it must be at least {low}")
        return value

    return parse


def _add_dataset_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--format",
        choices=("folder", "webdataset", "tfrecord"),
        help="default: from what lies at PATH",
    )
    parser.add_argument(
        "--extensions",
        metavar="LIST",
        help="folder: only files with these suffixes, as jpg,png; or: images",
    )


def _run_index(argv: Sequence[str]) -> int:
    parser = _command_parser(
        "index",
        "Lists a data set (folder of files, WebDataset tars, TFRecord files) and saves the list,\n"
        "so that loaders open it in milliseconds. The data itself is not changed or copied.",
        "examples:\n"
        "  forebay index /data/train\n"
        "  forebay index /data/train --extensions images\n"
        "  forebay index /data/shards --format webdataset --rebuild\n"
        "  forebay index /data/train --verify      every file against the saved list\n",
    )
    parser.add_argument("path", metavar="PATH", help="folder, or one tar or TFRecord file")
    _add_dataset_arguments(parser)
    parser.add_argument("--rebuild", action="store_true", help="list anew, even if nothing changed")
    parser.add_argument(
        "--verify",
        action="store_true",
        help="check every file's existence and size, every tar header, every TFRecord checksum",
    )
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="save here, for forebay.Catalog.load(FILE)"
    )
    from .commands.index import run

    return run(parser.parse_args(argv))


def _run_doctor(argv: Sequence[str]) -> int:
    parser = _command_parser(
        "doctor",
        "Without PATH: what this build and this machine have, and what the missing parts cost.\n"
        "With PATH: measures the folder (lists it, then reads at most 400 files for about 6 s)\n"
        "and predicts epoch times with PyTorch's DataLoader and with Forebay.",
        "examples:\n"
        "  forebay doctor\n"
        "  forebay doctor /data/train\n"
        "  forebay doctor /data/train --workers 12 --memory 64G\n",
    )
    parser.add_argument("path", metavar="PATH", nargs="?", help="your data set")
    _add_dataset_arguments(parser)
    parser.add_argument(
        "--workers",
        type=_count(1),
        metavar="N",
        help="workers of your PyTorch DataLoader (default: 4, 8 and 16 are shown)",
    )
    parser.add_argument(
        "--memory", metavar="SIZE", help="memory for Forebay, such as 8G (default: Forebay's own)"
    )
    from .commands.doctor import run

    return run(parser.parse_args(argv))


def _run_demo(argv: Sequence[str]) -> int:
    parser = _command_parser(
        "demo",
        "Makes a small data set, shows it through an emulated slow file system, and trains the\n"
        "same small model from it twice: with PyTorch's DataLoader and with Forebay. Prints a\n"
        "table, draws a plot, and checks that both saw the same samples in the same order and\n"
        "reached the same loss. All it makes is removed at the end, the plot excepted.",
        "examples:\n  forebay demo\n  forebay demo --epochs 5 --out plots\n",
    )
    parser.add_argument("--files", type=_count(20), default=2000, metavar="N", help="default 2000")
    parser.add_argument("--epochs", type=_count(1), default=3, metavar="N", help="default 3")
    parser.add_argument("--out", default="out", metavar="DIR", help="for demo.png (default out)")
    parser.add_argument("--keep", action="store_true", help="keep the data set; says where it is")
    # Hidden: what happens on a machine without FUSE, for tests and for the curious.
    parser.add_argument("--no-fuse", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args(argv)
    try:
        import torch  # noqa: F401 - asked for before anything is made
    except ImportError:
        complain("the demo trains with PyTorch, which is not installed\ntry: pip install torch")
        return 1
    from .commands.demo import run

    return run(arguments)


def _add_peers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--peers",
        metavar="off|auto|LIST",
        help="nodes that share what they read: host:port,host:port,... by node, with FOREBAY_NODE, "
        "or etcds://host:port; default: as torchrun's arguments, SLURM or MPI tell",
    )


def _add_job(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--job",
        metavar="NAME",
        help="the job that this belongs to, for policies; default: $FOREBAY_JOB, or that of all "
        "who name none in this daemon",
    )


def _run_run(argv: Sequence[str]) -> int:
    parser = _command_parser(
        "run",
        "Runs a program as it is. Files below the data folders are copied to a local disk as they\n"
        "are read, and opened there from then on; PyTorch's coming order is foreseen and read\n"
        "ahead. Everything else, and every write, goes where it went before. The exit code is\n"
        "the program's; if Forebay fails, the program runs without.",
        "examples:\n"
        "  forebay run -- python train.py --data /data/train\n"
        "  forebay run --source /data/train --source /data/val -- python train.py\n"
        "  forebay run --source /data --cache /nvme/forebay --cache-size 500G -- ./train.sh\n\n"
        "Without --source, the data folders are the folders among the command's arguments.\n"
        "docs/transparent.md says what is covered, and what to do when it is not faster.\n",
    )
    parser.usage = "forebay run [options] [--] command ..."
    parser.add_argument(
        "--source",
        action="append",
        default=[],
        metavar="[NAME=]DIR",
        help="a data folder, may be given several times; default: folders among the arguments. "
        "NAME: what nodes that have it at different paths call it",
    )
    parser.add_argument(
        "--cache",
        metavar="DIR",
        help="keep the copies here for later runs; default: a folder below $SLURM_TMPDIR, $TMPDIR "
        "or /var/tmp, removed at the end",
    )
    parser.add_argument(
        "--cache-size",
        metavar="SIZE",
        help="for copies that stay, such as 200G; default: four fifths of the free disk",
    )
    parser.add_argument(
        "--ahead",
        metavar="SIZE",
        help="for copies made just ahead of their reading, when the cache is full; default 256M",
    )
    parser.add_argument(
        "--private",
        action="store_true",
        help="a daemon and a folder of this run's own, also for one of several tasks of a job on "
        "the node, which share them otherwise",
    )
    _add_peers(parser)
    _add_job(parser)
    parser.add_argument(
        "--no-hook", action="store_true", help="do not look at the order of PyTorch's loaders"
    )
    parser.add_argument("--quiet", action="store_true", help="no summary on standard error")
    parser.add_argument("command", nargs=argparse.REMAINDER, help=argparse.SUPPRESS)
    from .commands.run import run

    return run(parser.parse_args(argv))


def _run_simulate(argv: Sequence[str]) -> int:
    parser = _command_parser(
        "simulate",
        "Simulates a training job on a cluster, sample by sample in virtual time, under Forebay,\n"
        "NoPFS, LBANN, DeepIO, MONARCH, PyTorch-like double buffering and more, beside the bound\n"
        "without I/O. A scenario is a TOML file: cluster, tiers, network, source, data set, job.",
        "examples:\n"
        "  forebay simulate scenarios/nopfs/imagenet1k.toml\n"
        "  forebay simulate scenarios/nopfs/*.toml --json study.json --plot study.png\n"
        "  forebay simulate scenarios/scale/imagenet1k.toml --policies forebay,nopfs\n"
        "  forebay simulate scenarios/peers.toml --peers --hold 1.2\n",
    )
    parser.add_argument("scenarios", metavar="SCENARIO", nargs="+", help="a .toml file")
    parser.add_argument("--policies", metavar="LIST", help="only these, as forebay,nopfs")
    parser.add_argument("--json", metavar="FILE", help="write all figures; - prints them instead")
    parser.add_argument("--plot", metavar="FILE", help="draw a picture, such as out.png")
    parser.add_argument(
        "--peers",
        action="store_true",
        help="not times: what the nodes read from the source and from each other",
    )
    parser.add_argument(
        "--hold",
        metavar="SHARE",
        type=float,
        help="with --peers: n nodes hold SHARE of the data set together, instead of [[tiers]]",
    )
    from .commands.simulate import run

    return run(parser.parse_args(argv))


def _run_plan(argv: Sequence[str]) -> int:
    parser = _command_parser(
        "plan",
        "What would Forebay gain on this data set, and what would more memory or NVMe buy?\n"
        "Lists the data set, measures its storage for a few seconds (or takes your figures), and\n"
        "simulates the job: as it is today, with Forebay, and with other sizes of the tiers.",
        "examples:\n"
        "  forebay plan /data/train --memory 64G --nvme 1T --nodes 8\n"
        "  forebay plan /data/train --step-ms 120 --batch-size 256 --epochs 90\n"
        "  forebay plan /data/train --source-bandwidth 2G --source-latency 1.5 --json -\n\n"
        "Sizes and rates are written as 64G or 1.5T, rates by the second.\n",
    )
    parser.add_argument("path", metavar="PATH", help="folder, or one tar or TFRecord file")
    _add_dataset_arguments(parser)
    cluster = parser.add_argument_group("cluster")
    cluster.add_argument("--nodes", type=_count(1), default=1, metavar="N", help="default 1")
    cluster.add_argument(
        "--ranks-per-node", type=_count(1), default=1, metavar="N", help="default 1"
    )
    cluster.add_argument(
        "--memory",
        metavar="SIZE",
        help="for samples, of a node; default: half of what is free here",
    )
    cluster.add_argument("--nvme", metavar="SIZE", default="0", help="of a node; default: none")
    for name, default in (("memory", "10G"), ("nvme", "2G"), ("network", "1.1G")):
        cluster.add_argument(
            f"--{name}-bandwidth",
            metavar="RATE",
            default=default,
            help=f"of a node, default {default}",
        )
    source = parser.add_argument_group("source")
    source.add_argument(
        "--source-bandwidth",
        metavar="RATE",
        help="of all nodes together; default: measured from here",
    )
    source.add_argument("--source-latency", type=float, metavar="MS", help="of opening and reading")
    job = parser.add_argument_group("job")
    job.add_argument(
        "--batch-size", type=_count(1), default=64, metavar="N", help="of a rank, default 64"
    )
    job.add_argument("--epochs", type=_count(1), default=10, metavar="N", help="default 10")
    job.add_argument("--step-ms", type=float, metavar="MS", help="compute on a rank's batch")
    job.add_argument(
        "--samples-per-second",
        type=float,
        metavar="N",
        help="that a rank computes, instead of --step-ms; default: no limit",
    )
    job.add_argument(
        "--workers",
        type=_count(1),
        default=8,
        metavar="N",
        help="of PyTorch today, a rank; default 8",
    )
    parser.add_argument("--json", metavar="FILE", help="write all figures; - prints them instead")
    from .commands.plan import run

    return run(parser.parse_args(argv))


def _cache_part(argv: Sequence[str]) -> int:
    name, *rest = argv
    text = {
        "ls": "Lists the data sets whose copies a cache folder holds.",
        "warm": "Reads a data set through a cache folder, so that training finds its copies there.",
        "verify": "Reads every copy, compares checksums, and removes damaged copies.",
        "clear": "Removes the copies of one data set, or all. Not while a job writes to it.",
    }[name]
    parser = _command_parser(f"cache {name}", text, "")
    parser.add_argument("folder", metavar="FOLDER", help="as given to cache_dir=")
    parser.add_argument(
        "--cache-group", metavar="GROUP", help="members share the folder, as cache_group="
    )
    if name == "warm":
        parser.add_argument("path", metavar="PATH", help="the data set")
        _add_dataset_arguments(parser)
        parser.add_argument("--size", metavar="SIZE", help="limit, as cache_bytes=, such as 200G")
        parser.add_argument("--memory", default="256M", metavar="SIZE", help="default 256M")
    if name in ("verify", "clear"):
        parser.add_argument("--dataset", metavar="PATH", help="only this data set, as ls shows it")
    if name == "verify":
        parser.add_argument("--dry-run", action="store_true", help="remove nothing")
        parser.add_argument(
            "--source", action="store_true", help="compare each copy with its file, both read"
        )
    if name == "clear":
        parser.add_argument("--yes", action="store_true", help="do not ask")
    from .commands import cache as cache_command

    run: Run = getattr(cache_command, f"run_{name}")
    return run(parser.parse_args(rest))


def _run_cache(argv: Sequence[str]) -> int:
    if argv and argv[0] in ("ls", "warm", "verify", "clear"):
        return _cache_part(argv)
    parser = _command_parser(
        "cache",
        "What a folder of cache_dir= holds; fill it, check it, empty it.",
        "examples:\n"
        "  forebay cache ls /nvme/forebay                   data sets, sizes, last use, writer\n"
        "  forebay cache warm /nvme/forebay /data/train     before the job starts\n"
        "  forebay cache verify /nvme/forebay --dry-run     read every copy, remove nothing\n"
        "  forebay cache verify /nvme/forebay --source      each copy against its file\n"
        "  forebay cache clear /nvme/forebay --dataset /data/old\n\n"
        "'forebay cache ls --help' explains one of them.\n",
    )
    parser.add_argument("action", choices=("ls", "warm", "verify", "clear"))
    parser.add_argument("folder", metavar="FOLDER", help="as given to cache_dir=")
    parser.parse_args(argv)
    return 2


def _run_mount(argv: Sequence[str]) -> int:
    parser = _command_parser(
        "mount",
        "Shows SRC, read-only, at the folder MNT: files are copied to a local disk as they are\n"
        "read, and come from there from then on. For static programs and containers; others need\n"
        "no mount: forebay run.",
        "examples:\n"
        "  forebay mount /lustre/imagenet /mnt/imagenet --cache /nvme/forebay --cache-size 200G\n"
        "  docker run -v /mnt/imagenet:/data:ro ...     --allow-other if it has its own user\n"
        "  forebay unmount /mnt/imagenet\n",
    )
    parser.add_argument("source", metavar="SRC", help="the data folder")
    parser.add_argument("mountpoint", metavar="MNT", help="an existing folder outside of it")
    parser.add_argument(
        "--cache",
        metavar="DIR",
        help="keeps the copies for the next time; default: a folder that goes",
    )
    parser.add_argument(
        "--cache-size", metavar="SIZE", help="of all copies; default: four fifths of the free disk"
    )
    parser.add_argument(
        "--allow-other",
        action="store_true",
        help="let other users in (not root: needs user_allow_other in /etc/fuse.conf)",
    )
    parser.add_argument(
        "--name", metavar="NAME", help="what nodes that have SRC at different paths call it"
    )
    _add_peers(parser)
    _add_job(parser)
    parser.add_argument("--foreground", action="store_true", help="stay; Ctrl-C unmounts")
    from .commands.mount import run_mount

    return run_mount(parser.parse_args(argv))


def _run_unmount(argv: Sequence[str]) -> int:
    parser = _command_parser(
        "unmount",
        "Ends a mount of 'forebay mount', also one whose process was killed.",
        "example:\n  forebay unmount /mnt/imagenet\n",
    )
    parser.add_argument("mountpoint", metavar="MNT")
    parser.add_argument("--lazy", action="store_true", help="now, though programs still use it")
    from .commands.mount import run_unmount

    return run_unmount(parser.parse_args(argv))


def _run_policy(argv: Sequence[str]) -> int:
    parser = _command_parser(
        "policy",
        "Who may take how much of the source and of the tiers: policies are TOML files.",
        "",
    )
    from .commands.policy import run

    return run(parser, argv)


def _run_status(argv: Sequence[str]) -> int:
    parser = _command_parser(
        "status",
        "What forebayd does, the engine that this user's ranks and jobs on this node share.\n"
        "Exit code 1 when none runs.",
        "examples:\n"
        "  forebay status\n"
        "  forebay status --prometheus      every metric as Prometheus text\n"
        "  forebay status --json            all of it, for programs\n",
    )
    parser.add_argument(
        "--folder", metavar="DIR", help="where its socket lies; default: as loaders"
    )
    form = parser.add_mutually_exclusive_group()
    form.add_argument("--json", action="store_true", help="all of it as JSON")
    form.add_argument("--prometheus", action="store_true", help="metrics as Prometheus text")
    from .views.daemon_status import run

    return run(parser.parse_args(argv))


def _interval(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"'{text}' is not a number of seconds") from None
    if not 0.2 <= value <= 3600:
        raise argparse.ArgumentTypeError(f"{text} s; it takes 0.2 to 3600")
    return value


def _port(text: str) -> int:
    if not text.isdigit() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"'{text}' is no port")
    return int(text)


def _run_top(argv: Sequence[str]) -> int:
    parser = _command_parser(
        "top",
        "Watches forebayd: jobs and ranks with their rates, why they wait, how full the tiers\n"
        "are, what is read from the source, knobs. q or Ctrl-C leaves. Waits for a daemon to come.",
        "examples:\n"
        "  forebay top\n"
        "  forebay top --once | head -3     one look; exit code 1 when none runs\n"
        "  forebay top --interval 10 | tee top.log\n"
        "  forebay top --web                prints the address of a page with plots\n",
    )
    parser.add_argument(
        "--folder", metavar="DIR", help="where its socket lies; default: as loaders"
    )
    how = parser.add_mutually_exclusive_group()
    how.add_argument("--once", action="store_true", help="print one frame and end")
    how.add_argument(
        "--web",
        type=_port,
        nargs="?",
        const=0,
        metavar="PORT",
        help="show it in a browser instead: a page of your own while this runs",
    )
    parser.add_argument(
        "--interval", type=_interval, default=1.0, metavar="S", help="between looks; default 1"
    )
    from .views.top import run

    return run(parser.parse_args(argv))


def _run_tune(argv: Sequence[str]) -> int:
    parser = _command_parser(
        "tune",
        "What the tuner saw and decided. Record a log with forebay.Engine(tuner_log=...) or\n"
        "FOREBAY_TUNER_LOG=FILE. Exit code 1 when the recorded policy decides otherwise now.",
        "examples:\n"
        "  forebay tune replay tuner.log\n"
        "  forebay tune replay tuner.log --policy prisma     another rule on the same figures\n",
    )
    parts = parser.add_subparsers(
        dest="part", required=True, metavar="replay", parser_class=_Parser
    )
    replay = parts.add_parser("replay", help="feed a log to a policy and print its decisions")
    replay.add_argument("log", metavar="LOG", help="the file that was recorded")
    replay.add_argument(
        "--policy", choices=("forebay", "prisma"), help="default: the one that was recorded"
    )
    from .commands.tune import run

    return run(parser.parse_args(argv))


def _run_bench(argv: Sequence[str]) -> int:
    if importlib.util.find_spec("forebay_bench") is None:
        complain(
            "benches come with the source tree, not with the package; in a clone of it: "
            "make bench NAME=epoch, or, with this package, PYTHONPATH=bench forebay bench epoch"
        )
        return 1
    benches = importlib.import_module("forebay_bench")
    return int(benches.main(list(argv)))


_RUN: dict[str, Callable[[Sequence[str]], int]] = {
    "bench": _run_bench,
    "cache": _run_cache,
    "demo": _run_demo,
    "doctor": _run_doctor,
    "index": _run_index,
    "mount": _run_mount,
    "plan": _run_plan,
    "policy": _run_policy,
    "run": _run_run,
    "simulate": _run_simulate,
    "status": _run_status,
    "top": _run_top,
    "tune": _run_tune,
    "unmount": _run_unmount,
}


def _dispatch(argv: list[str]) -> int:
    if not argv:
        _main_parser().print_help()
        return 2
    name = argv[0]
    if name in _RUN:
        return _RUN[name](argv[1:])
    if name == "help":
        return _dispatch([*argv[1:2], "--help"])
    if name.startswith("-"):
        options = _main_parser().parse_args(argv)
        if options.version:
            print(_version())
            return 0
        # An option before the command, such as `forebay --quick bench`.
        complain(f"options come after the command: forebay {options.command or 'COMMAND'} ...")
        return 2
    close = difflib.get_close_matches(name, _RUN, n=1, cutoff=0.5)
    if close:
        hint = f"did you mean 'forebay {close[0]}'?"
    elif os.path.exists(name):
        hint = f"to measure that folder: forebay doctor {name}"
    else:
        hint = f"there are: {', '.join(_COMMANDS)}"
    complain(f"'{name}' is not a command; {hint}\ntry: forebay --help")
    return 2


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command; returns its exit code and never raises for what a user can cause."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _dispatch(arguments)
    except SystemExit as stop:  # argparse: --help, or a complaint already made
        return stop.code if isinstance(stop.code, int) else 0 if stop.code is None else 1
    except KeyboardInterrupt:
        print(file=sys.stderr)
        complain("interrupted")
        return 130
    except BrokenPipeError:  # `forebay doctor | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except (ArgumentError, MissingError, AccessError) as error:
        complain(str(error))
        return 2
    except (ForebayError, OSError, RuntimeError) as error:
        if os.environ.get("FOREBAY_TRACEBACK"):
            raise
        complain(f"{error}\n(FOREBAY_TRACEBACK=1 shows where)")
        return 1


if __name__ == "__main__":
    sys.exit(main())
