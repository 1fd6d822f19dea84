"""The guard: turns what the ranks report into verdicts.

Framework-neutral. An adapter reports through a :class:`~hora.guard.reporter.Reporter`; the supervisor
feeds a :class:`~hora.guard.judge.Judge`. Between them lie a board (memory that each rank writes and the
supervisor reads, so that a rank which hangs still tells where) and a socket for each rank, which carries
records: JSON objects, one a line, told apart by their ``kind``.
"""
