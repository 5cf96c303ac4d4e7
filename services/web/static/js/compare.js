// The same request once more without speculation: both times, and whether the texts are the same.

import { el, announce, plural, seconds } from "./dom.js";
import { Characters, firstDifference } from "./points.js";

const CONTEXT = 24;

export class Comparison {
  #text = el("div", { class: "answer plain-text" });
  #verdict = el("p", { class: "verdict" });
  #times = el("div", { class: "times" });

  constructor(withReply) {
    this.withReply = withReply;
    this.element = el("section", { class: "comparison", "aria-label": "The same request without speculation" },
      el("h3", {}, "Without speculation, same seed"), this.#text, this.#times, this.#verdict);
    this.#verdict.textContent = "Running again without speculation …";
  }

  update(reply) {
    this.#text.textContent = reply.text;
    this.#showTimes(reply);
  }

  finish(reply) {
    this.update(reply);
    const place = firstDifference(this.withReply.text, reply.text);
    const same = place < 0 && this.withReply.finish === reply.finish;
    this.element.classList.add(same ? "same" : "differs");
    const message = same ? this.#equal(reply) : this.#different(reply, place);
    this.#verdict.replaceChildren(...message);
    this.#verdict.className = `verdict ${same ? "same" : "broken"}`;
    if (same) announce(this.#verdict.textContent);
    else this.#verdict.setAttribute("role", "alert");
  }

  fail(failure) {
    this.element.classList.add("failed");
    this.#verdict.textContent = `Not compared. ${failure.message}`;
  }

  #equal(reply) {
    const length = new Characters(reply.text).length;
    const parts = [`The same text, all ${plural(length, "character")}. `];
    const ratio = reply.totalS / this.withReply.totalS;
    parts.push(el("strong", {}, `${ratio.toFixed(1)} times as fast`), " with speculation.");
    if (reply.usage?.prompt_tokens_details?.cached_tokens) parts.push(" The second run found the prompt already read.");
    return parts;
  }

  #different(reply, place) {
    if (place < 0) return ["The texts are the same, but one was cut off and the other was not."];
    const around = (text) => new Characters(text);
    const pick = (text) => around(text).slice(Math.min(place, around(text).length), Math.min(place + CONTEXT, around(text).length));
    return [
      el("strong", {}, `The texts differ from character ${place + 1} on. `),
      "With speculation: ", el("q", {}, pick(this.withReply.text)), "; without: ", el("q", {}, pick(reply.text)), ". This is a fault; please report it.",
    ];
  }

  #showTimes(reply) {
    const longest = Math.max(this.withReply.totalS, reply.totalS);
    const row = (name, one) => {
      const bar = el("span", { class: "time-bar" });
      bar.style.setProperty("--part", String(one.totalS / longest));
      const speed = one.tokensPerS ? `${one.tokensPerS.toFixed(0)} tokens/s` : "";
      return el("div", { class: "time" }, el("span", { class: "name" }, name), el("span", { class: "track" }, bar),
        el("span", { class: "value" }, seconds(one.totalS)), el("span", { class: "speed" }, speed));
    };
    this.#times.replaceChildren(row("with", this.withReply), row("without", reply));
  }
}
