"""What a page looks like to someone who reads it with difficulty: contrasts, names, sizes, as the browser computes them."""

from typing import Any

_TEXTS = """() => {
  const pixel = Object.assign(document.createElement("canvas"), { width: 1, height: 1 });
  const canvas = pixel.getContext("2d", { willReadFrequently: true });
  const rgba = (colour) => {
    canvas.clearRect(0, 0, 1, 1);
    canvas.fillStyle = colour;
    canvas.fillRect(0, 0, 1, 1);
    const [r, g, b, a] = canvas.getImageData(0, 0, 1, 1).data;
    return [r, g, b, a / 255];
  };
  const over = (top, below) => below.map((value, i) => (i < 3 ? top[i] * top[3] + value * (1 - top[3]) : 1));
  const ground = (element) => {
    const layers = [];
    for (let at = element; at; at = at.parentElement) {
      layers.push(rgba(getComputedStyle(at).backgroundColor));
      if (at.matches("dialog")) break;
    }
    return layers.reverse().reduce((below, top) => over(top, below), [255, 255, 255, 1]);
  };
  const found = [];
  const walker = document.createTreeWalker(document.body, NodeFilter.SHOW_TEXT);
  while (walker.nextNode()) {
    const element = walker.currentNode.parentElement;
    const text = walker.currentNode.data.trim().slice(0, 40);
    if (!text || !element.checkVisibility({ visibilityProperty: true })) continue;
    if (element.closest(".hidden, noscript, :disabled")) continue;
    const below = ground(element);
    const field = element.closest("[data-behind]"); // marks behind a field: it is the field's text that is seen
    const inked = field ? document.getElementById(field.dataset.behind) : element;
    found.push([text, over(rgba(getComputedStyle(inked).color), below).slice(0, 3), below.slice(0, 3)]);
  }
  const fields = "textarea, input:not([type=checkbox], [type=radio], [type=file])";
  for (const field of document.querySelectorAll(fields)) {
    if (!field.checkVisibility()) continue;
    const below = ground(field);
    found.push([`field ${field.id}`, rgba(getComputedStyle(field).color).slice(0, 3), below.slice(0, 3)]);
    found.push([`hint in ${field.id}`, rgba(getComputedStyle(field, "::placeholder").color).slice(0, 3), below.slice(0, 3)]);
  }
  return found;
}"""

_SMALL = """() => [...document.querySelectorAll("button, summary, input, textarea, label.switch")]
  .filter((e) => e.checkVisibility() && !e.closest("label") || e.matches("label.switch"))
  .map((e) => [e.id || e.textContent.trim().slice(0, 30), e.getBoundingClientRect().width, e.getBoundingClientRect().height])
  .filter(([, width, height]) => width < 24 || (height < 24 && height < 20))"""

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
    texts = page.evaluate(_TEXTS)
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
    found: list[Any] = page.evaluate(_SMALL)
    return found


def structure_faults(page: Any) -> list[str]:
    """Ids used twice, levels of headings left out, labels that point nowhere, more than one main part."""
    faults: list[str] = page.evaluate("""() => {
      const faults = [];
      const ids = [...document.querySelectorAll("[id]")].map((e) => e.id);
      ids.filter((id, i) => ids.indexOf(id) !== i).forEach((id) => faults.push(`id ${id} twice`));
      let level = 0;
      for (const h of [...document.querySelectorAll("h1, h2, h3, h4")].filter((e) => e.checkVisibility())) {
        if (Number(h.tagName[1]) > level + 1) faults.push(`${h.tagName} "${h.textContent.slice(0, 20)}" after level ${level}`);
        level = Number(h.tagName[1]);
      }
      for (const name of ["aria-labelledby", "aria-describedby", "aria-controls", "for"])
        for (const e of document.querySelectorAll(`[${name}]`))
          for (const id of e.getAttribute(name).split(" ")) if (!document.getElementById(id)) faults.push(`${name} to ${id}`);
      for (const link of document.querySelectorAll("a[href^='#']"))
        if (!document.getElementById(link.getAttribute("href").slice(1))) faults.push(`link to ${link.getAttribute("href")}`);
      for (const only of ["main", "h1"])
        if (document.querySelectorAll(only).length !== 1) faults.push(`not one ${only}`);
      if (!document.documentElement.lang || !document.title) faults.push("lang or title");
      return faults;
    }""")
    return faults
