"""What the guard sees of a training: replicas, gradients, inputs, noise, order, plan and pace.

Each module takes small records in hooks that torch calls, and sends them to the supervisor, which judges
(see :mod:`hora.guard`).
"""
