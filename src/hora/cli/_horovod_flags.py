"""Flags of ``horovodrun``, and what becomes of each."""

from __future__ import annotations

import argparse
from pathlib import Path

import hora

__all__ = ["NO_EFFECT", "VARIABLE_OF", "parser"]

VARIABLE_OF = {
    "timeline_filename": "HOROVOD_TIMELINE",
    "stall_check_warning_time_seconds": "HOROVOD_STALL_CHECK_TIME_SECONDS",
    "stall_check_shutdown_time_seconds": "HOROVOD_STALL_SHUTDOWN_TIME_SECONDS",
    "gloo_timeout_seconds": "HOROVOD_GLOO_TIMEOUT_SECONDS",
    "start_timeout": "HORA_TIMEOUT",
    "network_interface": "HOROVOD_GLOO_IFACE",
}
"""Flags that are one variable with a value."""

_NO_MPI = "Hora does not use MPI"
_ITS_OWN = "the engine chooses its own algorithm"
_NO_TUNING = "there is nothing to tune: batches of operations grow with the load by themselves"
_NO_LOG = "Hora logs nothing but errors and stalls"
_NO_STAMP = "the ranks' output is shown as they write it; the run directory has the times of what happened"
_SHELL = "set HORA_REMOTE_SHELL, for example to 'ssh -p 2222 -i key {host}'"

_SWITCHES = {
    "mpi": "Hora does not use MPI; the ranks talk by Gloo, or NCCL on GPUs",
    "jsrun": "Hora starts the workers itself",
    "tcp": _NO_MPI,
    "mpi_threads_disable": _NO_MPI,
    "disable_cache": "there is no cache of host checks to disable",
    "hierarchical_allreduce": _ITS_OWN,
    "hierarchical_allgather": _ITS_OWN,
    "torus_allreduce": _ITS_OWN,
    "autotune": _NO_TUNING,
    "log_hide_timestamp": _NO_LOG,
    "log_with_timestamp": _NO_LOG,
    "log_without_timestamp": _NO_LOG,
    "prefix_output_with_timestamp": _NO_STAMP,
}

_VALUES = {
    "cycle_time_ms": "Hora has no cycle: operations start when the last rank asks for them",
    "cache_capacity": "negotiation has no response cache to size",
    "autotune_log_file": _NO_TUNING,
    "autotune_warmup_samples": _NO_TUNING,
    "autotune_steps_per_sample": _NO_TUNING,
    "autotune_bayes_opt_max_samples": _NO_TUNING,
    "autotune_gaussian_process_noise": _NO_TUNING,
    "log_level": _NO_LOG,
    "mpi_args": _NO_MPI,
    "binding_args": "use taskset for the whole job",
    "thread_affinity": "use taskset for the whole job",
    "num_nccl_streams": "NCCL runs on torch.distributed's own stream",
    "ssh_port": _SHELL,
    "ssh_identity_file": _SHELL,
    "slots_per_host": "the host discovery script says how many slots a host has",
}

NO_EFFECT = _SWITCHES | _VALUES
"""Flags that are accepted, each with one line saying why it changes nothing."""

_NEGATED = (
    *("autotune", "hierarchical_allreduce", "hierarchical_allgather", "torus_allreduce"),
    *("mpi_threads_disable", "log_hide_timestamp"),
)
"""Those of them that Horovod also has with ``--no-`` in front."""

_OTHER_NAMES = {
    "ssh_port": ("-p",),
    "ssh_identity_file": ("-i",),
    "prefix_output_with_timestamp": ("-prefix-timestamp",),
    "slots_per_host": ("--slots",),
}


def parser() -> argparse.ArgumentParser:
    """Horovod's command line. Its help shows what has an effect here."""
    made = argparse.ArgumentParser(
        prog="horovodrun",
        description="Run a Horovod script on N workers, with Hora in Horovod's place.",
        allow_abbrev=False,
    )
    add = made.add_argument
    add("-v", "--version", action="version", version=f"hora {hora.__version__}, as Horovod 0.28.1")
    add("-np", "--num-proc", dest="np", type=int, help="number of workers")
    add("-cb", "--check-build", action="store_true", help="show what this installation can do")
    add("-H", "--hosts", help="hosts and their slots, as localhost:2,b:2")
    add("-hostfile", "--hostfile", help="file with lines `host slots=2`")
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
    add("--config-file", type=Path, metavar="FILE", help="YAML file with these flags; those given here win")
    hidden = argparse.SUPPRESS
    for name in _SWITCHES:
        flag = name.replace("_", "-")
        add(f"--{flag}", *_OTHER_NAMES.get(name, ()), action="store_true", help=hidden)
        if name in _NEGATED:
            add(f"--no-{flag}", dest=name, action="store_false", help=hidden)
    for name in _VALUES:
        add(f"--{name.replace('_', '-')}", *_OTHER_NAMES.get(name, ()), dest=name, help=hidden)
    add("--min-np", "--min-num-proc", dest="min_workers", metavar="N", help="go on with so many workers")
    add("--max-np", "--max-num-proc", dest="max_workers", metavar="N", help="take in up to so many")
    add("--host-discovery-script", dest="hosts_from", metavar="PROGRAM", help="prints lines host:slots")
    add("--elastic-timeout", metavar="S", help="wait so long for --min-np workers; default: 600")
    add("--reset-limit", metavar="N", help="give up when workers have been lost more often")
    add(
        "--blacklist-cooldown-range",
        dest="cooldown",
        nargs=2,
        metavar=("MIN", "MAX"),
        help="seconds for which a host that keeps failing gets no workers",
    )
    add("command", nargs=argparse.REMAINDER, metavar="command", help="what every worker runs")
    return made
