// What an answer took, in numbers. Only what was measured is shown: without the server's figures there are fewer.

import { el, seconds } from "./dom.js";

const percent = (share) => `${Math.round(share * 100)} %`;

/** A row of figures; while the answer is written it holds what is known so far. */
export function figures(reply) {
  const rows = [
    reply.firstS !== null && ["first word", seconds(reply.firstS)],
    ...reply.stages.map(([name, ms]) => [name, `${Math.round(ms)} ms`]),
    reply.tokensPerS && ["tokens/s", reply.tokensPerS.toFixed(0)],
    reply.stepLength && ["tokens a step", reply.stepLength.toFixed(1)],
    reply.rightShare !== null && ["guesses right", percent(reply.rightShare)],
    reply.finish && ["in all", seconds(reply.totalS)],
    reply.finish && reply.tokens && ["tokens", String(reply.tokens)],
  ].filter(Boolean);
  const pairs = rows.map(([name, value]) => el("div", {}, el("dt", {}, name), el("dd", {}, value)));
  return el("dl", { class: "figures" }, ...pairs);
}

/** Who guessed the accepted tokens, as one bar; the rest the model wrote itself. Null where the server does not say. */
export function sharesBar(reply) {
  if (!reply.metrics) return null;
  const guessed = reply.shares;
  const own = Math.max(0, 1 - guessed.reduce((sum, [, share]) => sum + share, 0));
  const parts = [...guessed, ["not guessed", own]].filter(([, share]) => share >= 0.005);
  const spoken = parts.map(([name, share]) => `${name} ${percent(share)}`).join(", ");
  const bar = el("div", { class: "bar", "aria-hidden": "true" });
  const legend = el("p", { class: "legend" }, "Tokens guessed right, by drafter: ");
  for (const [index, [name, share]] of parts.entries()) {
    const kind = name === "not guessed" ? "own" : `drafter-${(index % 4) + 1}`;
    const part = el("span", { class: kind });
    part.style.flexGrow = String(share);
    bar.append(part);
  }
  legend.append(spoken);
  return el("div", { class: "shares" }, bar, legend);
}
