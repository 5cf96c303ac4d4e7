// An answer's text on the page: its quotes are links into their documents.

import { el, plural } from "./dom.js";
import { coloursOf, documentLink } from "./sources.js";
import { misplaced, piecesOf } from "./spans.js";
import { verdictText } from "./support.js";

/** The number that the answer itself writes behind a quote, as in `"..." [2]`; 0: none. */
function markerBehind(pieces, index) {
  const isClosing = /^[\s"”»’.,;:!?)]{1,4}$/.test(pieces[index + 1]?.text ?? "");
  return pieces[isClosing ? index + 2 : index + 1]?.number ?? 0;
}

/** Fills `place` with the answer. Pointing at a quote, or reaching it with Tab, shows it in its passage. */
export class Quotes {
  #reply;
  #sources;
  #turnId;

  constructor(turnId, place, reply, sources) {
    this.#turnId = turnId;
    this.#sources = sources;
    this.#reply = reply;
    const colours = coloursOf(reply.passages);
    const pieces = piecesOf(reply.text, reply.passages, reply.citations);
    this.numQuotes = pieces.filter((piece) => piece.kind === "quote").length;
    this.numBroken = pieces.filter((piece) => piece.same === false).length + misplaced(pieces, reply.citations);
    place.replaceChildren(...pieces.map((piece, index) => this.#nodeOf(piece, markerBehind(pieces, index), colours)));
  }

  /** What the sources say of the answer, for below it; or that a quote is not what its source says. */
  verdict() {
    if (this.numBroken) {
      const message = `${plural(this.numBroken, "quote")} in this answer: not what the source says.`;
      return el("p", { class: "verdict broken", role: "alert" }, message);
    }
    return el("p", { class: this.numQuotes ? "verdict quoted" : "verdict" }, verdictText(this.#reply, this.numQuotes));
  }

  #nodeOf(piece, marked, colours) {
    if (piece.kind === "text") return document.createTextNode(piece.text);
    if (piece.kind === "marker")
      return el("a", { class: `marker ${colours.get(piece.number)}`, href: `#${this.#turnId}-p${piece.number}`,
        "aria-label": `Source ${piece.number}` }, piece.text);
    const { citation } = piece;
    const [show, clear] = [() => this.#sources.show(citation), () => this.#sources.show(null)];
    return el("a", {
      class: `quote ${colours.get(citation.passage) ?? ""}${piece.same ? "" : " broken"}`, ...documentLink(citation.url),
      "data-number": marked === citation.passage ? null : citation.passage,
      "aria-description": piece.same ? `quoted from source ${citation.passage}; opens it` : "differs from its source",
      onmouseenter: show, onmouseleave: clear, onfocus: show, onblur: clear,
    }, piece.text);
  }
}
