"""``join()``: a rank that has no more data takes part in the steps of the others until all have joined."""

from __future__ import annotations

import contextlib
from typing import Any

from hora.core.errors import CollectiveError, HoraError
from hora.torch import _rendezvous
from hora.torch._context import Context, required
from hora.torch._presence import End
from hora.torch._request import dispatcher
from hora.torch._state import broadcast_optimizer_state, broadcast_parameters

__all__ = ["join"]


def join(device: int = -1) -> int:
    """Say that this rank has no more data, and wait until all ranks have said so.

    Meanwhile the others go on making steps. ``DistributedOptimizer`` then averages over the ranks that
    still have data, so that uneven data is weighted by what is there: each rank with data counts once per
    step, however many samples its micro-batch has. At the end every rank has the parameters, the state and
    the hyper-parameters of the optimizers from the last rank to join, which took part in every step; not
    the buffers of modules, nor what schedulers count.

    Every rank calls it once per epoch (or whatever is uneven), with any number of steps before, none too.
    A joined rank answers steps of all ``DistributedOptimizer`` of all ranks, whatever their order, in
    whatever form (several backward passes, closures, Adasum, compression). It cannot answer anything else.
    An operation of another kind, such as ``hora.mean`` or the forward of ``SyncBatchNorm``, ends with a
    ``CollectiveError`` on all ranks within a second or two. On GPUs that is seen only when the step before
    is known to have had joined ranks; one that comes directly after the join waits for ``HORA_TIMEOUT``.
    There, too, one optimizer alone is answered, without closures and Adasum.

    Args:
        device: accepted for scripts written for Horovod; what is sent is where the gradients are.

    Returns:
        The last rank to join, the same on all ranks.

    Raises:
        CollectiveError: an operation that joined ranks do not answer; optimizers of some ranks
            (``process_set=``); ranks that do not come within ``HORA_TIMEOUT`` seconds.
        GradientError: backward passes of this rank that no step has used.
    """
    context = required("join")
    if dispatcher().as_horovod:
        raise CollectiveError(
            "hora.torch.join() was called under hora run --horovod, where ranks are matched by name.",
            fix="Write horovod.torch.join(), or start the script without --horovod.",
        )
    if context.world.size == 1:
        return 0
    presence = context.presence
    try:
        unseen = _prepare(context)
    except HoraError as error:
        presence.report(error)
        raise
    with contextlib.nullcontext() if context.guard is None else context.guard.reporter.joined():
        last = presence.arrive()
        if unseen is None:
            record = _answer_what_is_told(context, last=last)
        else:
            record = _answer_cycles(unseen, context, last=last)
        end = presence.leave(record)
    _equalize(end, context)
    if context.watch is not None:
        context.watch.rejoined()
    return end.last


def _prepare(context: Context) -> Any:
    """The one reducer whose cycles are answered unseen, on engines that do not let the host wait; or None.

    Raises:
        CollectiveError: optimizers that could not be answered.
        GradientError: gradients that would be lost.
    """
    if context.presence.apart:
        raise CollectiveError(
            "join() was called while a DistributedOptimizer of some ranks (process_set=) is alive.",
            fix="Let the optimizers that are used with hora.join() be those of all ranks.",
        )
    found = list(context.presence.optimizers.values())
    if any(each.shards is not None or each.fully for each in found):
        spread = CollectiveError(
            "join() was called while a DistributedOptimizer with shard= is alive: this rank has a share of "
            "it, without which the others cannot make a step.",
            fix="Give every rank the same number of batches: data_loader(tail='uneven') does.",
        )
        context.presence.report(spread)
        raise spread
    reducers = [each.reducer for each in found if each.reducer is not None]
    for reducer in reducers:
        reducer.prepare_to_join()
    engines = _rendezvous.engines(context.group)
    devices = {
        parameter.device.type
        for each in found
        for group in each.optimizer().param_groups
        for parameter in group["params"]
    }
    if all(engines[device] in _rendezvous.PATIENT for device in devices):
        return None
    if len(found) > 1 or not reducers or reducers[0].with_closure:
        raise CollectiveError(
            f"join() on {' and '.join(sorted(devices))} answers one DistributedOptimizer, without closures "
            f"and Adasum; there are {len(found)}.",
            fix="Give every rank the same number of batches: data_loader(tail='uneven') does.",
        )
    return reducers[0]


def _answer_what_is_told(context: Context, *, last: bool) -> str:
    presence = context.presence
    if last:
        presence.end()
    optimizers = presence.optimizers
    while not (what := presence.hear()).startswith("{"):
        number = int(what.split()[1])
        if number not in optimizers:
            error = CollectiveError(
                f"join(): other ranks make steps with DistributedOptimizer number {number} (counted from 0), "
                "which is not alive on this rank.",
                fix="Keep the optimizers of all ranks until hora.join() has returned.",
            )
            presence.report(error)
            raise error
        optimizers[number].answer(what)
    return what


def _answer_cycles(reducer: Any, context: Context, *, last: bool) -> str:
    """Each message of the others is one of the reducer's: nothing else may be called."""
    size = context.world.size
    while reducer.answer_all() < size:
        pass
    if last:
        context.presence.end(empty=reducer.bucket_count)
    return context.presence.last_word()


def _equalize(end: End, context: Context) -> None:
    """Bring everybody to where the last rank is, where somebody was away."""
    for number in end.optimizers:
        attachment = context.presence.optimizers[number]
        optimizer = attachment.optimizer()
        parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
        broadcast_parameters(
            [(f"parameter {index}", parameter) for index, parameter in enumerate(parameters)], end.last
        )
        broadcast_optimizer_state(optimizer, end.last)
        if attachment.reducer is not None:
            attachment.reducer.restart(end.last)
