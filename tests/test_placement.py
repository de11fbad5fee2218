"""The placement as Python sees it; src/core/placement_test.cc has the rules."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from forebay import _forebay

LENGTHS = np.full(1200, 100, np.uint32)


def plan(**changes: Any) -> dict[str, Any]:
    arguments = {"nodes": [(10_000, 20_000)] * 4, "world": 8, "ranks_per_node": 2, "epochs": 20}
    return _forebay.plan_placement(LENGTHS, **(arguments | changes))


def test_codes_name_node_and_tier() -> None:
    found = plan()
    codes = found["codes"]
    assert codes.dtype == np.uint32 and len(codes) == 1200 and not codes.flags.writeable
    assert found["covered_samples"] == 1200 and found["rule"] == "frequency"
    node, tier = codes >> 1, codes & 1
    held = [[100 * int(((node == n) & (tier == t)).sum()) for t in (0, 1)] for n in range(4)]
    assert held == [list(used) for used in found["used"]]
    counts = np.zeros((4, 1200), int)
    for epoch in range(20):
        for rank in range(8):
            order = _forebay.epoch_order(1200, True, 0, epoch, rank, 8)
            counts[rank // 2, order] += 1
    assert counts[node, np.arange(1200)].sum() == found["local_accesses"]
    assert found["local_accesses"] > 1.2 * 1200 * 20 / 4


def test_what_does_not_fit_is_nowhere() -> None:
    found = plan(nodes=[(10_000, 0), (0, 5_050), (0, 0), (99, 0)], rule="hash")
    assert (found["codes"] == _forebay.NOWHERE).sum() == 1200 - 150
    assert found["used"] == [(10_000, 0), (0, 5_000), (0, 0), (0, 0)]


def test_the_same_plan_everywhere_but_not_for_every_seed() -> None:
    assert (plan(seed=3)["codes"] == plan(seed=3)["codes"]).all()
    assert (plan(seed=3)["codes"] != plan(seed=4)["codes"]).any()
    assert (plan(seed=3, rule="hash")["codes"] == plan(seed=4, rule="hash")["codes"]).all()


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"rule": "best"}, "no placement rule 'best'"),
        ({"nodes": []}, "not 0"),
        ({"nodes": [(1, 1)] * 3}, "rank 6 is on node 3, there are 3 nodes"),
        ({"world": 0}, "world size 0"),
    ],
)
def test_wrong_arguments_are_refused(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ValueError, match=says):
        plan(**changes)
