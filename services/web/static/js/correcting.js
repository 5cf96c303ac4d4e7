// A text's corrections from the service, and the same once more without speculation.

import { call } from "./api.js";

const MAX_SEED = 2 ** 32;

/** A correction with what it took; in the shape in which answers are compared. Throws: Failure. */
export async function corrected(text, seed, speculation) {
  const begin = performance.now();
  const reply = await call("POST", "/v1/grammar", { text, seed, speculation });
  const totalS = (performance.now() - begin) / 1000;
  const counted = reply.statistics ?? {};
  return {
    reply, totalS, text: reply.corrected, finish: "stop", usage: null, basis: reply.unfinished?.length ? null : text,
    tokensPerS: counted.num_output_tokens ? counted.num_output_tokens / totalS : 0,
    stepLength: counted.num_steps ? counted.num_output_tokens / counted.num_steps : 0,
  };
}

export const drawSeed = () => crypto.getRandomValues(new Uint32Array(1))[0] % MAX_SEED;
