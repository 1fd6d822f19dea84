"""What the adapters of all frameworks share: operations, the guard's half in a rank, how ranks meet and
agree.

It imports no framework. A framework is imported in its own adapter only: ``hora.torch``, ``hora.tensorflow``,
``hora.jax``.
"""
