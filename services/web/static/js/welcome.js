// The page before the first question: what is indexed and when it changed, and questions made from titles of documents.

import { call } from "./api.js";
import { byId, el, plural } from "./dom.js";

const NUM_EXAMPLES = 3;
const MOST_TITLE = 60;

/** `ask(question)`: an example was chosen. Throws: Failure. */
export async function welcome(ask) {
  const { data, total, changed_at: changedAt } = await call("GET", "/v1/documents?limit=200");
  const changed = new Date(1000 * changedAt).toLocaleString(undefined, { dateStyle: "medium", timeStyle: "short" });
  byId("indexed").textContent = `${plural(total, "document")} can be searched; the index changed last on ${changed}. Drop a file anywhere on this page to add it.`;
  const titles = [...new Set(data.map((each) => each.title.trim()))].filter((title) => title && title.length <= MOST_TITLE);
  const step = Math.max(1, Math.floor(titles.length / NUM_EXAMPLES));
  const chosen = titles.filter((_, index) => index % step === 0).slice(0, NUM_EXAMPLES);
  byId("examples").replaceChildren(...chosen.map((title) => {
    const question = questionOf(title);
    return el("li", {}, el("button", { type: "button", onclick: () => ask(question) }, question));
  }));
}

/** A question that a document of this title may answer. */
function questionOf(title) {
  if (title.endsWith("?")) return title;
  const task = /^how to (.+?)[.!]?$/i.exec(title);
  if (task) return `How do I ${task[1]}?`;
  return /\s/.test(title) ? `What does “${title}” cover?` : `What is ${title}?`;
}
