"""``hora plan``: the time, the memory and the price of a training, before the cluster is rented."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hora.core.errors import UsageError

if TYPE_CHECKING:
    from hora.plan.memory import Layout, Transformer
    from hora.plan.question import Prediction, Question

ASKED = (
    "batch",
    "micro_batch",
    "precision",
    "software",
    "epochs",
    "samples",
    "price",
    "checkpoint",
    "restart",
)
SHAPE = ("layers", "hidden", "heads", "sequence", "vocabulary", "feed_forward", "kv_heads")


def configure(parser: argparse.ArgumentParser) -> None:
    """What is asked, on what, and in which form the answer comes."""
    parser.usage = (
        "hora plan MODEL --on MACHINE [--gpus N] [options]\n"
        "       hora plan --validate [FILE.csv ...] [--rows]"
    )
    add = parser.add_argument
    add(
        "model",
        nargs="?",
        metavar="MODEL",
        help="resnet50, bert-large, gpt2-8.3b, ...; an unknown one lists all",
    )
    add(
        "--on",
        metavar="MACHINE",
        help="dgx-1, dgx-2h, dgx-superpod-2019, dgx-a100, dgx-h100, ... or a .toml file",
    )
    add("--gpus", type=int, metavar="N", help="default: one server")
    add(
        "--batch",
        type=int,
        default=0,
        metavar="N",
        help="global batch (default: the model's usual one per GPU)",
    )
    add("--micro-batch", type=int, default=0, metavar="N", help="per GPU and backward")
    add("--precision", choices=["mixed", "tf32", "fp32"], default="mixed", help="default: mixed")
    add("--software", default="", metavar="S", help="whose measurements are leaned on (default: the nearest)")

    shape = parser.add_argument_group("a transformer of another shape, or a script of your own")
    for name in SHAPE:
        shape.add_argument(f"--{name.replace('_', '-')}", type=int, default=0, metavar="N")
    shape.add_argument("--gated", action="store_true", help="gated feed-forward, as SwiGLU")
    shape.add_argument("--profile", type=Path, metavar="RUN", help="the run directory of a run on one worker")

    layout = parser.add_argument_group("its layout")
    layout.add_argument("--tensor", type=int, default=1, metavar="N", help="tensor-parallel workers")
    layout.add_argument("--pipeline", type=int, default=1, metavar="N", help="pipeline stages")
    layout.add_argument("--interleaved", type=int, default=1, metavar="N", help="chunks of layers per stage")
    layout.add_argument("--zero", type=int, choices=[0, 1, 2, 3], default=0, help="ZeRO stage")
    layout.add_argument("--recompute", choices=["none", "selective", "full"], default="none")
    layout.add_argument("--sequence-parallel", action="store_true")

    goal = parser.add_argument_group("time to train, price and failures")
    goal.add_argument("--epochs", type=float, default=0.0, metavar="X", help="default: by the model's curve")
    goal.add_argument("--samples", type=float, default=0.0, metavar="N", help="of one epoch")
    goal.add_argument("--price", type=float, default=0.0, metavar="X", help="per GPU and hour")
    goal.add_argument(
        "--checkpoint", type=float, default=30.0, metavar="S", help="seconds it blocks (default: 30)"
    )
    goal.add_argument("--restart", type=float, default=300.0, metavar="S", help="seconds (default: 300)")

    answer = parser.add_argument_group("other questions")
    answer.add_argument("--sweep", metavar="gpus=A..B", help="the curve over the number of GPUs")
    answer.add_argument("--search", action="store_true", help="the fastest layout of a transformer that fits")
    answer.add_argument("--compare", nargs=2, metavar="MACHINE", help="how much faster is the second?")
    answer.add_argument("--deadline", metavar="TIME", help="how many GPUs? 80s, 30min, 12h, 3d")
    answer.add_argument("--validate", nargs="*", metavar="FILE.csv", help="predicted against published")
    answer.add_argument("--rows", action="store_true", help="with --validate: every row")
    answer.add_argument("--json", action="store_true", help="print JSON")
    answer.add_argument("--picture", type=Path, metavar="FILE.svg", help="of --sweep or --validate")


def main(arguments: argparse.Namespace) -> int:
    """Print the answer; 0.

    Raises:
        HoraError: the question cannot be answered; it names the nearest one that can.
    """
    from hora.plan import search, text
    from hora.plan.prediction import predict

    if arguments.validate is not None:
        return _validate(arguments)
    _check(arguments)
    if arguments.compare:
        pair = [predict(search.best_batch(_question(arguments, name))) for name in arguments.compare]
        return _print(arguments, text.compared(*pair), [text.as_dict(one) for one in pair])
    question = _question(arguments, arguments.on)
    if arguments.sweep:
        found = search.sweep(question, _counts(arguments.sweep, question))
        _picture(arguments, found)
        return _print(arguments, text.sweep_lines(found), [text.as_dict(one) for one in found])
    if arguments.search:
        found = search.best_layouts(question)
        return _print(arguments, text.search_lines(found), [text.as_dict(one) for one in found])
    if arguments.deadline:
        answer = search.deadline(question, seconds_of(arguments.deadline))
        values = {
            name: None if one is None else text.as_dict(one)
            for name, one in (("likely", answer.likely), ("safe", answer.safe), ("fastest", answer.fastest))
        }
        return _print(arguments, text.deadline_lines(answer), values)
    one = predict(question)
    return _print(arguments, text.lines(one), text.as_dict(one))


def _check(arguments: argparse.Namespace) -> None:
    asked = [name for name in ("sweep", "search", "compare", "deadline") if getattr(arguments, name)]
    if len(asked) > 1:
        raise UsageError(f"--{asked[0]} and --{asked[1]} are two questions.", fix=f"Leave out --{asked[1]}.")
    if arguments.picture and not arguments.sweep:
        raise UsageError("--picture draws a sweep or a validation.", fix="Write --sweep gpus=8..512 as well.")
    named = [name for name in ("model", "profile", "layers") if getattr(arguments, name)]
    if len(named) > 1:
        raise UsageError(
            "MODEL, --profile and --layers each say what is trained.", fix="Give one of the three."
        )
    if not named:
        raise UsageError("What is trained? MODEL is missing.", fix="Write hora plan resnet50 --on dgx-a100.")
    if not arguments.compare and not arguments.on and not arguments.profile:
        raise UsageError("On which machine? --on is missing.", fix="Write --on dgx-a100.")


def _question(arguments: argparse.Namespace, on: str) -> Question:
    from hora.plan.hardware import machine
    from hora.plan.models import workload
    from hora.plan.question import Question

    model: Any
    if arguments.profile:
        from hora.plan.profile import read

        model, name = read(arguments.profile), arguments.profile.name
        where = machine(on) if on and on != model.machine.name else model.machine
    elif arguments.layers:
        where = machine(on)
        model, name = _shape(arguments), f"transformer of {arguments.layers} layers"
    else:
        where = machine(on)
        model, name = workload(arguments.model), arguments.model
    return Question(
        name=name,
        model=model,
        machine=where,
        gpus=where.gpus if arguments.gpus is None else arguments.gpus,
        layout=_layout(arguments),
        **{key: getattr(arguments, key) for key in ASKED},
    )


def _shape(arguments: argparse.Namespace) -> Transformer:
    from hora.plan.memory import Transformer

    for name, usual in (("hidden", 4096), ("heads", 32)):
        if getattr(arguments, name) < 1:
            raise UsageError(f"--layers needs --{name} beside it.", fix=f"Write --{name} {usual}.")
    values = {name: getattr(arguments, name) for name in SHAPE}
    values["sequence"] = values["sequence"] or 2048
    values["vocabulary"] = values["vocabulary"] or 51_200
    return Transformer(**values, gated=arguments.gated)


def _layout(arguments: argparse.Namespace) -> Layout:
    from hora.plan.memory import Layout

    names = ("tensor", "pipeline", "interleaved", "zero", "recompute", "sequence_parallel")
    for name in ("tensor", "pipeline", "interleaved"):
        if getattr(arguments, name) < 1:
            raise UsageError(f"--{name} {getattr(arguments, name)}: at least 1.", fix=f"Write --{name} 1.")
    return Layout(**{name: getattr(arguments, name) for name in names})


def _counts(words: str, question: Question) -> list[int]:
    from hora.plan.search import doublings

    match = re.fullmatch(r"gpus=(\d+)\.\.(\d+)", words)
    if match:
        return doublings(int(match[1]), int(match[2]), question.machine)
    listed = re.fullmatch(r"gpus=(\d+(?:,\d+)*)", words)
    if not listed:
        raise UsageError(
            f"--sweep {words}: it is neither gpus=A..B nor gpus=A,B,C.", fix="Write --sweep gpus=8..512."
        )
    return [int(part) for part in listed[1].split(",")]


def seconds_of(words: str) -> float:
    """80s, 30min, 12h, 3d as seconds.

    Raises:
        UsageError: it is none of these.
    """
    match = re.fullmatch(r"(\d+(?:\.\d+)?) ?(s|min|h|d)", words)
    if not match:
        raise UsageError(
            f"--deadline {words}: a number and s, min, h or d are expected.", fix="Write --deadline 80s."
        )
    return float(match[1]) * {"s": 1, "min": 60, "h": 3600, "d": 86_400}[match[2]]


def _validate(arguments: argparse.Namespace) -> int:
    from hora.plan import scores as table
    from hora.plan.validation import validate

    scores, unread = validate(arguments.validate)
    if arguments.picture:
        from hora.core.rundir import replace_text
        from hora.report import scatter_svg

        replace_text(arguments.picture, scatter_svg(scores))
    if arguments.json:
        values = {
            "families": {name: table.summary(some) for name, some in table.families(scores).items()},
            "rows": [
                {**dataclasses.asdict(one), "error": one.error, "covered": one.covered} for one in scores
            ],
            "not_recomputed": [dataclasses.asdict(one) for one in unread],
        }
        print(json.dumps(values, indent=1))
        return 0
    for line in table.validation_lines(scores, rows=arguments.rows):
        print(line)
    for one in unread:
        print(f"not recomputed: {one.source}: {one.reason}")
    print(table.LEGEND)
    return 0


def _picture(arguments: argparse.Namespace, found: list[Prediction]) -> None:
    if arguments.picture:
        from hora.core.rundir import replace_text
        from hora.report import sweep_svg

        replace_text(arguments.picture, sweep_svg(found))


def _print(arguments: argparse.Namespace, lines: list[str], values: object) -> int:
    print(json.dumps(values, indent=1) if arguments.json else "\n".join(lines))
    return 0
