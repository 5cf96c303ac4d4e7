// Suggested edits of a text: where they are while the text changes, and what they do to it. Offsets are UTF-16 units, as in
// the text field; the service gives them in both units.

/** The edits of a reply about `text`. One that does not fit the text is left out and counted as `lost`. */
export function editsOf(reply, text) {
  const found = reply.edits.map((edit) => ({
    start: edit.start_utf16, end: edit.end_utf16, original: edit.original, replacement: edit.replacement,
    kind: edit.kind, reason: edit.reason,
  }));
  const fitting = found.filter((edit) => text.slice(edit.start, edit.end) === edit.original);
  return { edits: fitting, lost: found.length - fitting.length };
}

/** The text with these edits applied, in one go. */
export function applied(text, edits) {
  let result = "";
  let at = 0;
  for (const edit of [...edits].sort((one, other) => one.start - other.start)) {
    result += text.slice(at, edit.start) + edit.replacement;
    at = edit.end;
  }
  return result + text.slice(at);
}

/** `edits` after one of them, or a set of them, has become part of the text. */
export function afterApplying(edits, done) {
  return edits.filter((edit) => !done.includes(edit)).map((edit) => {
    const shift = done.filter((one) => one.end <= edit.start && one !== edit)
      .reduce((sum, one) => sum + one.replacement.length - (one.end - one.start), 0);
    return { ...edit, start: edit.start + shift, end: edit.end + shift };
  });
}

/** `edits` after somebody typed: those that the change touches are gone, those behind it move. */
export function afterTyping(edits, before, after) {
  let start = 0;
  const shorter = Math.min(before.length, after.length);
  while (start < shorter && before[start] === after[start]) start++;
  let tail = 0;
  while (tail < shorter - start && before[before.length - 1 - tail] === after[after.length - 1 - tail]) tail++;
  const end = before.length - tail; // [start, end) of `before` was replaced
  const shift = after.length - before.length;
  return edits.filter((edit) => edit.end < start || edit.start > end).map((edit) =>
    edit.start > end ? { ...edit, start: edit.start + shift, end: edit.end + shift } : edit);
}

/** Names an edit by what stands around it, so that one that was rejected is known again. */
export function nameOf(edit, text) {
  const around = [text.slice(Math.max(0, edit.start - 16), edit.start), text.slice(edit.end, edit.end + 16)];
  return JSON.stringify([edit.original, edit.replacement, ...around]);
}
