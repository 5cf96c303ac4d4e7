// Which parts of an answer are quotes of which passage, and whether they really are.

import { Characters } from "./points.js";

/**
 * The answer as pieces in order: plain text, quotes, and markers like [2] that name a passage.
 * A quote is `same` only where both spans exist and are the same string, compared here again.
 */
export function piecesOf(answer, passages, citations) {
  const text = new Characters(answer);
  const pieces = [];
  let at = 0;
  for (const citation of [...citations].sort((one, other) => one.start - other.start)) {
    if (!text.holds(citation.start, citation.end) || citation.start < at) continue;
    pieces.push(...withMarkers(text.slice(at, citation.start), passages));
    pieces.push(quoteOf(text.slice(citation.start, citation.end), citation, passages));
    at = citation.end;
  }
  pieces.push(...withMarkers(text.slice(at), passages));
  return pieces;
}

/** Citations that no piece can show, because their span is outside the answer or inside another. */
export function misplaced(pieces, citations) {
  return citations.length - pieces.filter((piece) => piece.kind === "quote").length;
}

/** The quotes of one passage: its text as pieces, those of `citations` marked. Overlapping spans keep the first. */
export function passagePieces(passage, citations) {
  const text = new Characters(passage.text);
  const pieces = [];
  let at = 0;
  for (const citation of [...citations].sort((one, other) => one.passage_start - other.passage_start)) {
    if (!text.holds(citation.passage_start, citation.passage_end) || citation.passage_end <= at) continue;
    const from = Math.max(at, citation.passage_start);
    pieces.push({ kind: "text", text: text.slice(at, from) });
    pieces.push({ kind: "quote", text: text.slice(from, citation.passage_end), citation });
    at = citation.passage_end;
  }
  pieces.push({ kind: "text", text: text.slice(at) });
  return pieces.filter((piece) => piece.text !== "");
}

function quoteOf(text, citation, passages) {
  const passage = passages.find((one) => one.number === citation.passage);
  const source = passage && new Characters(passage.text);
  const same =
    source !== undefined &&
    source.holds(citation.passage_start, citation.passage_end) &&
    source.slice(citation.passage_start, citation.passage_end) === text;
  return { kind: "quote", text, citation, passage, same };
}

function withMarkers(text, passages) {
  const numbers = new Set(passages.map((passage) => passage.number));
  const pieces = [];
  for (const part of text.split(/(\[\d{1,3}\])/)) {
    const number = /^\[\d+\]$/.test(part) ? Number(part.slice(1, -1)) : 0;
    if (numbers.has(number)) pieces.push({ kind: "marker", text: part, number });
    else if (part) pieces.push({ kind: "text", text: part });
  }
  return pieces;
}
