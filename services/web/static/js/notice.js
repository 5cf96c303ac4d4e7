// What went wrong, in plain words, with the one thing that helps.

import { el, announce } from "./dom.js";

const WORDS = {
  unauthorized: ["This server asks for a key.", ""],
  busy: ["Too much at once.", "Try again"],
  gone: ["", "Try again"],
  too_long: ["This is too long for the model.", "Ask without what was said before"],
  absent: ["The server has no such thing.", "Try again"],
  refused: ["The server refused this question.", "Try again"],
};

/** `on`: {again, fresh}. Where the server says how long to wait, the button counts down and waits. */
export function noticeOf(failure, on) {
  const [lead, action] = WORDS[failure.kind] ?? WORDS.refused;
  const message = el("div", { role: "alert" }, lead && el("strong", {}, lead),
    failure.kind === "unauthorized" ? null : el("p", {}, failure.message));
  const notice = el("div", { class: "notice" }, message); // the button counts outside of what is read aloud
  if (failure.requestId && ["refused", "gone"].includes(failure.kind)) notice.append(el("p", { class: "request-id" }, `Request ${failure.requestId}`));
  if (failure.kind === "unauthorized") {
    notice.append(el("button", { type: "button", onclick: on.again }, "Enter a key"));
  } else {
    const button = el("button", { type: "button", onclick: failure.kind === "too_long" ? on.fresh : on.again }, action);
    notice.append(button);
    if (failure.retryAfterS) countDown(button, action, failure.retryAfterS);
  }
  return notice;
}

function countDown(button, action, retryAfterS) {
  const end = performance.now() + retryAfterS * 1000;
  const tick = () => {
    const left = Math.ceil((end - performance.now()) / 1000);
    button.disabled = left > 0;
    button.textContent = left > 0 ? `${action} in ${left} s` : action;
    if (left > 0) setTimeout(tick, 250);
    else if (button.isConnected) announce("You can try again now.");
  };
  tick();
}
