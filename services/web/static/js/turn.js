// One question with its answer and sources on the page, and behind a switch how the answer was made.

import { el, announce, plural } from "./dom.js";
import { FeedbackRow } from "./feedback.js";
import { figures, sharesBar } from "./figures.js";
import { noticeOf } from "./notice.js";
import { Quotes } from "./quotes.js";
import { Sources } from "./sources.js";
import { supportList, usedPassages } from "./support.js";

const NOTHING_FOUND = "No passage was found for this question.";
let count = 0;

export class TurnView {
  #id = `turn-${++count}`;
  #conversation;

  /** `on`: {again(view), compare(view), fresh(view)}, the work of the buttons below the answer. */
  constructor(turn, conversation, on) {
    this.turn = turn;
    this.#conversation = conversation;
    this.on = on;
    this.answer = el("div", { class: "answer", id: `${this.#id}-answer` });
    this.under = el("div", { class: "under" });
    this.side = el("div", { class: "side" });
    const heading = el("h2", { class: "question", id: `${this.#id}-question`, tabindex: "-1" }, turn.question);
    this.element = el("article", { class: "turn", id: this.#id, "aria-labelledby": heading.id },
      heading, this.answer, this.side, this.under);
  }

  begin() {
    this.answer.setAttribute("aria-busy", "true");
    this.answer.replaceChildren(el("span", { class: "waiting" }, "Looking for passages …"));
    this.under.replaceChildren();
    this.side.replaceChildren();
  }

  update(reply) {
    if (!this.side.hasChildNodes() && reply.passages.length) this.#showSources(reply, null);
    if (reply.text) this.answer.textContent = reply.text;
    else this.answer.replaceChildren(el("span", { class: "waiting" }, "Writing …"));
    this.under.replaceChildren(el("div", { class: "made" }, figures(reply)));
  }

  /** The whole answer is there, now or from an earlier visit. */
  finish({ aloud = true } = {}) {
    const { reply, stopped } = this.turn;
    this.answer.setAttribute("aria-busy", "false");
    const sources = this.#showSources(reply, stopped ? null : usedPassages(reply));
    const quotes = new Quotes(this.#id, this.answer, reply, sources);
    if (!reply.text) this.answer.append(el("span", { class: "waiting" }, stopped ? "" : "The answer is empty."));
    const remarks = this.#remarks(stopped, reply);
    if (!stopped) remarks.push(quotes.verdict());
    const isKept = !stopped && reply.kept;
    this.under.replaceChildren(
      el("div", { class: "remarks" }, ...remarks), (!stopped && supportList(reply)) || "",
      el("div", { class: "outcome" }, isKept ? new FeedbackRow(this.turn, this.#conversation).element : "", this.#actions(stopped)),
      reply.usage || reply.metrics || reply.firstS !== null ? this.#made(stopped, reply) : "");
    if (aloud) announce(`Answer: ${reply.text} ${remarks.map((remark) => remark.textContent).join(" ")}`);
  }

  fail(failure) {
    this.answer.setAttribute("aria-busy", "false");
    if (!this.turn.reply?.text) this.answer.replaceChildren();
    this.under.replaceChildren(noticeOf(failure, { again: () => this.on.again(this), fresh: () => this.on.fresh(this) }));
  }

  compareWith(comparison) {
    this.element.querySelector(".comparison")?.remove();
    this.under.querySelector(".made").append(comparison.element);
  }

  #showSources(reply, used) {
    const sources = new Sources(this.#id, reply, used);
    const isRewritten = reply.question && reply.question.trim() !== this.turn.question.trim();
    const none = reply.searched && !this.turn.stopped;
    this.side.replaceChildren(
      isRewritten ? el("p", { class: "searched" }, "Looked for: ", el("q", {}, reply.question)) : "",
      reply.passages.length ? sources.element : none ? el("p", { class: "none" }, NOTHING_FOUND) : "");
    return sources;
  }

  #remarks(stopped, reply) {
    const dropped = reply.droppedPassages && `${plural(reply.droppedPassages, "passage")} did not fit and was left out.`;
    const said = [
      stopped && "Stopped before the end; the server keeps it with the next answer.",
      !stopped && reply.kept === false && "The server could not keep this answer.",
      reply.finish === "length" && "Cut off at the longest length allowed.",
      dropped,
      reply.droppedTurns && `The first ${plural(reply.droppedTurns, "turn")} of this conversation no longer fit and were left out.`,
      reply.missing.length && "A part of the index could not be searched; this answer may lack passages from it.",
    ];
    return said.filter(Boolean).map((text) => el("p", { class: "remark" }, text));
  }

  #actions(stopped) {
    const copied = el("button", { type: "button", onclick: () => this.#copy(copied) }, "Copy");
    const again = stopped && el("button", { type: "button", onclick: () => this.on.again(this) }, "Try again");
    return el("div", { class: "actions" }, copied, again);
  }

  /** How the answer was made, and the same request without speculation. */
  #made(stopped, reply) {
    const compare = el("button", { type: "button", onclick: () => this.on.compare(this) }, "Run without speculation");
    return el("section", { class: "made", "aria-label": "How this answer was made" },
      figures(reply), sharesBar(reply) ?? "", !stopped && this.turn.request ? compare : "");
  }

  async #copy(button) {
    try {
      await navigator.clipboard.writeText(this.turn.reply.text);
      button.textContent = "Copied";
    } catch {
      getSelection().selectAllChildren(this.answer);
      button.textContent = "Selected: press Ctrl+C";
    }
    announce(button.textContent);
    setTimeout(() => (button.textContent = "Copy"), 2000);
  }
}
