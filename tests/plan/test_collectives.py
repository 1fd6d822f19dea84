"""Collectives: the measured curve, and what must hold of any size and number of GPUs."""

import csv

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hora.plan.collectives import DATA, all_reduce, bus_bandwidth, gather, point_to_point
from hora.plan.hardware import MACHINES

SIZES = st.floats(1e3, 1e11)
NAMES = st.sampled_from(sorted(MACHINES))


def test_the_measured_times_come_back():
    with (DATA / "nccl_allreduce_lut.csv").open() as file:
        rows = [row for row in csv.DictReader(file) if row["n_gpus"] == "8"]
    assert rows
    for row in rows:
        machine = MACHINES["dgx-1" if row["gpu"] == "V100" else "dgx-a100"]
        found = 1e6 * all_reduce(float(row["bytes"]), 8, machine)
        assert found == pytest.approx(float(row["time_us_oop"]), rel=0.02)


@given(size=SIZES, name=NAMES, servers=st.integers(1, 200))
@settings(max_examples=100, deadline=None)
def test_more_bytes_and_more_servers_never_take_less(size, name, servers):
    machine = MACHINES[name]
    gpus = servers * machine.gpus
    once = all_reduce(size, gpus, machine)
    assert once > 0
    assert all_reduce(size * 2, gpus, machine) >= once * 0.999
    assert all_reduce(size, gpus + machine.gpus, machine) >= once * 0.999
    assert gather(size, gpus, machine) < once * 1.001 or servers > 8  # a ring alone, where a tree is faster


@given(size=st.floats(1e9, 1e11), name=NAMES, servers=st.integers(2, 64))
@settings(max_examples=60, deadline=None)
def test_nothing_is_faster_than_the_wires(size, name, servers):
    machine = MACHINES[name]
    found = all_reduce(size, servers * machine.gpus, machine)
    assert found >= 2 * (servers - 1) / servers * size / machine.inter
    assert bus_bandwidth(size, machine) <= machine.intra


def test_one_gpu_needs_nothing_and_a_group_of_one_per_server_shares_the_adapters():
    machine = MACHINES["dgx-a100"]
    assert all_reduce(1e9, 1, machine) == 0
    whole = all_reduce(1e9, 8, machine, per_node=1)
    assert whole == pytest.approx(8 * all_reduce(1e9, 64, machine), rel=0.4)
    assert point_to_point(1e8, machine, same_node=True) < point_to_point(1e8, machine, same_node=False)
