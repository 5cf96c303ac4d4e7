// The service counts characters (code points); strings here count UTF-16 units, of which an emoji has two.

export class Characters {
  #text;
  #units = null; // the unit at which each character starts, and the end; null where both counts agree

  constructor(text) {
    this.#text = text;
    if (!/[\ud800-\udbff]/.test(text)) return;
    this.#units = [];
    let unit = 0;
    for (const character of text) {
      this.#units.push(unit);
      unit += character.length;
    }
    this.#units.push(unit);
  }

  get length() {
    return this.#units ? this.#units.length - 1 : this.#text.length;
  }

  holds(start, end) {
    return Number.isInteger(start) && Number.isInteger(end) && 0 <= start && start < end && end <= this.length;
  }

  slice(start, end = this.length) {
    const at = (place) => (this.#units ? this.#units[place] : place);
    return this.#text.slice(at(start), at(end));
  }
}

/** The first character in which two texts differ; -1: they are equal. */
export function firstDifference(one, other) {
  if (one === other) return -1;
  const left = [...one];
  const right = [...other];
  const place = left.findIndex((character, index) => character !== right[index]);
  return place < 0 ? left.length : place;
}
