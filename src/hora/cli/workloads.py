"""``hora workloads``: the workloads, their data and their targets."""

from __future__ import annotations

import argparse

from hora.workloads.registry import WORKLOADS


def configure(parser: argparse.ArgumentParser) -> None:
    """There is nothing to configure."""


def main(arguments: argparse.Namespace) -> int:
    """Print the list; 0."""
    for workload in WORKLOADS.values():
        print(f"{workload.name}: {workload.title}")
        print(f"  data: {workload.data}")
        for profile, target in workload.targets().items():
            print(f"  hora train {workload.name} --profile {profile}: top-1 accuracy of at least {target}")
    return 0
