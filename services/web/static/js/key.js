// The dialog that asks for a key. A key stays in this tab's session storage and goes nowhere but to this server.

import { hasKey, setKey } from "./api.js";
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

/** `work` runs with the key that is entered, and again until the server accepts a key; Escape leaves it. */
export function enterKey(remark, work) {
  done = (key) => {
    setKey(key);
    withKey(work);
  };
  byId("key-remark").textContent = remark;
  if (!byId("key-dialog").open) byId("key-dialog").showModal();
}

/** Runs `work`; where the server refuses the key, once more with each key that is entered. */
export async function withKey(work) {
  try {
    await work();
  } catch (cause) {
    if (cause.kind !== "unauthorized") throw cause;
    refused(work);
  }
}

/** Asks for another key after the server refused the last. */
export function refused(work) {
  enterKey(hasKey() ? "This key is not accepted." : "", work);
}
