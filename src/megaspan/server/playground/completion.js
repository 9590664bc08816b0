// Completion: one text that the model goes on with where it stands.

import { Generation } from "./generation.js";

const part = (id) => document.getElementById(id);

export class Completion {
  constructor(client, settings, meter, report) {
    Object.assign(this, { client, settings, meter, report });
    this.generation = new Generation(client, part("continue"), part("completion-stop"));
    this.text = part("prefix");
    this.prefix = null; // the text before the last continuation, while that stands unedited
    // The textarea lies over a copy of its text, which marks the continuation and gives the height.
    this.given = part("shadow").appendChild(new Text());
    this.marked = part("shadow").appendChild(document.createElement("mark")).appendChild(new Text());
    part("shadow").appendChild(new Text("\n\u200b")); // room for the line that is being begun
    part("continuation").addEventListener("submit", (event) => {
      event.preventDefault();
      this.run();
    });
    part("undo").addEventListener("click", () => this.undo());
    part("again").addEventListener("click", () => {
      this.undo();
      this.run();
    });
    this.text.addEventListener("input", () => this.#edited());
    this.text.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || !(event.ctrlKey || event.metaKey)) return;
      event.preventDefault();
      this.run();
    });
  }

  async run() {
    if (this.generation.running || !this.text.value) return;
    this.#restart(this.text.value);
    this.text.readOnly = true;
    let outcome = null;
    try {
      // Left out, the limit would be 16 tokens here; the server cuts it to the room that there is.
      const asked = { model: this.meter.model || undefined, max_tokens: this.meter.limit || undefined };
      const body = { prompt: this.prefix, ...asked, ...this.settings.sampling() };
      this.report(null);
      const running = this.generation.run("v1/completions", body, (choice) => this.#append(choice.text ?? ""));
      this.#refresh();
      outcome = await running;
    } catch (error) {
      this.report(error);
    }
    this.text.readOnly = false;
    part("completion-note").textContent = outcome ? outcome.note : "";
    this.#refresh();
    const usage = outcome?.usage;
    if (usage) this.meter.show(usage.total_tokens, usage.prompt_tokens_details?.cached_tokens);
    else this.measure();
  }

  undo() {
    if (this.generation.running || this.prefix === null) return;
    this.text.value = this.prefix;
    this.#edited();
  }

  stop() {
    this.generation.stop();
  }

  measure() {
    this.meter.estimate(this.text.value);
  }

  #restart(prefix) {
    this.prefix = prefix;
    this.given.data = prefix;
    this.marked.data = "";
    part("completion-note").textContent = "";
  }

  #append(text) {
    const page = part("shadow").closest(".page");
    const following = page.scrollHeight - page.scrollTop - page.clientHeight < 120;
    this.marked.appendData(text);
    if (text) this.meter.grow();
    this.text.value += text;
    if (following) requestAnimationFrame(() => (page.scrollTop = page.scrollHeight));
    return text !== "";
  }

  #edited() {
    this.#restart(this.text.value);
    this.prefix = null;
    this.#refresh();
    this.measure();
  }

  #refresh() {
    const { running } = this.generation;
    part("undo").disabled = part("again").disabled = running || this.prefix === null;
  }
}
