// One streamed answer as it grows: text, sources, quotes and figures. Knows nothing of the page.

import { stream } from "./api.js";

export class Reply {
  text = "";
  question = ""; // what was looked for: a follow-up made to stand alone
  passages = [];
  citations = [];
  sentences = []; // what the passages say of each sentence: quoted, supported, unsupported
  unknownQuotations = []; // spans inside quotation marks that are in no passage
  finish = ""; // why it ended: stop, length; "" while it runs
  usage = null;
  metrics = null; // the server's own figures, for keys that may see them
  live = null; // {num_output_tokens, num_steps} so far, for the same
  firstS = null; // seconds until the first text, measured here
  totalS = 0;
  droppedPassages = 0;
  droppedTurns = 0;
  missing = [];
  kept = null; // whether the server keeps this turn; null: it has not said so
  searched = true; // whether passages were looked for; of a stored answer it is not known
  found = ""; // what the quotes are to the question: "found in", "closest passage"
  #begin = performance.now();

  /** Asks and gives itself at every piece. Throws: Failure. */
  static async *of(body, signal) {
    const reply = new Reply();
    for await (const chunk of stream("/v1/chat/completions", body, signal)) {
      reply.#take(chunk);
      yield reply;
    }
  }

  /** An answer that the server kept, with the sources that it still has of it. */
  static stored(text, sources) {
    const reply = Object.assign(new Reply(), { text, finish: "stop", kept: true, searched: false });
    reply.#takeSources(sources);
    return reply;
  }

  /** What the answer was made of, to compare with another's. */
  get basis() {
    return JSON.stringify(this.passages.map((passage) => [passage.document_id, passage.text]));
  }

  get tokens() {
    return this.usage?.completion_tokens ?? this.live?.num_output_tokens ?? 0;
  }

  get stepLength() {
    const measured = this.metrics?.speculative_decoding?.mean_acceptance_length;
    if (measured) return measured;
    return this.live?.num_steps ? this.live.num_output_tokens / this.live.num_steps : 0;
  }

  /** Of all guessed tokens, those that were right; null where nothing was guessed or the server does not say. */
  get rightShare() {
    const counted = this.metrics?.speculative_decoding;
    return counted?.num_draft_tokens ? counted.num_accepted_draft_tokens / counted.num_draft_tokens : null;
  }

  /** Of decoding where the server says so, else as it arrives here. */
  get tokensPerS() {
    if (this.metrics?.tokens_per_second) return this.metrics.tokens_per_second;
    const writing = this.totalS - (this.firstS ?? this.totalS);
    return writing > 0 && this.tokens > 1 ? (this.tokens - 1) / writing : 0;
  }

  /** Milliseconds of the stages before the first token, where the server says them: [["encode", 12.5], ...]. */
  get stages() {
    const fields = { encode: "encode", search: "search", queue: "queue", read: "prefill" };
    const times = Object.entries(fields).map(([name, field]) => [name, this.metrics?.[`${field}_time_ms`] ?? 0]);
    return times.filter(([, ms]) => ms >= 0.5);
  }

  /** The share of the answer's tokens that each drafter guessed: [["copy", 0.71], ...], largest first. */
  get shares() {
    const drafters = Object.entries(this.metrics?.drafters ?? {});
    if (!this.tokens) return [];
    return drafters.filter(([, count]) => count > 0).map(([name, count]) => [name, count / this.tokens])
      .sort((one, other) => other[1] - one[1]);
  }

  #take(chunk) {
    this.totalS = (performance.now() - this.#begin) / 1000;
    const choice = chunk.choices?.[0];
    const piece = choice?.delta?.content ?? "";
    if (piece && this.firstS === null) this.firstS = this.totalS;
    this.text += piece;
    if (choice?.finish_reason) this.finish = choice.finish_reason;
    if (chunk.ragspec) this.#takeSources(chunk.ragspec);
    if (chunk.usage) this.usage = chunk.usage;
    if (chunk.metrics?.num_steps !== undefined) this.live = chunk.metrics;
    else if (chunk.metrics) this.metrics = chunk.metrics;
  }

  #takeSources(said) {
    this.question = said.question ?? this.question;
    this.passages = said.passages ?? this.passages;
    this.citations = said.citations ?? this.citations;
    this.sentences = said.sentences ?? this.sentences;
    this.unknownQuotations = said.unknown_quotations ?? this.unknownQuotations;
    this.droppedPassages = said.dropped_passages ?? this.droppedPassages;
    this.droppedTurns = said.dropped_turns ?? this.droppedTurns;
    this.missing = said.missing_segments ?? this.missing;
    this.found = said.found ?? this.found;
    this.kept = said.kept ?? this.kept;
    this.searched = said.searched ?? this.searched;
  }
}
