"""``horovodrun``: Horovod's command line on Hora's launcher."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import hora
from hora.core.errors import HoraError, LaunchError, MissingExtraError

__all__ = ["main"]

VARIABLE_OF = {
    "timeline_filename": "HOROVOD_TIMELINE",
    "stall_check_warning_time_seconds": "HOROVOD_STALL_CHECK_TIME_SECONDS",
    "stall_check_shutdown_time_seconds": "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    "gloo_timeout_seconds": "HOROVOD_GLOO_TIMEOUT_SECONDS",
    "start_timeout": "HORA_TIMEOUT",
    "network_interface": "HOROVOD_GLOO_IFACE",
    "network_interfaces": "HOROVOD_GLOO_IFACE",
}
"""Flags that are one variable with a value."""

NO_EFFECT = {
    "mpi": "Hora does not use MPI; the ranks talk by Gloo, or NCCL on GPUs",
    "jsrun": "Hora starts the workers itself",
    "cycle_time_ms": "Hora has no cycle: operations start when the last rank asks for them",
    "cache_capacity": "negotiation has no response cache to size",
    "disable_cache": "there is no cache of host checks to disable",
    "hierarchical_allreduce": "the engine chooses its own algorithm",
    "hierarchical_allgather": "the engine chooses its own algorithm",
    "torus_allreduce": "the engine chooses its own algorithm",
    "autotune": "there is nothing to tune: batches of operations grow with the load by themselves",
    "log_level": "Hora logs nothing but errors and stalls",
    "mpi_args": "Hora does not use MPI",
    "tcp": "Hora does not use MPI",
    "binding_args": "use taskset for the whole job",
    "thread_affinity": "use taskset for the whole job",
    "num_nccl_streams": "NCCL runs on torch.distributed's own stream",
    "mpi_threads_disable": "Hora does not use MPI",
    "ssh_port": "Hora starts workers on this host",
    "ssh_identity_file": "Hora starts workers on this host",
}
"""Flags that are accepted, each with one line saying why it changes nothing."""

REFUSED = {
    "host_discovery_script": "elastic jobs come with the elastic engine",
    "min_num_proc": "elastic jobs come with the elastic engine",
    "max_num_proc": "elastic jobs come with the elastic engine",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command on N workers; the exit code is that of the first failing rank."""
    words = list(sys.argv[1:] if argv is None else argv)
    try:
        arguments = _parser().parse_args(words)
        if arguments.config_file:
            _apply_config(arguments, arguments.config_file)
        if arguments.check_build:
            print(_build())
            return 0
        return _run(arguments)
    except HoraError as error:
        print(f"horovodrun: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="horovodrun",
        description="Run a Horovod script on N workers, with Hora in Horovod's place.",
        allow_abbrev=False,
    )
    add = parser.add_argument
    add("-v", "--version", action="version", version=f"hora {hora.__version__}, as Horovod 0.28.1")
    add("-np", "--num-proc", dest="np", type=int, help="number of workers")
    add("-cb", "--check-build", action="store_true", help="show what this installation can do")
    add("-H", "--hosts", help="hosts and their slots, as host:2; this host only")
    add("-hostfile", "--hostfile", help="file with lines `host slots=2`; this host only")
    add("--gloo", action="store_true", help="the default, and the only one on CPUs")
    add("--timeline-filename", metavar="FILE", help="rank 0 writes a Chrome trace of the operations")
    add("--timeline-mark-cycles", action="store_true", help="mark each release of operations in it")
    add("--no-timeline-mark-cycles", dest="timeline_mark_cycles", action="store_false")
    add("--fusion-threshold-mb", type=float, metavar="MB", help="join ready operations up to this size")
    add("--start-timeout", type=float, metavar="S", help="how long the start may take")
    add("--network-interface", "--network-interfaces", metavar="NAME", help="the network to use")
    add("--output-filename", type=Path, metavar="DIR", help="folder for rank.N/stdout and rank.N/stderr")
    add("--no-stall-check", action="store_true", help="no report of operations that only some ranks ask for")
    add("--stall-check", dest="no_stall_check", action="store_false")
    add("--stall-check-warning-time-seconds", type=float, metavar="S", help="seconds until that report")
    add("--stall-check-shutdown-time-seconds", type=float, metavar="S", help="seconds until they fail")
    add("--gloo-timeout-seconds", type=float, metavar="S", help="how long a collective waits")
    add("--verbose", action="store_true", help="tell which variables the workers get")
    add("--config-file", type=Path, metavar="FILE", help="YAML file with these flags")
    for flags, words in (
        (("--mpi", "--jsrun", "--tcp", "--disable-cache", "--mpi-threads-disable"), {"action": "store_true"}),
        (
            ("--no-mpi-threads-disable", "--log-with-timestamp", "--log-without-timestamp"),
            {"action": "store_true"},
        ),
        (("--prefix-output-with-timestamp",), {"action": "store_true"}),
        (
            ("--cycle-time-ms", "--cache-capacity", "--log-level", "--mpi-args", "--binding-args"),
            {"metavar": "X"},
        ),
        (("--thread-affinity", "--num-nccl-streams", "--autotune-log-file"), {"metavar": "X"}),
        (("--host-discovery-script",), {"metavar": "X"}),
    ):
        for flag in flags:
            add(flag, help=argparse.SUPPRESS, **words)  # type: ignore[arg-type]
    add("-p", "--ssh-port", help=argparse.SUPPRESS)
    add("-i", "--ssh-identity-file", help=argparse.SUPPRESS)
    for short, name in (("--min-np", "min"), ("--max-np", "max")):
        add(short, f"--{name}-num-proc", dest=f"{name}_num_proc", help=argparse.SUPPRESS)
    for name in ("autotune", "hierarchical-allreduce", "hierarchical-allgather", "torus-allreduce"):
        add(f"--{name}", action="store_true", help=argparse.SUPPRESS)
        add(f"--no-{name}", dest=name.replace("-", "_"), action="store_false", help=argparse.SUPPRESS)
    add("command", nargs=argparse.REMAINDER, metavar="command", help="what every worker runs")
    return parser


def _run(arguments: argparse.Namespace) -> int:
    from hora.launch import Job, horovod, run_job

    for name, reason in REFUSED.items():
        if getattr(arguments, name) is not None:
            flag = name.replace("_", "-")
            raise LaunchError(f"--{flag}: {reason}.", fix=f"Leave out --{flag} and write -np N.")
    command = arguments.command[1:] if arguments.command[:1] == ["--"] else arguments.command
    if not command:
        raise LaunchError(
            "There is nothing to run.", fix="Write for example: horovodrun -np 2 python train.py"
        )
    workers = arguments.np if arguments.np is not None else _slots(arguments)
    if workers is None:
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
    _slots(arguments)
    target, rest, title = horovod.target(command)
    result = run_job(Job(target=target, arguments=rest, workers=workers, env=env, name=title))
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


def _slots(arguments: argparse.Namespace) -> int | None:
    """Slots that ``-H`` or ``--hostfile`` name on this host; other hosts are refused."""
    from hora.launch.horovod import only_this_host

    entries = []
    if arguments.hosts:
        entries = [entry.strip() for entry in arguments.hosts.split(",") if entry.strip()]
    elif arguments.hostfile:
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
    if not entries:
        return None
    if not only_this_host(",".join(entries)):
        raise LaunchError(
            f"{', '.join(entries)}: Hora starts workers on this host only, for now.",
            fix="Write -H localhost:N, or start one rank per host with Slurm or MPI.",
        )
    try:
        slots = sum(int(entry.partition(":")[2] or 1) for entry in entries)
    except ValueError:
        raise LaunchError(
            f"{', '.join(entries)}: the number of slots is no number.", fix="Write -H localhost:2."
        ) from None
    if arguments.np is not None and arguments.np > slots:
        raise LaunchError(
            f"-np {arguments.np} workers do not fit in {slots} slots.",
            fix=f"Write -H localhost:{arguments.np}.",
        )
    return slots


def _apply_config(arguments: argparse.Namespace, path: Path) -> None:
    """Flags of a YAML file count unless the command line gave them."""
    try:
        import yaml
    except ImportError:
        raise MissingExtraError(
            "--config-file needs the package PyYAML, which is not installed.",
            fix="Run pip install pyyaml, or give the flags on the command line.",
        ) from None
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, yaml.YAMLError) as error:
        raise LaunchError(
            f"The file {path} cannot be read: {error}.", fix="Check its path and form."
        ) from error
    known: dict[tuple[str, str], str] = {
        ("params", "fusion_threshold_mb"): "fusion_threshold_mb",
        ("params", "cycle_time_ms"): "cycle_time_ms",
        ("params", "cache_capacity"): "cache_capacity",
        ("params", "hierarchical_allreduce"): "hierarchical_allreduce",
        ("params", "hierarchical_allgather"): "hierarchical_allgather",
        ("params", "torus_allreduce"): "torus_allreduce",
        ("autotune", "enabled"): "autotune",
        ("timeline", "filename"): "timeline_filename",
        ("timeline", "mark_cycles"): "timeline_mark_cycles",
        ("stall_check", "warning_time_seconds"): "stall_check_warning_time_seconds",
        ("stall_check", "shutdown_time_seconds"): "stall_check_shutdown_time_seconds",
        ("library_options", "gloo_timeout_seconds"): "gloo_timeout_seconds",
        ("library_options", "thread_affinity"): "thread_affinity",
        ("logging", "level"): "log_level",
    }
    for section, values in (content or {}).items():
        for key, value in (values if isinstance(values, dict) else {"": values}).items():
            _apply(arguments, known.get((section, key), section if key == "" else ""), value, section, key)


def _apply(arguments: argparse.Namespace, name: str, value: Any, section: str, key: str) -> None:
    if (section, key) == ("stall_check", "enabled"):
        name, value = "no_stall_check", not value
    if not name or not hasattr(arguments, name):
        where = f"{section}.{key}" if key else section
        print(f"horovodrun: {where} of the file has no effect: Hora has no such setting", file=sys.stderr)
    elif getattr(arguments, name) in (None, False):
        setattr(arguments, name, value)


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
