"""Is a rank keeping the others waiting? The verdict ``late-rank``."""

from __future__ import annotations

import itertools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from hora.core.plural import plural
from hora.guard.board import Phase
from hora.guard.verdict import Earlier, Verdict

if TYPE_CHECKING:
    from hora.guard.judge import Judge

__all__ = ["Late", "user_line"]

STACK_PATIENCE = 1.0
"""Seconds that the stacks of late ranks may take; then the verdict goes without them."""

ENGINE_STALL = 10.0
"""Seconds, at least, after which a collective that all ranks have entered counts as stuck: a busy host is
slow too."""

STOPPED_PATIENCE = 5.0
"""Seconds of waiting after which a rank that a signal has stopped is named: it does not come by itself, and a
pause that is meant (a debugger, a snapshot of the host) is shorter."""

STOPPED = "it is stopped"
"""How the answer begins that comes in place of the stack of a rank that a signal has stopped."""

SHOWN_FRAMES = 4
"""Innermost frames of a late rank's stack that the verdict shows."""

SHOWN_RANKS = 3
"""Late ranks whose stack is shown; others are counted."""


@dataclass
class _Case:
    """One place at which ranks wait too long; the job's stop is a case of its own, with new stacks."""

    asked: float
    asked_of: Sequence[int]
    stacks: dict[int, str] = field(default_factory=dict)
    children: dict[int, Mapping[int, str]] = field(default_factory=dict)
    """Processes of the late ranks that are stopped."""
    told: bool = False


class Late:
    """Watches how long ranks wait, and names the one that they wait for."""

    kinds = frozenset({"only"})

    def __init__(self, judge: Judge) -> None:
        self._judge = judge
        self._cases: dict[tuple[tuple[int, int], bool], _Case] = {}
        self._found: dict[tuple[int, int], Verdict] = {}  # of the places at which ranks still wait
        self._reasons: dict[int, str] = {}
        self._excused: dict[int, float] = {}  # when a rank was last seen to be away by declaration

    def receive(self, rank: int, record: Mapping[str, Any]) -> None:
        self._reasons[rank] = str(record["reason"])

    def ended(self, rank: int) -> None:
        return

    def stack(self, rank: int, text: str) -> None:
        """The stack of a rank, as ``faulthandler`` wrote it, or a sentence on why there is none."""
        for case in self._cases.values():
            if rank in case.asked_of:
                case.stacks.setdefault(rank, text)

    def tick(self, now: float) -> None:
        heads, options = self._judge.places.heads, self._judge.options
        places: dict[tuple[int, int], list[int]] = {}
        for rank, head in enumerate(heads):
            if head.phase in (Phase.ALONE, Phase.JOINED):
                self._excused[rank] = now
        for rank, place in self._judge.calls.waiting().items():
            places.setdefault(place, []).append(rank)
        for key in [key for key in self._cases if key[0] not in places]:
            del self._cases[key]
            self._found.pop(key[0], None)
        for place, ranks in places.items():
            missing = self._judge.places.missing(*place)
            began = min(heads[rank].since for rank in ranks)
            waited = now - max([began, *(self._excused.get(rank, 0.0) for rank in missing)])
            limit = options.stall_abort or options.timeout
            patience = options.stall_after if missing else max(options.stall_after, ENGINE_STALL)
            if waited >= min(STOPPED_PATIENCE, patience) and any(
                map(self._judge.desk.is_stopped, missing or ranks)
            ):
                patience = min(STOPPED_PATIENCE, patience)
            if waited < min(patience, limit):
                continue
            case = self._cases.get((place, waited >= limit))
            if case is not None and case.told:
                continue
            if case is None:
                # Where all are inside, one of them may be stopped there.
                asked = missing[:SHOWN_RANKS] or ranks
                case = self._cases[place, waited >= limit] = _Case(now, asked)
                for rank in asked:
                    self._judge.desk.ask_stack(rank)
            if len(case.stacks) < len(case.asked_of) and now - case.asked < STACK_PATIENCE:
                self._judge.urgent = True
                continue
            if missing and waited < min(ENGINE_STALL, limit) and any(map(_imports, case.stacks.values())):
                if now - case.asked >= STACK_PATIENCE:
                    del self._cases[place, False]  # libraries take seconds on a busy host: look again
                continue
            if not missing:  # one of those inside
                missing = [rank for rank, stack in case.stacks.items() if stack.startswith(STOPPED)]
            case.told = True
            case.children = {rank: self._judge.desk.stopped_children(rank) for rank in missing[:SHOWN_RANKS]}
            end = ""
            if waited >= limit:
                name = "--stall-abort" if options.stall_abort else "HORA_TIMEOUT"
                what = "A late rank is replaced" if options.replaces and missing else "The job is stopped"
                end = f" {what} after {limit:g} s ({name})."
            waiting = [rank for rank in ranks if rank not in missing] or ranks
            self._find(place, waiting, missing, waited, case, end=end)

    def _find(
        self,
        place: tuple[int, int],
        ranks: Sequence[int],
        missing: Sequence[int],
        waited: float,
        case: _Case,
        *,
        end: str,
    ) -> None:
        from hora.guard.judge import ranks_text

        call = self._judge.calls.call(ranks[0], self._judge.places.entry(ranks[0], *place))
        have = "has" if len(ranks) == 1 else "have"
        waiting = f"{ranks_text(ranks).capitalize()} {have} been waiting for {waited:.0f} s in {call.site}"
        if not missing:
            text = f"{waiting}, which all its ranks have entered: the engine does not finish it."
            advice = (
                "Check the network between the hosts (GLOO_SOCKET_IFNAME, firewalls), "
                "and whether a rank is stopped."
            )
        else:
            doing = " ".join(self._doing(rank, case) for rank in missing[:SHOWN_RANKS])
            more = (
                f" {len(missing) - SHOWN_RANKS} more ranks are missing." if len(missing) > SHOWN_RANKS else ""
            )
            text = f"{waiting}, and {ranks_text(missing)} did not come. {doing}{more}"
            advice = (
                "If it is slow by design, say so: `with hora.only(rank, reason=...):` around it; "
                "if not, look at the line named here."
            )
            hint = next((hint for rank in missing if (hint := _hint(case.stacks.get(rank, "")))), "")
            advice = f"{hint} {advice}" if hint else advice
            if any(case.stacks.get(rank, "").startswith(STOPPED) for rank in missing):
                advice = "Find out what has stopped it; SIGCONT lets it go on."
            pids = [str(pid) for rank in missing[:SHOWN_RANKS] for pid in case.children.get(rank, {})]
            if pids:
                advice = f"Find out what has stopped it; `kill -CONT {' '.join(pids)}` lets it go on."
        where = next(
            (line for line in (user_line(case.stacks.get(rank, "")) for rank in missing) if line), None
        )
        before = self._found.get(place)
        found = self._judge.find(
            Verdict(
                kind="late-rank",
                text=text + end,
                advice=advice,
                ranks=sorted(missing),
                call=call.text,
                where=where or call.where,
                step=self._judge.step(missing[0] if missing else ranks[0]),
            ),
            key=("late", place, bool(end)),
            stop=bool(end),
            earlier=Earlier(verdict=before, line=_still(missing) + end) if before is not None else None,
        )
        if found is not None:
            self._found[place] = found

    def _doing(self, rank: int, case: _Case) -> str:
        stack = case.stacks.get(rank)
        head = self._judge.places.heads[rank]
        who = f"Rank {rank}"
        if head.phase == Phase.ABSENT and head.calls == 0:
            who += " has not called hora.init()"
        elif head.step:
            who += f" has made {head.step} {plural(head.step, 'step')}"
        else:
            who += " has made no step yet"
        if stack is None:
            return f"{who}; its stack could not be taken."
        frames = _frames(stack)
        if not frames:
            return f"{who}; {stack.strip()}."
        children = list(case.children.get(rank, {}).values())
        parts = f" Its {' and '.join(children)} {'is' if len(children) == 1 else 'are'} stopped (SIGSTOP)."
        return f"{who}; it is in {' < '.join(frames[:SHOWN_FRAMES])}.{parts if children else ''}"


def _still(missing: Sequence[int]) -> str:
    from hora.guard.judge import ranks_text

    if not missing:
        return "The engine still does not finish."
    keep = "keeps" if len(missing) == 1 else "keep"
    return f"{ranks_text(missing).capitalize()} still {keep} the others waiting."


_HINTS = {
    "/torch/utils/data/dataloader.py": "It waits for a worker of its DataLoader: look at what that reads and "
    "computes for a sample (its stack is not shown, since it is a process of its own).",
    "/torch/autograd/graph.py": "If its model is wrapped in DistributedDataParallel, it waits there for the "
    "others' gradients, as when ranks make different numbers of steps.",
    "<frozen importlib": "It imports a module; a slow disk makes that slow.",
}
"""What a file among the frames that are not the user's tells."""

_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+) in (?P<name>.+)$')
_LIBRARY = re.compile(
    r"/(site|dist)-packages/|/lib/python3\.\d+/|"
    r"/hora/(adapter|torch|tensorflow|keras|jax|launch|guard|core)/|^<frozen"
)


def user_line(stack: str) -> str | None:
    """``file:line`` of the innermost frame that is neither installed nor Hora's; None if there is none."""
    for match in _main_thread(stack):
        if not _LIBRARY.search(match["file"]):
            return f"{match['file']}:{match['line']}"
    return None


def _library_files(stack: str) -> list[str]:
    """Files of the frames inside the user's innermost one."""
    files = [match["file"] for match in _main_thread(stack)]
    return list(itertools.takewhile(_LIBRARY.search, files))


def _imports(stack: str) -> bool:
    return any(file.startswith("<frozen importlib") for file in _library_files(stack))


def _hint(stack: str) -> str:
    files = _library_files(stack)
    return next((hint for part, hint in _HINTS.items() if any(part in file for file in files)), "")


def _frames(stack: str) -> list[str]:
    """The innermost frames in words, those of the user first named."""
    matches = _main_thread(stack)
    own = [match for match in matches if not _LIBRARY.search(match["file"])]
    shown = matches[:1] + [match for match in own if match is not matches[0]] if matches else []
    return [f"{match['name']} ({match['file']}:{match['line']})" for match in shown]


def _main_thread(stack: str) -> list[re.Match[str]]:
    """The frames of the main thread: ``faulthandler`` writes it last."""
    blocks = re.split(r"^(?=(?:Current thread|Thread) 0x)", stack, flags=re.MULTILINE)
    block = blocks[-1] if blocks else ""
    return [match for line in block.splitlines() if (match := _FRAME.match(line))]
