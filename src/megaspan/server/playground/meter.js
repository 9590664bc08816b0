// How much of the model's context the visible text takes.

const part = (id) => document.getElementById(id);
const PAUSE = 300; // milliseconds without a key before the text is counted

export class Meter {
  #timer = null;
  #counting = null;

  constructor(client) {
    this.client = client;
    this.limit = 0; // tokens; 0 while unknown
    this.model = "";
    this.used = this.cached = 0; // as counted
    this.grown = 0; // streamed since then
  }

  /** Ask what is served: its name and its context. */
  async connect() {
    const { data } = await this.client.get("v1/models");
    this.model = data[0].id;
    this.limit = data[0].max_model_len ?? 0;
    return this.model;
  }

  show(used, cached = 0) {
    this.#cancel();
    this.#counted(used, cached);
  }

  /** Another piece of a reply has come, which is a token or so; the usage at its end says exactly. */
  grow() {
    this.grown += 1;
    if (this.#timer === null) this.#draw(); // else what it grows from is being counted
  }

  #counted(used, cached) {
    this.#timer = null;
    Object.assign(this, { used, cached });
    this.#draw();
  }

  #draw() {
    const { cached } = this;
    const used = this.used + this.grown;
    const whole = Math.max(this.limit, used, 1);
    part("meter-cached").style.width = `${(100 * cached) / whole}%`;
    part("meter-used").style.width = `${(100 * (used - cached)) / whole}%`;
    part("meter-bar").setAttribute("aria-valuemax", whole);
    part("meter-bar").setAttribute("aria-valuenow", used);
    const count = (tokens) => tokens.toLocaleString("en");
    const of = this.limit ? ` of ${count(this.limit)}` : "";
    part("meter-text").textContent = `${count(used)}${of} tokens${cached ? `, ${count(cached)} cached` : ""}`;
  }

  /** Show `known` tokens and those of `text`, which is counted once nothing has changed for a moment. */
  estimate(text, known = 0) {
    if (!text) return this.show(known);
    this.#cancel();
    this.#timer = setTimeout(async () => {
      this.#counting = new AbortController();
      try {
        const { count } = await this.client.post("tokenize", { text }, this.#counting.signal);
        this.#counted(known + count, 0);
      } catch (error) {
        // A figure that could not be had stays as it is; what is wrong shows when the text is sent.
        if (error.name !== "AbortError") this.#timer = null;
      }
    }, PAUSE);
  }

  /** What is being counted, or shown next, holds all that has been streamed. */
  #cancel() {
    this.grown = 0;
    clearTimeout(this.#timer);
    this.#timer = null;
    this.#counting?.abort();
    this.#counting = null;
  }
}
