"""``horovodrun``: Horovod's command line on Hora's launcher."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hora
from hora.cli._elastic_flags import hosts_of, how_many
from hora.cli._horovod_flags import NO_EFFECT, VARIABLE_OF, parser
from hora.core.errors import HoraError, LaunchError

__all__ = ["main"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command on N workers; the exit code is that of the first failing rank."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        known = parser()
        arguments = known.parse_args(words)
        if arguments.config_file:
            from hora.cli._horovod_config import read

            theirs, lines = read(arguments.config_file, known)
            for line in lines:
                print(f"horovodrun: {line}", file=sys.stderr)
            arguments = known.parse_args([*theirs, *words])  # what comes later counts
        if arguments.check_build:
            print(_build())
            return 0
        return _run(arguments)
    except HoraError as error:
        print(f"horovodrun: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _run(arguments: argparse.Namespace) -> int:
    from hora.launch import Job, horovod, run_job
    from hora.launch.job import HERE

    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        raise LaunchError(
            "There is nothing to run.", fix="Write for example: horovodrun -np 2 python train.py"
        )
    wanted = None if arguments.np is None else str(arguments.np)
    workers, elastic = how_many(arguments, wanted)
    named = _hosts(arguments)
    hosts = hosts_of(named, wanted, flag="-H") if named is not None and elastic is None else []
    if hosts:
        workers = sum(slots for _, slots in hosts)
    elif elastic is None and arguments.np is None:
        raise LaunchError("The number of workers is missing.", fix="Write horovodrun -np 2 ...")
    env = _variables(arguments)
    lines = [
        f"--{name.replace('_', '-')} has no effect: {reason}"
        for name, reason in NO_EFFECT.items()
        if getattr(arguments, name)
    ]
    for line in [*lines, *horovod.explain({**os.environ, **env})]:
        print(f"horovodrun: {line}", file=sys.stderr)
    env |= horovod.environment({**os.environ, **env})
    if arguments.verbose:
        for key, value in sorted(env.items()):
            print(f"horovodrun: {key}={value}", file=sys.stderr)
    target, rest, title = horovod.target(command)
    result = run_job(
        Job(
            target=target,
            arguments=rest,
            workers=workers,
            env=env,
            name=title,
            elastic=elastic,
            hosts=hosts if any(name != HERE for name, _ in hosts) else [],
        )
    )
    if arguments.output_filename:
        _copy_output(result.run, arguments.output_filename, workers)
    return result.exit_code


def _variables(arguments: argparse.Namespace) -> dict[str, str]:
    found = {
        variable: f"{value:g}" if isinstance(value, float) else str(value)
        for flag, variable in VARIABLE_OF.items()
        if (value := getattr(arguments, flag, None)) is not None
    }
    if arguments.fusion_threshold_mb is not None:
        found["HOROVOD_FUSION_THRESHOLD"] = str(int(arguments.fusion_threshold_mb * (1 << 20)))
    if arguments.timeline_mark_cycles:
        found["HOROVOD_TIMELINE_MARK_CYCLES"] = "1"
    if arguments.no_stall_check:
        found["HOROVOD_STALL_CHECK_DISABLE"] = "1"
    return found


def _hosts(arguments: argparse.Namespace) -> str | None:
    """The hosts that ``-H`` or ``--hostfile`` name, with their slots."""
    if arguments.hosts:
        return str(arguments.hosts)
    entries = []
    if arguments.hostfile:
        try:
            text = Path(arguments.hostfile).read_text(encoding="utf-8")
        except OSError as error:
            raise LaunchError(
                f"The host file {arguments.hostfile} cannot be read: {error.strerror}.", fix="Check its path."
            ) from error
        lines = [line.partition("#")[0].split() for line in text.splitlines()]
        entries = [
            f"{line[0]}:{next((part[6:] for part in line if part.startswith('slots=')), '1')}"
            for line in lines
            if line
        ]
    return ",".join(entries) or None


def _copy_output(run: Any, folder: Path, workers: int) -> None:
    """Horovod's layout of the ranks' output. Hora keeps both streams in one log, in their order."""
    for rank in range(workers):
        place = folder / f"rank.{rank:0{len(str(workers - 1))}d}"
        place.mkdir(parents=True, exist_ok=True)
        (place / "stdout").write_bytes(run.log(rank).read_bytes())
        (place / "stderr").write_bytes(b"")


def _build() -> str:
    """What Horovod's ``--check-build`` shows, answered for Hora."""
    import importlib.util

    def mark(there: bool) -> str:
        return "[X]" if there else "[ ]"

    torch = importlib.util.find_spec("torch") is not None
    return f"""hora {hora.__version__}, as Horovod 0.28.1:

Available Frameworks:
    [ ] TensorFlow
    {mark(torch)} PyTorch
    [ ] MXNet

Available Controllers:
    [ ] MPI
    {mark(torch)} Gloo

Available Tensor Operations:
    {mark(_nccl())} NCCL
    [ ] DDL
    [ ] CCL
    [ ] MPI
    {mark(torch)} Gloo"""


def _nccl() -> bool:
    """Whether this PyTorch brings NCCL, found without importing it."""
    import importlib.util

    spec = importlib.util.find_spec("torch")
    places = spec.submodule_search_locations if spec else None
    return any(next(Path(place, "lib").glob("libtorch_cuda*"), None) is not None for place in places or ())


if __name__ == "__main__":
    raise SystemExit(main())
