"""Does a training survive? ``hora chaos`` disturbs a job and compares its result with the undisturbed one.

It knows no framework: the adapter (``hora.torch.chaos``) writes down the steps of the ranks, as lines that
:mod:`hora.core.journal` describes. Nothing is imported here: each rank imports a part of this package.
"""
