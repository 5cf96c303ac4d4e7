({
  // [text, colour, colour behind it] of every visible text
  texts: () => {
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
  },

  // [name, width, height] of every control that a finger misses
  small: () => [...document.querySelectorAll("button, summary, input, textarea, label.switch")]
    .filter((e) => e.checkVisibility() && !e.closest("label") || e.matches("label.switch"))
    .map((e) => [e.id || e.textContent.trim().slice(0, 30), e.getBoundingClientRect().width, e.getBoundingClientRect().height])
    .filter(([, width, height]) => width < 24 || (height < 24 && height < 20)),

  faults: () => {
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
  },
})
