"""PyTorch's DistributedDataParallel on several nodes, as torchrun starts it: Forebay's peers find
each other by its variables, and the loss curve is that of PyTorch's own loader.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import pytest
from forebay_bench.data import make_files
from forebay_testing import Cluster, SlowFs

pytest.importorskip("torch")
_usable, _reason = Cluster.available()
pytestmark = pytest.mark.skipif(not _usable, reason=f"no test bed here: {_reason}")
needs_fuse = pytest.mark.skipif(not SlowFs.available()[0], reason=SlowFs.available()[1])

_NODES = 4
_FILES = 160
_HERE = Path(__file__).resolve().parent


@needs_fuse
def test_the_loss_curve_is_the_same_with_and_without(tmp_path: Path) -> None:
    make_files(str(tmp_path / "train"), _FILES, 2000, 1, sigma=0.0, classes=4)
    out = tmp_path / "losses"
    command = [
        sys.executable, "-m", "torch.distributed.run", "--nnodes", str(_NODES),
        "--nproc-per-node", "1", "--master-port", "29511", "--max-restarts", "0",
    ]  # fmt: skip
    package = Path(sys.modules["forebay"].__file__ or "").resolve().parent.parent
    path = os.pathsep.join([str(package), *filter(None, [os.environ.get("PYTHONPATH")])])
    with SlowFs(tmp_path / "train", read_ms=1) as mount, Cluster(_NODES) as cluster:
        running = []
        for node in range(_NODES):
            log = open(tmp_path / f"log{node}", "w")  # noqa: SIM115
            running.append(
                cluster.start(
                    node,
                    [*command, "--node-rank", str(node), "--master-addr", cluster.address(0),
                     str(_HERE / "ddp_twice.py"), str(mount.path), str(out)],
                    {"PYTHONPATH": path, "OMP_NUM_THREADS": "1", "FOREBAY_PEERS": "auto",
                     "FOREBAY_PEER_SECRET": str(tmp_path / "secret"), "CUDA_VISIBLE_DEVICES": "",
                     "FOREBAY_PEER_WAIT": "20", "FOREBAY_PEER_LEASE": "20",
                     "HOME": str(tmp_path)},
                    stdout=log, stderr=log,
                )
            )  # fmt: skip
            log.close()
        for node, process in enumerate(running):
            assert process.wait(240) == 0, (tmp_path / f"log{node}").read_text()[-3000:]
    ranks = [json.loads((tmp_path / f"losses.{rank}").read_text()) for rank in range(_NODES)]
    for said in ranks:
        assert said["having"] == said["without"] == ranks[0]["without"]
        assert len(said["having"]) == 3 * -(-_FILES // (16 * _NODES))
    first, last = (float.fromhex(ranks[0]["having"][at]) for at in (0, -1))
    assert first > 0 and last > 0
    # Each sample was read from the mount by one of them; on a busy machine, where an answer seemed
    # to hang, by another, too.
    failed = sum(
        said["metrics"][f"forebay_{what}_total"]
        for said in ranks
        for what in ("peer_timeouts", "peer_refused", "peer_avoided", "source_hedged_reads")
    )
    reads = {name: sum(said["metrics"][f"forebay_{name}_reads_total"] for said in ranks)
             for name in ("source", "peer")}  # fmt: skip
    assert _FILES <= reads["source"] <= _FILES + failed and reads["peer"] > 0
