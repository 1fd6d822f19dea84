"""Names and arguments of Horovod's interface for TensorFlow and Keras, as its documentation has them."""

import importlib
import inspect

import pytest

SCALES = "op prescale_factor postscale_factor"
DEVICES = "device_dense device_sparse compression"
TAPE = f"gradtape {DEVICES} sparse_as_dense op gradient_predivide_factor num_groups groups process_set"
KERAS = (
    f"optimizer name {DEVICES} sparse_as_dense gradient_predivide_factor op backward_passes_per_step "
    "average_aggregated_gradients"
)

ARGUMENTS = {
    "horovod.tensorflow": {
        "init": "comm process_sets",
        "allreduce": f"tensor average {DEVICES} {SCALES} name process_set ignore_name_scope",
        "grouped_allreduce": f"tensors average {DEVICES} {SCALES}",
        "allgather": "tensor name ignore_name_scope process_set",
        "grouped_allgather": "tensors name ignore_name_scope process_set",
        "broadcast": "tensor root_rank name ignore_name_scope process_set",
        "broadcast_": "variables root_rank name process_set",
        "alltoall": "tensor splits name ignore_name_scope process_set",
        "reducescatter": "tensor device_dense compression op name process_set ignore_name_scope "
        "prescale_factor postscale_factor",
        "grouped_reducescatter": "tensors device_dense compression op",
        "join": "name ignore_name_scope",
        "barrier": "process_set name",
        "broadcast_variables": "variables root_rank process_set inplace",
        "broadcast_global_variables": "root_rank",
        "broadcast_object": "obj root_rank session name process_set",
        "broadcast_object_fn": "root_rank session name process_set",
        "allgather_object": "obj session name process_set",
        "BroadcastGlobalVariablesHook": "root_rank device",
        "DistributedOptimizer": f"optimizer name use_locking {DEVICES} sparse_as_dense "
        "backward_passes_per_step op gradient_predivide_factor average_aggregated_gradients num_groups "
        "groups process_set scale_local_gradients",
        "DistributedGradientTape": f"{TAPE} scale_local_gradients",
        "PartialDistributedGradientTape": f"{TAPE} local_layers scale_local_gradients",
        "SyncBatchNormalization": "fused",
        "add_process_set": "process_set",
        "remove_process_set": "process_set",
        "size_op": "process_set_id name",
        "rank_op": "name",
        "local_rank_op": "name",
        "local_size_op": "name",
        "process_set_included_op": "process_set_id name",
        "start_timeline": "file_path mark_cycles",
        "check_num_rank_power_of_2": "num_rank",
        "check_extension": "ext_name ext_env_var pkg_path",
    },
    "horovod.tensorflow.elastic": {
        "run": "func",
        "TensorFlowState": "variables session",
        "TensorFlowKerasState": "model optimizer backend",
    },
    "horovod.tensorflow.keras": {
        "init": "comm process_sets",
        "DistributedOptimizer": f"{KERAS} num_groups groups process_set scale_local_gradients",
        "PartialDistributedOptimizer": f"{KERAS} groups process_set local_layers scale_local_gradients",
        "broadcast_global_variables": "root_rank",
        "allreduce": "value name average prescale_factor postscale_factor op compression",
        "allgather": "value name",
        "broadcast": "value root_rank name",
        "reducescatter": "value name op",
        "load_model": "filepath custom_optimizers custom_objects compression legacy_opts",
        "start_timeline": "file_path mark_cycles",
    },
    "horovod.tensorflow.keras.callbacks": {
        "BroadcastGlobalVariablesCallback": "root_rank device local_variables",
        "MetricAverageCallback": "device process_set",
        "LearningRateWarmupCallback": "initial_lr warmup_epochs momentum_correction steps_per_epoch verbose",
        "LearningRateScheduleCallback": "initial_lr multiplier start_epoch end_epoch staircase "
        "momentum_correction steps_per_epoch",
        "BestModelCheckpoint": "monitor verbose mode save_freq",
    },
    "horovod.tensorflow.keras.elastic": {
        "run": "func",
        "KerasState": "model optimizer backend",
        "CommitStateCallback": "state batches_per_commit",
        "UpdateBatchStateCallback": "state",
        "UpdateEpochStateCallback": "state",
    },
}
for name in ("", ".callbacks", ".elastic"):
    ARGUMENTS[f"horovod.keras{name}"] = ARGUMENTS[f"horovod.tensorflow.keras{name}"]

BASICS = (
    "shutdown is_initialized stop_timeline size rank local_size local_rank cross_size cross_rank "
    "is_homogeneous mpi_threads_supported mpi_enabled mpi_built gloo_enabled gloo_built nccl_built ddl_built "
    "ccl_built cuda_built rocm_built"
)
NAMES = {
    "horovod.tensorflow": f"{BASICS} Average Sum Adasum Min Max Product Compression ProcessSet elastic "
    "global_process_set gpu_available mpi_ops",
    "horovod.tensorflow.compression": "Compression Compressor NoneCompressor FP16Compressor",
    "horovod.tensorflow.functions": "broadcast_variables broadcast_object broadcast_object_fn "
    "allgather_object broadcast_global_variables BroadcastGlobalVariablesHook",
    "horovod.tensorflow.mpi_ops": f"{BASICS} allreduce reducescatter allgather broadcast broadcast_ alltoall "
    "join size_op local_size_op rank_op local_rank_op process_set_included_op init check_num_rank_power_of_2 "
    "gpu_available Average Sum Adasum Min Max Product handle_average_backwards_compatibility",
    "horovod.tensorflow.sync_batch_norm": "SyncBatchNormalization",
    "horovod.tensorflow.util": "_executing_eagerly _has_eager _cache _make_subgraph vars_to_refs "
    "refs_to_vars",
    "horovod.tensorflow.elastic": "ObjectState HorovodInternalError HostsUpdatedInterrupt",
    "horovod.tensorflow.keras": f"{BASICS} Average Sum Compression ProcessSet global_process_set "
    "add_process_set remove_process_set callbacks elastic",
    "horovod.keras": f"{BASICS} Average Sum Compression ProcessSet global_process_set add_process_set "
    "remove_process_set callbacks elastic",
    "horovod.common.util": "check_extension gpu_available split_list num_rank_is_power_2",
}


@pytest.mark.parametrize("module", ARGUMENTS)
def test_arguments_in_horovods_order(module):
    found = importlib.import_module(module)
    for name, words in ARGUMENTS[module].items():
        parameters = list(inspect.signature(getattr(found, name)).parameters)
        assert parameters[: len(words.split())] == words.split(), name


@pytest.mark.parametrize("module", NAMES)
def test_names_that_scripts_import(module):
    found = importlib.import_module(module)
    assert [name for name in NAMES[module].split() if not hasattr(found, name)] == []


def test_what_horovod_is_built_with():
    for module in ("horovod.tensorflow", "horovod.tensorflow.keras", "horovod.keras"):
        hvd = importlib.import_module(module)
        for built in (hvd.mpi_built, hvd.mpi_enabled, hvd.ddl_built, hvd.ccl_built):
            assert not built()
        assert hvd.gloo_built()
        assert hvd.gloo_enabled()
        assert not hvd.is_initialized()
        with pytest.raises(ValueError, match="initialized"):
            hvd.rank()
    hvd = importlib.import_module("horovod.tensorflow")
    hvd.check_extension("horovod.tensorflow", "HOROVOD_WITH_TENSORFLOW", "file", "mpi_lib")
    with pytest.raises(ImportError):
        hvd.check_extension("horovod.mxnet", "HOROVOD_WITH_MXNET", "file")
    powers = [number for number in range(9) if hvd.check_num_rank_power_of_2(number)]
    assert powers == [1, 2, 4, 8]
