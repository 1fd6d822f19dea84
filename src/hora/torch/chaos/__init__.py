"""What happens inside the ranks of ``hora chaos``: a line for each step, with its samples.

:mod:`hora.chaos` disturbs the job and compares the lines with those of an undisturbed one.
"""
