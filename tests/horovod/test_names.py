"""Every name of Horovod's interface is there, with Horovod's arguments, and in the reference."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path

import pytest
import tests.ranks  # noqa: F401 - imports torch, which sets variables when it is first imported

import hora.torch.horovod as hvd
from hora.cli import _horovod_flags
from hora.launch import horovod as launch

REFERENCE = (Path(__file__).parents[2] / "docs" / "reference" / "horovod.md").read_text()

_REDUCTION = "op prescale_factor postscale_factor process_set"
_SCATTER = "op process_set prescale_factor postscale_factor"

ARGUMENTS = {
    "DistributedOptimizer": "optimizer named_parameters compression backward_passes_per_step op "
    "gradient_predivide_factor num_groups groups sparse_as_dense process_set",
    "SyncBatchNorm": "num_features eps momentum affine track_running_stats",
    "add_process_set": "process_set",
    "allgather": "tensor name process_set",
    "allgather_async": "tensor name process_set",
    "allgather_object": "obj name",
    "allreduce": f"tensor average name compression {_REDUCTION}",
    "allreduce_": f"tensor average name {_REDUCTION}",
    "allreduce_async": f"tensor average name {_REDUCTION}",
    "allreduce_async_": f"tensor average name {_REDUCTION}",
    "alltoall": "tensor splits name process_set",
    "alltoall_async": "tensor splits name process_set",
    "barrier": "process_set",
    "broadcast": "tensor root_rank name process_set",
    "broadcast_": "tensor root_rank name process_set",
    "broadcast_async": "tensor root_rank name process_set",
    "broadcast_async_": "tensor root_rank name process_set",
    "broadcast_object": "obj root_rank name process_set",
    "broadcast_object_fn": "root_rank name process_set",
    "broadcast_optimizer_state": "optimizer root_rank model",
    "broadcast_parameters": "params root_rank",
    "grouped_allgather": "tensors name process_set",
    "grouped_allgather_async": "tensors name process_set",
    "grouped_allreduce": f"tensors average name compression {_REDUCTION}",
    "grouped_allreduce_": f"tensors average name {_REDUCTION}",
    "grouped_allreduce_async": f"tensors average name {_REDUCTION}",
    "grouped_allreduce_async_": f"tensors average name {_REDUCTION}",
    "grouped_reducescatter": f"tensors name compression {_SCATTER}",
    "grouped_reducescatter_async": f"tensors name {_SCATTER}",
    "init": "comm process_sets",
    "join": "device",
    "poll": "handle",
    "process_set_included": "process_set_id",
    "reducescatter": f"tensor name compression {_SCATTER}",
    "reducescatter_async": f"tensor name {_SCATTER}",
    "remove_process_set": "process_set",
    "sparse_allreduce_async": "tensor name op process_set",
    "start_timeline": "file_path mark_cycles",
    "synchronize": "handle",
}
"""Horovod's positional arguments."""

WITHOUT_ARGUMENTS = (
    *("shutdown", "is_initialized", "rank", "size", "local_rank", "local_size", "cross_rank", "cross_size"),
    *("is_homogeneous", "mpi_threads_supported", "mpi_enabled", "mpi_built", "gloo_enabled", "gloo_built"),
    *("nccl_built", "ddl_built", "ccl_built", "cuda_built", "rocm_built", "stop_timeline"),
    "get_process_set_ids_and_ranks",
)

OTHERS = (
    *("Average", "Sum", "Adasum", "Min", "Max", "Product", "Compression", "ProcessSet", "elastic"),
    *("global_process_set", "HorovodInternalError", "HostsUpdatedInterrupt", "HorovodVersionMismatchError"),
)

MODULES = {
    "horovod": "run __version__",
    "horovod.common.basics": "HorovodBasics",
    "horovod.common.elastic": "State ObjectState",
    "horovod.common.exceptions": "HorovodInternalError HostsUpdatedInterrupt HorovodVersionMismatchError",
    "horovod.common.process_sets": "ProcessSet global_process_set add_process_set remove_process_set",
    "horovod.common.util": "check_extension env gpu_available is_iterable num_rank_is_power_2 split_list",
    "horovod.data": "BaseDataLoader AsyncDataLoaderMixin",
    "horovod.data.data_loader_base": "BaseDataLoader AsyncDataLoaderMixin",
    "horovod.runner": "run",
    "horovod.torch": "check_extension SyncBatchNorm compression functions mpi_ops optimizer sync_batch_norm",
    "horovod.torch.compression": "Compression Compressor NoneCompressor FP16Compressor",
    "horovod.torch.elastic": "run State ObjectState TorchState ElasticSampler state sampler",
    "horovod.torch.elastic.sampler": "ElasticSampler",
    "horovod.torch.elastic.state": "TorchState ModelStateHandler OptimizerStateHandler SamplerStateHandler "
    "StateHandler get_handler_registry set_handler_registry",
    "horovod.torch.functions": "allgather_object broadcast_object broadcast_object_fn "
    "broadcast_optimizer_state broadcast_parameters",
    "horovod.torch.mpi_ops": "allreduce poll synchronize join barrier size rank Average Sum Adasum "
    "handle_average_backwards_compatibility num_rank_is_power_2 gpu_available global_process_set",
    "horovod.torch.optimizer": "DistributedOptimizer _DistributedOptimizer _DistributedAdasumOptimizer",
    "horovod.torch.sync_batch_norm": "SyncBatchNorm",
}

FLAGS = """
--num-proc 2|-np 2|--check-build|-cb|--disable-cache|--start-timeout 3|--network-interfaces a|--verbose
--network-interface a|--output-filename x|--config-file x|--ssh-port 22|-p 22|--ssh-identity-file x|-i x
--fusion-threshold-mb 3|--cycle-time-ms 1|--cache-capacity 3|--hierarchical-allreduce|--torus-allreduce
--no-hierarchical-allreduce|--hierarchical-allgather|--no-hierarchical-allgather|--no-torus-allreduce
--autotune|--no-autotune|--autotune-log-file x|--autotune-warmup-samples 3|--autotune-steps-per-sample 3
--autotune-bayes-opt-max-samples 3|--autotune-gaussian-process-noise .1|--min-np 2|--min-num-proc 2
--max-np 2|--max-num-proc 2|--slots-per-host 2|--elastic-timeout 3|--reset-limit 3|--timeline-filename x
--blacklist-cooldown-range 1 2|--timeline-mark-cycles|--no-timeline-mark-cycles|--stall-check
--no-stall-check|--stall-check-warning-time-seconds 3|--stall-check-shutdown-time-seconds 3
--mpi-threads-disable|--no-mpi-threads-disable|--mpi-args=-x|--tcp|--binding-args=-x|--num-nccl-streams 2
--thread-affinity 2|--gloo-timeout-seconds 3|--log-level INFO|--log-with-timestamp|-prefix-timestamp
--log-without-timestamp|--log-hide-timestamp|--no-log-hide-timestamp|-H a:2|--hosts a:2|-hostfile x
--hostfile x|--host-discovery-script x|--gloo|--mpi|--jsrun
"""


@pytest.fixture
def shims(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(launch.SHIMS))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "horovod"]:
        del sys.modules[name]


def _visible(module: types.ModuleType) -> set[str]:
    return {
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and (not isinstance(value, types.ModuleType) or name == "elastic")
    }


def _parameters(function: object) -> list[str]:
    return list(inspect.signature(function).parameters)  # type: ignore[arg-type]


@pytest.mark.usefixtures("shims")
def test_horovod_torch_has_every_name_with_horovods_arguments() -> None:
    shim = importlib.import_module("horovod.torch")
    expected = {*ARGUMENTS, *WITHOUT_ARGUMENTS, *OTHERS, "check_extension"}
    assert _visible(shim) == expected
    assert _visible(hvd) == expected - {"check_extension"}
    for name, words in ARGUMENTS.items():
        assert _parameters(getattr(shim, name))[: len(words.split())] == words.split(), name
    for name in WITHOUT_ARGUMENTS:
        assert _parameters(getattr(shim, name)) == [], name


@pytest.mark.usefixtures("shims")
@pytest.mark.parametrize("module", MODULES)
def test_its_modules_have_the_names_that_scripts_import(module: str) -> None:
    found = importlib.import_module(module)
    assert [name for name in MODULES[module].split() if not hasattr(found, name)] == []


@pytest.mark.usefixtures("shims")
def test_the_basics_as_methods() -> None:
    basics = importlib.import_module("horovod.common.basics").HorovodBasics("path")
    assert basics.is_initialized() is False
    assert basics.gloo_built() is True
    assert basics.Sum is hvd.Sum
    assert [name for name in ("init", *WITHOUT_ARGUMENTS[:-1]) if not hasattr(basics, name)] == []


@pytest.mark.usefixtures("shims")
def test_variables_inside_with_only(monkeypatch: pytest.MonkeyPatch) -> None:
    import os

    env = importlib.import_module("horovod.common.util").env
    monkeypatch.setenv("HORA_TEST_KEPT", "1")
    with env(HORA_TEST_KEPT=None, HORA_TEST_NEW="2"):
        assert "HORA_TEST_KEPT" not in os.environ
        assert os.environ["HORA_TEST_NEW"] == "2"
    assert os.environ["HORA_TEST_KEPT"] == "1"
    assert "HORA_TEST_NEW" not in os.environ


def test_the_reference_has_every_name_and_every_argument() -> None:
    sections = dict(
        re.findall(r"^### `([A-Za-z_]+).*?\n(.*?)(?=^##|\Z)", REFERENCE, flags=re.MULTILINE | re.DOTALL)
    )
    headings = dict(re.findall(r"^### `([A-Za-z_]+)(.*)`$", REFERENCE, flags=re.MULTILINE))
    assert set(headings) == {*_visible(hvd), "check_extension"}
    for name, heading in headings.items():
        assert sections[name].strip(), name
        value = getattr(hvd, name, None)
        if inspect.isfunction(value):
            for parameter in _parameters(value):
                assert re.search(rf"\b{parameter}\b", heading), (name, parameter)


def test_the_reference_has_every_module_flag_and_variable() -> None:
    words = set(re.findall(r"`([^`\n]+)`", REFERENCE))
    assert [module for module in MODULES if module not in words] == []
    shown = {
        action.option_strings[-1]
        for action in _horovod_flags.parser()._actions
        if action.option_strings and action.help not in (None, "==SUPPRESS==") and action.dest != "help"
    }
    assert {flag for flag in shown if f"`{flag}`" not in REFERENCE} == set()
    assert [name for name in launch.HONOURED if name not in words] == []


def test_every_flag_of_horovodrun_is_taken_and_has_a_reason() -> None:
    parser = _horovod_flags.parser()
    for flag in FLAGS.replace("\n", "|").strip("|").split("|"):
        found = parser.parse_args([*flag.split(), "python", "train.py"])
        assert found.command == ["python", "train.py"], flag
    hidden = {action.dest for action in parser._actions if action.help == "==SUPPRESS=="}
    assert hidden == set(_horovod_flags.NO_EFFECT)


def test_the_arguments_of_run() -> None:
    words = (
        *("func", "args", "kwargs", "num_proc", "min_num_proc", "max_num_proc", "slots", "reset_limit"),
        *("cooldown_range", "hosts", "hostfile", "host_discovery_script", "start_timeout", "ssh_port"),
        *("ssh_identity_file", "disable_cache", "output_filename", "verbose", "use_gloo", "use_mpi"),
        *("mpi_args", "network_interface", "executable", "network_interfaces"),
    )
    assert _parameters(launch.run_function)[: len(words)] == list(words)
    with pytest.raises(TypeError):
        launch.run_function(print, no_such_argument=1)  # type: ignore[call-arg]


@pytest.mark.usefixtures("shims")
def test_a_loader_that_reads_ahead() -> None:
    data = importlib.import_module("horovod.data")

    class Numbers(data.BaseDataLoader):  # type: ignore[name-defined,misc]
        def __init__(self, count: int, *, fails: bool = False) -> None:
            self.count, self.fails = count, fails

        def __len__(self) -> int:
            return self.count

        def _iterate(self) -> Iterator[int]:
            yield from range(self.count)
            if self.fails:
                raise OSError("disk")

        def _process_batch(self, batch: int) -> int:
            return 10 * batch

    class Ahead(data.AsyncDataLoaderMixin, Numbers):  # type: ignore[name-defined,misc]
        pass

    for size in (0, 1, 64):
        loader = Ahead(size, 5)
        assert [list(loader), list(loader)] == [[0, 10, 20, 30, 40]] * 2
    for batch in Ahead(2, 1000):  # a pass that is not read to its end leaves no thread: the fixture looks
        if batch == 30:
            break
    started = iter(Ahead(2, 1000))
    assert next(started) == 0
    started.close()
    with pytest.raises(OSError, match="disk"):
        list(Ahead(2, 3, fails=True))
