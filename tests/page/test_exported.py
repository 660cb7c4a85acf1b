"""Exported pages of fabricated runs: they open from disk, can be read by all, and show text of a run as text."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe
from fabricated import Fabricated, hundred_members, prediction, two_kinds
from opened_page import OpenPage, as_file
from playwright.sync_api import Page, expect

from hetero_pp.program.view.command import self_contained

pytestmark = [pytest.mark.browser, pytest.mark.starts_processes]

VIEWS = ("topology", "rounds", "compare", "prediction")
SHARE_AWAITED = re.compile(r"awaited \d+ %")
HOSTILE = "<img src=x onerror=alert(1)><script>alert(2)</script>"


def together(*runs: Fabricated) -> dict[str, Any]:
    """Return the data of a page with several runs."""
    found: dict[str, Any] = {"runs": [], "histories": {}, "frames": {}, "predictions": {}}
    for run in runs:
        data = run.data()
        found["runs"] += data.pop("runs")
        for name, own in data.items():
            found[name] |= own
    return found


@pytest.fixture(scope="module")
def address(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the address of a page with two runs, one of which has faults."""
    data = together(two_kinds(), Fabricated("quick", groups=1))
    return as_file(self_contained(data), tmp_path_factory.mktemp("exported"))


def serious(page: Page) -> list[str]:
    """Return what a person with a screen reader, a keyboard or weak eyes would stumble over."""
    found = Axe().run(page).response["violations"]
    return [
        f"{one['id']}: {one['help']} {[node['target'] for node in one['nodes']][:4]}"
        for one in found
        if one["impact"] in ("serious", "critical")
    ]


@pytest.mark.parametrize("dark", [False, True], ids=["light", "dark"])
@pytest.mark.parametrize("view", VIEWS)
def test_axe_finds_nothing_serious(address: str, opened: OpenPage, view: str, dark: bool) -> None:
    page = opened(f"{address}#view={view}&time=35&select=member:home1.2", dark=dark)
    expect(page.locator(f"#{view} h2").first).to_be_visible()
    expect(page.locator("#panel h2")).to_have_text("home1.2")
    for summary in page.locator(f"#{view} summary").all():
        summary.click()
    assert serious(page) == []


def test_a_moment_is_shown_again_and_left_again(address: str, opened: OpenPage) -> None:
    page = opened(f"{address}#view=topology&time=35")
    away = page.locator('[data-item="member:home1.2"]')
    expect(away).to_have_attribute("data-state", "vacant")
    expect(page.locator("#attention")).to_contain_text("home1 is suspended")
    page.get_by_role("button", name="To the end of the run").click()
    expect(away).to_have_attribute("data-state", "finished")
    assert "time=" not in page.url


def test_a_link_tells_how_long_it_was_awaited(address: str, opened: OpenPage) -> None:
    page = opened(f"{address}#view=topology&time=35&select=link:home1.0-1", width=390)
    link = page.locator('[data-item="link:home1.0-1"]')
    expect(link).to_have_attribute("aria-label", SHARE_AWAITED)
    expect(link.locator("text").get_by_text(SHARE_AWAITED)).to_have_count(2)
    expect(page.locator("#panel")).to_contain_text("Awaited")
    page.get_by_text("Links as a table").click()
    expect(page.get_by_role("region", name="Links")).to_contain_text("Awaited back")


def test_a_host_that_joined_sees_what_its_member_adds(tmp_path: Path, opened: OpenPage) -> None:
    data = two_kinds().data()
    data["histories"]["faulty"]["own"] = ["home1.2"]
    page = opened(as_file(self_contained(data), tmp_path) + "#view=topology&time=23")
    told = re.compile(r"home1\.2.*\d+ of \d+ rounds of home1 included; 33 % of the tokens", re.DOTALL)
    expect(page.locator('[data-tile="This host"]')).to_have_text(told)
    expect(page.locator('[data-item="member:home1.2"]')).to_have_attribute("aria-label", re.compile("(this host)"))


def test_the_keyboard_reaches_a_member_and_the_slider(address: str, opened: OpenPage) -> None:
    page = opened(f"{address}#view=topology&time=35")
    page.locator("#views a").first.focus()
    for _ in range(20):  # the tabs of the other views and the buttons of the picture come first
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.dataset.item ?? ''"):
            break
    while not page.evaluate("document.activeElement.dataset.item").startswith("member:home1"):
        before = page.evaluate("document.activeElement.dataset.item")
        page.keyboard.press("ArrowRight")
        if page.evaluate("document.activeElement.dataset.item") == before:
            page.keyboard.press("ArrowDown")
    member = page.evaluate("document.activeElement.dataset.item")
    page.keyboard.press("Enter")
    expect(page.locator("#panel h2")).to_be_focused()
    expect(page.locator("#panel h2")).to_have_text(member.removeprefix("member:"))
    page.keyboard.press("Escape")
    expect(page.locator("#panel")).to_be_hidden()
    assert page.evaluate("document.activeElement.dataset.item") == member
    page.keyboard.press("Shift+Tab")
    slider = page.get_by_role("slider")
    for _ in range(60):
        if slider.evaluate("node => node === document.activeElement"):
            break
        page.keyboard.press("Tab")
    before = slider.get_attribute("aria-valuetext")
    page.keyboard.press("Shift+ArrowRight")
    expect(slider).not_to_have_attribute("aria-valuetext", before or "")


def test_a_hundred_members_are_shown_on_a_phone(tmp_path: Path, opened: OpenPage) -> None:
    data = hundred_members(rounds=3).data()
    page = opened(as_file(self_contained(data), tmp_path) + "#view=topology", width=360)
    expect(page.locator('[data-item^="member:"]')).to_have_count(100)
    for view in VIEWS:
        page.locator(f'[data-view="{view}"]').click()
        expect(page.locator(f"#{view}")).to_be_visible()
        assert page.evaluate("document.documentElement.scrollWidth") <= 360


def test_optional_replicas_without_anybody_share_one_box(tmp_path: Path, opened: OpenPage) -> None:
    data = Fabricated("many", groups=1, empty=49).data()
    page = opened(as_file(self_contained(data), tmp_path) + "#view=topology&time=35")
    expect(page.locator('[data-item^="replica:"][role="button"]')).to_have_count(2)
    expect(page.locator("[data-empty]")).to_contain_text("49 optional replicas49 vacant")
    expect(page.locator("#attention")).to_be_hidden()
    expect(page.locator('[data-tile="Members here"]')).to_contain_text("5 of 5")


LEAVES_ITS_BOX = """
() => [...document.querySelectorAll(".zoomed g")].flatMap((group) => {
  const box = group.querySelector(":scope > rect")?.getBBox()
  if (!box) return []
  return [...group.querySelectorAll(":scope > text")]
    .filter((text) => text.textContent)
    .filter((text) => text.getBBox().x < box.x || text.getBBox().x + text.getBBox().width > box.x + box.width)
    .map((text) => text.textContent)
})
"""


@pytest.mark.parametrize("width", [390, 1280, 2400])
def test_no_text_leaves_its_box(tmp_path: Path, opened: OpenPage, width: int) -> None:
    """Names of replicas, sites and devices may be long, and one card is that of this host."""
    data = Fabricated("wide", groups=1, sites={"a site whose name is long": ["home.1"]}).data()
    history = data["histories"]["wide"]
    history["own"] = ["home.1"]
    for member in history["topology"]["members"]:
        member["layers"] = "layers 1234-5678"
    for frame in data["frames"]["wide"]:
        for member in frame["members"].values():
            member["device"], member["detail"] = "cuda:0 NVIDIA H100 80GB HBM3", "waits for a member with a long name"
        frame["replicas"]["home"] |= {"loss": 12345.678, "tokens_per_second": 123456789}
    text = self_contained(data).replace('"home', '"home-of-somebody-1')
    page = opened(as_file(text, tmp_path) + "#view=topology&time=35", width=width)
    expect(page.locator(".card").first).to_be_visible()
    assert page.evaluate(LEAVES_ITS_BOX) == []


def test_the_first_view_has_the_loss_and_charts_zoom_and_smooth(address: str, opened: OpenPage) -> None:
    page = opened(f"{address}#view=topology")
    chart = page.locator("#topology .chart")
    picture = chart.locator('[role="img"]')
    expect(chart.locator("canvas")).to_be_visible()
    before = picture.screenshot()
    chart.get_by_label("Smoothing").select_option("smoothing strong")
    chart.get_by_label("log loss").check()
    chart.get_by_label("log x").check()
    expect(picture).to_have_attribute("aria-label", re.compile("smoothing strong; logarithmic x; logarithmic y$"))
    assert picture.screenshot() != before
    chart.get_by_label("log x").uncheck()
    over = chart.locator(".u-over").bounding_box()
    assert over is not None
    page.mouse.move(over["x"] + over["width"] / 4, over["y"] + 50)
    page.mouse.down()
    page.mouse.move(over["x"] + over["width"] / 2, over["y"] + 50, steps=5)
    page.mouse.up()
    expect(picture).to_have_attribute("aria-label", re.compile("; round [34][.0-9]* to [78][.0-9]*; smoothing"))
    chart.get_by_label("Show the whole curves").click()
    expect(picture).not_to_have_attribute("aria-label", re.compile("; round"))
    chart.get_by_label("Show less of the curves, enlarged").click()
    expect(picture).to_have_attribute("aria-label", re.compile("; round 4[.0-9]* to 12"))


def test_text_of_a_run_stays_text(tmp_path: Path, opened: OpenPage) -> None:
    data = Fabricated(HOSTILE, groups=1, rounds=2, sites={HOSTILE: ["home.1"]}).data()
    history = data["histories"][HOSTILE]
    history["topology"]["members"][0] |= {"layers": HOSTILE, "engine": HOSTILE}
    history["marks"][0]["text"] = HOSTILE
    history["problems"] = [HOSTILE]
    for frame in data["frames"][HOSTILE]:
        frame["members"]["dc"] |= {"state": HOSTILE, "device": HOSTILE, "detail": HOSTILE}
    page = opened(f"{as_file(self_contained(data), tmp_path)}#view=topology&select=member:dc")
    expect(page.locator("#attention")).to_contain_text(HOSTILE)
    expect(page.locator("#panel")).to_contain_text(HOSTILE)
    page.locator('[data-view="rounds"]').click()
    expect(page.locator("#rounds .marks")).to_contain_text([HOSTILE])
    assert page.locator("img").count() == 0
    page.evaluate("location.hash = '#view=rounds&select=constructor:x'")
    expect(page.locator("#panel")).to_be_hidden()


def test_megabytes_of_labels_do_not_hang_the_page(tmp_path: Path, opened: OpenPage) -> None:
    data = Fabricated("long", groups=1, rounds=2).data()
    long = "x" * 2_500_000
    history = data["histories"]["long"]
    history["topology"]["members"][0]["layers"] = history["marks"][0]["text"] = long
    history["problems"], history["settings"]["corpus"] = [long], long
    page = opened(f"{as_file(self_contained(data), tmp_path)}#view=topology&select=member:dc")
    expect(page.locator("#attention")).to_contain_text("xxx")
    for view in VIEWS:
        page.locator(f'[data-view="{view}"]').click()
        expect(page.locator(f"#{view}")).to_be_visible()
    assert page.evaluate("document.body.innerText.length") < 20_000


def test_a_prediction_without_a_run_is_shown(tmp_path: Path, opened: OpenPage) -> None:
    alone = {"id": "planned", "name": "planned", "kind": "prediction", "is_live": False, "predicts": True}
    data = {"runs": [alone], "histories": {}, "frames": {}, "predictions": {"planned": prediction()}}
    page = opened(as_file(self_contained(data), tmp_path))
    expect(page.locator("#prediction")).to_contain_text(re.compile(r"A step takes [\d.]+ m?s\."))
    expect(page.locator("#views a:visible")).to_have_count(1)
    chart = page.locator("#prediction .gantt")
    bars = chart.locator("rect").count()
    chart.focus()
    page.keyboard.press("+")  # fewer bars fit
    assert 0 < chart.locator("rect").count() < bars


def test_a_prediction_stands_beside_a_rehearsal_whose_losses_mean_nothing(tmp_path: Path, opened: OpenPage) -> None:
    data = two_kinds().data()
    data["runs"][0]["predicts"], data["histories"]["faulty"]["rehearsal"] = True, True
    bars = [("computed", 0.0, 0.7), ("waited", 0.7, 1.9)]
    measured = [{"kind": kind, "start": start, "end": end, "micro_batch": None} for kind, start, end in bars]
    data["predictions"] = {"faulty": prediction() | {"measured": [{"id": "home1.0", "bars": measured}]}}
    page = opened(as_file(self_contained(data), tmp_path) + "#view=prediction")
    chart = page.locator("#prediction .gantt")
    expect(chart.get_by_text("measured", exact=True)).to_have_count(1)
    expect(chart).to_contain_text("home1.0: measured: waiting, 0.7 s to 1.9 s")  # the axis is long enough for it
    expect(page.locator("#rehearsal")).to_be_visible()
    expect(page.locator('[data-tile="Validation loss"]')).to_contain_text("nothing is trained")
