"""What a page looks like to someone who reads it with difficulty: contrasts, names, sizes, as the browser computes them."""

from pathlib import Path
from typing import Any

_LOOKING = Path(__file__).with_name("looking.js").read_text()


_NAMED_ROLES = {
    "button", "link", "textbox", "searchbox", "checkbox", "switch", "radio", "spinbutton", "combobox", "dialog", "navigation",
    "complementary", "article", "image", "form", "heading", "DisclosureTriangle",
}  # fmt: skip


def contrast(one: list[float], other: list[float]) -> float:
    """WCAG 2's ratio of two colours, from 1 to 21. Source: https://www.w3.org/TR/WCAG22/#dfn-contrast-ratio"""
    bright, dark = sorted((_luminance(one), _luminance(other)), reverse=True)
    return (bright + 0.05) / (dark + 0.05)


def _luminance(colour: list[float]) -> float:
    parts = [value / 255 for value in colour]
    linear = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]


def faint_texts(page: Any, least: float = 4.5) -> list[str]:
    """Visible texts with less contrast than `least` to what is behind them."""
    texts = page.evaluate(f"({_LOOKING}).texts()")
    assert texts
    return [f"{text!r}: {contrast(ink, paper):.2f}" for text, ink, paper in texts if contrast(ink, paper) < least]


def nameless(page: Any) -> list[str]:
    """Parts that a screen reader would announce by their role alone, as the browser's accessibility tree has them."""
    session = page.context.new_cdp_session(page)
    nodes = session.send("Accessibility.getFullAXTree")["nodes"]
    session.detach()
    shown = [node for node in nodes if not node.get("ignored") and node.get("role", {}).get("value") in _NAMED_ROLES]
    assert shown
    return [node["role"]["value"] for node in shown if not node.get("name", {}).get("value", "").strip()]


def too_small(page: Any) -> list[Any]:
    """Controls that a finger misses."""
    found: list[Any] = page.evaluate(f"({_LOOKING}).small()")
    return found


def structure_faults(page: Any) -> list[str]:
    """Ids used twice, levels of headings left out, labels that point nowhere, more than one main part."""
    faults: list[str] = page.evaluate(f"({_LOOKING}).faults()")
    return faults
