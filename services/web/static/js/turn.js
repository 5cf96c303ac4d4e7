// One question with its answer, sources and figures on the page.

import { el, announce, plural } from "./dom.js";
import { figures, sharesBar } from "./figures.js";
import { noticeOf } from "./notice.js";
import { Quotes } from "./quotes.js";
import { Sources } from "./sources.js";
import { supportList, usedPassages } from "./support.js";

const NOTHING_FOUND = "No passage was found for this question.";
let count = 0;

export class TurnView {
  #id = `turn-${++count}`;
  #sources = null;
  #quotes = null;

  /** `on`: {again(view), compare(view)}, what the buttons below the answer do. */
  constructor(turn, on) {
    this.turn = turn;
    this.on = on;
    this.answer = el("div", { class: "answer", id: `${this.#id}-answer` });
    this.under = el("div", { class: "under" });
    this.side = el("div", { class: "side" });
    const heading = el("h2", { class: "question", id: `${this.#id}-question`, tabindex: "-1" }, turn.question);
    this.element = el("article", { class: "turn", id: this.#id, "aria-labelledby": heading.id },
      heading, el("div", { class: "body" }, this.answer, this.under), this.side);
    this.element.addEventListener("keydown", (event) => this.#goBack(event));
  }

  begin() {
    this.answer.setAttribute("aria-busy", "true");
    this.answer.replaceChildren(el("span", { class: "waiting" }, "Looking for passages …"));
    this.under.replaceChildren();
    this.side.replaceChildren();
    this.#sources = null;
  }

  update(reply) {
    if (!this.#sources && reply.passages.length) this.#showSources(reply);
    if (reply.text) this.answer.textContent = reply.text;
    else this.answer.replaceChildren(el("span", { class: "waiting" }, "Writing …"));
    this.under.replaceChildren(figures(reply));
  }

  /** The whole answer is there, now or from an earlier visit. */
  finish({ aloud = true } = {}) {
    const { reply, stopped } = this.turn;
    this.answer.setAttribute("aria-busy", "false");
    if (!this.#sources) this.#showSources(reply);
    this.#quotes = new Quotes(this.answer, reply, this.#sources);
    if (!stopped) this.#sources.setCitations(reply.citations, usedPassages(reply));
    if (!reply.text) this.answer.append(el("span", { class: "waiting" }, stopped ? "" : "The answer is empty."));
    const remarks = this.#remarks(stopped, reply);
    if (!stopped) remarks.push(this.#quotes.verdict());
    const outcome = el("div", { class: "outcome" }, el("div", { class: "remarks" }, ...remarks), this.#actions(stopped));
    this.under.replaceChildren(outcome, (!stopped && supportList(reply)) || "", figures(reply), sharesBar(reply) ?? "");
    if (aloud) announce(`Answer: ${reply.text} ${remarks.map((remark) => remark.textContent).join(" ")}`);
  }

  fail(failure) {
    this.answer.setAttribute("aria-busy", "false");
    if (!this.turn.reply?.text) this.answer.replaceChildren();
    this.under.replaceChildren(noticeOf(failure, { again: () => this.on.again(this), fresh: () => this.on.fresh(this) }));
  }

  compareWith(comparison) {
    this.element.querySelector(".comparison")?.remove();
    this.under.after(comparison.element);
  }

  #showSources(reply) {
    this.#sources = new Sources(this.#id, reply.passages, (number, pressed) => this.#quotes?.light(number, pressed));
    const isRewritten = reply.question && reply.question.trim() !== this.turn.question.trim();
    this.side.replaceChildren(
      isRewritten ? el("p", { class: "searched" }, "Looked for: ", el("q", {}, reply.question)) : "",
      reply.passages.length ? this.#sources.element : this.turn.stopped ? "" : el("p", { class: "none" }, NOTHING_FOUND));
  }

  #remarks(stopped, reply) {
    const dropped = reply.droppedPassages && `${plural(reply.droppedPassages, "passage")} did not fit and was left out.`;
    const said = [
      stopped && "Stopped before the end.",
      reply.finish === "length" && "Cut off at the longest length allowed.",
      dropped,
      reply.droppedTurns && `The first ${plural(reply.droppedTurns, "turn")} of this conversation no longer fit and were left out.`,
      reply.missing.length && "A part of the index could not be searched; this answer may lack passages from it.",
    ];
    return said.filter(Boolean).map((text) => el("p", { class: "remark" }, text));
  }

  #actions(stopped) {
    const copied = el("button", { type: "button", onclick: () => this.#copy(copied) }, "Copy");
    const compare = el("button", { type: "button", onclick: () => this.on.compare(this) }, "Run without speculation");
    const again = el("button", { type: "button", onclick: () => this.on.again(this) }, "Try again");
    return el("div", { class: "actions" }, copied, stopped ? again : compare);
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

  /** Escape leaves a passage for the quote it was reached from. */
  #goBack(event) {
    if (event.key !== "Escape" || !this.#sources?.cameFrom || !this.side.contains(document.activeElement)) return;
    event.stopPropagation();
    this.#sources.cameFrom.focus();
  }
}
