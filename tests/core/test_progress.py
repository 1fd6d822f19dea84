"""The displays: what they write, and what a terminal shows of it."""

from __future__ import annotations

import fcntl
import io
import json
import math
import os
import pty
import re
import select
import struct
import sys
import termios
import time
from collections.abc import Iterator
from typing import TextIO

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hora.core.progress import (
    BarDisplay,
    LineDisplay,
    PipeDisplay,
    Progress,
    SilentDisplay,
    decode,
    display,
)
from hora.core.settings import Settings

HALF = Progress(
    done=4500,
    total=10000,
    epoch=3,
    epochs=12,
    values={"loss": 0.4123, "accuracy": 0.861},
    rate=2310.0,
    size=2,
    eta=32.0,
)


class Clock:
    """A clock that tests move by hand."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


class Screen:
    """As much of a terminal as the displays use: text, wrapping, CR, LF, cursor up, erase below, colours."""

    def __init__(self, width: int) -> None:
        self.width = width
        self.lines: list[str] = [""]  # logical lines; a terminal re-wraps them when its width changes
        self.line, self.cell = 0, 0

    def write(self, text: str) -> None:
        for token in re.findall(r"\x1b\[[0-9;?]*[A-Za-z]|\r|\n|[^\x1b\r\n]+", text):
            if token == "\n":
                self.line, self.cell = self.line + 1, 0
                self.lines += [""] * (self.line + 1 - len(self.lines))
            elif token == "\r":
                self.cell = 0
            elif token.startswith("\x1b["):
                self._escape(token)
            else:
                old = self.lines[self.line].ljust(self.cell)
                self.lines[self.line] = old[: self.cell] + token + old[self.cell + len(token) :]
                self.cell += len(token)

    def _escape(self, token: str) -> None:
        if token.endswith("A"):
            assert self.cell == 0, "the display counts rows from the start of a line"
            rows = int(token[2:-1])
            while rows > 0:
                self.line -= 1
                rows -= max(1, math.ceil(len(self.lines[self.line]) / self.width))
            assert rows == 0, "the cursor would stop in the middle of a wrapped line"
        elif token == "\x1b[J":
            self.lines[self.line] = self.lines[self.line][: self.cell]
            del self.lines[self.line + 1 :]
        else:
            assert token.endswith("m"), f"unexpected escape {token!r}"


class Terminal:
    """A real pseudo-terminal: ``stream`` is the program's side."""

    def __init__(self, width: int, *, encoding: str = "utf-8") -> None:
        self.master, slave = pty.openpty()
        self.stream: TextIO = open(slave, "w", encoding=encoding)  # noqa: SIM115, PTH123 (closed by the fixture)
        self.screen = Screen(width)
        self.raw = ""
        self.resize(width)

    def resize(self, width: int) -> None:
        fcntl.ioctl(self.master, termios.TIOCSWINSZ, struct.pack("HHHH", 24, width, 0, 0))
        self.screen.width = width

    def lines(self) -> list[str]:
        """What the screen shows after everything that was written so far."""
        while select.select([self.master], [], [], 0)[0]:
            text = os.read(self.master, 65536).decode()
            self.raw += text
            self.screen.write(text)
        return self.screen.lines

    def close(self) -> None:
        self.stream.close()
        os.close(self.master)


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> Iterator[Terminal]:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = Terminal(80)
    yield terminal
    terminal.close()


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for end in ends:
        try:
            os.close(end)
        except OSError:
            continue  # closed by the test


# --- the bar -----------------------------------------------------------------------------------------


def test_bar_on_a_terminal(terminal: Terminal) -> None:
    bar = BarDisplay(terminal.stream, every=0.0)
    bar.update(HALF)
    first, second, below = terminal.lines()
    # 79 columns, less the words (45 %, epoch 3/12, 0:32 to go: 4 + 10 + 10) and three gaps of two.
    assert first == "━" * 22 + "─" * 27 + "  45 %  epoch 3/12  0:32 to go"
    assert second == "loss 0.412  accuracy 0.861  2,310 samples/s  (1,155 per worker)"
    assert below == ""
    bar.close()


def test_bar_stays_below_worker_output(terminal: Terminal) -> None:
    bar = BarDisplay(terminal.stream, every=0.0)
    for count in range(5):
        bar.update(HALF)
        bar.print_line(f"line {count}\n", terminal.stream)
    bar.note("target reached")
    bar.close()
    bar.close()
    lines = terminal.lines()
    assert lines[:6] == [*(f"line {count}" for count in range(5)), "target reached"]
    assert lines[6].startswith("━")
    assert len(lines) == 9


def test_bar_survives_a_terminal_that_becomes_narrow_and_wide_again(terminal: Terminal) -> None:
    bar = BarDisplay(terminal.stream, every=0.0)
    for width in (80, 40, 61, 200, 40):
        terminal.resize(width)
        bar.update(HALF)
        lines = terminal.lines()
        assert len(lines) == 3, width
        assert all(len(line) < width for line in lines)
    bar.close()


@pytest.mark.parametrize("width", [40, 50, 60, 80, 120, 200])
def test_bar_drops_the_least_important_first(width: int) -> None:
    stream = io.StringIO()
    bar = BarDisplay(stream, width=width)
    bar.update(HALF)
    text = stream.getvalue()
    for needed in ("45 %", "epoch 3/12", "to go", "loss 0.412", "2,310 samples/s"):
        assert needed in text
    assert ("accuracy 0.861" in text) == (width >= 50)
    assert ("per worker" in text) == (width >= 80)


@pytest.mark.parametrize("kind", [BarDisplay, LineDisplay])
def test_a_training_that_has_ended_has_no_time_to_go(kind: type[BarDisplay] | type[LineDisplay]) -> None:
    stream = io.StringIO()
    shown = kind(stream)
    shown.update(HALF)
    shown.close()
    last = stream.getvalue()[-150:]
    assert "45 %" in last
    assert "to go" not in last


def test_bar_drops_the_learning_rate_before_an_accuracy() -> None:
    stream = io.StringIO()
    bar = BarDisplay(stream, width=50)
    bar.update(
        Progress(done=1, total=2, values={"loss": 0.4, "lr": 0.1, "accuracy": 0.8}, rate=2000.0, size=2)
    )
    assert "accuracy 0.800" in stream.getvalue()
    assert "lr" not in stream.getvalue()


@pytest.mark.parametrize("width", [1, 2, 5, 9, 15, 25])
def test_a_sliver_of_a_terminal(width: int) -> None:
    stream = io.StringIO()
    bar = BarDisplay(stream, width=width)
    bar.update(HALF)
    bar.close()
    plain = re.sub(r"\x1b\[[0-9;]*[A-Za-z]", "", stream.getvalue())
    assert all(len(line) < width for line in plain.replace("\r", "").split("\n"))


def test_brackets_colours_and_long_lines_pass_through(terminal: Terminal) -> None:
    bar = BarDisplay(terminal.stream, every=0.0)
    bar.update(HALF)
    bar.print_line("[red]not markup[/red] [0] :smile:", terminal.stream)
    bar.print_line("\x1b[31mred\x1b[0m and \x1b[1mbold", terminal.stream)
    bar.print_line("x" * 1000, terminal.stream)
    bar.close()
    lines = terminal.lines()
    assert lines[:3] == ["[red]not markup[/red] [0] :smile:", "red and bold", "x" * 1000]
    assert "\x1b[31mred\x1b[0m and \x1b[1mbold\x1b[0m" in terminal.raw


def test_worker_output_cannot_move_the_cursor(terminal: Terminal) -> None:
    bar = BarDisplay(terminal.stream, every=0.0)
    bar.update(HALF)
    bar.print_line("10 %\r50 %\r100 %\n", terminal.stream)
    bar.print_line("\x1b[2J\x1b[5Aup\x1b]0;title\x07\x08\x1b[?25l", terminal.stream)
    bar.update(Progress(done=1, total=2, values={"evil\x1b[2A\n": 1.0}))
    lines = terminal.lines()
    assert lines[:2] == ["100 %", "up"]
    assert len(lines) == 5
    bar.close()


def test_redirected_worker_output_is_written_unchanged_and_leaves_the_bar_alone(terminal: Terminal) -> None:
    bar = BarDisplay(terminal.stream, every=0.0)
    bar.update(HALF)
    before = list(terminal.lines())
    raw = len(terminal.raw)
    file = io.StringIO()
    bar.print_line("\x1b[31mred\x1b[2J\r", file)
    assert file.getvalue() == "\x1b[31mred\x1b[2J\r\n"
    assert terminal.lines() == before
    assert len(terminal.raw) == raw
    bar.close()


def test_cursor_is_never_hidden(terminal: Terminal) -> None:
    bar = BarDisplay(terminal.stream, every=0.0)
    bar.update(HALF)
    terminal.lines()
    assert "\x1b[?25l" not in terminal.raw  # so there is nothing to restore, even after SIGKILL
    bar.close()


def test_each_redraw_is_one_write() -> None:
    class Counting(io.StringIO):
        writes = 0

        def write(self, text: str) -> int:
            self.writes += 1
            return super().write(text)

        def isatty(self) -> bool:
            return True

    stream = Counting()
    bar = BarDisplay(stream, width=80)
    bar.update(HALF)
    bar.print_line("text", stream)
    assert stream.writes == 2


def test_no_color(terminal: Terminal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("NO_COLOR", "1")
    bar = BarDisplay(terminal.stream, every=0.0)
    bar.update(HALF)
    bar.close()
    terminal.lines()
    colours = re.findall(r"\x1b\[([0-9;]*)m", terminal.raw)
    assert set(colours) <= {"0", "1", "2"}  # bold and dim are not colours


def test_ascii_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    terminal = Terminal(80, encoding="ascii")
    bar = BarDisplay(terminal.stream, every=0.0)
    bar.update(HALF)
    bar.print_line("Grüße ✓", terminal.stream)
    first, second, *_ = terminal.lines()
    bar.close()
    assert first == r"Gr\xfc\xdfe \u2713"
    assert second.startswith("#" * 22 + "-" * 27)
    terminal.close()


def test_a_terminal_that_hangs_up_ends_the_bar_in_silence(terminal: Terminal) -> None:
    class Gone(io.StringIO):
        def write(self, text: str) -> int:
            raise OSError(5, "Input/output error")

    bar = BarDisplay(Gone(), width=80, every=0.0)
    bar.update(HALF)
    bar.note("x")
    bar.update(HALF)
    bar.close()


def test_unknown_total_and_numbers_that_are_not_finite(terminal: Terminal) -> None:
    bar = BarDisplay(terminal.stream, every=0.0)
    bar.update(
        Progress(done=1280, total=0, values={"loss": math.nan, "x": math.inf}, rate=math.nan, eta=math.inf)
    )
    assert terminal.lines() == ["1,280 samples", "loss nan  x inf", ""]
    bar.close()


def test_last_state_is_shown_although_redraws_are_limited() -> None:
    stream = io.StringIO()
    bar = BarDisplay(stream, width=80, every=1e9)
    bar.update(Progress(done=0, total=100))
    bar.update(Progress(done=50, total=100))
    assert "50 %" not in stream.getvalue()
    bar.close()
    assert "50 %" in stream.getvalue()


# --- lines -------------------------------------------------------------------------------------------


def test_line() -> None:
    stream = io.StringIO()
    lines = LineDisplay(stream, every=0.0)
    lines.update(HALF)
    assert stream.getvalue() == (
        "epoch 3/12  45 %  loss 0.412  accuracy 0.861  2,310 samples/s (1,155 per worker)  0:32 to go\n"
    )


def test_lines_come_at_epoch_edges_and_every_ten_seconds() -> None:
    stream, clock = io.StringIO(), Clock()
    lines = LineDisplay(stream, clock=clock)
    # 100 steps of 0.25 s; epochs of 30 s would start at steps 0 and 60 (15 s).
    for step in range(100):
        clock.now = step * 0.25
        lines.update(Progress(done=step, total=101, epoch=1 if step < 60 else 2, epochs=2))
    lines.close()
    lines.close()
    shown = [line.split("  ")[:2] for line in stream.getvalue().splitlines()]
    # At 10 s (step 40); at the edge, with the state before it (step 59); 10 s after it (15 + 10 = step 100
    # does not come), so the last one (step 99) is written by close().
    assert shown == [["epoch 1/2", "39 %"], ["epoch 1/2", "58 %"], ["epoch 2/2", "98 %"]]


def test_lines_do_not_flood_when_epochs_are_tiny() -> None:
    stream, clock = io.StringIO(), Clock()
    lines = LineDisplay(stream, clock=clock)
    for epoch in range(1, 1001):
        clock.now = epoch * 0.01
        lines.update(Progress(done=epoch, total=2000, epoch=epoch, epochs=2000))
    assert 9 <= len(stream.getvalue().splitlines()) <= 11


def test_a_note_does_not_put_off_the_next_line() -> None:
    stream, clock = io.StringIO(), Clock()
    lines = LineDisplay(stream, clock=clock)
    clock.now = 9.0
    lines.note("note")
    clock.now = 10.0
    lines.update(Progress(done=1, total=2))
    assert stream.getvalue().splitlines() == ["note", "50 %"]


def test_lines_hold_no_control_characters() -> None:
    stream = io.StringIO()
    lines = LineDisplay(stream, every=0.0)
    lines.note("a\x1b[31mb\rc\nd")
    lines.update(Progress(done=1, total=2, unit="x\r\n", values={"\x1b[1mloss": 1.0}))
    lines.close()
    assert not re.search(r"[^\x20-\x7e\n]", stream.getvalue())


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(0.4, "0:00"), (59.6, "1:00"), (3599.0, "59:59"), (3661.0, "1:01:01"), (200_000.0, "2 d 7 h")],
)
def test_durations(seconds: float, text: str) -> None:
    stream = io.StringIO()
    LineDisplay(stream, every=0.0).update(Progress(done=1, total=2, eta=seconds))
    assert stream.getvalue() == f"50 %  {text} to go\n"


def test_time_to_go_follows_from_the_rate() -> None:
    stream = io.StringIO()
    LineDisplay(stream, every=0.0).update(Progress(done=100, total=400, rate=5.0))
    assert stream.getvalue() == "25 %  5.00 samples/s  1:00 to go\n"


def test_a_hundred_percent_means_done() -> None:
    stream = io.StringIO()
    lines = LineDisplay(stream, every=0.0)
    lines.update(Progress(done=9_999_999, total=10_000_000))
    lines.update(Progress(done=10_000_000, total=10_000_000))
    assert stream.getvalue().splitlines() == ["99 %", "100 %"]


# --- the pipe ----------------------------------------------------------------------------------------


def read(fd: int) -> list[str]:
    os.set_blocking(fd, False)
    try:
        return os.read(fd, 1 << 20).decode().splitlines()
    except BlockingIOError:
        return []


def test_pipe_round_trip(pipe: tuple[int, int]) -> None:
    shown = PipeDisplay(pipe[1])
    shown.update(HALF)
    shown.note("target\nreached ✓")
    assert [decode(line) for line in read(pipe[0])] == [HALF, "target\nreached ✓"]


def test_pipe_limits_its_rate_and_keeps_the_last(pipe: tuple[int, int]) -> None:
    shown = PipeDisplay(pipe[1], every=3600.0)
    for done in range(1, 1001):
        shown.update(Progress(done=done, total=1000))
    assert [json.loads(line)["done"] for line in read(pipe[0])] == [1, 1000]
    shown.update(Progress(done=5, total=1000))
    shown.close()
    shown.close()
    assert [json.loads(line)["done"] for line in read(pipe[0])] == [5]


@pytest.mark.alone
def test_pipe_that_is_full_or_closed_never_blocks_or_raises(pipe: tuple[int, int]) -> None:
    shown = PipeDisplay(pipe[1], every=0.0)
    start = time.monotonic()
    for _ in range(2000):
        shown.update(HALF)  # far more than 64 KiB
    assert time.monotonic() - start < 2.0
    assert all(isinstance(decode(line), Progress) for line in read(pipe[0])), "no half-written record"
    os.close(pipe[0])
    shown.update(HALF)
    shown.note("x")
    shown.close()


def test_records_stay_atomic(pipe: tuple[int, int]) -> None:
    shown = PipeDisplay(pipe[1])
    shown.update(Progress(done=1, total=2, values={f"{n}" * 100: float(n) for n in range(500)}))
    shown.note("ä" * 100_000)
    progress, note = read(pipe[0])
    assert max(len(progress), len(note)) < select.PIPE_BUF
    record = decode(progress)
    assert isinstance(record, Progress)
    assert next(iter(record.values)) == "0" * 80, "the first values are kept"
    assert isinstance(decode(note), str)


@pytest.mark.alone
def test_an_update_between_two_records_costs_microseconds(pipe: tuple[int, int]) -> None:
    shown = PipeDisplay(pipe[1], every=3600.0)
    shown.update(HALF)
    best = math.inf
    for _ in range(5):
        start = time.perf_counter()
        for _ in range(1000):
            shown.update(HALF)
        best = min(best, (time.perf_counter() - start) / 1000)
    assert best < 20e-6


def test_numbers_that_are_not_finite_cross_the_pipe(pipe: tuple[int, int]) -> None:
    PipeDisplay(pipe[1]).update(
        Progress(done=1, total=2, values={"loss": math.nan, "norm": math.inf}, eta=math.inf)
    )
    (line,) = read(pipe[0])
    record = decode(line)
    assert isinstance(record, Progress)
    assert math.isnan(record.values["loss"])
    assert record.values["norm"] == math.inf
    assert record.eta is None


@pytest.mark.parametrize(
    "line",
    [
        "",
        "{",
        "null",
        "[" * 100_000,
        '{"kind": "progress"}',
        '{"kind": "progress", "done": "1", "total": 2}',
        '{"kind": "progress", "done": NaN, "total": 2}',
        '{"kind": "progress", "done": 1, "total": -2}',
        '{"kind": "progress", "done": 1, "total": 1e999}',
        '{"kind": "progress", "done": 1, "total": 2, "values": [1]}',
        '{"kind": "progress", "done": 1, "total": 2, "values": {"a": "x"}}',
        '{"kind": "progress", "done": 1, "total": 2, "rate": ' + "9" * 400 + "}",
        '{"kind": "note", "text": 3}',
        '{"kind": "other"}',
        "9" * 5000,
        "\x00\ufffd",
    ],
)
def test_decode_ignores_malformed_lines(line: str) -> None:
    assert decode(line) is None


@settings(deadline=None)
@given(st.text())
def test_decode_never_raises(text: str) -> None:
    decode(text)
    decode('{"kind": "progress", "done": 1, "total": 2, "unit": ' + json.dumps(text) + "}")


# --- the choice --------------------------------------------------------------------------------------


def test_display_is_chosen_by_settings_and_stream(
    terminal: Terminal, pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = io.StringIO()
    assert isinstance(display(Settings(status_fd=pipe[1]), stream=terminal.stream), PipeDisplay)
    assert isinstance(display(Settings(), stream=terminal.stream), BarDisplay)
    assert isinstance(display(Settings(), stream=file), LineDisplay)
    assert isinstance(display(Settings(progress="lines"), stream=terminal.stream), LineDisplay)
    assert isinstance(display(Settings(progress="bar"), stream=file), BarDisplay)
    assert isinstance(display(Settings(progress="off"), stream=terminal.stream), SilentDisplay)
    assert isinstance(display(Settings(rank=1), stream=terminal.stream), SilentDisplay)
    monkeypatch.setenv("TERM", "dumb")
    assert isinstance(display(Settings(), stream=terminal.stream), LineDisplay)


def test_inherited_status_variable_without_its_pipe_shows_nothing(pipe: tuple[int, int]) -> None:
    os.close(pipe[0])
    closed = pipe[0]
    assert isinstance(display(Settings(status_fd=closed), stream=io.StringIO()), SilentDisplay)
    with open(os.devnull, "w") as file:  # noqa: PTH123 (the number now means another file)
        assert isinstance(display(Settings(status_fd=file.fileno()), stream=file), SilentDisplay)


def test_silence_lets_worker_output_through() -> None:
    file = io.StringIO()
    silent = SilentDisplay()
    silent.update(HALF)
    silent.note("x")
    silent.print_line("out", file)
    silent.close()
    assert file.getvalue() == "out\n"


def test_import_does_not_load_rich() -> None:
    code = "import sys, hora.core.progress; sys.exit('rich' in sys.modules)"
    path = os.pathsep.join(sys.path)
    assert os.spawnve(os.P_WAIT, sys.executable, [sys.executable, "-c", code], {"PYTHONPATH": path}) == 0
