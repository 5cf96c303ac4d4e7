// The passages beside one answer: numbered, coloured by document, with quotes marked where they stand.

import { el, plural, scrolling, sourceLabel } from "./dom.js";
import { passagePieces } from "./spans.js";

const NUM_COLOURS = 6;
const beside = matchMedia("(min-width: 64rem)");

/** Passage number -> "doc-1" ... "doc-6": one colour for each document, in the order in which they appear. */
export function coloursOf(passages) {
  const documents = [...new Set(passages.map((passage) => passage.document_id))];
  const colour = (passage) => `doc-${(documents.indexOf(passage.document_id) % NUM_COLOURS) + 1}`;
  return new Map(passages.map((passage) => [passage.number, colour(passage)]));
}

const isView = (url) => String(url).startsWith("/document?");
const NEW_TAB = { target: "ragspec-source", rel: "opener" }; // the tab gets a copy of this one's key

export class Sources {
  #cards = new Map(); // passage number -> {card, button, text, count, passage, citations}
  #onPressed;
  #head;
  #kept = null; // the citation that was gone to

  /** `onPressed(number, pressed)`: a passage was chosen, so that all its quotes in the answer light up. */
  constructor(turnId, passages, onPressed) {
    this.#onPressed = onPressed;
    const colours = coloursOf(passages);
    const cards = passages.map((passage) => this.#cardOf(passage, turnId, colours.get(passage.number)));
    const head = el("h3", { id: `${turnId}-sources` }, `${plural(passages.length, "passage")} found`);
    this.#head = head;
    const list = el("ol", { class: "passages" }, ...cards);
    const labels = { "aria-labelledby": head.id, id: `${turnId}-passages`, tabindex: "0" };
    this.element = el("aside", { class: "sources", ...labels, onfocusout: (event) => this.#left(event) }, head, list);
  }

  /** The finished answer's quotes, each beside its passage. `used`: the numbers of quoted and of supporting passages. */
  setCitations(citations, used) {
    this.#head.textContent = `${plural(used.size, "source")} used`;
    for (const [number, entry] of this.#cards) {
      entry.citations = citations.filter((citation) => citation.passage === number);
      const kind = used.has(number) ? "supports" : "not used";
      entry.count.textContent = entry.citations.length ? plural(entry.citations.length, "quote") : kind;
      entry.card.classList.toggle("quoted", entry.citations.length > 0);
      if (entry.open && isView(entry.citations[0]?.url)) entry.open.href = entry.citations[0].url;
      this.#render(entry, entry.citations, false);
    }
  }

  /** Mark this quote, and no other, in its passage; `go` there, and it stays marked until the focus leaves the sources. */
  show(citation, { go = false } = {}) {
    if (go) {
      this.#kept = citation;
      this.#cards.get(citation.passage)?.button.focus({ preventScroll: true });
    }
    const mark = this.#mark(citation);
    if (go || beside.matches) mark?.scrollIntoView({ block: go ? "center" : "nearest", behavior: scrolling() });
  }

  /** Nothing is pointed at any more. */
  clear() {
    this.#mark(this.#kept);
  }

  #mark(citation) {
    for (const entry of this.#cards.values()) {
      if (!entry.card.classList.contains("active")) continue;
      entry.card.classList.remove("active");
      this.#render(entry, entry.citations, false);
    }
    const entry = citation && this.#cards.get(citation.passage);
    if (!entry) return null;
    entry.card.classList.add("active");
    return this.#render(entry, [citation], true);
  }

  #left(event) {
    if (this.element.contains(event.relatedTarget)) return;
    this.#kept = null;
    this.clear();
  }

  go(number) {
    const entry = this.#cards.get(number);
    entry?.button.focus({ preventScroll: true });
    entry?.card.scrollIntoView({ block: "nearest", behavior: scrolling() });
  }

  #cardOf(passage, turnId, colour) {
    const count = el("span", { class: "count" });
    const title = passage.title || passage.document_id;
    const button = el("button", { type: "button", class: "passage-title", "aria-pressed": "false" },
      el("span", { class: "number" }, String(passage.number)), el("span", { class: "title" }, title), count);
    const text = el("p", { class: "passage-text" });
    const place = el("p", { class: "place" },
      passage.heading && el("span", { class: "heading" }, passage.heading),
      passage.source && sourceLabel(passage.source), passage.page && el("span", {}, `page ${passage.page}`));
    const open = isView(passage.url) && el("a", { class: "open-source", href: passage.url, ...NEW_TAB }, "Open in the document");
    const card = el("li", { class: `passage ${colour}`, id: `${turnId}-p${passage.number}` },
      button, (passage.heading || passage.source) && place, text, open);
    const entry = { card, button, text, count, open, passage, citations: [] };
    this.#cards.set(passage.number, entry);
    this.#render(entry, [], false);
    card.addEventListener("click", (event) => {
      const chooses = !event.target.closest("a") && String(getSelection()) === "";
      if (chooses) this.#press(passage.number);
    });
    return card;
  }

  #press(number) {
    for (const [other, entry] of this.#cards) {
      const pressed = other === number && entry.button.getAttribute("aria-pressed") === "false";
      entry.button.setAttribute("aria-pressed", String(pressed));
      entry.card.classList.toggle("open", pressed);
      this.#onPressed(other, pressed);
    }
  }

  #render(entry, citations, now) {
    const pieces = passagePieces(entry.passage, citations);
    const nodes = pieces.map((piece) =>
      piece.kind === "quote" ? el("mark", { class: now ? "now" : null }, piece.text) : piece.text);
    entry.text.replaceChildren(...nodes);
    return entry.text.querySelector("mark");
  }
}
