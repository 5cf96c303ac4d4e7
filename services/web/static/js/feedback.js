// A reader's verdict on an answer, with a note: kept by the server beside the answer, in the conversation.

import { Failure, all, call } from "./api.js";
import { announce, el } from "./dom.js";

const NAMES = { up: "Good answer", down: "Wrong answer" };

export class FeedbackRow {
  #turn;
  #conversation;
  #buttons = new Map();
  #note = el("textarea", { rows: "2", maxlength: "4000", "aria-label": "Note", placeholder: "What was good or wrong? (optional)" });
  #form;
  #said = el("p", { class: "hint" });

  constructor(turn, conversation) {
    this.#turn = turn;
    this.#conversation = conversation;
    for (const [rating, name] of Object.entries(NAMES)) {
      const button = el("button", { type: "button", class: `thumb ${rating}`, onclick: () => this.#press(rating) }, name);
      this.#buttons.set(rating, button);
    }
    this.#form = el("form", { class: "note", "aria-label": "Note" }, this.#note, el("button", { type: "submit" }, "Save note"));
    this.#form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#send(this.#turn.feedback.rating, this.#note.value.trim());
    });
    this.element = el("div", { class: "feedback", role: "group", "aria-label": "Feedback" },
      ...this.#buttons.values(), this.#form, this.#said);
    this.#note.value = turn.feedback?.note ?? "";
    this.#show();
  }

  /** Pressed again, the verdict is taken back. */
  #press(rating) {
    const isTakenBack = this.#turn.feedback?.rating === rating;
    return this.#send(isTakenBack ? null : rating, isTakenBack ? "" : this.#note.value.trim());
  }

  async #send(rating, note) {
    try {
      const path = `/v1/conversations/${this.#conversation.id}/items`;
      this.#turn.item ??= await itemOf(this.#turn, path);
      await call("POST", `${path}/${this.#turn.item}/feedback`, { rating, note });
      this.#turn.feedback = rating ? { rating, note } : undefined;
      this.#said.textContent = rating ? "Kept with this conversation." : "Taken back.";
      if (!rating) this.#note.value = "";
    } catch (cause) {
      if (!(cause instanceof Failure)) throw cause;
      this.#said.textContent = cause.message;
    }
    announce(this.#said.textContent);
    this.#show();
  }

  #show() {
    const given = this.#turn.feedback?.rating;
    for (const [rating, button] of this.#buttons) button.setAttribute("aria-pressed", String(rating === given));
    this.#form.hidden = !given;
  }
}

/** The id under which the server keeps the answer. Throws: Failure. */
async function itemOf(turn, path) {
  const text = turn.reply.text.replaceAll("\0", "\uFFFD");
  const item = (await all(path)).find((each) => each.role === "assistant" && each.content[0].text === text);
  if (!item) throw new Failure("absent", "The server has not kept this answer.");
  return item.id;
}
