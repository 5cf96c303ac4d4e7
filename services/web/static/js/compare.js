// The same request once more without speculation, then with it: both times, and whether all texts are the same. Why a second
// time with it: by then the prompt has been read in either case, so that the two times differ by speculation alone.

import { el, announce, plural, seconds } from "./dom.js";
import { Characters, firstDifference } from "./points.js";

const CONTEXT = 24;

export class Comparison {
  #text = el("div", { class: "answer plain-text" });
  #verdict = el("p", { class: "verdict" });
  #times = el("div", { class: "times" });

  /** `original`: the answer that is there already. All runs have text, finish, totalS, tokensPerS, and basis: what the text was made
   *  of, or null where time ran out before all of it was there. */
  constructor(original) {
    this.original = original;
    this.element = el("section", { class: "comparison", "aria-label": "The same request without speculation" },
      el("h3", {}, "Without speculation, same seed"), this.#text, this.#times, this.#verdict);
    this.#verdict.textContent = "Running again without speculation …";
  }

  update(without) {
    this.#text.textContent = without.text;
  }

  ranWithout(without) {
    this.update(without);
    this.#verdict.textContent = "And once more with speculation, now that the prompt is read …";
  }

  finish(without, again) {
    this.#showTimes(without, again);
    if ([this.original, without, again].some((run) => run.basis === null))
      return this.fail({ message: "There was not enough time for all of the text in every run." });
    if (without.basis !== this.original.basis || again.basis !== this.original.basis)
      return this.fail({ message: "Other passages were found: the documents have changed, or not all of them could be searched." });
    const fault = this.#differs("without speculation", without) ?? this.#differs("with it, a second time", again);
    this.element.classList.add(fault ? "differs" : "same");
    this.#verdict.className = `verdict ${fault ? "broken" : "same"}`;
    if (fault) this.#verdict.setAttribute("role", "alert");
    this.#verdict.replaceChildren(...(fault ?? this.#equal(without, again)));
    if (!fault) announce(this.#verdict.textContent);
  }

  fail(failure) {
    this.element.classList.add("failed");
    this.#verdict.textContent = `Not compared. ${failure.message}`;
  }

  #equal(without, again) {
    const length = new Characters(without.text).length;
    const ratio = (without.totalS / again.totalS).toFixed(1);
    const fast = el("strong", {}, `${ratio} times as fast`);
    return [`The same text, all ${plural(length, "character")}. `, fast, " with speculation, the prompt already read in both."];
  }

  /** What to say where a run's text is not the original's; null: it is. */
  #differs(name, run) {
    const place = firstDifference(this.original.text, run.text);
    if (place < 0 && this.original.finish === run.finish) return null;
    if (place < 0) return [`The same text, but ${name} it ended for another reason. This is a fault; please report it.`];
    const pick = (text) => el("q", {}, [...text].slice(place, place + CONTEXT).join(""));
    return [
      el("strong", {}, `The texts differ from character ${place + 1} on. `), "The answer: ", pick(this.original.text),
      `; ${name}: `, pick(run.text), ". This is a fault; please report it.",
    ];
  }

  #showTimes(without, again) {
    const longest = Math.max(without.totalS, again.totalS);
    const row = (name, run) => {
      const bar = el("span", { class: "time-bar" });
      bar.style.setProperty("--part", String(run.totalS / longest));
      const speed = run.tokensPerS ? `${run.tokensPerS.toFixed(0)} tokens/s` : "";
      return el("div", { class: "time" }, el("span", { class: "name" }, name), el("span", { class: "track" }, bar),
        el("span", { class: "value" }, seconds(run.totalS)), el("span", { class: "speed" }, speed));
    };
    this.#times.replaceChildren(row("with", again), row("without", without));
  }
}
