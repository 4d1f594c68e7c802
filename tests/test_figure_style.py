"""bench/figure_style.py: colours that everyone can read and tell apart, and labels that do not collide."""

from __future__ import annotations

import pytest

from radixkv.bench.figure_style import THEMES, Theme, channels, percent, spread, times
from radixkv.bench.scenario_results import BATCH, COPIED, OURS, PLAIN


def test_words() -> None:
    assert [percent(share) for share in (0.0, 0.825, 1.0)] == ["0 %", "82 %", "100 %"]
    assert [times(ratio) for ratio in (0.96, 7.449, 51.06, 120.4)] == ["1.0 ×", "7.4 ×", "51.1 ×", "120 ×"]


def test_tint() -> None:
    assert THEMES[0].tint("#804020", 1.0) == "#804020" and THEMES[0].tint("#804020", 0.0) == "#ffffff"
    assert THEMES[0].tint("#000000", 0.5) == "#808080"


def test_spread() -> None:
    assert spread([5.0, 50.0], 10, 0, 100) == [5.0, 50.0]
    assert spread([52.0, 50.0, 51.0], 10, 0, 100) == [70.0, 50.0, 60.0]
    assert spread([99.0, 98.0, 3.0], 10, 0, 100) == [100.0, 90.0, 3.0]


def luminance(color: str) -> float:
    """Relative luminance as the Web Content Accessibility Guidelines 2.2 define it."""
    parts = [value / 255 for value in channels(color)]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return sum(weight * part for weight, part in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("theme", THEMES, ids=lambda theme: theme.name)
def test_all_text_has_contrast_enough(theme: Theme) -> None:
    """4.5 is what the guidelines ask of small text; numbers in bars lie on colours of their own."""

    def contrast(front: str, back: str) -> float:
        bright, dark = sorted((luminance(front), luminance(back)), reverse=True)
        return (bright + 0.05) / (dark + 0.05)

    for color in (theme.ink, theme.faint, *theme.methods.values()):
        assert contrast(color, theme.background) >= 4.5, color
    for color in theme.methods.values():
        assert contrast(theme.ink, theme.tint(color, 0.28)) >= 4.5, color
    assert contrast(theme.methods[OURS], theme.tint(theme.methods[OURS], 0.2)) >= 3.0, "large bold numbers on the claimed range"


# What eyes without one kind of cone see, on linear RGB (Viénot, Brettel and Mollon 1999).
CONES = {
    "protanopia": ((0.11238, 0.88762, 0.0), (0.11238, 0.88762, 0.0), (0.00401, -0.00401, 1.0)),
    "deuteranopia": ((0.29275, 0.70725, 0.0), (0.29275, 0.70725, 0.0), (-0.02234, 0.02234, 1.0)),
}


@pytest.mark.parametrize("kind", CONES)
@pytest.mark.parametrize("theme", THEMES, ids=lambda theme: theme.name)
def test_the_accent_is_told_from_all_others_by_colour_blind_eyes(theme: Theme, kind: str) -> None:
    def seen(color: str) -> list[float]:
        linear = [(value / 255) ** 2.2 for value in channels(color)]
        return [max(0.0, sum(a * b for a, b in zip(row, linear, strict=True))) ** (1 / 2.2) for row in CONES[kind]]

    for method in (PLAIN, COPIED, BATCH):
        difference = max(abs(a - b) for a, b in zip(seen(theme.methods[OURS]), seen(theme.methods[method]), strict=True))
        assert difference > 0.2, method
