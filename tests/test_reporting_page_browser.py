"""The page of results in a real browser: by mouse and keyboard, in both themes, on a phone, from a file, offline."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from reporting_records import record

from mae_bench.reporting import page
from mae_bench.reporting.record import write_record
from mae_bench.reporting.store import load_frame

CHROMIUM, DRIVER = "/usr/bin/chromium", "/usr/bin/chromedriver"
HOSTILE = "</script><img src=x onerror=document.title='broken'>"

selenium = pytest.importorskip("selenium.webdriver", reason="selenium is not installed: pip install selenium")
WebDriverWait = pytest.importorskip("selenium.webdriver.support.ui").WebDriverWait
pytestmark = pytest.mark.skipif(
    not (shutil.which(CHROMIUM) and shutil.which(DRIVER)), reason=f"needs {CHROMIUM} and {DRIVER}"
)

RUNS = [
    record(
        init=init, seed=seed, value=value + seed, run_id=f"tiny_linear.vit_t_{init}.seed{seed}", notes=[HOSTILE],
        per_class={HOSTILE: {"top1": 1.0}}, recipe_hash=str(number) * 64,
        history=[{"step": float(s), "loss": 2.0 - s / 40, "top1": float(s)} for s in range(40)],
    )
    for number, (init, value) in enumerate([("scratch", 40.0), ("supervised", 9.0), ("mae", 49.0)], start=1)
    for seed in (0, 1)
]  # fmt: skip
FIRST = "#run-tiny_linear.vit_t_scratch.seed0"


SLOW = 240  # seconds for a start or a page; a busy machine takes many


def patiently(act: Callable[[], Any], *late: type[Exception]) -> Any:
    """Act; once more where the browser was too ``late``. Whatever else goes wrong is a fault."""
    try:
        return act()
    except late:
        return act()


def eventually(browser: Any, holds: Callable[[], bool]) -> bool:
    """Whether it comes to hold: a browser tells a page of its address and its dialogues a moment later."""
    return bool(WebDriverWait(browser, 30).until(lambda _: holds()))


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    from selenium.common.exceptions import WebDriverException
    from selenium.webdriver.chrome.service import Service

    options = selenium.ChromeOptions()
    options.binary_location = CHROMIUM
    # Reduced motion: a click does not wait for a smooth scroll.
    for option in ("--headless=new", "--no-sandbox", "--disable-dev-shm-usage", "--window-size=1200,900",
                   "--force-prefers-reduced-motion"):  # fmt: skip
        options.add_argument(option)
    options.set_capability("goog:loggingPrefs", {"browser": "ALL", "performance": "ALL"})
    driver = patiently(lambda: selenium.Chrome(service=Service(DRIVER), options=options), WebDriverException)
    driver.set_page_load_timeout(SLOW)
    driver.command_executor.client_config.timeout = SLOW + 10  # of one command; the page's own limit comes first
    yield driver
    driver.quit()


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("page")
    for number, one in enumerate(RUNS):
        write_record(one, folder / f"run{number}")
    page.write(page.page(load_frame([folder])), folder / "report.html")
    return (folder / "report.html").as_uri()


@pytest.fixture
def opened(browser: Any, address: str) -> Iterator[Any]:
    """The page, fresh; after each test no error has been logged and no request was made but for the file itself."""
    from selenium.common.exceptions import TimeoutException
    from urllib3.exceptions import ReadTimeoutError

    browser.get("about:blank")
    browser.get_log("browser"), browser.get_log("performance")
    patiently(lambda: browser.get(address), TimeoutException, ReadTimeoutError)
    yield browser
    assert browser.get_log("browser") == []
    events = [json.loads(entry["message"])["message"] for entry in browser.get_log("performance")]
    requests = {event["params"]["request"]["url"] for event in events if event["method"] == "Network.requestWillBeSent"}
    assert {one.partition("#")[0] for one in requests if not one.startswith("data:")} <= {address}
    assert browser.title == "mae_bench: results"  # no script of a record has run


def keys(browser: Any, *typed: str) -> None:
    selenium.ActionChains(browser).send_keys(*typed).perform()


def find(browser: Any, selector: str) -> Any:
    return browser.find_element("css selector", selector)


def column(browser: Any, table: str, number: int) -> list[str]:
    """Texts of the shown rows."""
    rows = "[...document.querySelectorAll(arguments[0])].filter((row) => !row.hidden)"
    script = f"return {rows}.map((row) => row.cells[arguments[1]].textContent)"
    return list(browser.execute_script(script, f"#table-{table} tbody tr", number))


def is_open(browser: Any) -> bool:
    return bool(browser.execute_script("return document.getElementById('record').open"))


def test_sorting_by_mouse_and_keyboard(opened: Any) -> None:
    head = find(opened, "#table-results thead th:nth-child(4)")
    numbers = ["40.50 ± 0.71", "9.50 ± 0.71", "49.50 ± 0.71"]
    assert column(opened, "results", 3) == numbers
    find(opened, "#table-results thead th:nth-child(4) button").click()
    assert head.get_attribute("aria-sort") == "ascending"
    assert column(opened, "results", 3) == [numbers[1], numbers[0], numbers[2]]  # as numbers, not as text
    keys(opened, "\ue007")  # Enter, on the button that has the focus
    assert head.get_attribute("aria-sort") == "descending"
    assert column(opened, "results", 3) == [numbers[2], numbers[0], numbers[1]]
    assert "sorted by mean ± std, descending" in find(opened, "[data-for=table-results] output").text
    keys(opened, "\ue007")
    assert head.get_attribute("aria-sort") is None and column(opened, "results", 3) == numbers


def test_filters(opened: Any) -> None:
    search = find(opened, "[data-for=table-runs] input")
    search.send_keys("MAE seed1")
    assert column(opened, "runs", 2) == ["vit_t_mae"]
    assert find(opened, "[data-for=table-runs] output").text == "1 of 6 rows"
    search.clear()
    find(opened, "[data-for=table-runs] select[data-filter=init] option:nth-child(3)").click()
    assert column(opened, "runs", 2) == ["vit_t_scratch"] * 2
    search.send_keys("nothing like it")
    assert column(opened, "runs", 2) == []


def test_a_record_opens_by_click_and_closes_by_escape(opened: Any) -> None:
    link = find(opened, f".matrix a[href='{FIRST}']")
    link.click()
    assert eventually(opened, lambda: is_open(opened) and opened.current_url.endswith(FIRST))
    text = find(opened, "#record").text
    assert "python -m mae_bench run" in text and "1" * 64 in text and HOSTILE in text
    keys(opened, "\ue00c")
    assert eventually(opened, lambda: not is_open(opened) and "#" not in opened.current_url)
    assert opened.switch_to.active_element == link


def test_a_record_opens_by_keyboard_and_shows_its_siblings(opened: Any) -> None:
    opened.execute_script("document.querySelector(arguments[0]).focus()", f"#table-runs a[href='{FIRST}']")
    keys(opened, "\ue007")
    assert eventually(
        opened, lambda: is_open(opened) and find(opened, "#record-title").text == FIRST.removeprefix("#run-")
    )
    find(opened, ".seeds a:nth-child(2)").click()
    assert eventually(opened, lambda: is_open(opened) and find(opened, "#record-title").text.endswith("seed1"))
    opened.back()
    assert eventually(opened, lambda: find(opened, "#record-title").text.endswith("seed0"))
    find(opened, ".seeds a:last-child").click()
    assert eventually(opened, lambda: not is_open(opened) and "#curve-" in opened.current_url)


def test_the_command_is_copied_or_selected(opened: Any) -> None:
    find(opened, f".matrix a[href='{FIRST}']").click()
    button = find(opened, ".command button")
    button.click()
    assert eventually(opened, lambda: button.text != "Copy")
    assert button.text in ("Copied", "Selected: press Ctrl+C")


def test_an_address_opens_its_record(opened: Any, address: str) -> None:
    opened.get("about:blank")
    opened.get(address + FIRST)
    assert eventually(opened, lambda: is_open(opened))


def test_the_theme_is_the_systems_until_it_is_chosen(opened: Any, address: str) -> None:
    script = "return getComputedStyle(document.body).backgroundColor"
    dark, light = "rgb(20, 23, 27)", "rgb(255, 255, 255)"
    for scheme, ground in (("dark", dark), ("light", light)):
        features = [{"name": "prefers-color-scheme", "value": scheme}]
        opened.execute_cdp_cmd("Emulation.setEmulatedMedia", {"features": features})
        assert opened.execute_script(script) == ground
    button = find(opened, "#theme")
    assert button.text == "Dark theme"
    button.click()
    assert opened.execute_script(script) == dark and button.text == "Light theme"
    opened.get(address)
    assert opened.execute_script(script) == dark  # remembered
    find(opened, "#theme").click()
    assert opened.execute_script(script) == light


def test_without_storage_the_theme_still_changes(opened: Any, address: str) -> None:
    broken = "Object.defineProperty(window, 'localStorage', {get() { throw new DOMException('no', 'SecurityError'); }})"
    added = opened.execute_cdp_cmd("Page.addScriptToEvaluateOnNewDocument", {"source": broken})
    opened.get(address)
    before = find(opened, "#theme").text
    find(opened, "#theme").click()
    assert find(opened, "#theme").text != before
    opened.execute_cdp_cmd("Page.removeScriptToEvaluateOnNewDocument", {"identifier": added["identifier"]})


def test_a_phone_needs_no_sideways_scrolling(opened: Any) -> None:
    phone = {"width": 360, "height": 740, "deviceScaleFactor": 2, "mobile": True}
    opened.execute_cdp_cmd("Emulation.setDeviceMetricsOverride", phone)
    width = "return document.documentElement.scrollWidth"
    assert opened.execute_script(width) == 360
    find(opened, f".matrix a[href='{FIRST}']").click()
    assert opened.execute_script(width) == 360
    assert opened.execute_script("const d = document.getElementById('record'); return d.scrollWidth <= d.clientWidth")
    keys(opened, "\ue00c")
    opened.execute_script("document.querySelectorAll('details').forEach((one) => { one.open = true; })")
    assert opened.execute_script(width) == 360
    opened.execute_cdp_cmd("Emulation.clearDeviceMetricsOverride", {})


def test_without_javascript_every_table_is_there(opened: Any, address: str) -> None:
    opened.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": True})
    opened.get(address)
    text = find(opened, "main").text
    opened.execute_cdp_cmd("Emulation.setScriptExecutionDisabled", {"value": False})
    assert "need JavaScript" in text and "40.50 ± 0.71" in text and "seed1" in text


def test_the_first_tab_skips_to_the_results_and_the_focus_is_seen(opened: Any) -> None:
    keys(opened, "\ue004")
    active = opened.switch_to.active_element
    assert active.text == "Skip to the results" and active.rect["x"] >= 0
    outline = "const s = getComputedStyle(document.activeElement); return [s.outlineStyle, s.outlineWidth]"
    assert opened.execute_script(outline) == ["solid", "2px"]
    keys(opened, "\ue007")
    assert opened.switch_to.active_element.get_attribute("id") == "main"
