// The text field with its underlined edits, and the history of both.

import { byId, el } from "./dom.js";
import { afterTyping } from "./edits.js";

const PAUSE_MS = 800;
const MAX_STEPS = 200;

export class Editor {
  edits = [];
  #field = byId("text");
  #marks = byId("marks");
  #past = [];
  #future = [];
  #shown = { text: "", edits: [] };
  #typedAt = 0;
  #active = null;
  #on;

  /** `on`: {changed(), pointed(edit or null)}. */
  constructor(on) {
    this.#on = on;
    this.#field.addEventListener("input", () => this.#typed());
    this.#field.addEventListener("beforeinput", (event) => this.#history(event));
    this.#field.addEventListener("keydown", (event) => this.#keys(event));
    this.#field.addEventListener("scroll", () => (this.#marks.scrollTop = this.#field.scrollTop));
    for (const name of ["click", "keyup"]) this.#field.addEventListener(name, () => this.#pointed());
    new ResizeObserver(() => this.#draw()).observe(this.#field);
  }

  get text() {
    return this.#field.value;
  }

  get canUndo() {
    return this.#past.length > 0;
  }

  get canRedo() {
    return this.#future.length > 0;
  }

  /** A step that can be undone: another text, other edits, or both. */
  set(text, edits) {
    this.#remember();
    this.#show({ text, edits });
  }

  undo() {
    this.#travel(this.#past, this.#future);
  }

  redo() {
    this.#travel(this.#future, this.#past);
  }

  /** Marks this edit more strongly, and brings it into view. */
  point(edit) {
    this.#active = edit;
    this.#draw();
    const mark = this.#marks.querySelector(".active");
    if (!mark) return;
    const top = mark.offsetTop - this.#field.clientHeight / 3;
    const outside = mark.offsetTop < this.#field.scrollTop || mark.offsetTop > this.#field.scrollTop + this.#field.clientHeight - 30;
    if (outside) this.#field.scrollTop = Math.max(0, top);
  }

  focus(place) {
    this.#field.focus();
    if (place !== undefined) this.#field.setSelectionRange(place, place);
  }

  #typed() {
    const now = performance.now();
    if (now - this.#typedAt > PAUSE_MS || this.#future.length) this.#remember();
    this.#typedAt = now;
    this.#show({ text: this.text, edits: afterTyping(this.edits, this.#shown.text, this.text) });
  }

  #remember() {
    this.#past.push(this.#shown);
    if (this.#past.length > MAX_STEPS) this.#past.shift();
    this.#future = [];
    this.#typedAt = 0;
  }

  #travel(from, to) {
    const state = from.pop();
    if (!state) return;
    to.push(this.#shown);
    this.#typedAt = 0;
    this.#show(state);
  }

  #show(state) {
    this.#shown = state;
    this.edits = state.edits;
    if (this.#field.value !== state.text) {
      const place = Math.min(this.#field.selectionStart, state.text.length);
      this.#field.value = state.text;
      this.#field.setSelectionRange(place, place);
    }
    this.#active = null;
    this.#draw();
    this.#on.changed();
  }

  /** The same text once more behind the field, with the edits underlined in it. */
  #draw() {
    const nodes = [];
    let at = 0;
    for (const edit of [...this.edits].sort((one, other) => one.start - other.start)) {
      const kind = `edit ${edit.start === edit.end ? "gap" : ""} ${edit === this.#active ? "active" : ""}`;
      nodes.push(this.text.slice(at, edit.start), el("mark", { class: kind }, this.text.slice(edit.start, edit.end)));
      at = edit.end;
    }
    this.#marks.replaceChildren(...nodes, this.text.slice(at), "\n ");
    this.#marks.style.width = `${this.#field.clientWidth}px`; // as narrow as the text beside a scroll bar
    this.#marks.scrollTop = this.#field.scrollTop;
  }

  #pointed() {
    const place = this.#field.selectionStart;
    this.#on.pointed(this.edits.find((edit) => edit.start <= place && place <= edit.end) ?? null);
  }

  #history(event) {
    if (event.inputType !== "historyUndo" && event.inputType !== "historyRedo") return;
    event.preventDefault();
    if (event.inputType === "historyUndo") this.undo();
    else this.redo();
  }

  /** The field's own history does not know of edits, so it is never asked. */
  #keys(event) {
    const key = event.key.toLowerCase();
    if (!(event.ctrlKey || event.metaKey) || event.altKey || (key !== "z" && key !== "y")) return;
    event.preventDefault();
    if (key === "y" || event.shiftKey) this.redo();
    else this.undo();
  }
}
