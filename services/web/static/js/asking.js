// A turn from its question to its answer, and once more without speculation.

import { Failure } from "./api.js";
import { Comparison } from "./compare.js";
import { byId } from "./dom.js";
import { Reply } from "./reply.js";
import { historyOf } from "./conversations.js";

const MAX_SEED = 2 ** 32;

/** The request of the last of `turns`; its seed is drawn here, so that it can be asked again word for word. */
export function requestOf(turns, model, conversation, collection) {
  const turn = turns.at(-1);
  return {
    model, conversation,
    messages: [...historyOf(turns.slice(0, -1)), { role: "user", content: turn.question }],
    seed: crypto.getRandomValues(new Uint32Array(1))[0] % MAX_SEED,
    temperature: number("temperature"),
    max_completion_tokens: number("max-tokens"),
    retrieval: { num_passages: number("num-passages"), ...(collection ? { vector_store_ids: [collection] } : {}) },
    speculation: true,
    ...(byId("telemetry").checked ? { metrics: true } : {}),
    stream: true,
    stream_options: { include_usage: true },
  };
}

/** What a field says, brought into its range, which it then shows. */
function number(id) {
  const field = byId(id);
  const given = field.value === "" ? Number(field.defaultValue) : Number(field.value);
  field.value = Math.min(Math.max(given, Number(field.min)), Number(field.max));
  return Number(field.value);
}

/** Streams the answer of `view.turn` to what `request()` gives. Throws nothing: a failure is shown where the answer would be. */
export async function ask(view, signal, request) {
  const { turn } = view;
  Object.assign(turn, { reply: new Reply(), failed: false, stopped: false });
  view.begin();
  try {
    turn.request = await request();
    for await (const reply of Reply.of(turn.request, signal)) {
      turn.reply = reply;
      view.update(reply);
    }
    view.finish();
    return null;
  } catch (cause) {
    const failure = failureOf(cause);
    turn.stopped = failure.kind === "stopped";
    turn.failed = !turn.stopped;
    if (turn.stopped) view.finish();
    else view.fail(failure);
    return failure;
  }
}

/** The same request without speculation beside the answer, and once more with it; neither is kept. The messages hold all earlier
 *  turns; the stored conversation would add this one. */
export async function compare(view, signal) {
  const comparison = new Comparison(view.turn.reply);
  const request = { ...view.turn.request, conversation: undefined, store: false };
  view.compareWith(comparison);
  try {
    const without = await whole({ ...request, speculation: false }, signal, (reply) => comparison.update(reply));
    comparison.ranWithout(without);
    comparison.finish(without, await whole(request, signal, () => undefined));
  } catch (cause) {
    comparison.fail(failureOf(cause));
  }
}

async function whole(request, signal, onPiece) {
  let last = null;
  for await (const reply of Reply.of(request, signal)) {
    last = reply;
    onPiece(reply);
  }
  if (!last) throw new Failure("refused", "The answer of the server is empty.");
  return last;
}

function failureOf(cause) {
  if (cause instanceof Failure) return cause;
  console.error(cause);
  return new Failure("refused", "This page could not read the answer of the server.");
}
