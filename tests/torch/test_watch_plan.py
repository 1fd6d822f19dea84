"""The global batch that the guard's plan names, derived from what came before the first step."""

from __future__ import annotations

import pytest

from hora.torch.watch._plan import _batch


@pytest.mark.parametrize(
    ("passes", "batches", "words"),
    [
        (1, 1, "global batch 32 (2 workers x 16 samples)"),
        (4, 4, "global batch 128 (2 workers x 16 samples x 4 backward passes)"),
        (4, 7, "global batch 128 (2 workers x 16 samples x 4 backward passes)"),  # some were for evaluation
        (2, 1, "global batch 32 (2 workers x 16 samples in 2 backward passes)"),  # one batch, cut in two
        (6, 3, "global batch 96 (2 workers x 16 samples x 3 batches in 6 backward passes)"),
        (2, 0, "global batch 64 (2 workers x 16 samples x 2 backward passes)"),  # no loader was seen
    ],
)
def test_a_batch_cut_up_for_several_passes_counts_once(passes: int, batches: int, words: str) -> None:
    assert _batch(32, 2, passes, batches) == words
