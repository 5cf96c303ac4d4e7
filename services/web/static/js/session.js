// The conversations of this tab. They live in its session storage only: closing the tab forgets them, the server keeps none.

const PLACE = "ragspec.conversations";

export class Session {
  conversations = [];
  current = null;

  constructor() {
    try {
      const kept = JSON.parse(sessionStorage.getItem(PLACE) ?? "[]");
      this.conversations = kept.filter((one) => one.id && Array.isArray(one.turns));
    } catch {
      this.conversations = [];
    }
    this.current = this.conversations[0] ?? this.begin();
  }

  /** A new conversation, or the one that is still empty. */
  begin() {
    const empty = this.conversations.find((one) => one.turns.length === 0);
    if (!empty) this.conversations.unshift({ id: crypto.randomUUID?.() ?? String(Math.random()), turns: [] });
    this.current = empty ?? this.conversations[0];
    return this.current;
  }

  open(id) {
    this.current = this.conversations.find((one) => one.id === id) ?? this.current;
  }

  forget(id) {
    this.conversations = this.conversations.filter((one) => one.id !== id);
    if (this.current.id === id) this.current = this.conversations[0] ?? this.begin();
    this.save();
  }

  /** Where the storage is full, the oldest conversation is not kept. */
  save() {
    const kept = this.conversations.filter((one) => one.turns.length);
    while (kept.length) {
      try {
        sessionStorage.setItem(PLACE, JSON.stringify(kept));
        return;
      } catch {
        kept.pop();
      }
    }
    sessionStorage.removeItem(PLACE);
  }
}

export const titleOf = (conversation) => conversation.turns[0]?.question ?? "New conversation";

/** What the server is sent of the turns so far: answers as far as they were written, also those that were stopped. */
export function historyOf(turns) {
  return turns.filter((turn) => turn.reply?.text && !turn.failed).flatMap((turn) => [
    { role: "user", content: turn.question },
    { role: "assistant", content: turn.reply.text.replaceAll("\0", "\uFFFD") }, // the service refuses NUL
  ]);
}
