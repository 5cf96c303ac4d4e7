// The page of one source: the document as the server draws it, with a quote marked, in a frame that runs no scripts.

import { Failure, page } from "./api.js";
import { byId } from "./dom.js";
import { begin } from "./key.js";

const SAID = { absent: "There is no such document, or it is not for this key." };

async function show() {
  const frame = byId("source");
  try {
    const markup = await page(`/v1/documents/view${location.search}`);
    const placed = markup.replaceAll('href="/web/', `href="${location.origin}/web/`); // a blob has no address of its own
    frame.src = `${URL.createObjectURL(new Blob([placed], { type: "text/html;charset=utf-8" }))}#quote`;
    frame.hidden = false;
    byId("said").hidden = true;
  } catch (cause) {
    if (!(cause instanceof Failure)) throw cause;
    frame.hidden = true;
    byId("said").hidden = false;
    byId("said").textContent = SAID[cause.kind] ?? cause.message;
    if (cause.kind === "unauthorized") throw cause;
  }
}

begin(show);
