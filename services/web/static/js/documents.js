// The dialog in which a collection of documents is chosen, filled and emptied.

import { Failure, all, call } from "./api.js";
import { byId, el, plural } from "./dom.js";

const CHOSEN = "ragspec.collection";
const [POLL_MS, LONGEST_POLL_MS] = [700, 5000];
const STORES = "/v1/vector_stores";
const OWN = "My documents"; // the collection of what is added while none is chosen

export class Documents {
  chosen = sessionStorage.getItem(CHOSEN) ?? ""; // a store's id; "": everything that this key may read
  #stores = [];
  #dialog = byId("documents");
  #list = byId("collections");
  #files = byId("files");
  #said = byId("documents-said");
  #onChosen;
  #onChanged;

  /** `onChosen(name)`: another collection is to answer. `onChanged()`: there are other documents. */
  constructor(onChosen, onChanged) {
    this.#onChosen = onChosen;
    this.#onChanged = onChanged;
    byId("documents-open").addEventListener("click", () => this.#open());
    byId("documents-close").addEventListener("click", () => this.#dialog.close());
    byId("new-collection").addEventListener("submit", (event) => this.#doing(event, () => this.#create()));
    byId("upload").addEventListener("change", (event) => {
      const files = [...event.target.files];
      event.target.value = ""; // the same file can be chosen again after a failure
      this.#doing(event, () => this.#uploadAll(files));
    });
    this.#takeDrops();
  }

  /** Files that are dropped anywhere on the page are added. */
  #takeDrops() {
    const place = byId("drop");
    const hasFiles = (event) => event.dataTransfer?.types.includes("Files") && !byId("documents-open").hidden;
    document.addEventListener("dragover", (event) => {
      if (!hasFiles(event)) return;
      event.preventDefault();
      place.hidden = false;
    });
    document.addEventListener("dragleave", (event) => {
      if (!event.relatedTarget) place.hidden = true;
    });
    document.addEventListener("drop", async (event) => {
      place.hidden = true;
      if (!hasFiles(event)) return;
      event.preventDefault();
      const files = [...event.dataTransfer.files];
      if (!this.#dialog.open) await this.#open();
      await this.#doing(null, () => this.#uploadAll(files));
    });
  }

  /** Which collections there are; where the server keeps none, the button to choose one is hidden. What was chosen stays so
   *  where they cannot be listed: an answer from more than that would be another one. */
  async load() {
    let kind = "";
    try {
      this.#stores = await all(STORES);
    } catch (failure) {
      [this.#stores, kind] = [[], failure.kind];
    }
    byId("documents-open").hidden = kind === "absent";
    const isThere = this.#stores.some((store) => store.id === this.chosen) || !["", "absent"].includes(kind);
    this.#choose(isThere ? this.chosen : "");
  }

  #choose(id) {
    this.chosen = id;
    sessionStorage.setItem(CHOSEN, id);
    const store = this.#stores.find((one) => one.id === id);
    this.#onChosen(store?.name || (store ? "Unnamed" : id ? "The collection chosen before" : "All documents"));
    this.#showStores();
  }

  async #open() {
    this.#said.textContent = "";
    this.#dialog.showModal();
    await this.#doing(null, () => this.#refresh());
  }

  async #refresh() {
    this.#stores = await all(STORES);
    this.#choose(this.chosen);
    await this.#showFiles();
  }

  #showStores() {
    const option = (id, name, detail) => {
      const input = el("input", { type: "radio", name: "collection", value: id });
      input.checked = id === this.chosen;
      input.addEventListener("change", () => this.#doing(null, async () => (this.#choose(id), await this.#showFiles())));
      return el("label", { class: "choice" }, input, el("span", {}, name), el("span", { class: "detail" }, detail));
    };
    const stores = this.#stores.map((store) =>
      option(store.id, store.name || "Unnamed", plural(store.file_counts?.total ?? 0, "document")));
    const hadFocus = this.#list.contains(document.activeElement);
    this.#list.replaceChildren(option("", "All documents", "everything this key may read"), ...stores);
    if (hadFocus) this.#list.querySelector(":checked")?.focus();
    byId("files-title").textContent = this.chosen ? "In this collection" : `New documents go to “${OWN}”`;
  }

  async #showFiles() {
    if (!this.chosen) return this.#files.replaceChildren();
    const store = this.chosen;
    const [held, known] = await Promise.all([
      all(`${STORES}/${encodeURIComponent(store)}/files`), all("/v1/files", 10_000)]);
    if (store !== this.chosen) return;
    const names = new Map(known.map((file) => [file.id, file.filename]));
    const rows = held.map((file) => this.#rowOf(file, names.get(file.id) ?? file.id));
    this.#files.replaceChildren(...(rows.length ? rows : [el("li", { class: "none" }, "No documents here yet.")]));
  }

  #rowOf(file, name) {
    const path = `${STORES}/${encodeURIComponent(this.chosen)}/files/${encodeURIComponent(file.id)}`;
    const remove = el("button", { type: "button", class: "quiet", "aria-label": `Remove ${name}` }, "Remove");
    remove.addEventListener("click", () => this.#doing(null, async () => {
      await call("DELETE", path);
      await this.#refresh();
      this.#say(`${name} was removed from this collection. The server still has the file.`);
      this.#said.append(" ", this.#deletingOf(file, name));
      this.#dialog.querySelector("h2").focus();
    }));
    const state = { completed: "", in_progress: "being read …", failed: "could not be read" }[file.status] ?? file.status;
    const reason = file.status === "failed" && file.last_error?.message ? `: ${file.last_error.message}` : "";
    return el("li", {}, el("span", { class: "name" }, name), el("span", { class: "detail" }, state + reason), remove);
  }

  #deletingOf(file, name) {
    const path = `/v1/files/${encodeURIComponent(file.id)}`;
    return el("button", { type: "button", onclick: () => this.#doing(null, async () => {
      await call("DELETE", path);
      await this.#refresh();
      this.#say(`${name} was deleted.`);
      this.#dialog.querySelector("h2").focus();
    }) }, "Delete the file, too");
  }

  async #create() {
    const name = byId("collection-name");
    const store = await call("POST", STORES, { name: name.value.trim() });
    name.value = "";
    await this.#refresh();
    this.#choose(store.id);
    await this.#showFiles();
    this.#say(`Collection ${store.name} is ready for documents.`);
    byId("upload").focus();
  }

  async #uploadAll(files) {
    const store = this.chosen || (this.#stores.find((one) => one.name === OWN) ?? (await call("POST", STORES, { name: OWN }))).id;
    try {
      for (const [index, file] of files.entries()) {
        this.#say(`Reading ${file.name} (${index + 1} of ${files.length}) …`);
        const form = new FormData();
        form.append("purpose", "assistants");
        form.append("file", file);
        const kept = await this.#patiently("POST", "/v1/files", form);
        const held = await this.#patiently("POST", `${STORES}/${encodeURIComponent(store)}/files`, { file_id: kept.id });
        await this.#untilRead(store, held, file.name);
      }
    } finally {
      await this.#refresh().then(this.#onChanged).catch(() => undefined); // what went wrong before is what is said
    }
    this.#say(`${plural(files.length, "document")} added.`);
  }

  async #untilRead(store, file, name) {
    for (let pauseMs = POLL_MS; file.status === "in_progress"; pauseMs = Math.min(1.5 * pauseMs, LONGEST_POLL_MS)) {
      await pause(pauseMs);
      file = await this.#patiently("GET", `${STORES}/${encodeURIComponent(store)}/files/${encodeURIComponent(file.id)}`);
    }
    if (file.status !== "completed") throw new Failure("refused", `${name}: ${file.last_error?.message ?? "could not be read."}`);
  }

  /** As `call`; where the key has asked too much, it waits, as long as the dialog is open: the files after this one are wanted, too. */
  async #patiently(method, path, body = undefined) {
    for (;;) {
      try {
        return await call(method, path, body);
      } catch (failure) {
        if (failure.kind !== "busy" || !this.#dialog.open) throw failure;
        const waitS = Math.max(1, failure.retryAfterS);
        this.#say(`${failure.message} It goes on in ${waitS} s.`);
        await pause(1000 * waitS);
      }
    }
  }

  /** One thing at a time, its failure said in the dialog. */
  async #doing(event, work) {
    event?.preventDefault();
    this.#dialog.setAttribute("aria-busy", "true");
    try {
      await work();
    } catch (cause) {
      if (!(cause instanceof Failure)) throw cause;
      this.#say(cause.message, true);
    } finally {
      this.#dialog.removeAttribute("aria-busy");
    }
  }

  #say(text, wrong = false) {
    this.#said.textContent = text;
    this.#said.classList.toggle("wrong", wrong);
  }
}

const pause = (ms) => new Promise((resolve) => setTimeout(resolve, ms));
