// The grammar page: a text, its suggested edits, and what becomes of them.

import { Failure, call } from "./api.js";
import { Comparison } from "./compare.js";
import { corrected, drawSeed } from "./correcting.js";
import { announce, byId, el, plural, scrolling, seconds } from "./dom.js";
import { afterApplying, applied, editsOf, nameOf } from "./edits.js";
import { Editor } from "./editor.js";
import { begin, withKey } from "./key.js";
import { noticeOf } from "./notice.js";

const WITHHELD = {
  number: "a number", name: "a name", code: "code", markup: "markup", dictionary: "in your dictionary", ignored: "ignored",
  ratio: "too much of the sentence", kind: "of a kind that is switched off", layout: "layout",
};
const rejected = new Set();
const editor = new Editor({ changed: () => showEdits(), pointed: (edit) => highlight(edit) });
let cards = new Map(); // edit -> its card
let checked = null; // the text that was corrected last

const correct = () => withKey(check);

async function check() {
  const text = editor.text;
  if (!text.trim()) return editor.focus();
  byId("correct").disabled = true;
  byId("outcome").replaceChildren(el("p", { class: "hint" }, "Reading …"));
  const seed = drawSeed();
  try {
    const first = await corrected(text, seed, true);
    take(text, first);
    if (byId("comparing").checked) await compare(text, seed, first);
  } catch (cause) {
    if (!(cause instanceof Failure)) throw cause;
    byId("outcome").replaceChildren(noticeOf(cause, { again: correct, fresh: () => editor.focus() }));
    if (cause.kind === "unauthorized") throw cause;
  } finally {
    byId("correct").disabled = false;
  }
}

/** Its edits, unless the text has become another meanwhile: then they are about a text that is no more. */
function take(text, one) {
  const outcome = byId("outcome");
  if (editor.text !== text) {
    outcome.replaceChildren(el("p", { class: "hint" }, "The text was changed meanwhile. Correct it again."));
    return;
  }
  checked = text;
  const { edits, lost } = editsOf(one.reply, text);
  editor.set(text, edits.filter((edit) => !rejected.has(nameOf(edit, text))));
  const numSentences = one.reply.statistics?.num_sentences;
  const said = el("p", { class: "hint checked" }, numSentences ? `${plural(numSentences, "sentence")} checked.` : "Checked.");
  outcome.replaceChildren(said, byId("comparing").checked ? figures(one) : "");
  if (lost) outcome.append(el("p", { class: "notice", role: "alert" }, `${plural(lost, "suggestion")} did not fit the text and was left out.`));
  if (one.reply.unfinished?.length) outcome.append(el("p", { class: "hint" }, "There was not enough time for all of it; a part stays as it is."));
  showWithheld(one.reply.withheld ?? []);
  announce(edits.length ? `${plural(editor.edits.length, "suggestion")}.` : "No suggestions.");
}

async function compare(text, seed, first) {
  const comparison = new Comparison(first);
  byId("outcome").append(comparison.element);
  try {
    const without = await corrected(text, seed, false);
    comparison.ranWithout(without);
    comparison.finish(without, await corrected(text, seed, true));
  } catch (cause) {
    if (!(cause instanceof Failure)) throw cause;
    comparison.fail(cause);
  }
}

function figures(one) {
  const rows = [["in all", seconds(one.totalS)]];
  if (one.tokensPerS) rows.push(["tokens/s", one.tokensPerS.toFixed(0)]);
  if (one.stepLength) rows.push(["tokens a step", one.stepLength.toFixed(1)]);
  return el("dl", { class: "figures" }, ...rows.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value))));
}

function showEdits() {
  cards = new Map(editor.edits.map((edit) => [edit, cardOf(edit)]));
  byId("edits").replaceChildren(...cards.values());
  const none = checked === null ? "Nothing yet." : "Nothing to suggest.";
  byId("none").textContent = editor.edits.length ? "" : none;
  byId("side-title").textContent = editor.edits.length ? plural(editor.edits.length, "suggestion") : "Suggestions";
  for (const id of ["accept-all", "reject-all"]) byId(id).disabled = editor.edits.length === 0;
  byId("undo").disabled = !editor.canUndo;
  byId("redo").disabled = !editor.canRedo;
}

function cardOf(edit) {
  const change = el("p", { class: "change" },
    edit.original ? el("del", {}, edit.original) : el("span", { class: "detail" }, "add"), " ",
    edit.replacement ? el("ins", {}, edit.replacement) : el("span", { class: "detail" }, "leave out"));
  const said = `${edit.original || "nothing"} to ${edit.replacement || "nothing"}`;
  const accept = el("button", { type: "button", "aria-label": `Accept ${said}`, onclick: () => decide([edit], true) }, "Accept");
  const reject = el("button", { type: "button", "aria-label": `Reject ${said}`, onclick: () => decide([edit], false) }, "Reject");
  const kind = el("span", { class: "kind" }, edit.kind.replaceAll("_", " "));
  const reason = el("p", { class: "reason" }, kind, edit.reason && ` ${edit.reason}`);
  const show = () => editor.point(edit);
  return el("li", { class: "card", onmouseenter: show, onfocusin: show }, change, reason, el("div", { class: "row" }, accept, reject));
}

/** Edits become part of the text, or are given up; the focus goes on to the next one. */
function decide(done, isAccepted) {
  const place = editor.edits.indexOf(done[0]);
  const left = editor.edits.filter((edit) => !done.includes(edit));
  if (!isAccepted) done.forEach((edit) => rejected.add(nameOf(edit, editor.text)));
  if (isAccepted) editor.set(applied(editor.text, done), afterApplying(editor.edits, done));
  else editor.set(editor.text, left);
  announce(`${plural(done.length, "suggestion")} ${isAccepted ? "accepted" : "rejected"}, ${editor.edits.length} left.`);
  const next = [...cards.values()][Math.min(place, cards.size - 1)];
  if (next) next.querySelector("button").focus();
  else byId("undo").focus();
}

function highlight(edit) {
  for (const [one, card] of cards) card.classList.toggle("active", one === edit);
  if (edit) cards.get(edit).scrollIntoView({ block: "nearest", behavior: scrolling() });
  editor.point(edit);
}

function showWithheld(withheld) {
  const place = byId("withheld");
  place.hidden = withheld.length === 0;
  place.querySelector("summary").textContent = `${plural(withheld.length, "change")} held back`;
  place.querySelector("ul").replaceChildren(...withheld.map((edit) =>
    el("li", {}, `${edit.original || "(nothing)"} → ${edit.replacement || "(nothing)"} `,
      el("span", { class: "detail" }, WITHHELD[edit.withheld] ?? edit.withheld))));
}

async function connect() {
  try {
    byId("model").textContent = (await call("GET", "/v1/models")).data[0]?.id ?? "";
  } catch (cause) {
    if (!(cause instanceof Failure) || cause.kind === "unauthorized") throw cause;
  }
}

byId("correct").addEventListener("click", correct);
byId("undo").addEventListener("click", () => editor.undo());
byId("redo").addEventListener("click", () => editor.redo());
byId("accept-all").addEventListener("click", () => decide([...editor.edits], true));
byId("reject-all").addEventListener("click", () => decide([...editor.edits], false));
byId("copy").addEventListener("click", async () => {
  const copied = await navigator.clipboard.writeText(editor.text).then(() => true, () => false);
  announce(copied ? "Copied." : "The browser did not allow copying.");
  byId("copy").textContent = copied ? "Copied" : "Not copied";
  setTimeout(() => (byId("copy").textContent = "Copy"), 2000);
});
byId("text").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && (event.ctrlKey || event.metaKey)) {
    event.preventDefault();
    correct();
  }
});

begin(connect);
showEdits();
byId("text").focus();
