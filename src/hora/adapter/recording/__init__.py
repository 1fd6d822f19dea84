"""What the adapters share to record a training for ``hora verify``: see :mod:`hora.core.recording`.

:mod:`hora.verify` starts the runs, compares the records and names the cause. Here is what happens inside a
rank of them, whatever the framework: what is written down of a batch, a pass and a step, and what an
experiment replaces. How a framework's own calls come to this its adapter knows (``hora.jax.verify`` say).
"""
