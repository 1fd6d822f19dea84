"""Run directories as trainings leave them, made in milliseconds and always the same."""

from __future__ import annotations

import base64
import json
import math
import random
import struct
import zlib
from pathlib import Path
from typing import Any

from hora.core.events import Timeline
from hora.core.rundir import RunDirectory
from hora.guard.verdict import Verdict

CLASSES = (
    "T-shirt",
    "trouser",
    "pullover",
    "dress",
    "coat",
    "sandal",
    "shirt",
    "sneaker",
    "bag",
    "ankle boot",
)
STARTED = 1_790_000_000.0


def finished(
    path: Path,
    *,
    workers: int = 2,
    epochs: int = 8,
    records: int = 320,
    target: float = 0.87,
    reached: bool = True,
) -> RunDirectory:
    """A run that trained to its end; ``records`` train records spread over its epochs."""
    draw = random.Random(1)
    run = RunDirectory.create(path, about={"name": path.name, "exit_code": 0})
    rate = 1180.0 * workers * 0.92
    seconds = 71.0
    lines = []
    accuracy = 0.0
    for index in range(records):
        part = (index + 1) / records
        per_rank = [
            rate / workers * draw.gauss(1.0, 0.02) * (0.9 if rank == 5 else 1.0) for rank in range(workers)
        ]
        warm = min(1.0, part * 10)
        lines.append(
            {
                "kind": "train",
                "step": index * 4 + 4,
                "epoch": epochs * part,
                "time": seconds * part,
                "loss": 0.55 + 1.8 * math.exp(-part * 6) + draw.gauss(0, 0.05),
                "lr": 0.4 * warm * (1 - part) ** 2 if part > 0.1 else 0.4 * 0.81 * warm,
                "samples_per_second": sum(per_rank),
                "samples_per_second_per_rank": per_rank,
            }
        )
        if (index + 1) * epochs % records < epochs:
            best = target + 0.013 if reached else target - 0.02
            accuracy = best - 0.35 * math.exp(-part * 5)
            lines.append(
                {
                    "kind": "eval",
                    "step": index * 4 + 4,
                    "epoch": epochs * part,
                    "time": seconds * part,
                    "loss": 0.36 + 0.9 * math.exp(-part * 4) + draw.gauss(0, 0.01),
                    "accuracy": accuracy,
                }
            )
    write_lines(run, lines)
    rounds = [[1180.0 * draw.gauss(1, 0.015), rate * draw.gauss(1, 0.02)] for _ in range(3)]
    one, everyone = (sorted(values)[1] for values in zip(*rounds, strict=True))
    run.describe(
        created=STARTED,
        config={
            "workload": "resnet",
            "profile": "quick",
            "global_batch": 128,
            "optimizer": {"name": "sgd", "lr": 0.4, "momentum": 0.9, "weight_decay": 5e-4},
            "label_smoothing": 0.1,
            "warmup_epochs": 0.8,
            "augment": ["flip", "shift"],
            "channels_last": True,
            "data": "/usr/share/datasets/fashion-mnist",
            "seed": 1,
        },
        world={"size": workers, "local_size": workers, "host_count": 1, "device": "cpu", "engine": "gloo"},
        versions={"hora": "0.1.0", "python": "3.11.2", "torch": "2.13.0+cpu", "numpy": "2.4.6"},
        summary={
            "workload": "resnet",
            "profile": "quick",
            "target": target,
            "reached": reached,
            "accuracy": accuracy,
            "epochs": epochs,
            "steps": records * 4,
            "time_to_train": seconds,
            "samples_per_second": rate,
            "scaling_factor": everyone / one,
            "scaling": {
                "one_worker": one,
                "all_workers": everyone,
                "rounds": [{"one_worker": a, "all_workers": b} for a, b in rounds],
            },
            "workers": workers,
        },
    )
    (path / "predictions.json").write_text(json.dumps(predictions(24)))
    (path / "logs" / "rank-0.log").write_text("epoch 1\n")
    run.timeline.write_text('{"traceEvents": []}')
    run.mlperf_log.write_text(":::MLLOG {}\n")
    return run


def failed(path: Path, *, records: int = 40) -> RunDirectory:
    """A run in which rank 1 raised and rank 0 lost its connection because of that."""
    run = finished(path, records=max(records, 1))
    about = {key: value for key, value in run.about().items() if key != "summary"}
    run.run_json.write_text(json.dumps(about | {"exit_code": 1}))
    if not records:
        run.metrics.unlink()
    (path / "predictions.json").unlink()
    for rank, kind, message, echo in (
        (0, "RuntimeError", "Connection closed by peer [127.0.0.1]:41234", True),
        (1, "ValueError", "Expected input batch_size (64) to match target batch_size (63).", False),
    ):
        run.failure(rank).write_text(
            json.dumps(
                {
                    "rank": rank,
                    "time": STARTED + 10.0 - rank * 0.2,
                    "type": kind,
                    "message": message,
                    "traceback": "Traceback (most recent call last):\n"
                    '  File "/home/ada/train.py", line 31, in <module>\n'
                    "    loss = loss_fn(model(images), labels)\n"
                    f"{kind}: {message}\n",
                    "hora": None,
                    "echo": echo,
                    "exit": False,
                }
            )
        )
    return run


def elastic(path: Path) -> RunDirectory:
    """A run of an elastic job whose workers died, were replaced and came later."""
    run = finished(path, workers=3)
    killed = "worker {} (rank 1) has failed: SIGKILL (killed from outside), exit code 137"
    worlds: list[dict[str, Any]] = [
        {"number": 0, "time": STARTED + 3, "workers": [0, 1, 2], "reason": None, "commits": 0, "repeats": 0},
        {"number": 1, "time": STARTED + 21.5, "workers": [0, 2], "reason": killed.format(1), "commits": 40},
        {
            "number": 2,
            "time": STARTED + 30,
            "workers": [0, 2, 3],
            "reason": None,
            "commits": 61,
            "repeats": 0,
        },
        {"number": 3, "time": STARTED + 55, "workers": [0, 2, 3, 4], "reason": None, "commits": 90},
        {"number": 4, "time": STARTED + 60, "workers": [0, 3, 4], "reason": killed.format(2), "commits": 99},
    ]
    worlds[1]["repeats"], worlds[4]["repeats"] = 7, 1
    lines = "".join(json.dumps(world) + "\n" for world in worlds)
    run.worlds.write_text(lines + '{"number": 5, "wor')
    run.describe(start=STARTED, ended=STARTED + 71, exit_code=0)
    return run


def judged(path: Path, *, workers: int = 3) -> RunDirectory:
    """A run on which the guard had something to say, and that has timelines."""
    run = finished(path, workers=workers)
    found = [
        Verdict(kind="plan", text="Global batch 128 on 3 workers; 40 steps per epoch.", time=STARTED + 2),
        Verdict(
            kind="late-rank",
            text="Ranks 0 and 2 have been waiting for 31 s in allreduce 'loss' float32 () average at "
            "train.py:41; rank 1 did not come. " + "It reads features/a-very-long-name/" * 20,
            advice="If it is slow by design, say so: `with hora.only(rank, reason=...):` around it.",
            ranks=(1,),
            hosts=("lab-3",),
            call="allreduce 'loss' float32 () average",
            where="features.py:112",
            step=1204,
            time=STARTED + 250,
        ),
    ]
    lines = "".join(one.line() for one in found)
    (path / "verdicts.jsonl").write_text(lines + '{"kind": "not-finite", "ranks": [1], "te\n')
    for rank in range(workers):
        timeline = Timeline(run.events(rank), rank=rank)
        for step in range(50):
            start = STARTED + 3 + step
            timeline.add("wait for data", start, start + 0.06, lane="data")
            timeline.add("wait for gradients", start + 0.5 + 0.1 * rank, start + 0.8)
            timeline.add("step", start + 0.06, start + 0.97, lane="steps")
        timeline.close()
    return run


def predictions(count: int) -> dict[str, Any]:
    """Sample predictions: every sixth is wrong."""
    draw = random.Random(2)
    images = []
    for index in range(count):
        label = index % len(CLASSES)
        wrong = index % 6 == 4
        images.append(
            {
                "png": base64.b64encode(picture(draw)).decode(),
                "label": label,
                "predicted": (label + 2) % len(CLASSES) if wrong else label,
                "confidence": draw.uniform(0.4, 0.7) if wrong else draw.uniform(0.8, 1.0),
            }
        )
    return {"classes": list(CLASSES), "images": images}


def picture(draw: random.Random, *, side: int = 28) -> bytes:
    """A grey PNG with a bright shape on black, as the images of Fashion-MNIST are."""
    wide, high = draw.uniform(4, 11), draw.uniform(7, 12)
    rows = b"".join(
        b"\0"
        + bytes(
            int(90 + 150 * abs(math.sin(x * y / 40)))
            if abs((x - 14) / wide) ** 3 + abs((y - 14) / high) ** 3 < 1
            else 0
            for x in range(side)
        )
        for y in range(side)
    )
    header = struct.pack(">IIBBBBB", side, side, 8, 0, 0, 0, 0)
    parts = ((b"IHDR", header), (b"IDAT", zlib.compress(rows)), (b"IEND", b""))
    return b"\x89PNG\r\n\x1a\n" + b"".join(
        struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))
        for kind, data in parts
    )


def write_lines(run: RunDirectory, lines: list[dict[str, Any]]) -> None:
    run.metrics.write_text("".join(json.dumps(line) + "\n" for line in lines))
