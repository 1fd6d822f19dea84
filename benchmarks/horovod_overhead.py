"""What matching by name costs: a small named allreduce under --horovod, beside the same one natively.

    python benchmarks/horovod_overhead.py [--ranks 2] [--rounds 20]

The two take turns, round by round; a round's time is the median of its calls.
"""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable

from _interleave import Report, arguments, duration, interleave, long_table, spread

CALLS = 100


def measure(rounds: int) -> dict[str, list[float]]:
    import torch

    import hora.torch as hora
    from hora.torch import _request
    from hora.torch import horovod as hvd
    from hora.torch.horovod import _session

    torch.set_num_threads(1)
    hvd.init()
    client = _session.session("allreduce").client
    tensor = torch.ones(16)

    def seconds(function: Callable[..., object], named: bool) -> float:
        _request.use(client if named else None)
        for _ in range(5):
            function(tensor, name="small")
        found = []
        for _ in range(CALLS):
            start = time.perf_counter()
            function(tensor, name="small")
            found.append(time.perf_counter() - start)
        hora.barrier()
        return statistics.median(found)

    measures = {
        "named": functools.partial(seconds, hvd.allreduce, True),
        "native": functools.partial(seconds, hora.allreduce, False),
    }
    found = interleave(measures, rounds)
    _request.use(client)
    hvd.shutdown()
    return found


def main() -> int:
    import hora

    parser = arguments(__doc__)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    seconds = hora.run(measure, args=(given.rounds,), workers=given.ranks)[0]
    report = Report("horovod_overhead", base="native")
    report.add({"measure": "allreduce of 16 floats", "ranks": given.ranks}, seconds)
    print(long_table(report.rows))
    extra = [named - native for named, native in zip(seconds["named"], seconds["native"], strict=True)]
    print(f"matching by name costs {spread(extra).text(duration)}")
    return report.finish(given.json)


if __name__ == "__main__":
    raise SystemExit(main())
