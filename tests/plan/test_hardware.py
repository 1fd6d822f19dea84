"""Machines by name and by file."""

import pytest

from hora.core.errors import UsageError
from hora.plan import hardware
from hora.plan.hardware import EXAMPLE, MACHINES, machine


def test_the_superpod_of_2019_has_1536_gpus():
    assert MACHINES["dgx-superpod-2019"].most == 1536
    assert MACHINES["dgx-2h"].nodes(17) == 2


def test_an_unknown_machine_names_the_nearest():
    with pytest.raises(UsageError, match="--on dgx-a100") as caught:
        machine("dgxa100")
    assert "dgx-superpod-2019" in str(caught.value)


def test_the_example_file_is_read_in_gigabytes(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(EXAMPLE)
    found = machine(str(path))
    assert (found.name, found.gpus, found.inter, found.price) == ("my-cluster", 4, 48e9, 2.5)
    assert found.gpu.memory == 40e9
    assert found.gpu.bandwidth == MACHINES["dgx-a100"].gpu.bandwidth


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("gpus = 4", "like = "),
        ('like = "dgx-a100"\nnics = 4', "nics is no property"),
        ('like = "dgx-a100"\ngpus = -4', "not a positive number"),
        ('like = "dgx-a100"\ngpus = 2.5', "it is a count"),
        ('like = "dgx-a100"\ninter = "fast"', "not a positive number"),
        ('like = "dgx-a100"\ninter = true', "not a positive number"),
        ('like = "dgx-a100"\ngpu = "H10"', 'gpu = "H100"'),
        ('like = "dgx-a100"\n[gpu]\nmemry = 3', "Write memory"),
        ('like = "dgx-a100"\ncurve = "B"', "curve"),
        ("like = ", "it is not TOML"),
    ],
)
def test_a_wrong_file_tells_what_to_write(tmp_path, text, message):
    path = tmp_path / "mine.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=message):
        machine(str(path))


def test_a_missing_file_shows_an_example(tmp_path):
    with pytest.raises(UsageError, match=r'like = "dgx-a100"'):
        machine(str(tmp_path / "none.toml"))


def test_every_price_and_property_is_positive_but_the_free_ones():
    for found in MACHINES.values():
        assert found.gpus > 0
        assert found.inter > 0
        assert found.gpu.peak("mixed") >= found.gpu.peak("fp32")
    assert hardware.nearest("v100", hardware.GPUS).startswith("V100")
