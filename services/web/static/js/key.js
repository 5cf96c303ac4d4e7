// The dialog that asks for a key. A key stays in this tab's session storage and goes nowhere but to this server.

import { byId } from "./dom.js";

let done = () => undefined;

byId("key-form").addEventListener("submit", (event) => {
  event.preventDefault();
  const key = byId("key").value.trim();
  byId("key-dialog").close();
  byId("key").value = "";
  done(key);
});
byId("key-close").addEventListener("click", () => byId("key-dialog").close());

/** `then(key)` once one was entered; Escape leaves it. */
export function askForKey(remark, then) {
  done = then;
  byId("key-remark").textContent = remark;
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
}
