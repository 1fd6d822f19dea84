"""GPUs, machines and clusters: what a plan may be asked about, and how a user describes another one.

Peaks are dense (no sparsity) TFLOP/s, memory is bytes, bandwidths are bytes per second and per direction.
Sources: NVIDIA's data sheets unless a line says otherwise.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from pathlib import Path
from typing import Any, Literal

from hora.core.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

__all__ = ["GPUS", "MACHINES", "Gpu", "Machine", "Precision", "from_toml", "machine", "nearest"]

Curve = Literal["mesh", "V100", "A100", "flat"]
Precision = Literal["mixed", "tf32", "fp32"]
PRECISIONS: tuple[Precision, ...] = ("mixed", "tf32", "fp32")
GB = 1e9


@dataclass(frozen=True, kw_only=True)
class Gpu:
    """One accelerator.

    Attributes:
        generation: GPUs of one generation run the same kernels.
        mixed, tf32, fp32: peak TFLOP/s of 16-bit tensor cores, TF32 and plain 32 bits.
        memory: bytes.
        bandwidth: of the memory, bytes/s.
        watts: board power at full load.
    """

    name: str
    generation: str
    mixed: float
    tf32: float
    fp32: float
    memory: float
    bandwidth: float
    watts: float

    def peak(self, precision: Precision) -> float:
        """FLOP/s of this precision."""
        return 1e12 * float(getattr(self, precision))


SXM3 = 1.07
"""V100 SXM3 (DGX-2) over SXM2 (DGX-1) at the same work; mean of 24 single-GPU pairs of the tables."""
SXM3H = 1.165
"""V100 SXM3 at 450 W (DGX-2H) over SXM2; mean of 12 single-node pairs of the same tables."""


def _v100(name: str, speed: float, memory: float, watts: float) -> Gpu:
    return Gpu(
        name=name,
        generation="V100",
        mixed=125 * speed,
        tf32=15.7 * speed,
        fp32=15.7 * speed,
        memory=memory * GB,
        bandwidth=900 * GB * speed,
        watts=watts,
    )


def _a100(name: str, memory: float, bandwidth: float) -> Gpu:
    return Gpu(
        name=name,
        generation="A100",
        mixed=312,
        tf32=156,
        fp32=19.5,
        memory=memory * GB,
        bandwidth=bandwidth * GB,
        watts=400,
    )


def _hopper(name: str, memory: float, bandwidth: float) -> Gpu:
    return Gpu(
        name=name,
        generation="H100",
        mixed=989.4,
        tf32=494.7,
        fp32=67,
        memory=memory * GB,
        bandwidth=bandwidth * GB,
        watts=700,
    )


GPUS: dict[str, Gpu] = {
    gpu.name: gpu
    for gpu in (
        _v100("V100-SXM2-16GB", 1.0, 16, 300),
        _v100("V100-SXM2-32GB", 1.0, 32, 300),
        _v100("V100-SXM3-32GB", SXM3, 32, 350),
        _v100("V100-SXM3-32GB-H", SXM3H, 32, 450),
        _a100("A100-40GB", 40, 1555),
        _a100("A100-80GB", 80, 2039),
        _hopper("H100", 80, 3350),
        _hopper("H200", 141, 4800),
        Gpu(
            name="B200",
            generation="B200",
            mixed=2250,
            tf32=1100,
            fp32=80,
            memory=180 * GB,
            bandwidth=8000 * GB,
            watts=1000,
        ),
    )
}


@dataclass(frozen=True, kw_only=True)
class Machine:
    """One kind of server, of which a cluster has any number.

    Attributes:
        gpus: in one server.
        intra: peak bus bandwidth of an all-reduce inside the server, bytes/s per GPU.
        curve: whose measured all-reduce curve has the shape of this machine's; a mesh has one for each count,
            a flat one none.
        inter: bytes/s that NCCL gets out of all adapters of one server's compute network.
        watts: of the whole server, without its share of switches and cooling.
        price: per GPU and hour, in the user's currency; 0 where it is not known.
    """

    name: str
    gpu: Gpu
    gpus: int
    intra: float
    curve: Curve
    inter: float
    watts: float
    price: float = 0.0
    servers: int = 0

    @property
    def most(self) -> int:
        """GPUs of the cluster that this name stands for; 0 where it is not bounded."""
        return self.servers * self.gpus

    def nodes(self, gpus: int) -> int:
        """Servers that hold so many GPUs."""
        return -(-gpus // self.gpus)


# Bus bandwidths: V100 and A100 from measured curves (134.5 and 229 GB/s at 1 GB on 8 GPUs); H100 ring 365, as
# NVIDIA's maintainers state; B200 by its links, 18 x 40.1 GB/s. Adapters: EDR 12, HDR 24, NDR 48 GB/s.
_V, _A, _H, _B = 134.5 * GB, 229.0 * GB, 365.0 * GB, 722.0 * GB


def _machine(  # noqa: PLR0917 - a table's columns
    name: str, gpu: str, gpus: int, intra: float, curve: Curve, inter: float, watts: float
) -> Machine:
    return Machine(name=name, gpu=GPUS[gpu], gpus=gpus, intra=intra, curve=curve, inter=inter, watts=watts)


MACHINES: dict[str, Machine] = {
    found.name: found
    for found in (
        _machine("dgx-1", "V100-SXM2-16GB", 8, _V, "mesh", 4 * 12 * GB, 3500),
        _machine("dgx-1-32gb", "V100-SXM2-32GB", 8, _V, "mesh", 4 * 12 * GB, 3500),
        _machine("dgx-2", "V100-SXM3-32GB", 16, _V, "V100", 8 * 12 * GB, 10000),
        _machine("dgx-2h", "V100-SXM3-32GB-H", 16, _V, "V100", 8 * 12 * GB, 12000),
        _machine("dgx-a100-40gb", "A100-40GB", 8, _A, "A100", 8 * 24 * GB, 6500),
        _machine("dgx-a100", "A100-80GB", 8, _A, "A100", 8 * 24 * GB, 6500),
        _machine("dgx-h100", "H100", 8, _H, "A100", 8 * 48 * GB, 10200),
        _machine("dgx-h200", "H200", 8, _H, "A100", 8 * 48 * GB, 10200),
        _machine("dgx-b200", "B200", 8, _B, "A100", 8 * 48 * GB, 14300),
    )
}
MACHINES["dgx-superpod-2019"] = replace(MACHINES["dgx-2h"], name="dgx-superpod-2019", servers=96)


def nearest(wrong: str, choices: Mapping[str, object]) -> str:
    """The choice that looks most like what was written."""
    small = {choice.lower(): choice for choice in sorted(choices)}
    inside = [choice for choice in small if wrong.lower() in choice]
    return small[(inside or difflib.get_close_matches(wrong.lower(), small, n=1, cutoff=0.0))[0]]


def machine(name: str) -> Machine:
    """A preset by its name, or the machine in a TOML file.

    Raises:
        UsageError: the name is no preset and no file; it names the nearest preset.
    """
    if name in MACHINES:
        return MACHINES[name]
    if name.endswith(".toml"):
        return from_toml(Path(name))
    close = nearest(name, MACHINES)
    raise UsageError(
        f"--on {name}: no such machine. Known are {', '.join(sorted(MACHINES))}, and .toml files.",
        fix=f"Write --on {close}.",
    )


EXAMPLE = """\
name = "my-cluster"
like = "dgx-a100"      # what is not written is as in this preset
gpus = 4               # in one server
inter = 48             # GB/s of all network adapters of one server
price = 2.5            # per GPU and hour
[gpu]                  # only where the GPU is another one
memory = 40            # GB
"""
_GIGA = {"intra", "inter", "memory", "bandwidth"}


def from_toml(path: Path) -> Machine:
    """A machine described by a file: a preset with the fields that differ; amounts in GB and GB/s.

    Raises:
        UsageError: the file cannot be read, or a key or a value in it cannot be used.
    """
    try:
        table = tomllib.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise UsageError(
            f"--on {path}: it cannot be read ({error.strerror}).",
            fix=f"Write a file such as:\n{EXAMPLE}",
        ) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(
            f"--on {path}: it is not TOML ({error}).", fix=f"Write for example:\n{EXAMPLE}"
        ) from error
    if "like" not in table:
        raise UsageError(
            f"{path}: `like` is missing, the preset that the machine resembles.",
            fix='Write like = "dgx-a100".',
        )
    base = machine(str(table.pop("like")))
    gpu = table.pop("gpu", {})
    if isinstance(gpu, str):
        if gpu not in GPUS:
            raise UsageError(
                f'{path}: gpu = "{gpu}" is not known.', fix=f'Write gpu = "{nearest(gpu, GPUS)}".'
            )
        new = GPUS[gpu]
    else:
        new = replace(base.gpu, **_checked(path, "[gpu] ", gpu, base.gpu))
    table.setdefault("name", path.stem)
    return replace(base, **_checked(path, "", table, base), gpu=new)


def _checked(path: Path, where: str, table: Mapping[str, Any], base: Gpu | Machine) -> dict[str, Any]:
    """The values of a table in the units of the class, each of the type that its field has."""
    known = {field.name: getattr(base, field.name) for field in fields(base) if field.name != "gpu"}
    found: dict[str, Any] = {}
    for key, value in table.items():
        if key not in known:
            raise UsageError(
                f"{path}: {where}{key} is no property. Known are {', '.join(known)}.",
                fix=f"Write {nearest(key, known)}.",
            )
        if isinstance(known[key], str):
            found[key] = str(value)
            continue
        free = key in ("price", "servers") and value == 0
        if not free and (isinstance(value, bool) or not isinstance(value, (int, float)) or not value > 0):
            raise UsageError(
                f"{path}: {where}{key} = {value!r} is not a positive number.", fix=f"Write {key} = 8."
            )
        if isinstance(known[key], int) and value != int(value):
            raise UsageError(
                f"{path}: {where}{key} = {value}: it is a count.", fix=f"Write {key} = {int(value) + 1}."
            )
        found[key] = int(value) if isinstance(known[key], int) else value * (GB if key in _GIGA else 1.0)
    if found.get("curve", "A100") not in ("mesh", "V100", "A100"):
        raise UsageError(f"{path}: curve = {found['curve']!r} is not known.", fix='Write curve = "A100".')
    return found
