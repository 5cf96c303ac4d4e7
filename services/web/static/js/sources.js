// The sources of one answer: a card for each passage that it uses, coloured by document; the others behind one line.

import { el, plural, sourceLabel } from "./dom.js";
import { Characters } from "./points.js";
import { passagePieces } from "./spans.js";

const NUM_COLOURS = 6;
const AROUND = 140; // characters of a passage before and after its first mark

/** Passage number -> "doc-1" ... "doc-6": one colour for each document, in the order in which they appear. */
export function coloursOf(passages) {
  const documents = [...new Set(passages.map((passage) => passage.document_id))];
  const colour = (passage) => `doc-${(documents.indexOf(passage.document_id) % NUM_COLOURS) + 1}`;
  return new Map(passages.map((passage) => [passage.number, colour(passage)]));
}

/** Attributes of a link that opens a document in its tab, which gets a copy of this tab's key; none for another address. */
export function documentLink(url) {
  return String(url).startsWith("/document?") ? { href: url, target: "ragspec-source", rel: "opener" } : {};
}

/** The first row, with its line's end, of the table that the first mark is in, empty if it is in none. A large table's passages have it as the last heading. */
function tableHeader(passage, marked) {
  const start = Math.min(...marked.map((each) => each.passage_start));
  const above = new Characters(passage.text).slice(0, marked.length ? start : 0);
  const rows = /(?:^|\n)((?:[ \t]*\|[^\n]*\n)+)$/.exec(above)?.[1];
  const last = passage.heading?.split(" > ").at(-1);
  const isHeader = last?.includes("|") && !passage.headings?.includes(last);
  return rows ? (isHeader ? `${last}\n` : rows.slice(0, rows.indexOf("\n") + 1)) : "";
}

export class Sources {
  #cards = new Map(); // passage number -> card
  #marks = new Map(); // citation -> its mark

  /** `used`: numbers of the passages that are quoted or support a sentence; null: the answer is not whole yet. */
  constructor(turnId, reply, used) {
    const colours = coloursOf(reply.passages);
    const [own, others] = [[], []];
    for (const passage of reply.passages) (used?.has(passage.number) ? own : others).push(passage);
    const cards = (passages) => el("ol", { class: "passages" },
      ...passages.map((passage) => this.#cardOf(passage, `${turnId}-p${passage.number}`, colours, reply)));
    const rest = used ? `${plural(others.length, "other passage")} found, not used` : `${plural(others.length, "passage")} found`;
    const title = el("h3", { id: `${turnId}-sources` }, own.length ? plural(own.length, "source") : "Sources");
    this.element = el("aside", { class: "sources", "aria-labelledby": title.id }, title,
      own.length > 0 && cards(own),
      others.length > 0 && el("details", { class: "others" }, el("summary", {}, rest), cards(others)));
  }

  /** Mark this quote in its passage, or none. */
  show(citation) {
    for (const card of this.#cards.values()) card.classList.remove("active");
    for (const [each, mark] of this.#marks) mark.classList.toggle("now", each === citation);
    if (citation) this.#cards.get(citation.passage)?.classList.add("active");
  }

  #cardOf(passage, id, colours, reply) {
    const citations = reply.citations.filter((each) => each.passage === passage.number);
    const supporting = reply.sentences.filter((each) => each.passage === passage.number && each.label !== "quoted");
    const name = passage.title || passage.document_id;
    const title = el("a", { class: "title", ...documentLink(citations[0]?.url ?? passage.url) }, name);
    const kind = citations.length ? plural(citations.length, "quote") : supporting.length ? "supports" : "";
    const place = el("p", { class: "place" }, passage.heading && passage.heading !== name && el("span", { class: "heading" }, passage.heading),
      passage.source && sourceLabel(passage.source), passage.page && el("span", {}, `page ${passage.page}`));
    const marked = citations.length ? citations : supporting;
    const card = el("li", { class: `passage ${colours.get(passage.number)}`, id, tabindex: "-1" },
      el("p", { class: "passage-title" }, el("span", { class: "number" }, String(passage.number)), title, el("span", { class: "count" }, kind)),
      place, el("p", { class: tableHeader(passage, marked) ? "passage-text rows" : "passage-text" }, ...this.#excerpt(passage, marked)));
    this.#cards.set(passage.number, card);
    return card;
  }

  /** The passage around its marks: the whole of it is one click away. */
  #excerpt(passage, marked) {
    const pieces = passagePieces(passage, marked);
    const header = tableHeader(passage, marked);
    const cut = (piece, index) => {
      if (index === 0 && header && piece.kind !== "quote") return header;
      const text = new Characters(piece.text);
      const [isFirst, isLast] = [index === 0, index === pieces.length - 1];
      if (piece.kind === "quote" || text.length <= 2 * AROUND) return piece.text;
      if (isFirst && isLast) return `${text.slice(0, 2 * AROUND).trimEnd()} …`;
      const [before, after] = [text.slice(0, AROUND).trimEnd(), text.slice(text.length - AROUND).trimStart()];
      return isFirst ? `… ${after}` : isLast ? `${before} …` : `${before} … ${after}`;
    };
    return pieces.map((piece, index) => {
      if (piece.kind !== "quote") return cut(piece, index);
      const mark = el("mark", {}, piece.text);
      this.#marks.set(piece.citation, mark);
      return mark;
    });
  }
}
