// The key of this tab, and the dialog that asks for it. A key goes nowhere but to this server.

import { key, setKey, takeKeyFromAddress } from "./api.js";
import { byId } from "./dom.js";

const dialog = byId("key-dialog");
const waiting = new Set(); // what runs with the next key
let ofPage = async () => undefined;

/** `work` of the page: it runs now, and first with each key that is entered or comes in the address. */
export function begin(work) {
  ofPage = work;
  takeKeyFromAddress();
  return withKey(work);
}

/** Runs `work`; where it throws that the key is refused, it runs again with each key that is entered. Escape leaves it. */
export async function withKey(work) {
  const used = key();
  try {
    await work();
  } catch (cause) {
    if (cause.kind !== "unauthorized") throw cause;
    if (key() !== used) return withKey(work);
    waiting.add(work);
    ask(used ? "This key is not accepted." : "");
  }
}

function ask(remark) {
  byId("key-remark").textContent = remark;
  if (!dialog.open) dialog.showModal();
}

function leave() {
  waiting.clear();
  byId("key").value = "";
  dialog.close();
}

/** With another key: the page's work, and then all that waits, unless this key is refused too. */
async function goOn() {
  const works = new Set(waiting).add(ofPage);
  leave();
  await withKey(ofPage);
  for (const work of works) {
    if (waiting.size) waiting.add(work);
    else if (work !== ofPage) await withKey(work);
  }
}

addEventListener("hashchange", () => takeKeyFromAddress(goOn));
byId("key-open").addEventListener("click", () => ask(""));
byId("key-form").addEventListener("submit", (event) => (event.preventDefault(), setKey(byId("key").value.trim()), goOn()));
byId("key-close").addEventListener("click", leave);
dialog.addEventListener("cancel", leave);
