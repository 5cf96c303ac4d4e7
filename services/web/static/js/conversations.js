// The conversations that the server keeps for this key: listed, opened, renamed, exported and deleted.

import { all, call, pages } from "./api.js";
import { byId, el, plural } from "./dom.js";
import { Reply } from "./reply.js";

const PATH = "/v1/conversations";
const OPEN = "ragspec.conversation";
const STOPPED = "ragspec.stopped";
const DAY_S = 86_400;
const MOST_TITLE = 200;

export class Conversations {
  #current = { id: "", title: "", turns: [] };
  #list = [];
  #loading = { begun: [] }; // the conversations that began since the list was last asked for
  #on;

  /** `on`: {opened(), said(text)}. A conversation: {id, title, turns}; its id is "" until its first question is asked. */
  constructor(on) {
    this.#on = on;
    this.show();
    byId("new").addEventListener("click", () => (this.begin(), on.opened()));
  }

  get current() {
    return this.#current;
  }

  begin() {
    this.#current = { id: "", title: "", turns: [] };
    sessionStorage.removeItem(OPEN);
    this.show();
  }

  /** Throws: Failure. */
  async load() {
    const found = [];
    const loading = (this.#loading = { begun: [] });
    for await (const page of pages(PATH)) {
      found.push(...page.data);
      byId("kept").textContent = keptText(page.ttl_s);
    }
    if (this.#loading !== loading) return; // with another key
    const begun = loading.begun.filter((each) => !found.some(({ id }) => id === each.id));
    this.#list = [...begun, ...found.map((each) => ({ id: each.id, title: each.metadata.title ?? "Untitled" }))];
    const open = this.#list.find((each) => each.id === sessionStorage.getItem(OPEN));
    if (open && !this.#current.turns.length) await this.open(open);
    this.show();
  }

  /** Throws: Failure. */
  async open({ id, title }) {
    const items = await all(`${PATH}/${id}/items`, 100, "&order=asc&include=ragspec");
    const turns = [];
    for (let n = 0; n + 1 < items.length; n += 2) turns.push(turnOf(items[n], items[n + 1]));
    const stopped = JSON.parse(sessionStorage.getItem(STOPPED) ?? "null");
    if (stopped?.id === id) turns.push({ question: stopped.question, reply: Reply.stored(stopped.text, {}), stopped: true });
    this.#current = { id, title, turns };
    sessionStorage.setItem(OPEN, id);
    this.show();
    this.#on.opened();
  }

  /** The id of a conversation; the server makes it for the first question. Throws: Failure. */
  async idFor(current, question) {
    if (current.id) return current.id;
    current.title = [...question].slice(0, MOST_TITLE).join("").trim();
    current.id = (await call("POST", PATH, { metadata: { title: current.title } })).id;
    const begun = { id: current.id, title: current.title };
    this.#list.unshift(begun);
    this.#loading.begun.push(begun);
    if (current === this.#current) sessionStorage.setItem(OPEN, current.id);
    this.show();
    return current.id;
  }

  /** The last answer, if it was stopped, stays in this tab until the server gets it with the next one. */
  answered(conversation, { question, reply, stopped }) {
    if (stopped && reply.text) sessionStorage.setItem(STOPPED, JSON.stringify({ id: conversation.id, question, text: reply.text }));
    else sessionStorage.removeItem(STOPPED);
  }

  /** The server has it no longer: the next question begins another with the same turns. */
  lost(conversation) {
    this.#list = this.#list.filter((each) => each.id !== conversation.id);
    conversation.id = "";
    this.show();
  }

  show() {
    if (this.#current.id) byId("new").removeAttribute("aria-current");
    else byId("new").setAttribute("aria-current", "true");
    byId("conversations").replaceChildren(...this.#list.map((each) => this.#rowOf(each)));
  }

  #rowOf(each) {
    const isCurrent = each.id === this.#current.id;
    const open = el("button", { type: "button", class: "open", "aria-current": isCurrent && "true" }, each.title);
    open.addEventListener("click", () => this.#doing(() => this.open(each)));
    if (!isCurrent) return el("li", {}, open);
    const action = (name, work) =>
      el("button", { type: "button", class: "quiet", "aria-label": `${name}: ${each.title}`, onclick: () => this.#doing(work) }, name);
    const actions = el("div", { class: "actions" }, action("Rename", () => this.#rename(each)),
      action("Export", () => this.#export(each)), action("Delete", () => this.#delete(each)));
    return el("li", {}, open, actions);
  }

  async #rename(each) {
    const field = el("input", { type: "text", maxlength: String(MOST_TITLE), "aria-label": "Name of the conversation", value: each.title });
    const form = el("form", { class: "rename" }, field, el("button", { type: "submit" }, "Save"));
    form.addEventListener("submit", (event) => {
      event.preventDefault();
      this.#doing(async () => {
        const title = field.value.trim() || each.title;
        await call("POST", `${PATH}/${each.id}`, { metadata: { title } });
        each.title = title;
        this.show();
        this.#focusOpen();
      });
    });
    form.addEventListener("keydown", (event) => {
      if (event.key !== "Escape") return;
      event.preventDefault();
      this.show();
      this.#focusOpen();
    });
    byId("conversations").querySelector("[aria-current]").replaceWith(form);
    field.select();
  }

  /** As the service gives it: the messages, with the sources of the answers and the feedback on them. */
  async #export(each) {
    const items = await all(`${PATH}/${each.id}/items`, 100, "&order=asc&include=ragspec");
    const text = JSON.stringify({ id: each.id, title: each.title, items }, null, 1);
    const link = el("a", { href: URL.createObjectURL(new Blob([text], { type: "application/json" })), download: `${each.id}.json` });
    link.click();
    URL.revokeObjectURL(link.href);
  }

  async #delete(each) {
    if (!confirm(`Delete the conversation “${each.title}”, with its answers and feedback?`)) return;
    await call("DELETE", `${PATH}/${each.id}`);
    this.#list = this.#list.filter((other) => other !== each);
    this.begin();
    this.#on.opened();
    this.#on.said("Deleted.");
    byId("new").focus();
  }

  async #doing(work) {
    try {
      await work();
    } catch (failure) {
      this.#on.said(failure.message);
    }
  }

  #focusOpen() {
    byId("conversations").querySelector("[aria-current]").focus();
  }
}

const textOf = (item) => item.content.map((part) => part.text).join("\n");

const turnOf = (asked, answered) => ({
  question: textOf(asked), reply: Reply.stored(textOf(answered), answered.ragspec), item: answered.id, feedback: answered.feedback,
});

/** What the server is sent of the turns so far: answers as far as they were written, also those that were stopped. */
export function historyOf(turns) {
  return turns.filter((turn) => turn.reply?.text && !turn.failed).flatMap((turn) => [
    { role: "user", content: turn.question },
    { role: "assistant", content: turn.reply.text.replaceAll("\0", "\uFFFD") }, // the service refuses NUL
  ]);
}

function keptText(ttlS) {
  const days = Math.round(ttlS / DAY_S);
  const kept = days >= 1 ? plural(days, "day") : `${Math.round(ttlS / 60)} minutes`;
  return `The server keeps conversations, with their sources and your feedback, until ${kept} after their last use. ` +
    "Whoever has this key can read them.";
}
