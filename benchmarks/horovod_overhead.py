"""What matching by name costs: a small named allreduce under --horovod, beside the same one natively.

    python benchmarks/horovod_overhead.py [workers]

Prints the median, the 10th and the 90th percentile over rounds that alternate between the two. On a busy
machine the 10th percentile comes nearest to what an idle one gives.
"""

from __future__ import annotations

import statistics
import sys
import time

ROUNDS = 20
CALLS = 100


def measure() -> dict[str, list[float]]:
    import torch

    import hora.torch as hora
    from hora.torch import _request
    from hora.torch import horovod as hvd
    from hora.torch.horovod import _session

    torch.set_num_threads(1)
    hvd.init()
    tensor = torch.ones(16)
    seconds: dict[str, list[float]] = {"named": [], "native": []}
    for _ in range(ROUNDS):
        for kind in ("named", "native"):
            _request.use(_session.session("allreduce").client if kind == "named" else None)
            function = hvd.allreduce if kind == "named" else hora.allreduce
            for _ in range(5):
                function(tensor, name="small")
            for _ in range(CALLS):
                start = time.perf_counter()
                function(tensor, name="small")
                seconds[kind].append(time.perf_counter() - start)
            hora.barrier()
    _request.use(_session.session("allreduce").client)
    hvd.shutdown()
    return seconds


def main() -> None:
    import hora

    workers = int(sys.argv[1]) if len(sys.argv) > 1 else 2
    seconds = hora.run(measure, workers=workers)[0]
    for kind, values in seconds.items():
        tenths = statistics.quantiles(values, n=10)
        shown = [
            f"{share} {value * 1e6:6.0f} us"
            for share, value in zip(("10 %", "90 %"), (tenths[0], tenths[-1]), strict=True)
        ]
        print(f"{kind:8} median {statistics.median(values) * 1e6:6.0f} us   {'   '.join(shown)}")
    extra = statistics.median(seconds["named"]) - statistics.median(seconds["native"])
    print(f"matching by name costs {extra * 1e6:.0f} us ({workers} workers)")


if __name__ == "__main__":
    main()
