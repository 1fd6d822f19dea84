"""What runs inside each rank before, around and after the user's code.

Started by path, as ``python _worker.py PARENT FAILURE NOTIFY STACK KIND TARGET ARGUMENTS...``, and kept
free of imports from Hora: the start of a rank costs what plain ``python`` costs, and the user's ``sys.path``
decides which Hora the script sees. It does four things:

- it ties the rank's life to the launcher's (``PR_SET_PDEATHSIG``);
- it runs the script, module or function as ``__main__``, with ``sys.argv`` and ``sys.path[0]`` as plain
  ``python`` would set them;
- it writes an uncaught exception to the FAILURE file, with its time, so that the launcher can tell the
  first failure from the echoes of it;
- it writes its stack to the STACK descriptor whenever the launcher asks by a signal.

FAILURE is a path, NOTIFY a descriptor on which one line tells the launcher that the file is there: a
rank can hang on its way out, in a thread or in a destructor. STACK is a descriptor too, or -1.
"""

from __future__ import annotations

import os
import sys
import time
from types import ModuleType, TracebackType
from typing import Any

__all__ = ["main", "stack_signal"]

PR_SET_PDEATHSIG = 1
"""From <linux/prctl.h>."""


def main() -> None:
    _, parent, failure, notify, stack, kind, target, *arguments = sys.argv
    _die_with(int(parent))
    _drop_own_path()
    _prepare(int(notify), int(stack))
    started_by = os.getpid()
    try:
        if kind == "function":
            _run_function(target, arguments[0])
        else:
            _preload()
            _run_program(kind, target, arguments)
    except BaseException as error:
        if os.getpid() == started_by:
            _report(error, failure, int(notify))
            if kind == "function" and isinstance(error, Exception):
                _send_exception(error, arguments[0])
        raise


def stack_signal() -> int | None:
    """The signal on which a rank writes its stack; None where there are no real-time signals (macOS).

    One that neither Python's libraries nor profilers use, who take the first and the last ones.
    """
    import signal

    first = getattr(signal, "SIGRTMIN", None)
    return None if first is None else int(first) + 13


def _die_with(parent: int) -> None:
    """Let the kernel kill this rank when the launcher ends, however it ends.

    The signal is tied to the *thread* that started the rank. The launcher's event loop runs in that
    same thread until the last rank has ended, so it cannot end before them.
    """
    if sys.platform != "linux":
        return
    import ctypes
    import signal

    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    if os.getppid() != parent:  # it ended before the line above
        os.kill(os.getpid(), signal.SIGKILL)


def _drop_own_path() -> None:
    if not getattr(sys.flags, "safe_path", False) and not sys.flags.isolated:
        sys.path.pop(0)


_notify_pipe: int | None = None


def _prepare(notify: int, stack: int) -> None:
    global _notify_pipe
    import atexit
    import faulthandler
    import signal

    _notify_pipe = os.fstat(notify).st_ino
    atexit.register(_leave)  # registered first, so that it runs last
    # A launcher started from a thread that blocks signals would otherwise hand the block on.
    signal.pthread_sigmask(signal.SIG_SETMASK, [])
    ours = ("HORA_STORE_FD", "HORA_STATUS_FD", "HORA_GUARD_FD", "HORA_GUARD_BOARD", "HORA_ELASTIC_FD")
    for number in (notify, stack, *(int(os.environ[key]) for key in ours if key in os.environ)):
        if number >= 0:
            os.set_inheritable(number, False)
    number_of_signal = stack_signal()
    if stack >= 0 and number_of_signal is not None:
        faulthandler.register(number_of_signal, file=stack, all_threads=True, chain=False)
    if sys.stderr is not None:
        faulthandler.enable()  # a segmentation fault then says in which line


# --- running ------------------------------------------------------------------------------------


def _preload() -> None:
    """What looks on at the script has to be there before it."""
    if "HORA_PRELOAD" in os.environ:
        import importlib

        importlib.import_module(os.environ["HORA_PRELOAD"])


def _run_program(kind: str, target: str, arguments: list[str]) -> None:
    import importlib.machinery
    import importlib.util

    sys.argv = [target, *arguments]
    if kind == "module":
        _put_first(os.getcwd())
        spec = importlib.util.find_spec(target)
        if spec is not None and spec.submodule_search_locations is not None:
            spec = importlib.util.find_spec(target + ".__main__")
        if spec is None:
            raise ImportError(f"No module named {target}")
        sys.argv[0] = spec.origin or target
    elif os.path.isdir(target) or _is_archive(target):
        _put_first(target)
        spec = importlib.machinery.PathFinder.find_spec("__main__", [target])
        if spec is None:
            raise ImportError(f"can't find '__main__' module in {target!r}")
    else:
        _put_first(os.path.dirname(os.path.realpath(target)))
        _execute_file(target)
        return
    loader: Any = spec.loader
    code = loader.get_code(spec.name)
    module = _new_main(file=spec.origin, loader=loader)
    module.__spec__ = spec
    module.__package__ = spec.parent
    exec(code, module.__dict__)


def _execute_file(path: str) -> None:
    import importlib.machinery

    absolute = os.path.abspath(path)
    if path.endswith(".pyc"):
        sourceless = importlib.machinery.SourcelessFileLoader("__main__", absolute)
        compiled: Any = sourceless.get_code("__main__")
        exec(compiled, _new_main(file=absolute, loader=sourceless).__dict__)
        return
    with open(path, "rb") as file:
        code = compile(file.read(), path, "exec", dont_inherit=True)
    loader = importlib.machinery.SourceFileLoader("__main__", absolute)
    exec(code, _new_main(file=absolute, loader=loader).__dict__)


def _is_archive(path: str) -> bool:
    import zipimport

    try:
        zipimport.zipimporter(path)
    except zipimport.ZipImportError:
        return False
    return True


def _put_first(folder: str) -> None:
    if not getattr(sys.flags, "safe_path", False) and not sys.flags.isolated:
        sys.path.insert(0, folder)


_kept: list[ModuleType] = []


def _new_main(*, file: str | None, loader: object) -> ModuleType:
    """An empty ``__main__`` in place of this file's, as ``pickle`` and ``multiprocessing`` expect it."""
    _kept.append(sys.modules["__main__"])
    module = ModuleType("__main__")
    module.__builtins__ = __builtins__  # type: ignore[attr-defined]
    module.__loader__ = loader  # type: ignore[assignment]
    module.__annotations__ = {}
    module.__cached__ = None  # type: ignore[attr-defined]
    if file is not None:
        module.__file__ = file
    sys.modules["__main__"] = module
    return module


def _run_function(payload: str, results: str) -> None:
    import pickle

    with open(payload, "rb") as file:
        header = pickle.load(file)
        sys.path[:] = header["path"]
        sys.argv[:] = header["argv"]
        _new_main(file=None, loader=None)
        function, args, kwargs = pickle.load(file)
    value = function(*args, **kwargs)
    try:
        data = _dump((True, value), by_value=header["by_value"])
    except Exception as error:
        raise TypeError(
            f"the result of rank {os.environ['HORA_RANK']}, a {type(value).__qualname__}, "
            f"cannot be pickled: {error}"
        ) from error
    _send(data, results)


def _dump(value: object, *, by_value: bool) -> bytes:
    if by_value:
        import cloudpickle  # the caller has it, or it could not have made the payload

        data: bytes = cloudpickle.dumps(value)
        return data
    import pickle

    return pickle.dumps(value)


def _send(data: bytes, results: str) -> None:
    path = os.path.join(results, f"rank-{os.environ['HORA_RANK']}.pickle")
    with open(path + ".new", "wb") as file:
        file.write(data)
    os.replace(path + ".new", path)


def _send_exception(error: Exception, results: str) -> None:
    import pickle

    try:
        _send(pickle.dumps((False, error)), results)
    except Exception as problem:  # noqa: BLE001 - whatever the exception's __reduce__ raises
        # The report has its text in any case; the object itself is only a convenience.
        print(f"the exception object stays here, it cannot be pickled: {problem}", file=sys.stderr)


# --- failing ------------------------------------------------------------------------------------


def _report(error: BaseException, path: str, notify: int) -> None:
    """Record a failure, though PyTorch's handler raises when a loader worker ends, in this too."""
    for _ in range(2):
        try:
            _record(error, path, notify)
        except Exception:  # noqa: BLE001 - one that stays is raised below
            continue
        return
    _record(error, path, notify)


def _record(error: BaseException, path: str, notify: int) -> None:
    """Write the failure file; where that works, the launcher prints the traceback instead of Python."""
    global _failed_with
    now = time.time()
    if isinstance(error, KeyboardInterrupt):
        sys.excepthook = _say_nothing  # whoever sent SIGINT knows; the launcher names the signal
        return
    if type(error).__name__ == "StopForNow":  # hora.core.notices: it was asked to, and has told so
        return
    if isinstance(error, SystemExit) and (
        error.code is None or (isinstance(error.code, int) and error.code & 0xFF == 0)
    ):
        return
    import json
    import signal

    # From here on it cannot (see above).
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    _failed_with = error.code & 0xFF if isinstance(error, SystemExit) and isinstance(error.code, int) else 1
    rank = os.environ.get("HORA_WORKER") or os.environ["HORA_RANK"]
    try:
        details = _sibling("_record").describe(error)
    except Exception as problem:  # noqa: BLE001 - the failure itself must get through whatever its parts do
        details = _bare(error, problem)
    record = {"rank": int(rank), "time": now, **details}
    try:
        with open(path + ".new", "w") as file:
            json.dump(record, file)
        os.replace(path + ".new", path)
        news = f"{rank}\n"
    except OSError:
        news = json.dumps(_sibling("_record").shortened(record), ensure_ascii=False) + "\n"
        _remove(path + ".new")
    # torch.distributed puts a hook of its own in place, which prints the traceback once more.
    if sys.excepthook is sys.__excepthook__ or str(sys.excepthook.__module__).startswith("torch."):
        sys.excepthook = _say_nothing
    try:
        if os.fstat(notify).st_ino == _notify_pipe:  # else its number stands for a file of the user's by now
            os.write(notify, news.encode("utf-8", "replace"))
    except OSError:  # the launcher has gone, and this rank is about to be killed
        return


def _sibling(name: str) -> Any:
    """Another file of this folder, found by path: ``sys.path`` is the user's."""
    import importlib.util

    path = os.path.join(os.path.dirname(os.path.abspath(__file__)), f"{name}.py")
    spec = importlib.util.spec_from_file_location(f"hora_launch{name}", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _remove(path: str) -> None:
    try:
        os.unlink(path)
    except OSError:  # it was never made
        return


_failed_with: int | None = None


def _leave() -> None:
    """End a failed rank here, after all that was registered to be done at its end.

    What follows in a normal end tears down the engines, whose threads may wait for peers that are gone; C++
    then aborts the process, and its exit code would hide the one of the failure.
    """
    if _failed_with is not None:
        for stream in (sys.stdout, sys.stderr):
            try:
                stream.flush()
            except (AttributeError, OSError, ValueError):  # closed, or None: nothing is left to write
                continue
        os._exit(_failed_with)


def _say_nothing(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
    return


def _bare(error: BaseException, problem: Exception) -> dict[str, Any]:
    kind = type(error).__name__
    text = f"{kind}\n(no traceback: {type(problem).__name__} while it was made)\n"
    return {"type": kind, "message": "", "traceback": text, "echo": False, "exit": False, "code": 1}


if __name__ == "__main__":
    main()
