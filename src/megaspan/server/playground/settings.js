// What the settings form says, as fields of a request. Kept in sessionStorage: gone when the tab closes.

import { ServerError } from "./client.js";

const STORE = "megaspan.settings";

export class Settings {
  constructor(form) {
    this.form = form;
    this.#restore();
    form.addEventListener("input", () => this.#keep());
    form.addEventListener("submit", (event) => event.preventDefault());
  }

  get apiKey() {
    return this.#text("api_key").trim();
  }

  get system() {
    return this.#text("system");
  }

  set reasoningEffort(effort) {
    this.form.elements.reasoning_effort.value = effort;
    this.#keep();
  }

  /** Fields that both modes send. Empty ones are left to the server. */
  sampling() {
    const fields = {};
    for (const name of ["temperature", "top_p", "max_tokens", "seed"]) {
      const input = this.form.elements[name];
      if (!input.checkValidity()) throw new ServerError(`${input.labels[0].textContent.trim()}: ${input.validationMessage}`);
      if (input.value !== "") fields[name] = Number(input.value);
    }
    const stop = this.#text("stop").split("\n").filter((line) => line !== "");
    if (stop.length) fields.stop = stop.map((line) => line.replaceAll("\\n", "\n").replaceAll("\\t", "\t"));
    return fields;
  }

  /** The fields that only chat has. */
  chat() {
    const fields = {};
    if (this.#text("reasoning_effort")) fields.reasoning_effort = this.#text("reasoning_effort");
    const tools = this.tools();
    if (tools.length) fields.tools = tools;
    return fields;
  }

  tools() {
    const text = this.#text("tools").trim();
    if (!text) return [];
    let listed;
    try {
      listed = [JSON.parse(text)].flat();
    } catch {
      throw new ServerError("Tools: not JSON.");
    }
    return listed.map((tool) => (tool?.function ? tool : { type: "function", function: tool }));
  }

  #text(name) {
    return this.form.elements[name].value;
  }

  #keep() {
    sessionStorage.setItem(STORE, JSON.stringify(Object.fromEntries(new FormData(this.form))));
  }

  #restore() {
    const kept = JSON.parse(sessionStorage.getItem(STORE) ?? "{}");
    for (const [name, value] of Object.entries(kept)) {
      if (this.form.elements[name]) this.form.elements[name].value = value;
    }
  }
}
