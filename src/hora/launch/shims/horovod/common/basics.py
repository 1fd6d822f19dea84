"""``horovod.common.basics``: the job's basics as methods of an object."""

from __future__ import annotations

from ._face import face

__all__ = ["HorovodBasics"]


_hvd = face()


class HorovodBasics:
    """``init``, ``rank``, ``nccl_built`` and all other functions about the job, as methods.

    Args:
        pkg_path: where Horovod has its library; there is none here.
        args: more of it.
    """

    def __init__(self, pkg_path: str = "", *args: str) -> None:
        self.Average, self.Sum, self.Adasum = _hvd.Average, _hvd.Sum, _hvd.Adasum
        self.Min, self.Max, self.Product = _hvd.Min, _hvd.Max, _hvd.Product

    init = staticmethod(_hvd.init)
    shutdown = staticmethod(_hvd.shutdown)
    is_initialized = staticmethod(_hvd.is_initialized)
    start_timeline = staticmethod(_hvd.start_timeline)
    stop_timeline = staticmethod(_hvd.stop_timeline)
    rank = staticmethod(_hvd.rank)
    size = staticmethod(_hvd.size)
    local_rank = staticmethod(_hvd.local_rank)
    local_size = staticmethod(_hvd.local_size)
    cross_rank = staticmethod(_hvd.cross_rank)
    cross_size = staticmethod(_hvd.cross_size)
    is_homogeneous = staticmethod(_hvd.is_homogeneous)
    mpi_threads_supported = staticmethod(_hvd.mpi_threads_supported)
    mpi_enabled = staticmethod(_hvd.mpi_enabled)
    mpi_built = staticmethod(_hvd.mpi_built)
    gloo_enabled = staticmethod(_hvd.gloo_enabled)
    gloo_built = staticmethod(_hvd.gloo_built)
    nccl_built = staticmethod(_hvd.nccl_built)
    ddl_built = staticmethod(_hvd.ddl_built)
    ccl_built = staticmethod(_hvd.ccl_built)
    cuda_built = staticmethod(_hvd.cuda_built)
    rocm_built = staticmethod(_hvd.rocm_built)
