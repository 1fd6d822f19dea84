"""The settings table."""

import dataclasses
from pathlib import Path

import pytest

from hora.core import settings
from hora.core.errors import SettingError


def test_defaults_without_variables() -> None:
    loaded = settings.load({})
    assert loaded == settings.Settings()
    assert loaded.timeout == 300.0
    assert loaded.run_dir is None


def test_each_type_is_parsed() -> None:
    loaded = settings.load(
        {
            "HORA_TIMEOUT": "2.5",
            "HORA_RUN_DIR": "runs/a b",
            "HORA_DEVICE": "cpu",
            "HORA_TIMELINE": "off",
            "HORA_SIZE": "4",
            "PATH": "elsewhere",
        }
    )
    assert (loaded.timeout, loaded.run_dir, loaded.device) == (2.5, Path("runs/a b"), "cpu")
    assert (loaded.timeline, loaded.size) == (False, 4)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("HORA_TIMEOUT", "soon", r"HORA_TIMEOUT='soon' is not a number\. Write for example HORA_TIMEOUT=30"),
        ("HORA_SIZE", "2.5", r"HORA_SIZE='2.5' is not a whole number"),
        ("HORA_TIMELINE", "perhaps", "is not on or off"),
        ("HORA_DEVICE", "gpu", "is not one of auto, cpu, cuda"),
        ("HORA_TIMEOUT", "0", "HORA_TIMEOUT='0' is too small"),
        ("HORA_TIMEOUT", "-1", "too small"),
        ("HORA_TIMEOUT", "nan", "is not a number"),
        ("HORA_BUCKET_MB", "inf", "is not a number"),
        (
            "HORA_BUKET_MB",
            "25",
            r"HORA_BUKET_MB='25' is not a setting of Hora\. Did you mean HORA_BUCKET_MB\?",
        ),
        ("HORA_XYZ", "1", "hora settings"),
    ],
)
def test_a_wrong_value_is_an_error_with_the_line_to_write(name: str, text: str, message: str) -> None:
    with pytest.raises(SettingError, match=message):
        settings.load({name: text})


@pytest.mark.parametrize(
    "name", ["HORA_SERVICE_HOST", "HORA_PORT", "HORA_PORT_80_TCP_ADDR", "HORA_WEB_SERVICE_PORT"]
)
def test_kubernetes_service_links_are_not_settings(name: str) -> None:
    assert settings.load({name: "10.0.0.1"}) == settings.Settings()


def test_the_table_has_a_row_per_setting_and_says_where_a_value_came_from() -> None:
    rows = {row.variable: row for row in settings.rows({"HORA_TIMEOUT": "60"})}
    assert list(rows) == ["HORA_" + field.name.upper() for field in dataclasses.fields(settings.Settings)]
    assert (rows["HORA_TIMEOUT"].value, rows["HORA_TIMEOUT"].source) == ("60.0", "environment")
    assert rows["HORA_DEVICE"].source == "default"
    assert all(row.meaning for row in rows.values())


def test_the_documentation_shows_this_table() -> None:
    from tools.make_settings_page import PAGE, page

    assert PAGE.read_text(encoding="utf-8") == page(), "run: python tools/make_settings_page.py"
