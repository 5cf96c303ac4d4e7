// What the sources say of each sentence of an answer.

import { el, plural } from "./dom.js";
import { Characters } from "./points.js";

const MOST_SHOWN = 6;
/** Whether the quotes answer, by the calibrated score of the best passage. */
const LEADS = { "found in": "Found in", "closest passage": "Closest passage found, quoted from" };

/** The numbers of the passages that the answer quotes or that support it. */
export function usedPassages(reply) {
  return new Set([...reply.citations, ...(reply.sentences ?? [])].map((each) => each.passage).filter(Boolean));
}

/** One sentence for all of it: what is quoted from where, what is supported, what stands in no source. */
export function verdictText(reply, numQuotes) {
  const quoted = new Set(reply.citations.map((citation) => citation.passage)).size;
  const count = (label) => (reply.sentences ?? []).filter((sentence) => sentence.label === label).length;
  const supported = count("supported");
  const related = count("related");
  const unsupported = count("unsupported");
  const unknown = (reply.unknownQuotations ?? []).length;
  const said = [
    numQuotes ? `${LEADS[reply.found] ?? "Quoted from"} ${plural(quoted, "source")}.` : "Nothing in this answer is quoted word for word.",
    supported && `${plural(supported, "sentence")} supported by a source.`,
    related && `${plural(related, "sentence")} to compare with a source.`,
    unsupported && `${plural(unsupported, "sentence")} not found in the sources.`,
    unknown && `${plural(unknown, "quotation")} found in no source.`,
  ];
  return said.filter(Boolean).join(" ");
}

/** The sentences that are no quotes, each with the passage's sentence that supports it. Null where all is quoted. */
export function supportList(reply) {
  const answer = new Characters(reply.text);
  const unknown = (reply.unknownQuotations ?? []).filter((span) => answer.holds(span.start, span.end));
  const open = (reply.sentences ?? []).filter((each) => each.label !== "quoted" && answer.holds(each.start, each.end));
  const items = [
    ...unknown.map((span) => itemOf("unsupported", "In quotation marks, but in no source", answer.slice(span.start, span.end))),
    ...open.map((each) => sentenceItem(each, answer, reply.passages)),
  ];
  if (!items.length) return null;
  const shown = items.slice(0, MOST_SHOWN);
  const rest = items.length - shown.length;
  return el("ul", { class: "support" }, ...shown, rest > 0 && el("li", {}, `… and ${rest} more`));
}

function sentenceItem(sentence, answer, passages) {
  const text = answer.slice(sentence.start, sentence.end);
  const passage = passages.find((one) => one.number === sentence.passage);
  const source = passage && new Characters(passage.text);
  if (!source?.holds(sentence.passage_start, sentence.passage_end)) return itemOf("unsupported", "Not found in the sources", text);
  const place = el("span", { class: "said" }, source.slice(sentence.passage_start, sentence.passage_end));
  const verdict = sentence.label === "supported" ? "Supported by" : "Compare with";
  return itemOf(sentence.label, `${verdict} source ${passage.number}`, text, place);
}

const itemOf = (kind, label, text, ...more) =>
  el("li", { class: kind }, el("span", { class: "kind" }, `${label}: `), text, ...more);
