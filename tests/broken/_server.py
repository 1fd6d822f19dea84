"""Runs jobs of ``hora run`` for the tests, several at a time, without importing torch for each rank anew.

    python -m tests.broken._server LIMIT PARENT [MODULE PATIENCE] < requests > results

The requests come as lines of JSON, ``{"name", "arguments", "folder", "real"}``, the results go as
paths of JSON files, ``{"name", "code", "began", "output", "left"}``, each when its job has ended.

A job is the command line of ``hora run`` in a process of its own, with the real supervisor. Only the start
of a rank differs: it is forked from the supervisor, where MODULE (``hora.torch``) and its framework are
imported already, and then does what a new interpreter would do with ``_worker.py``. ``real`` leaves that
out. Hora is imported twice beforehand: the supervisor uses one copy of its modules, and a rank gets
the other, which nobody has used.
"""

from __future__ import annotations

import atexit
import ctypes
import faulthandler
import gc
import importlib
import io
import json
import os
import random
import selectors
import signal
import subprocess
import sys
import threading
import time
import types
import warnings
from pathlib import Path
from typing import Any

LATE_IMPORTS = ("torch.distributed", "torch.utils.data", "torch.nn.parallel", "torch.optim", "torch._dynamo")
"""What a training script, or PyTorch itself at the first optimizer, imports beside ``torch``."""

SUPERVISOR = ("hora.cli.run", "hora.launch")
"""What it imports of Hora."""

PATIENCE = 60.0
"""Seconds after which a job is killed; the test then says so."""

LEAVING = 2.0
"""Seconds that processes of an ended job get to vanish."""

MARK = "HORA_JOB"
NO_JOB = "0" * 32
"""A job's mark in the environment has 32 characters; see :func:`_mark`."""

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36
"""From <linux/prctl.h>."""

_path = list(sys.path)
_of_rank: dict[str, types.ModuleType] = {}
_of_supervisor: dict[str, types.ModuleType] = {}


def main(limit: int, parent: int, module: str = "hora.torch", patience: float = PATIENCE) -> None:
    """Run what is asked for until nothing more comes, or until the parent has ended."""
    _die_with(parent)
    os.environ.pop(MARK, None)
    _import(module)
    running = 0
    for line in sys.stdin:
        if running == limit:
            os.wait()
            running -= 1
        parent = os.getpid()
        if os.fork() == 0:
            _die_with(parent)
            _keep(**json.loads(line), patience=patience)
            os._exit(0)
        running += 1
    while running:
        os.wait()
        running -= 1


def _import(module: str) -> None:
    if module == "hora.torch":
        import torch

        torch.set_num_threads(1)  # a forked process has no thread of a pool
        for name in LATE_IMPORTS:
            importlib.import_module(name)
        torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    elif module == "hora.tensorflow":
        importlib.import_module("keras")  # TensorFlow imports it late
    elif module == "hora.keras":
        # As if the other frameworks were not installed: nothing may need them.
        for other in {"torch", "tensorflow", "jax"} - {os.environ["KERAS_BACKEND"]}:
            sys.modules[other] = None  # type: ignore[assignment]
    # JAX, once imported, warns of each fork. Here no thread is running that a fork could lose.
    warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
    for names, copy in ((module,), _of_rank), (SUPERVISOR, _of_supervisor):
        for name in names:
            importlib.import_module(name)
        copy.update(_take_out())
    if (torch := sys.modules.get("torch")) is not None:  # as the backend of Keras, too
        torch.set_num_threads(1)
    gc.collect()
    gc.freeze()  # so that collections in the forks do not go through what they share


def _take_out() -> dict[str, types.ModuleType]:
    """Hora's modules, which are then no longer known as imported."""
    names = [name for name in sys.modules if name == "hora" or name.startswith("hora.")]
    return {name: sys.modules.pop(name) for name in names}


def _die_with(parent: int) -> None:
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it ended before the line above
        os._exit(1)


def _prctl(option: int, value: int) -> None:
    ctypes.CDLL(None).prctl(option, int(value), 0, 0, 0)


# --- one job --------------------------------------------------------------------------------------


def _keep(name: str, arguments: list[str], folder: str, real: bool, patience: float) -> None:
    """Run one job and report on it. What it leaves behind becomes a child of this process."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    reader, writer = os.pipe()
    began = time.time()
    command = [sys.executable, "-m", "hora", "run", *arguments]
    if real:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=writer, stderr=writer, cwd=folder
        ).pid
    else:
        keeper = os.getpid()
        process = os.fork()
        if process == 0:
            _die_with(keeper)
            os.close(reader)
            _launch(command, folder, writer)
    os.close(writer)
    output = _read(reader, until=time.monotonic() + patience)
    if output is None:
        os.kill(process, signal.SIGKILL)
    code = os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])
    result = {
        "name": name,
        "code": code if output is not None else None,
        "began": began,
        "output": output or [],
        "left": _left(),
    }
    # Longer than what a pipe takes in one piece, so results of several jobs would mix.
    place = Path(folder) / f"{name}.json"
    place.write_text(json.dumps(result))
    os.write(1, f"{place}\n".encode())


def _read(reader: int, *, until: float) -> list[tuple[float, str]] | None:
    """The lines that a job prints, each with its time; None if it does not come to an end."""
    lines: list[tuple[float, str]] = []
    rest = b""
    with selectors.DefaultSelector() as selector:
        selector.register(reader, selectors.EVENT_READ)
        while selector.select(max(0.0, until - time.monotonic())):
            data = os.read(reader, 1 << 16)
            if not data:
                return lines
            *whole, rest = (rest + data).split(b"\n")
            lines += [(time.time(), line.decode("utf-8", "replace")) for line in whole]
    return None


def _left() -> list[str]:
    """The processes that are still there, by their command lines; they are killed."""
    until = time.monotonic() + LEAVING
    while (children := _children()) and time.monotonic() < until:
        _reap()
        time.sleep(0.02)  # other programs' ends, of which nothing tells
    names = []
    for child in children:
        words = Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0")
        names.append(b" ".join(words).decode("utf-8", "replace").strip())
        os.kill(child, signal.SIGKILL)
    return names


def _children() -> list[int]:
    _reap()
    tasks = Path("/proc/self/task").iterdir()
    return [int(child) for task in tasks for child in (task / "children").read_text().split()]


def _reap() -> None:
    try:
        while os.waitpid(-1, os.WNOHANG)[0]:
            pass
    except ChildProcessError:
        return


# --- inside the launcher --------------------------------------------------------------------------


def _launch(command: list[str], folder: str, output: int) -> None:
    """Be ``hora run``."""
    null = os.open(os.devnull, os.O_RDONLY)
    for old, new in ((null, 0), (output, 1), (output, 2)):
        os.dup2(old, new)
    os.close(output)
    os.chdir(folder)
    sys.argv = ["hora", *command[3:]]
    sys.modules.update(_of_supervisor)
    from hora import cli
    from hora.launch import _start

    _start.subprocess = types.SimpleNamespace(  # type: ignore[assignment]
        **{**vars(subprocess), "Popen": _Forked}
    )
    try:
        code = cli.main(command[3:])
    except SystemExit as end:
        code = end.code if isinstance(end.code, int) else 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


class _Forked(subprocess.Popen):  # type: ignore[type-arg]
    """A rank that starts as a fork."""

    def _execute_child(self, args: list[str], *positional: Any, **named: Any) -> None:
        names = subprocess.Popen._execute_child.__code__.co_varnames[2:]  # type: ignore[attr-defined]
        given = dict(zip(names, positional, strict=False)) | named
        self.pid = os.fork()
        if self.pid == 0:
            _be_rank(args, given)
        self._child_created = True
        for end in ("p2cread", "c2pwrite", "errwrite"):
            if given[end] != -1:
                os.close(given[end])


def _be_rank(args: list[str], given: dict[str, Any]) -> None:
    """Do what a new interpreter does with ``python [flags] _worker.py ...``."""
    signal.set_wakeup_fd(-1)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL)
    for end, number in (("p2cread", 0), ("c2pwrite", 1), ("errwrite", 2)):
        os.dup2(given[end], number)
    kept = {0, 1, 2, *given["pass_fds"]}
    for fd in [int(entry.name) for entry in Path("/proc/self/fd").iterdir()]:
        if fd not in kept:
            _close(fd)
    for fd in given["pass_fds"]:
        os.set_inheritable(fd, True)
    os.setsid()
    os.environ.clear()
    os.environ.update(given["env"])
    _mark(given["env"][MARK])
    for name, fd in (("stdout", 1), ("stderr", 2)):
        raw = io.FileIO(fd, "w", closefd=False)
        setattr(sys, name, io.TextIOWrapper(raw, "utf-8", write_through=True))
        setattr(sys, f"__{name}__", getattr(sys, name))
    _forget()
    words = args[next(i for i, word in enumerate(args) if word.endswith("_worker.py")) :]
    sys.argv = words
    added = [place for place in os.environ.get("PYTHONPATH", "").split(os.pathsep) if place not in _path]
    sys.path[:] = [str(Path(words[0]).parent), *filter(None, added), *_path[1:]]
    _end(_run(Path(words[0])))


def _close(fd: int) -> None:
    try:
        os.close(fd)
    except OSError:  # the one by which the folder was listed
        return


def _mark(job: str) -> None:
    """Let ``/proc/self/environ`` show the job's mark, by which launcher and reaper find its processes."""
    shown = Path("/proc/self/environ").read_bytes()
    place = shown.index(f"{MARK}={NO_JOB}".encode()) + len(MARK) + 1
    start = int(Path("/proc/self/stat").read_text().rpartition(")")[2].split()[47])
    with open("/proc/self/mem", "r+b", buffering=0) as memory:  # noqa: PTH123 - unbuffered
        memory.seek(start + place)
        memory.write(job.encode())


def _forget() -> None:
    """What a new interpreter would not know: what Hora has done here, and the state of random generators."""
    import numpy as np

    _take_out()
    sys.modules.update(_of_rank)
    faulthandler.disable()
    random.seed()
    np.random.seed()
    if (torch := sys.modules.get("torch")) is not None:
        torch.seed()


def _run(worker: Path) -> int:
    module = types.ModuleType("__main__")
    module.__file__ = str(worker)
    sys.modules["__main__"] = module
    try:
        exec(compile(worker.read_text(), str(worker), "exec"), module.__dict__)
    except SystemExit as end:
        if end.code is None or isinstance(end.code, int):
            return (end.code or 0) & 0xFF
        print(end.code, file=sys.stderr)
        return 1
    except BaseException:  # noqa: BLE001 - as the interpreter does it
        sys.excepthook(*sys.exc_info())  # type: ignore[arg-type]
        return 1
    return 0


def _end(code: int) -> None:
    """The interpreter's way out."""
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    limit, parent, *others = sys.argv[1:]
    main(int(limit), int(parent), *others[:1], *map(float, others[1:]))
