"""How long a collective takes: NCCL's rings and trees, with latency and the bandwidth of each size.

Inside a server the bus bandwidth follows a measured curve over the message's size (V100 and A100,
``data/nccl_allreduce_lut.csv``), scaled to the machine's peak. Between servers a ring takes
``2 (N-1) a + 2 (N-1)/N S/B`` and a double tree ``2 log2(N) a + 2 S/B`` at a lower bandwidth; NCCL takes the
faster one, and so does this. A collective over both runs them as one pipeline: the slower part counts whole.
"""

from __future__ import annotations

import csv
import math
from functools import cache
from pathlib import Path

import numpy as np

from hora.plan.hardware import Machine

__all__ = ["DATA", "all_reduce", "bus_bandwidth", "gather", "point_to_point"]

DATA = Path(__file__).parent / "data"

MEASURED = 8
"""GPUs of the servers that were measured."""
HOP = 20e-6
"""Seconds of one hop between servers: 14 us of network (NCCL's tuning table, Simple) and the host."""
RING = 0.85
"""Share of the adapters' bandwidth that a ring between servers gets: 82 of 96 GB/s (nccl-tests #100)."""
TREE = 0.75
"""The same of a double tree."""
PIPELINE = 0.2
"""Share of the faster part of a two-level collective that its pipeline does not hide. Our assumption."""
SMALLEST = 80e-6
"""Seconds of an all-reduce inside a server of up to 1 MB (same measured table)."""


@cache
def _curves() -> dict[tuple[str, int], tuple[list[float], list[float]]]:
    """By generation and number of GPUs: log(bytes), and bus bandwidth over the peak of 8 GPUs."""
    with (DATA / "nccl_allreduce_lut.csv").open(encoding="utf-8") as file:
        rows = [(row["gpu"], int(row["n_gpus"]), int(row["bytes"]), row) for row in csv.DictReader(file)]
    found: dict[tuple[str, int], tuple[list[float], list[float]]] = {}
    for gpu, gpus, size, row in rows:
        where, share = found.setdefault((gpu, gpus), ([], []))
        where.append(math.log(size))
        share.append(float(row["busbw_GBps_oop"]))
    peaks = {gpu: max(share) for (gpu, gpus), (_, share) in found.items() if gpus == MEASURED}
    return {key: (where, [value / peaks[key[0]] for value in share]) for key, (where, share) in found.items()}


def bus_bandwidth(size: float, machine: Machine, gpus: int = 0) -> float:
    """Bytes/s of an all-reduce of ``size`` bytes among GPUs of one server, as nccl-tests counts it.

    Args:
        size: bytes.
        machine: the server.
        gpus: that take part; behind a switch all counts are alike, in a mesh (DGX-1) each has its own links.
    """
    if machine.curve == "flat":
        return machine.intra
    generation = "V100" if machine.curve == "mesh" else machine.curve
    own = (generation, gpus) if machine.curve in ("mesh", "A100") else (generation, MEASURED)
    where, share = _curves().get(own) or _curves()[generation, MEASURED]
    return machine.intra * float(np.interp(math.log(max(size, 1.0)), where, share))


def _inside(size: float, gpus: int, machine: Machine, rounds: int) -> float:
    """A ring inside one server: ``rounds`` is 2 for all-reduce, 1 for reduce-scatter and all-gather."""
    if gpus <= 1 or size <= 0:
        return 0.0
    return max(rounds * (gpus - 1) / gpus * size / bus_bandwidth(size, machine, gpus), SMALLEST * rounds / 2)


def _between(size: float, nodes: int, bandwidth: float, rounds: int) -> float:
    """A ring, or for an all-reduce a tree, between servers."""
    if nodes <= 1 or size <= 0:
        return 0.0
    ring = rounds * (nodes - 1) * (HOP + size / nodes / (RING * bandwidth))
    if rounds == 1:
        return ring
    return min(ring, 2 * math.log2(nodes) * HOP + 2 * size / (TREE * bandwidth))


def all_reduce(size: float, gpus: int, machine: Machine, *, per_node: int = 0) -> float:
    """Seconds to sum ``size`` bytes over ``gpus`` GPUs.

    Args:
        size: bytes of each GPU's array.
        gpus: that take part.
        machine: the server they are in.
        per_node: of them in one server, which share its adapters with the groups beside theirs; 0: as many
            as fit.
    """
    return _two_level(size, gpus, machine, per_node, 2)


def gather(size: float, gpus: int, machine: Machine, *, per_node: int = 0) -> float:
    """Seconds of an all-gather to, or a reduce-scatter of, ``size`` bytes over ``gpus`` GPUs."""
    return _two_level(size, gpus, machine, per_node, 1)


def _two_level(size: float, gpus: int, machine: Machine, per_node: int, rounds: int) -> float:
    inside = min(gpus, per_node or machine.gpus)
    share = inside / machine.gpus if per_node else 1.0  # of the adapters
    first = _inside(size, inside, machine, rounds)
    second = _between(size, -(-gpus // inside), machine.inter * share, rounds)
    return max(first, second) + PIPELINE * min(first, second)


def point_to_point(size: float, machine: Machine, *, same_node: bool) -> float:
    """Seconds to send ``size`` bytes from one GPU to another: its own share of the adapters, or the links."""
    if same_node:
        return 10e-6 + size / (0.65 * machine.intra)
    return HOP + size / (RING * machine.inter / machine.gpus)
