"""Samples that no node caches when the cluster has just enough room for all of them."""

from __future__ import annotations

import numpy as np
from forebay import _forebay

from .measure import Case, Outcome
from .run import Context


def _counts(size: int, nodes: int, epochs: int, seed: int) -> np.ndarray:
    """[node, sample]: how often each node uses each sample, one rank a node."""
    counts = np.zeros((nodes, size), np.uint8)
    node = np.arange(size) % nodes
    for epoch in range(epochs):
        counts[node, _forebay.epoch_order(size, True, seed, epoch)] += 1
    return counts


def _nopfs_uncovered(counts: np.ndarray, room: int, ties: np.random.Generator | None) -> float:
    """NoPFS's placement: each node caches what it uses most often, whatever the others cache."""
    nodes, size = counts.shape
    held = np.zeros(size, bool)
    for node in range(nodes):
        order = np.arange(size) if ties is None else ties.permutation(size)
        often = np.argsort(-counts[node][order].astype(np.int16), kind="stable")
        held[order[often[:room]]] = True
    return 1 - float(held.mean())


def _capacity(total: int, nodes: int, memory_share: float, unit: int) -> list[tuple[int, int]]:
    """The data set's bytes, in whole units, over all nodes and both tiers."""
    units = [total // unit * (n + 1) // nodes - total // unit * n // nodes for n in range(nodes)]
    memory = [int(u * memory_share) for u in units]
    return [(m * unit, (u - m) * unit) for u, m in zip(units, memory, strict=True)]


def run(ctx: Context) -> Outcome:
    out = Outcome()
    work = ctx.workload
    size, epochs, length = work["samples"], work["epochs"], work["bytes"]
    equal = np.full(size, length, np.uint32)
    spread = np.random.default_rng(ctx.seed)
    unequal = spread.integers(length // 2, length * 3 // 2, size, dtype=np.uint32)
    worst = 0.0
    for nodes in work["nodes"]:
        missing: dict[str, list[float]] = {"equal": [], "unequal": [], "random": [], "number": []}
        local: list[float] = []
        for i in range(ctx.repeats):
            seed = ctx.seed + i
            common = {"world": nodes, "epochs": epochs, "seed": seed}
            room = _capacity(size * length, nodes, work["memory_share"], length)
            plan = _forebay.plan_placement(equal, room, **common)
            if [sum(node) for node in plan["used"]] != [sum(node) for node in room]:
                ctx.say("some room stays empty")
            missing["equal"].append(1 - plan["covered_samples"] / size)
            local.append(plan["local_accesses"] / (size * epochs))
            room = _capacity(int(unequal.sum()), nodes, work["memory_share"], 1)
            plan = _forebay.plan_placement(unequal, room, **common)
            missing["unequal"].append(1 - plan["covered_samples"] / size)
            counts = _counts(size, nodes, epochs, seed)
            ties = np.random.default_rng(seed)
            missing["random"].append(_nopfs_uncovered(counts, size // nodes, ties))
            missing["number"].append(_nopfs_uncovered(counts, size // nodes, None))
            ctx.say(f"{nodes} nodes: {missing['equal'][-1]:.2%} ({i + 1}/{ctx.repeats})")
        worst = max(worst, max(missing["equal"]))
        rivals = {
            "NoPFS": float(np.median(missing["random"])),
            "NoPFS, ties by number": float(np.median(missing["number"])),
        }
        out.cases += [
            Case(f"cached nowhere, {nodes} nodes", "share", missing["equal"], rivals=rivals),
            Case(f"cached nowhere, {nodes} nodes, unequal samples", "share", missing["unequal"],
                 note="lengths from a half to one and a half of the mean"),
            Case(f"local accesses, {nodes} nodes", "share", local,
                 rivals={"by chance": 1 / nodes}),
        ]  # fmt: skip
    out.figures["uncovered_share"] = worst
    out.notes.append(
        f"{size:,} samples, {epochs} epochs, the cluster's capacity is the data set, "
        f"{work['memory_share']:.0%} of it memory; a repetition is another seed"
    )
    out.notes.append(
        "NoPFS: each node caches what it uses most often, alone, of equals a random one or the one "
        "with the lower number; unequal samples cannot fill every tier to the last byte"
    )
    return out
