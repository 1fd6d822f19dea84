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
        for profile, targets in workload.targets().items():
            least = ", ".join(
                f"{workload.measures[kind]} of at least {value}" for kind, value in targets.items()
            )
            print(f"  hora train {workload.name} --profile {profile}: {least}")
    return 0
