// The chat page: its parts, tied together.

import { Failure, call, hasKey, setKey, takeKeyFromAddress } from "./api.js";
import { ask, compare, requestOf } from "./asking.js";
import { Documents } from "./documents.js";
import { announce, byId, el, scrolling } from "./dom.js";
import { askForKey } from "./key.js";
import { Reply } from "./reply.js";
import { Session, titleOf } from "./session.js";
import { Drawer } from "./drawer.js";
import { TurnView } from "./turn.js";

takeKeyFromAddress();
addEventListener("hashchange", () => takeKeyFromAddress(connect));

const session = new Session();
const drawer = new Drawer(byId("side"), byId("side-open"));
const documents = new Documents((name) => (byId("collection-chosen").textContent = name));
const question = byId("question");
const turns = byId("turns");
let model = "";
let running = null; // the AbortController of what is being written

/** What the page must know of the server. A wrong key is asked for, at once. */
async function connect() {
  try {
    const [served] = (await call("GET", "/v1/models")).data;
    model = served?.id ?? "";
    if (served?.max_model_len) limitAnswers(served.max_model_len);
    byId("model").textContent = model;
    await documents.load();
  } catch (cause) {
    if (!(cause instanceof Failure)) throw cause;
    if (cause.kind === "unauthorized") return enterKey(hasKey() ? "This key is not accepted." : "");
    byId("model").textContent = "not connected";
  }
}

/** An answer may take half of what the model can see; the other half is for what it reads. */
function limitAnswers(maxTokens) {
  const field = byId("max-tokens");
  field.max = Math.max(1, Math.min(field.max, Math.floor(maxTokens / 2)));
}

function enterKey(remark, then = () => undefined) {
  askForKey(remark, async (key) => {
    setKey(key);
    await connect();
    then();
  });
}

const views = {
  again: (view) => run(view),
  compare: (view) => run(view, compare),
  fresh: (view) => {
    const isFirst = session.current.turns[0] === view.turn;
    leave(view.turn);
    session.begin();
    show();
    question.value = view.turn.question;
    fit();
    if (isFirst) question.focus(); // it is the question that is too long
    else submit();
  },
};

/** Writes into `view` until it is done or stopped; one answer at a time. */
async function run(view, work = ask) {
  running?.abort();
  const own = (running = new AbortController());
  busy(true);
  let failure = null;
  try {
    if (work === ask) await prepare(view.turn);
    failure = await work(view, own.signal);
    if (work === ask && !failure && byId("comparing").checked) await compare(view, own.signal);
    session.save();
  } finally {
    if (running === own) {
      running = null;
      busy(false);
    } else {
      failure = null; // another answer is being written, or another conversation is open
    }
  }
  if (failure?.kind === "unauthorized") enterKey(hasKey() ? "This key is not accepted." : "", () => run(view));
}

/** Why the turns are taken at once: another conversation may be open by the time the server is found. */
async function prepare(turn) {
  const { turns: all } = session.current;
  if (!model) await connect();
  turn.request = requestOf(all.slice(0, all.indexOf(turn) + 1), model, documents.chosen);
}

function submit() {
  const text = question.value.trim();
  if (!text) return question.focus();
  const turn = { question: text };
  session.current.turns.push(turn);
  question.value = "";
  fit();
  const view = append(turn);
  listConversations();
  byId("empty").hidden = true;
  view.element.scrollIntoView({ block: "start", behavior: scrolling() });
  return run(view);
}

function append(turn) {
  const view = new TurnView(turn, views);
  turns.append(view.element);
  return view;
}

/** The current conversation, from what the session keeps of it. */
function show() {
  running?.abort();
  turns.replaceChildren();
  for (const turn of session.current.turns) {
    if (turn.reply) turn.reply = Object.assign(new Reply(), turn.reply);
    const view = append(turn);
    if (turn.reply && (turn.stopped || turn.reply.text) && !turn.failed) view.finish({ aloud: false });
    else view.fail(new Failure("gone", "This question was not answered."));
  }
  byId("empty").hidden = session.current.turns.length > 0;
  listConversations();
}

function leave(turn) {
  session.current.turns = session.current.turns.filter((one) => one !== turn);
  session.save();
}

function listConversations() {
  if (session.current.turns.length) byId("new").removeAttribute("aria-current");
  else byId("new").setAttribute("aria-current", "true"); // it is open already
  const rows = session.conversations.filter((one) => one.turns.length).map((one) => {
    const isCurrent = one === session.current;
    const open = el("button", { type: "button", class: "open", "aria-current": isCurrent && "true" }, titleOf(one));
    open.addEventListener("click", () => (session.open(one.id), show(), drawer.close(), question.focus()));
    const forget = el("button", { type: "button", class: "quiet", "aria-label": `Forget: ${titleOf(one)}` }, "×");
    forget.addEventListener("click", () => (session.forget(one.id), show(), announce("Forgotten."), byId("new").focus()));
    return el("li", {}, open, forget);
  });
  byId("conversations").replaceChildren(...rows);
}

function busy(isBusy) {
  byId("send").hidden = isBusy;
  byId("stop").hidden = !isBusy;
  if (isBusy && document.activeElement === document.body) byId("stop").focus();
}

function fit() {
  question.style.height = "auto";
  question.style.height = `${Math.min(question.scrollHeight, 200)}px`;
}

byId("ask").addEventListener("submit", (event) => (event.preventDefault(), submit()));
byId("stop").addEventListener("click", () => (running?.abort(), question.focus()));
byId("new").addEventListener("click", () => (session.begin(), show(), drawer.close(), question.focus()));
byId("key-open").addEventListener("click", () => enterKey(""));
question.addEventListener("input", fit);
question.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!running) submit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running && !event.defaultPrevented && !document.querySelector("dialog[open]")) running.abort();
});

show();
connect();
question.focus();
