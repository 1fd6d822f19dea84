"""Operations matched by name across the ranks, as ``hora run --horovod`` promises: in whatever order each
rank asks for them, and with zeros for ranks that have joined. Rank 0 coordinates.
"""
