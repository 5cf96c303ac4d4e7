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

async function enter() {
  setKey(byId("key").value.trim());
  const works = [ofPage, ...waiting];
  leave();
  for (const work of new Set(works)) await withKey(work);
}

addEventListener("hashchange", () => takeKeyFromAddress(() => withKey(ofPage)));
byId("key-open").addEventListener("click", () => ask(""));
byId("key-form").addEventListener("submit", (event) => (event.preventDefault(), enter()));
byId("key-close").addEventListener("click", leave);
dialog.addEventListener("cancel", leave);
