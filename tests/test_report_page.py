"""The page that report() writes, in a real browser: folding, hovering, finding, and no complaint of its console."""

from __future__ import annotations

import html
import random
import re
from pathlib import Path

import pytest

from tests.browser import Page, browser, needs_browser
from tests.small_cache import ask, keep, small_cache
from tests.test_report import Words, busy_cache, large_cache
from tests.test_report_escaping import NASTY, Speller, nasty_cache

pytestmark = needs_browser

ROWS = "[...document.querySelectorAll('#rows .row')]"


@pytest.fixture(scope="module")
def tab(tmp_path_factory):
    with browser(tmp_path_factory.mktemp("browser")) as page:
        yield page


@pytest.fixture
def page(tab: Page):
    """The browser's tab, light and wide; whatever the test did, nothing was complained of and nothing but the file was asked for."""
    tab.errors.clear()
    tab.requests.clear()
    tab.resize(1280, 900)
    yield tab
    assert tab.errors == []
    assert tab.requests and all(address.startswith("file:///") and address.endswith(".html") for address in tab.requests)


def row(text: str) -> str:
    """The row that begins with a text, as an expression."""
    return f"{ROWS}.find(row => row.querySelector('.words').textContent.startsWith({text!r}))"


def words_of(page: Page) -> list[str]:
    return page.run(f"{ROWS}.map(row => row.querySelector('.words').textContent)")


def numbers_of(page: Page) -> list[list[str]]:
    return page.run(f"{ROWS}.map(row => [...row.querySelectorAll('.num')].map(cell => cell.textContent))")


def forked_cache():
    """The words 0 to 31, going on in two ways, one of which goes on in two ways again; the first is used, and leased by whom it returns."""
    cache = small_cache()
    keep(cache, range(40))
    keep(cache, [*range(32), *range(900, 948)])
    keep(cache, [*range(32), *range(900, 932), *range(700, 710)])
    for _ in range(3):
        ask(cache, [*range(40), 7])
    return cache, cache.match_prefix(range(32))


def test_the_tree_is_drawn_folds_and_opens(page, tmp_path):
    cache, lease = forked_cache()
    page.open(cache.report(tmp_path / "cache.html", tokenizer=Words()))
    assert page.run("document.title") == "radixkv cache report"
    first, used, other = "w0 w1", "w32 w33", "w900 w901"
    assert [text.split(" ")[0] for text in words_of(page)] == ["weights", "w0", "w32", "w900", "w932", "w700"]
    assert [numbers[:2] for numbers in numbers_of(page)] == [["99", "3"], ["32", "3"], ["9", "3"], ["32", "0"], ["16", "0"], ["10", "0"]]
    assert page.run(f"{ROWS}.map(row => row.querySelectorAll('.tag').length)") == [0, 1, 0, 0, 0, 0]
    assert page.run(f"{ROWS}.map(row => row.getAttribute('aria-level'))") == ["1", "2", "3", "3", "4", "4"]
    page.click(f"{row(other)}.querySelector('.twist')")
    assert len(words_of(page)) == 4 and page.run(f"{row(other)}.getAttribute('aria-expanded')") == "false"
    page.click(f"{row(first)}.querySelector('.twist')")
    assert len(words_of(page)) == 2
    page.click("document.getElementById('unfold')")
    assert len(words_of(page)) == 6
    page.click("document.getElementById('fold')")
    assert len(words_of(page)) == 1
    page.click("document.getElementById('unfold')")
    page.click(row(used))
    assert "Tokens 32 to 41" in page.run("document.getElementById('details').textContent")
    assert page.run("document.querySelector('#details .own').textContent").startswith("w32 w33")
    assert page.run("document.querySelector('#details .above').textContent").endswith("w31")
    lease.release()


def test_hovering_tells_of_a_node(page, tmp_path):
    cache, lease = forked_cache()
    page.open(cache.report(tmp_path / "cache.html", tokenizer=Words()))
    assert page.run("document.getElementById('tip').hidden")
    page.hover(row("w0 w1"))
    said = page.run("document.getElementById('tip').textContent")
    assert not page.run("document.getElementById('tip').hidden")
    assert said.startswith("w0 w1 w2") and "Tokens 0 to 32, 2 blocks, 3 hits" in said and ", leased; 4 nodes below" in said
    page.hover("document.querySelector('h1')")
    assert page.run("document.getElementById('tip').hidden")
    page.hover("document.querySelectorAll('#timeline .reused')[1]")
    assert page.run("document.getElementById('tip').textContent").endswith("1 request, a hit: 40 of 41 prompt tokens reused (98 %)")
    lease.release()


def test_the_keyboard_is_enough(page, tmp_path):
    cache, lease = forked_cache()
    page.open(cache.report(tmp_path / "cache.html", tokenizer=Words()))
    page.run("document.getElementById('tree').focus()")

    def chosen() -> str:
        return page.run("document.getElementById(document.getElementById('tree').getAttribute('aria-activedescendant')).innerText")

    page.press("ArrowDown")
    assert "weights 0" in chosen()
    page.press("ArrowDown", 3)
    assert "w900" in chosen()
    page.press("ArrowLeft")
    assert len(words_of(page)) == 4
    page.press("ArrowLeft")
    assert "w0" in chosen()
    page.press("End")
    page.press("ArrowRight")
    page.press("ArrowRight")
    assert "w932" in chosen()
    page.press("Home")
    page.press("Enter")
    assert len(words_of(page)) == 1
    page.press("/")
    assert page.run("document.activeElement.id") == "find"
    lease.release()


def test_finding_and_sorting(page, tmp_path):
    cache, lease = forked_cache()
    page.open(cache.report(tmp_path / "cache.html", tokenizer=Words()))
    page.run("document.getElementById('find').focus()")
    page.write("w705")
    page.press("Enter")
    assert page.run("document.getElementById('found').textContent") == "in 1 node"
    assert len(words_of(page)) == 4 and page.run("document.querySelector('mark').textContent") == "w705"
    assert "Tokens 64 to 74" in page.run("document.getElementById('details').textContent")
    page.press("Escape")
    page.write("904 905")  # token ids
    page.press("Enter")
    assert page.run("document.getElementById('found').textContent") == "in 1 node" and "Tokens 32 to 64" in page.run(
        "document.getElementById('details').textContent"
    )
    page.press("Escape")
    page.write("nowhere to be found")
    page.press("Enter")
    assert page.run("document.getElementById('found').textContent") == "nowhere in what is shown" and words_of(page) == []
    page.press("Escape")
    assert len(words_of(page)) == 6
    page.run("(s => { s.value = 'tokens'; s.dispatchEvent(new Event('change')) })(document.getElementById('sort'))")
    assert [text.split(" ")[0] for text in words_of(page)] == ["weights", "w0", "w900", "w932", "w700", "w32"]
    lease.release()


def test_what_a_prompt_says_is_shown_as_text_and_never_run(page, tmp_path):
    page.open(nasty_cache().report(tmp_path / "cache.html", tokenizer=Speller()))
    page.click("document.getElementById('unfold')")
    rows = words_of(page)
    for text in (NASTY[0], NASTY[1], NASTY[2], NASTY[4], NASTY[6], "line one↵line two\\ttab", r"]]>\u2028\u2029\x00\x1b[2J\r\u202e"):
        assert any(shown.startswith(text) for shown in rows), text
    assert any("</script>" in shown and "<img src=x" in shown for shown in rows[:1])  # the namespace
    for place in range(len(rows)):
        page.click(f"{ROWS}[{place}]")
        page.hover(f"{ROWS}[{place}]")
    assert NASTY[1] in page.run("document.getElementById('gone').textContent")
    whole = page.run("document.documentElement.outerHTML")
    assert html.escape(NASTY[1], quote=False) in whole
    assert page.run("window.ran") is None
    assert page.run("document.querySelectorAll('img, iframe, a, object, [onerror]').length") == 0
    assert page.run("document.scripts.length") == 2


def test_an_injected_script_would_not_run(tab, tmp_path):
    """The policy of the page is no ornament: were text ever put in as HTML, it still could do nothing."""
    tab.resize(1280, 900)
    tab.open(small_cache().report(tmp_path / "cache.html"))
    tab.errors.clear()
    tab.run("document.body.insertAdjacentHTML('beforeend', \"<img src='data:,' onerror='window.ran = 1'>\")")
    tab.run("document.body.append(Object.assign(document.createElement('script'), {textContent: 'window.ran = 2'}))")
    tab.frame()
    assert tab.run("window.ran") is None
    assert any("Content Security Policy" in error for error in tab.errors)


def test_ten_thousand_nodes_in_a_browser(page, tmp_path):
    """It was drawn after 2.8 s, on one core that several others used too; of all rows only those in sight are in the document."""
    page.open(large_cache(10_000).report(tmp_path / "cache.html", tokenizer=Words()))
    assert page.run("performance.timing.domComplete - performance.timing.responseEnd") < 20_000
    page.click("document.getElementById('unfold')")
    assert page.run("rows.length") > 9_000 and 10 < len(words_of(page)) < 60
    page.run("(tree => { tree.scrollTop = tree.scrollHeight })(document.getElementById('tree'))")
    page.frame()
    last = words_of(page)[-1]
    assert last.startswith("w") or last.startswith("…")
    assert page.run("document.querySelectorAll('*').length") < 3_000


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [400, 1280])
def test_nothing_sticks_out_and_words_can_be_read(page, tmp_path, width, scheme):
    cache, _ = busy_cache()
    page.resize(width, 800, scheme)
    page.open(cache.report(tmp_path / "cache.html", tokenizer=Words()))
    assert page.run("document.documentElement.scrollWidth <= innerWidth")
    ink, paper = (page.run(f"getComputedStyle(document.body).{name}") for name in ("color", "backgroundColor"))
    brightness = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (ink, paper)]
    assert abs(brightness[0] - brightness[1]) > 500 and (brightness[0] > brightness[1]) == (scheme == "dark")
    page.screenshot(tmp_path / "page.png")
    assert (tmp_path / "page.png").stat().st_size > 20_000


def test_requests_and_evictions_are_drawn(page, tmp_path):
    cache, _ = busy_cache()
    page.open(cache.report(tmp_path / "cache.html", tokenizer=Words()))
    stats = cache.stats()
    label = page.run("document.querySelector('#timeline svg').getAttribute('aria-label')")
    share = round(100 * stats.cached_tokens / stats.prompt_tokens)
    assert label == f"40 requests: {share} % of the prompt tokens reused, {stats.evicted_tokens:,} tokens evicted"
    assert page.run("document.querySelectorAll('#timeline rect.computed').length") == 40
    assert page.run("document.querySelectorAll('#timeline rect.evicted').length") > 3
    widths = page.run("[...document.querySelectorAll('#pool rect')].map(rect => [rect.className.baseVal, rect.getAttribute('width')])")
    assert [(name, pytest.approx(float(width.rstrip("%")))) for name, width in widths] == [
        (name, 100 * number / 60) for name, number in (("cached", stats.blocks_cached), ("free", stats.blocks_free)) if number
    ]
    assert page.run("document.querySelectorAll('#best li').length") > 2 and page.run("document.querySelectorAll('#gone li').length") > 2


def test_an_empty_cache_says_so(page, tmp_path):
    page.open(small_cache().report(tmp_path / "cache.html"))
    text = page.run("document.body.innerText")
    for said in ("The cache is empty.", "Nothing was evicted yet.", "No prefix is shared or was reused yet."):
        assert said in text
    assert page.run("document.querySelector('#timeline').textContent") == "No request yet."


def test_a_deep_chain(page, tmp_path: Path):
    """A thousand nodes one below the other: nothing in the page is recursive."""
    rng, cache = random.Random(1), small_cache(3000)
    chain = [rng.randrange(900) for _ in range(1000 * 16)]
    keep(cache, chain)
    for border in range(16, len(chain), 16):
        leaf = [*chain[:border], 1000]
        blocks = cache.allocate(-(-len(leaf) // 16))
        inserted = cache.tree.insert(leaf, blocks, cache.full_namespace())
        cache.pool.release([*blocks[: inserted.first_adopted], *inserted.replaced])
    page.open(cache.report(tmp_path / "cache.html", tokenizer=Words()))
    page.click("document.getElementById('unfold')")
    assert page.run("rows.length") == 2000
    page.run("document.getElementById('tree').focus()")
    page.press("End")
    assert page.run("depth[chosen]") > 0 and page.run("document.documentElement.scrollWidth <= innerWidth")
