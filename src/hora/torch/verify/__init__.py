"""What happens inside the ranks of ``hora verify``: records of each step, and changes to the script's run.

:mod:`hora.verify` starts the runs, compares the records and names the cause.
"""
