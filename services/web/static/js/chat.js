// The chat page: its parts, tied together.

import { Failure, call, stopped } from "./api.js";
import { ask, compare, requestOf } from "./asking.js";
import { Conversations } from "./conversations.js";
import { Documents } from "./documents.js";
import { announce, byId, el, scrolling } from "./dom.js";
import { Drawer } from "./drawer.js";
import { begin, withKey } from "./key.js";
import { TurnView } from "./turn.js";
import { welcome } from "./welcome.js";

const TELEMETRY = "ragspec.telemetry";
const drawer = new Drawer(byId("side"), byId("side-open"));
const conversations = new Conversations({ opened: () => (show(), question.focus()), said: announce });
const documents = new Documents((name) => (byId("collection-chosen").textContent = name), () => orSay("indexed", welcome(askExample)));
const question = byId("question");
const turns = byId("turns");
let model = "";
let running = null; // the AbortController of what is being written

async function connect() {
  try {
    await readServer();
  } catch (cause) {
    if (!(cause instanceof Failure) || cause.kind === "unauthorized") throw cause;
    byId("model").textContent = "not connected";
  }
}

/** What the page must know of the server. */
async function readServer() {
  const [served] = (await call("GET", "/v1/models")).data;
  model = served?.id ?? "";
  if (served?.max_model_len) limitAnswers(served.max_model_len);
  byId("model").textContent = model;
  await Promise.all([
    documents.load(), orSay("kept", conversations.load()), orSay("indexed", welcome(askExample))]);
}

/** A failure is said in the element `id`, and the rest of the page works on. */
async function orSay(id, work) {
  try {
    await work;
  } catch (cause) {
    if (!(cause instanceof Failure)) throw cause;
    byId(id).textContent = cause.message;
  }
}

/** An answer may take half of what the model can see; the other half is for what it reads. */
function limitAnswers(maxTokens) {
  const field = byId("max-tokens");
  field.max = Math.max(1, Math.min(field.max, Math.floor(maxTokens / 2)));
}

const views = {
  again: (view) => run(view),
  compare: (view) => run(view, compare),
  fresh: (view) => {
    const isFirst = conversations.current.turns[0] === view.turn;
    conversations.begin();
    show();
    question.value = view.turn.question;
    fit();
    if (isFirst) question.focus(); // it is the question that is too long
    else submit();
  },
};

/** Writes into `view` until it is done or stopped, one answer at a time; with another key later, unless the user went on. */
function run(view, work = answer) {
  const { current } = conversations;
  running?.abort();
  running = null;
  return withKey(async () => {
    if (!running && conversations.current === current) await write(view, work);
  });
}

async function write(view, work) {
  const own = (running = new AbortController());
  const conversation = conversations.current;
  busy(true);
  let failure = null;
  try {
    failure = await work(view, own.signal);
    if (work === answer) conversations.answered(conversation, view.turn);
  } finally {
    if (running === own) {
      running = null;
      busy(false);
    } else {
      failure = null; // another answer is being written, or another conversation is open
    }
  }
  if (failure?.kind === "absent") conversations.lost(conversation);
  if (failure?.kind === "unauthorized") throw failure;
}

function answer(view, signal) {
  const conversation = conversations.current;
  return ask(view, signal, async () => {
    if (!model) await readServer();
    if (signal.aborted) throw stopped();
    const id = await conversations.idFor(conversation, view.turn.question);
    const { turns: all } = conversation;
    return requestOf(all.slice(0, all.indexOf(view.turn) + 1), model, id, documents.chosen);
  });
}

function submit() {
  const text = question.value.trim();
  if (!text) return question.focus();
  const turn = { question: text };
  conversations.current.turns.push(turn);
  question.value = "";
  fit();
  const view = append(turn);
  byId("empty").hidden = true;
  view.element.scrollIntoView({ block: "start", behavior: scrolling() });
  return run(view);
}

function askExample(text) {
  question.value = text;
  submit();
}

function append(turn) {
  const view = new TurnView(turn, conversations.current, views);
  turns.append(view.element);
  return view;
}

/** The current conversation, as the server keeps it. */
function show() {
  running?.abort();
  turns.replaceChildren();
  for (const turn of conversations.current.turns) append(turn).finish({ aloud: false });
  byId("empty").hidden = conversations.current.turns.length > 0;
  drawer.close();
}

function showTelemetry(isShown) {
  byId("telemetry").checked = isShown;
  document.body.classList.toggle("telemetry", isShown);
  sessionStorage.setItem(TELEMETRY, String(isShown));
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
byId("telemetry").addEventListener("change", () => showTelemetry(byId("telemetry").checked));
question.addEventListener("input", fit);
question.addEventListener("keydown", (event) => {
  if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
  event.preventDefault();
  if (!running) submit();
});
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape" && running && !event.defaultPrevented && !document.querySelector("dialog[open]")) running.abort();
});

showTelemetry(sessionStorage.getItem(TELEMETRY) === "true");
begin(connect);
question.focus();
