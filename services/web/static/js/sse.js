// Server-sent events from a stream of bytes. A character, a line end or an event may be cut anywhere between two reads.

/** The complete lines of a byte stream; \n, \r\n and \r each end one. A line that nothing ends is not given. */
async function* lines(stream) {
  const reader = stream.getReader();
  const decoder = new TextDecoder(); // keeps half a character until the rest comes, and drops a byte order mark
  let rest = "";
  let afterReturn = false; // the \n of a \r\n may come with the next read
  try {
    for (;;) {
      const { value, done } = await reader.read();
      let text = done ? decoder.decode() : decoder.decode(value, { stream: true });
      if (afterReturn && text !== "") {
        if (text.startsWith("\n")) text = text.slice(1);
        afterReturn = false;
      }
      if (text.endsWith("\r")) afterReturn = true;
      const parts = (rest + text).split(/\r\n|\n|\r/);
      rest = parts.pop();
      yield* parts;
      if (done) return;
    }
  } finally {
    await reader.cancel().catch(() => undefined);
  }
}

/** The data of each event, as text. An event that its blank line does not end was cut off, and is not given. */
export async function* eventData(stream) {
  let data = [];
  for await (const line of lines(stream)) {
    if (line === "") {
      if (data.length) yield data.join("\n");
      data = [];
    } else if (line === "data" || line.startsWith("data:")) {
      data.push(line.slice(5).replace(/^ /, ""));
    }
  }
}
