"""The report as a browser shows it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from tests.report import samples
from tests.report.browser import Browser, find

from hora.report import write_report

PROGRAM = find()
pytestmark = pytest.mark.skipif(
    PROGRAM is None,
    reason="Chromium is not installed. On Debian: apt-get install --no-install-recommends chromium",
)

PAGES = ("good", "ranks", "failed", "judged", "elastic")
HIDDEN = "<b>rank</b><img src=http://127.0.0.1:9/x.png><script>document.title='owned'</script>"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    assert PROGRAM is not None
    browser = Browser(PROGRAM, tmp_path_factory.mktemp("profile"))
    yield browser
    browser.close()


@pytest.fixture(scope="module")
def pages(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("runs")
    runs = {
        "good": samples.finished(root / "good"),
        "ranks": samples.finished(root / "ranks", workers=64, records=100, reached=False),
        "failed": samples.failed(root / "failed", records=0),
        "hostile": samples.finished(root / "hostile"),
        "judged": samples.judged(root / "judged"),
        "elastic": samples.elastic(root / "elastic"),
    }
    long = "a-very-long-value-without-any-place-to-break-" * 20
    runs["hostile"].describe(config={"name": HIDDEN, HIDDEN: long, long: long}, versions={HIDDEN: HIDDEN})
    return {name: write_report(run) for name, run in runs.items()}


@pytest.mark.parametrize("name", PAGES)
def test_page_is_quiet_and_offline(browser: Browser, pages: dict[str, Path], name: str) -> None:
    browser.open(pages[name])
    assert browser.complaints() == []
    outside = [
        url for url in browser.requests() if not url.startswith("data:") and url != pages[name].as_uri()
    ]
    assert outside == []


@pytest.mark.parametrize("name", [*PAGES, "hostile"])
@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_overflows(browser: Browser, pages: dict[str, Path], name: str, width: int) -> None:
    browser.open(pages[name], width=width)
    assert browser.evaluate("document.documentElement.scrollWidth") <= width
    # Texts that stick out of their chart would overlap something else.
    outside = browser.evaluate(
        """[...document.querySelectorAll('svg text:not(.readout)')].filter(text => {
             const box = text.getBoundingClientRect(), chart = text.ownerSVGElement.getBoundingClientRect();
             return box.left < chart.left - 2 || box.right > chart.right + 8 || box.bottom > chart.bottom + 2;
           }).map(text => text.textContent)"""
    )
    assert outside == []


def test_curves_have_a_size(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["good"])
    boxes = browser.evaluate(
        """[...document.querySelectorAll('svg .curve')].map(curve => {
             const box = curve.getBoundingClientRect(); return [box.width, box.height];
           })"""
    )
    assert len(boxes) == 6  # loss: each record, average, test; accuracy; learning rate; throughput
    assert all(width > 200 and height > 5 for width, height in boxes)
    assert browser.evaluate("document.querySelectorAll('svg').length") == 6


def test_images_decode(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["good"])
    widths = browser.evaluate("[...document.images].map(image => image.naturalWidth)")
    assert widths == [28] * 24
    assert browser.evaluate("document.querySelectorAll('.images .wrong').length") == 4


def test_pointing_at_a_chart_shows_its_values(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["good"])
    box = browser.evaluate(
        """(() => { const chart = document.querySelectorAll('svg')[1]; chart.scrollIntoView();
             const box = chart.getBoundingClientRect();
             return [box.left, box.top, box.width, box.height]; })()"""
    )
    shown = """[...document.querySelectorAll('.readout')]
                 .filter(text => getComputedStyle(text).visibility === 'visible')
                 .map(text => text.textContent)"""
    assert browser.evaluate(shown) == []
    browser.point_at(box[0] + box[2] * 0.95, box[1] + box[3] * 0.5)
    # The sample approaches 0.883 as 0.35 exp(-5 t): at the end of 8 epochs 0.883 - 0.0024 = 0.881.
    assert browser.evaluate(shown) == ["epoch 8   test 0.881"]


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_text_is_readable_in_both_colour_schemes(
    browser: Browser, pages: dict[str, Path], scheme: str
) -> None:
    browser.open(pages["good"], scheme=scheme)
    contrasts = browser.evaluate(
        """(() => {
          const light = colour => {
            const [r, g, b] = colour.match(/[0-9.]+/g).slice(0, 3).map(value => {
              const part = value / 255;
              return part <= 0.04045 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4;
            });
            return 0.2126 * r + 0.7152 * g + 0.0722 * b;
          };
          const page = light(getComputedStyle(document.body).backgroundColor);
          const contrast = colour => {
            const own = light(colour);
            return (Math.max(own, page) + 0.05) / (Math.min(own, page) + 0.05);
          };
          return ['h1', '.note', 'dt', 'a', 'td', '.wrong .class', '.legend li'].map(name =>
              [name, contrast(getComputedStyle(document.querySelector(name)).color)])
            .concat(['.tick', '.rule-name'].map(name =>
              [name, contrast(getComputedStyle(document.querySelector('svg ' + name)).fill)]));
        })()"""
    )
    # WCAG 2.1, 1.4.3 (level AA): at least 4.5 : 1 for text.
    assert [name for name, contrast in contrasts if contrast < 4.5] == []


def test_names_stay_text(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["hostile"])
    assert browser.complaints() == []
    assert browser.evaluate("document.scripts.length") == 0
    assert browser.evaluate("[...document.images].every(image => image.src.startsWith('data:'))")
    assert browser.evaluate("document.title").startswith("Target reached")
    assert HIDDEN in browser.evaluate("document.body.innerText")


def test_policy_forbids_requests(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["good"])
    blocked = browser.evaluate(
        """new Promise(resolve => {
             document.addEventListener('securitypolicyviolation', event => resolve(event.effectiveDirective));
             const image = new Image(); image.src = 'http://127.0.0.1:9/x.png'; document.body.append(image);
           })"""
    )
    assert blocked == "img-src"


def test_page_is_structured_for_screen_readers(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["failed"])
    browser.open(pages["good"])
    assert browser.evaluate("document.querySelectorAll('h1').length") == 1
    assert browser.evaluate(
        "[...document.querySelectorAll('svg')].every(svg => svg.getAttribute('aria-label'))"
    )
    assert browser.evaluate("[...document.images].every(image => image.alt)")
    assert browser.evaluate(
        "[...document.querySelectorAll('table')].every(table => table.querySelector('th[scope]'))"
    )


def test_a_verdict_leads_to_its_explanation(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["judged"])
    shown = browser.evaluate(
        """[...document.querySelectorAll('.verdict h3 a')].map(link => {
             const target = document.querySelector(link.getAttribute('href'));
             return [link.textContent, target && target.textContent];
           })"""
    )
    assert [words for words, _ in shown] == [
        "A rank keeps the others waiting",
        "What the training is going to do",
    ]
    assert all(words == target for words, target in shown)
    assert browser.evaluate("document.querySelectorAll('.verdict.alarm').length") == 2
    assert browser.evaluate("document.querySelector('.advice code').textContent").startswith(
        "with hora.only("
    )
    top = "document.querySelector('{}').getBoundingClientRect().top"
    assert browser.evaluate(f"{top.format('.verdict')} < {top.format('#training')}")


def test_bars_of_time_have_a_size(browser: Browser, pages: dict[str, Path]) -> None:
    browser.open(pages["judged"])
    widths = browser.evaluate(
        """[...document.querySelectorAll('svg .stack')].map(bar =>
             [...bar.querySelectorAll('rect')].map(part => part.getBoundingClientRect().width))"""
    )
    assert len(widths) == 3
    # Of 50 s each: 0.3, 0.2 and 0.1 s of each second waiting for gradients, 0.06 for data.
    shares = [[round(100 * part / sum(bar)) for part in bar] for bar in widths]
    assert [share[1] for share in shares] == [30, 20, 10]
    assert all(share[2] == 6 for share in shares)
