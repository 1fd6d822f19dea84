"""What is to be run, checked before anything is started or written."""

from __future__ import annotations

import difflib
import importlib.machinery
import importlib.util
import os
import shlex
import shutil
import sys
import zipimport
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from hora.core import settings
from hora.core.errors import LaunchError
from hora.launch import _network, _remote_shell

__all__ = [
    "Elastic",
    "FunctionTarget",
    "Job",
    "ModuleTarget",
    "ScriptTarget",
    "Target",
    "check",
    "check_workers",
    "cores",
    "locate",
    "rank_environment",
]

OWNED = (
    *("HORA_RANK", "HORA_SIZE", "HORA_LOCAL_RANK", "HORA_LOCAL_SIZE", "HORA_HOST_INDEX", "HORA_HOST_COUNT"),
    *("HORA_STORE", "HORA_STORE_FD", "HORA_STATUS_FD", "HORA_RUN_DIR", "HORA_JOB"),
    *("HORA_NOTICES", "HORA_ATTEMPT", "HORA_ELASTIC_FD", "HORA_WORKER"),
    *("HORA_GUARD_FD", "HORA_GUARD_BOARD"),
    *("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE"),
    *("MASTER_ADDR", "MASTER_PORT"),
)
"""Variables that the launcher alone sets; those of an outer launcher are not handed on."""

HOST = "127.0.0.1"

HERE = "localhost"
"""What this host is called among those of a job."""

TEST_RUNNERS = frozenset({"pytest", "py.test", "unittest", "nose2"})
"""Modules and programs that run tests, which provoke on purpose what the guard looks for."""


@dataclass(frozen=True)
class ScriptTarget:
    """A Python file, or a directory or zip file that holds a ``__main__.py``, as for ``python PATH``."""

    path: str

    @property
    def stem(self) -> str:
        """The name of the file without its suffix: what a run is called by default."""
        return Path(self.path).absolute().stem or "script"


@dataclass(frozen=True)
class ModuleTarget:
    """A module or package, as for ``python -m NAME``."""

    name: str

    @property
    def stem(self) -> str:
        """The last part of the name: what a run is called by default."""
        return self.name.removesuffix(".__main__").rpartition(".")[2]


@dataclass(frozen=True)
class FunctionTarget:
    """A pickled call; ``hora.run`` makes it.

    Attributes:
        payload: file with the pickled call.
        results: existing directory in which rank N leaves ``rank-N.pickle``.
        stem: the function's name.
    """

    payload: Path
    results: Path
    stem: str


Target = ScriptTarget | ModuleTarget | FunctionTarget


@dataclass(frozen=True, kw_only=True)
class Elastic:
    """How the number of a job's workers may change while it runs.

    Attributes:
        least: with fewer workers it does not train.
        most: more are not started.
        timeout: seconds that it waits for enough workers.
        resets: how often a world may be lost before the job is given up; None: as often as it makes progress.
        cooldown: shortest and longest time in seconds in which a host that keeps failing gets no workers.
        hosts_from: a program that prints one host a line, with ``:slots``; it is asked once a second.
    """

    least: int = 1
    most: int = 1
    timeout: float = 600.0
    resets: int | None = None
    cooldown: tuple[float, float] = (1.0, 60.0)
    hosts_from: str | None = None


@dataclass(frozen=True, kw_only=True)
class Job:
    """What the user asks to run.

    Attributes:
        target: what every rank runs.
        arguments: its ``sys.argv[1:]``.
        workers: number of ranks.
        env: variables added to the ranks' environment.
        run_dir: run directory to make; None: ``runs/<name>-<date>-<time>``.
        prefix: put ``[rank] `` in front of each line on the console (never in the logs).
        quiet: show nothing but failures on the console; the logs are complete all the same.
        name: what the run is called; None: the target's own name.
        timeout: seconds after which the job is stopped and counts as failed (exit code 124); None: never.
        restarts: how often all ranks are started again after a failure.
        elastic: how the number of workers may change; None: when one fails, the job has failed.
        hosts: names of hosts, and how many of the workers each has, in the order of the ranks; ``localhost``
            is this one. Empty: all are on this host.
    """

    target: Target
    arguments: Sequence[str] = ()
    workers: int = 1
    env: Mapping[str, str] = field(default_factory=dict)
    run_dir: Path | None = None
    prefix: bool = True
    quiet: bool = False
    name: str | None = None
    timeout: float | None = None
    restarts: int = 0
    elastic: Elastic | None = None
    hosts: Sequence[tuple[str, int]] = ()

    @property
    def here(self) -> int:
        """How many of the workers are on this host."""
        return dict(self.hosts).get(HERE, 0) if self.hosts else self.workers

    @property
    def title(self) -> str:
        """What the run is called: ``name``, else the target's own name."""
        return self.name or self.target.stem


def check(job: Job) -> None:
    """Find what cannot work before anything is started or written.

    Raises:
        LaunchError: a missing script or module, a wrong number of workers, a variable that cannot be set.
        SettingError: a ``HORA_*`` variable with a wrong name or value.
    """
    try:
        Path.cwd()
    except OSError as error:
        raise LaunchError(
            f"The current directory no longer exists ({error.strerror}).",
            fix="Change to one that exists: cd ~",
        ) from error
    check_workers(job.workers)
    if job.timeout is not None and not job.timeout > 0:
        raise LaunchError(
            f"timeout={job.timeout} is not a positive number of seconds.", fix="Write --timeout 3600."
        )
    if isinstance(job.restarts, bool) or not isinstance(job.restarts, int) or job.restarts < 0:
        raise LaunchError(
            f"restarts={job.restarts!r} is not a number of restarts: it takes at least 0.",
            fix="Write for example --restarts 3.",
        )
    if job.name is not None and (
        not job.name or "/" in job.name or "\0" in job.name or job.name in (".", "..")
    ):
        raise LaunchError(
            f"name={job.name!r} cannot name a directory.", fix="Write a plain word: --name first-try"
        )
    for key, value in job.env.items():
        _check_variable(key, value)
    chosen = settings.load(rank_environment(job))
    if job.elastic is not None and job.elastic.hosts_from is not None:
        program_of(job.elastic.hosts_from)
    if job.hosts or (job.elastic is not None and job.elastic.hosts_from is not None):
        _remote_shell.check(chosen.remote_shell)
        if chosen.network is not None:
            _network.check(chosen.network)
    if isinstance(job.target, ScriptTarget):
        _check_script(job.target.path)
    elif isinstance(job.target, ModuleTarget):
        _check_module(job.target.name)


def program_of(command: str) -> list[str]:
    """The words of the command that names hosts, with the program's whole path.

    Raises:
        LaunchError: there is no such program.
    """
    words = shlex.split(command)
    found = shutil.which(words[0]) if words else None
    if found is None and words and os.access(words[0], os.X_OK) and Path(words[0]).is_file():
        found = words[0]
    if found is None:
        raise LaunchError(
            f"The program {command!r}, which is to name the hosts, cannot be run.",
            fix=f"Make it one that prints lines host:slots: chmod +x {command}",
        )
    return [str(Path(found).absolute()), *words[1:]]


def check_workers(workers: int) -> None:
    """Raises LaunchError unless ``workers`` is a number of workers that can be started."""
    if isinstance(workers, bool) or not isinstance(workers, int) or workers < 1:
        raise LaunchError(
            f"{workers!r} is not a number of workers: it takes at least 1.", fix="Write for example -n 2."
        )
    # Not a promise that so many fit; a typing error must not start to fork.
    if workers > MOST_WORKERS:
        raise LaunchError(
            f"{workers} workers on one host are more than the {MOST_WORKERS} that Hora starts there.",
            fix=f"Write -n {os.cpu_count() or 1} for one worker per core of this host.",
        )


MOST_WORKERS = 4096


def cores() -> int:
    """Cores that this launcher, and so its ranks, may use: ``taskset`` and cpusets are respected."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def rank_environment(job: Job, environ: Mapping[str, str] | None = None) -> dict[str, str]:
    """The environment that all ranks of the job share; what differs per rank is added at the start."""
    outer = os.environ if environ is None else environ
    shared = {key: value for key, value in outer.items() if key not in OWNED}
    # With all ranks of a host reducing at once, more threads than cores make each of them slower.
    shared.setdefault("OMP_NUM_THREADS", str(max(1, cores() // max(1, job.here))))
    shared["PYTHONUNBUFFERED"] = "1"
    shared.update(job.env)
    if _runs_tests(job):
        shared.setdefault("HORA_GUARD", "off")
    return shared


def locate(module: str, path: Sequence[str]) -> importlib.machinery.ModuleSpec | None:
    """Find a module without running code, its parent packages' included (they may import torch)."""
    top, *rest = module.split(".")
    spec = importlib.machinery.PathFinder.find_spec(top, list(path)) or _other_finders(top)
    name = top
    for part in rest:
        if spec is None or spec.submodule_search_locations is None:
            return None
        name = f"{name}.{part}"
        spec = importlib.machinery.PathFinder.find_spec(name, list(spec.submodule_search_locations))
    return spec


def _other_finders(top: str) -> importlib.machinery.ModuleSpec | None:
    """Built-in and frozen modules, and editable installs that have a finder of their own."""
    try:
        return importlib.util.find_spec(top)
    except (ImportError, ValueError):
        return None


def _runs_tests(job: Job) -> bool:
    if isinstance(job.target, ModuleTarget):
        return job.target.name.partition(".")[0] in TEST_RUNNERS
    if isinstance(job.target, ScriptTarget):
        # A program that is not Python's is the first argument of a script of ours (hora.launch.horovod).
        own = Path(job.target.path) == Path(__file__).with_name("_exec.py")
        program = job.arguments[0] if own and job.arguments else job.target.path
        return Path(program).name in TEST_RUNNERS
    return False


def _check_variable(key: str, value: str) -> None:
    if key in OWNED:
        raise LaunchError(f"{key} is set by the launcher for each rank.", fix=f"Leave out --env {key}=...")
    if not key or "=" in key or "\0" in key + value:
        raise LaunchError(
            f"{key!r} cannot be the name of a variable, or {value!r} its value.", fix="Write --env KEY=VALUE."
        )


def _check_script(path: str) -> None:
    if not path or "\0" in path:
        raise LaunchError(f"{path!r} is not the path of a script.", fix="Write hora run -n 2 train.py")
    if Path(path).is_dir():
        if not any((Path(path) / name).is_file() for name in ("__main__.py", "__main__.pyc")):
            raise LaunchError(f"The directory {path} holds no __main__.py.", fix=_nearest(f"{path}/"))
        return
    if not Path(path).exists():
        if Path(path).is_symlink():
            raise LaunchError(
                f"The script {path} is a link that leads nowhere.", fix="Give the script itself."
            )
        raise LaunchError(f"The script {path} does not exist.", fix=_nearest(path))
    if not os.access(path, os.R_OK):
        raise LaunchError(f"The script {path} cannot be read.", fix=f"Allow it: chmod u+r {path}")
    if zipimport_holds(path) is False:
        raise LaunchError(
            f"The zip file {path} holds no __main__.py.",
            fix="Add one: python -m zipapp FOLDER -m module:function",
        )


def zipimport_holds(path: str) -> bool | None:
    """Whether a zip file holds a ``__main__``; None when the path is no zip file."""
    try:
        return zipimport.zipimporter(path).find_spec("__main__") is not None
    except zipimport.ZipImportError:
        return None


def _nearest(path: str) -> str:
    """Advice that names the existing file whose name comes closest."""
    folder, name = os.path.split(path)
    try:
        names = sorted(entry.name for entry in os.scandir(folder or ".") if not entry.name.startswith("."))
    except OSError:
        return f"There is no directory {folder} either; check the path."
    scripts = [entry for entry in names if entry.endswith(".py")]
    near = difflib.get_close_matches(name, names, n=1) or (
        [entry for entry in scripts if Path(entry).stem.lower() == name.lower()]
        or ([] if name else scripts[:1])
    )
    if near:
        return f"Did you mean {Path(folder) / near[0]}?"
    if scripts:
        return f"The scripts in {folder or 'this directory'} are: {', '.join(scripts[:8])}."
    return f"There is no Python script in {folder or 'this directory'}; check the path."


def _check_module(name: str) -> None:
    path = [str(Path.cwd()), *sys.path]
    if not all(part.isidentifier() for part in name.split(".")):
        stem = name.removesuffix(".py").strip("./").replace("/", ".")
        raise LaunchError(
            f"{name!r} is not the name of a module.",
            fix=f"For a file, leave out -m; for a module, write -m {stem}.",
        )
    spec = locate(name, path)
    if spec is not None:
        is_package = spec.submodule_search_locations is not None
        if not is_package or locate(name + ".__main__", path) is not None:
            return
        raise LaunchError(
            f"{name} is a package without __main__, so it cannot be run.",
            fix=f"Name one of its modules: -m {name}.train",
        )
    parent = name.rpartition(".")[0]
    if parent and locate(parent, path) is not None and _may_extend_path(parent, path):
        return  # only running the package can tell
    top = name.partition(".")[0]
    missing = name if not parent or locate(top, path) is None else f"{name} (the package {top} exists)"
    if name.endswith(".py") and Path(name).exists():
        raise LaunchError(f"There is no module {missing}.", fix=f"Leave out -m to run the file {name}.")
    raise LaunchError(
        f"There is no module {missing}.",
        fix="Run from the directory that holds it, or install it, or set PYTHONPATH.",
    )


def _may_extend_path(package: str, path: Sequence[str]) -> bool:
    spec = locate(package, path)
    if spec is None or spec.origin is None or not spec.origin.endswith(".py"):
        return False
    try:
        return "__path__" in Path(spec.origin).read_text(errors="replace")
    except OSError:
        return False
