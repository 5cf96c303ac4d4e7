// The list of conversations: beside the page where there is room, else a drawer that opens over it.

const wide = matchMedia("(min-width: 64rem)");

export class Drawer {
  #side;
  #button;

  constructor(side, button) {
    this.#side = side;
    this.#button = button;
    button.addEventListener("click", () => (this.isOpen ? this.close() : this.open()));
    side.addEventListener("keydown", (event) => {
      if (event.key !== "Escape" || wide.matches) return;
      event.preventDefault();
      this.close();
      this.#button.focus();
    });
    document.addEventListener("click", (event) => {
      if (this.isOpen && !side.contains(event.target) && !button.contains(event.target)) this.close();
    });
    wide.addEventListener("change", () => this.close());
    this.close();
  }

  get isOpen() {
    return this.#button.getAttribute("aria-expanded") === "true";
  }

  open() {
    this.#set(true);
    this.#side.querySelector("button").focus();
  }

  close() {
    this.#set(false);
  }

  /** Closed, it is out of reach of Tab too. */
  #set(isOpen) {
    this.#button.setAttribute("aria-expanded", String(isOpen));
    this.#side.classList.toggle("open", isOpen);
    this.#side.inert = !isOpen && !wide.matches;
  }
}
