"""Which steps count, and what samples they used, from journals written by hand."""

from __future__ import annotations

import dataclasses

from hora.chaos.compare import samples
from hora.chaos.history import History, history
from hora.core.journal import Entry, Span


def entry(
    world: str,
    number: int,
    rank: int,
    *spans: Span,
    before: int | None = None,
    after: int | None = None,
    size: int = 2,
    time: float | None = None,
) -> Entry:
    attempt = int(world.partition(":")[0])
    return Entry(
        pid=attempt * 100 + rank,
        worker=rank,
        world=world,
        rank=rank,
        size=size,
        number=number,
        time=attempt * 1000 + number if time is None else time,
        data="train",
        spans=spans,
        before=before,
        after=after,
        total=float(after or 0),
    )


def steps(world: str, first: int, last: int, *, per_epoch: int = 4, begin: int | None = None) -> list[Entry]:
    """Steps ``first`` to ``last`` of two ranks with two samples each; the checksum is the number of steps."""
    made = []
    for number, step in enumerate(range(first, last + 1), 1):
        epoch, place = divmod((step - 1) * 4, per_epoch * 4)
        for rank in (0, 1):
            span = (epoch, place + 2 * rank, place + 2 * rank + 2)
            before = step - 1 if number > 1 or begin is None else begin
            made.append(entry(world, number, rank, span, before=before, after=step))
    return made


PLAIN = history(steps("1:0", 1, 8))


def differences(found: History) -> list[str]:
    return samples(PLAIN, found, tolerance=0.0).differences


def test_an_undisturbed_run() -> None:
    assert PLAIN.coverage() == {0: [(0, 16)], 1: [(0, 16)]}
    assert (len(PLAIN.steps), PLAIN.repeats, PLAIN.breaks, PLAIN.checked) == (8, [], [], True)
    assert differences(PLAIN) == []
    assert samples(PLAIN, PLAIN, tolerance=0.0).same == [
        "8 steps",
        "32 samples in 2 epochs, none lost and none used twice",
    ]


def test_steps_that_are_made_again_count_once() -> None:
    found = history(steps("1:0", 1, 6) + steps("2:0", 4, 8))
    assert len(found.steps) == 8
    assert len(found.made) == 11
    assert found.repeats == [(2001.0, 3)]
    assert differences(found) == []


def test_a_restart_from_the_beginning() -> None:
    found = history(steps("1:0", 1, 3) + steps("2:0", 1, 8))
    assert found.repeats == [(2001.0, 3)]
    assert differences(found) == []


def test_twice_restarted_at_one_place() -> None:
    found = history(steps("1:0", 1, 6) + steps("2:0", 3, 5) + steps("3:0", 3, 8))
    assert found.repeats == [(2001.0, 4), (3001.0, 3)]
    assert differences(found) == []


def test_lost_samples_are_named() -> None:
    found = history(steps("1:0", 1, 4) + steps("2:0", 6, 8, begin=4))
    assert differences(found) == [
        "after step 4, which ended at position 16 of epoch 0, training went on at position 4 of epoch 1",
        "epoch 1: 4 samples were lost (positions 0 to 3)",
    ]


def test_samples_used_twice_are_named() -> None:
    """The loader went back, and the model did not: what was made is not taken back by it."""
    found = history(steps("1:0", 1, 6) + steps("2:0", 6, 8, begin=6))
    assert differences(found) == [
        "after step 6, which ended at position 8 of epoch 1, training went on at position 4 of epoch 1",
        "epoch 1: 4 samples were used 2 times (positions 4 to 7)",
    ]


def test_a_model_that_went_back_without_its_loader_is_named() -> None:
    found = history(steps("1:0", 1, 6) + steps("2:0", 7, 8, begin=3))
    assert differences(found) == ["step 7 did not begin with the parameters that any step before it had left"]


def test_two_ranks_with_the_same_samples() -> None:
    same = [
        dataclasses.replace(
            one, spans=((one.spans[0][0], one.spans[0][1] // 4 * 4, one.spans[0][1] // 4 * 4 + 2),)
        )
        for one in steps("1:0", 8, 8)
    ]
    found = history(steps("1:0", 1, 7) + [dataclasses.replace(one, number=8) for one in same])
    assert differences(found) == [
        "epoch 1: 2 samples were used 2 times (positions 12 to 13)",
        "epoch 1: 2 samples were lost (positions 14 to 15)",
    ]


def test_a_step_that_a_killed_rank_has_not_written_counts_where_the_others_go_on_from_it() -> None:
    for last in (4, 5, 6):
        for gone in (0, 1):
            made = steps("1:0", 1, last)
            made.remove(next(one for one in made if one.number == last and one.rank == gone))
            found = history(made + steps("2:0", last + 1, 8))
            assert found.repeats == []
            assert differences(found) == []


def test_a_step_that_a_killed_rank_has_not_written_is_taken_back() -> None:
    for gone in (0, 1):
        made = steps("1:0", 1, 5)
        made.remove(next(one for one in made if one.number == 5 and one.rank == gone))
        found = history(made + steps("2:0", 5, 8))
        assert found.repeats == [(2001.0, 1)]
        assert differences(found) == []


def test_another_number_of_ranks_goes_on() -> None:
    alone = [
        entry("2:0", number, 0, (1, 4 * number, 4 * number + 4), before=4 + number, after=5 + number, size=1)
        for number in (1, 2, 3)
    ]
    found = history(steps("1:0", 1, 5) + alone)
    assert found.breaks == []
    assert differences(found) == []


def test_without_a_loader_of_horas_the_parameters_tell() -> None:
    def bare(entries: list[Entry]) -> list[Entry]:
        return [dataclasses.replace(one, data=None, spans=()) for one in entries]

    plain = history(bare(steps("1:0", 1, 8)))
    again = history(bare(steps("1:0", 1, 6) + steps("2:0", 4, 8)))
    assert again.repeats == [(2001.0, 3)]
    assert samples(plain, again, tolerance=0.0).same == ["8 steps"]
    less = history(bare(steps("1:0", 1, 6)))
    assert samples(plain, less, tolerance=0.0).differences == [
        "6 steps count, and 8 undisturbed",
        "the parameters after the last step are not those of the undisturbed run (relative difference 0.2)",
    ]


def test_a_script_that_changes_its_parameters_between_steps_is_followed_by_its_samples() -> None:
    def averaged(entries: list[Entry]) -> list[Entry]:
        return [dataclasses.replace(one, before=(one.before or 0) + 1000) for one in entries]

    plain = history(averaged(steps("1:0", 1, 8)), checked=False)
    assert not plain.checked
    found = history(averaged(steps("1:0", 1, 6) + steps("2:0", 4, 8)), checked=plain.checked)
    assert found.repeats == [(2001.0, 3)]
    assert samples(plain, found, tolerance=0.0).differences == []


def test_other_parameters_at_the_end() -> None:
    made = steps("1:0", 1, 8)
    made[-2:] = [dataclasses.replace(one, after=9, total=8.000004) for one in made[-2:]]
    assert differences(history(made)) == [
        "the parameters after the last step are not those of the undisturbed run (relative difference 5e-07)"
    ]
    assert samples(PLAIN, history(made), tolerance=1e-6).differences == []
