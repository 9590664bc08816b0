// The chat: its turns, and sending, regenerating and clearing them.

import { element } from "./fenced.js";
import { Generation } from "./generation.js";
import { Reply } from "./reply.js";

const NOTHING = { turns: 0, tokens: 0 };
const part = (id) => document.getElementById(id);

export class Chat {
  constructor(client, settings, meter, report) {
    Object.assign(this, { client, settings, meter, report });
    this.turns = []; // {message, element}
    this.counted = NOTHING; // how many of the first turns have how many tokens, by the server's count
    this.generation = new Generation(client, part("send"), part("chat-stop"));
    this.list = part("messages");
    this.draft = part("draft");
    this.atEnd = true; // whether the end of the conversation is in sight
    this.list.addEventListener("scroll", () => {
      this.atEnd = this.list.scrollHeight - this.list.scrollTop - this.list.clientHeight < 120;
    });
    part("composer").addEventListener("submit", (event) => {
      event.preventDefault();
      this.send();
    });
    part("regenerate").addEventListener("click", () => this.regenerate());
    part("clear").addEventListener("click", () => this.clear());
    this.draft.addEventListener("input", () => this.generation.running || this.measure());
    this.draft.addEventListener("keydown", (event) => {
      if (event.key !== "Enter" || event.shiftKey || event.isComposing) return;
      event.preventDefault();
      this.send();
    });
  }

  /** What is written answers the oldest tool call that has no result yet; else it is the user's next message. */
  async send() {
    const text = this.draft.value;
    if (this.generation.running || !text.trim()) return;
    const [call] = this.unanswered();
    if (call) this.#add({ role: "tool", tool_call_id: call.id, content: text }, `Result of ${call.function.name}`);
    else this.#add({ role: "user", content: text }, "You");
    this.draft.value = "";
    this.#refresh();
    if (!this.unanswered().length) await this.#reply();
  }

  async regenerate() {
    if (this.generation.running) return;
    const last = this.turns.findLastIndex(({ message }) => message.role === "assistant");
    this.counted = NOTHING;
    if (last === this.turns.length - 1 || this.unanswered().length) {
      for (const { element: shown } of this.turns.splice(last)) shown.remove();
    }
    this.measure();
    await this.#reply();
  }

  clear() {
    this.generation.stop();
    this.turns = [];
    this.counted = NOTHING;
    this.list.replaceChildren();
    this.#refresh();
    this.draft.focus();
  }

  stop() {
    this.generation.stop();
  }

  unanswered() {
    const answered = new Set(this.turns.map(({ message }) => message.tool_call_id));
    return this.turns.flatMap(({ message }) => message.tool_calls ?? []).filter((call) => !answered.has(call.id));
  }

  /** Count the conversation and what is being written: what the last usage told, and the text since then. */
  measure() {
    const { turns, tokens } = this.counted;
    const texts = this.turns.slice(turns).map(({ message }) => (message.reasoning_content ?? "") + message.content);
    if (!turns) texts.unshift(this.settings.system);
    this.meter.estimate([...texts, this.draft.value].filter(Boolean).join("\n"), tokens);
  }

  async #reply() {
    const turns = this.turns;
    for (const offer of this.list.querySelectorAll(".offer")) offer.remove();
    const reply = new Reply(this.list);
    this.list.setAttribute("aria-busy", "true");
    this.atEnd = true;
    this.#follow();
    let outcome = null;
    try {
      const body = { messages: this.#messages(), ...this.settings.sampling(), ...this.settings.chat() };
      if (this.meter.model) body.model = this.meter.model;
      this.report(null);
      const running = this.generation.run("v1/chat/completions", body, (choice) => {
        const shown = reply.take(choice);
        if (shown) this.meter.grow();
        this.#follow();
        return shown;
      });
      this.#refresh();
      outcome = await running;
    } catch (error) {
      this.report(error);
    }
    reply.finish(outcome ? outcome.note : "failed");
    if (reply.onlyReasoned && ["length", "stop"].includes(outcome?.finish)) {
      reply.offer("Answer without reasoning", () => {
        this.settings.reasoningEffort = "none";
        this.regenerate();
      });
    }
    this.list.removeAttribute("aria-busy");
    const cleared = turns !== this.turns;
    if (cleared || (reply.empty && !outcome?.usage)) reply.element.remove();
    else turns.push({ message: reply.message, element: reply.element });
    this.#refresh(cleared ? null : outcome?.usage);
    this.#follow();
  }

  #messages() {
    const system = this.settings.system ? [{ role: "system", content: this.settings.system }] : [];
    return [...system, ...this.turns.map(({ message }) => message)];
  }

  #add(message, name) {
    const shown = this.list.appendChild(element("article", `message ${message.role}`));
    shown.setAttribute("aria-label", name);
    if (message.role === "tool") shown.appendChild(element("p", "note quiet", name));
    shown.appendChild(element("div", "prose", message.content));
    this.turns.push({ message, element: shown });
  }

  #refresh(usage = null) {
    const { running } = this.generation;
    const [call] = this.unanswered();
    const label = call ? `Result of ${call.function.name}` : "Message";
    this.draft.placeholder = part("draft-label").textContent = label;
    part("regenerate").disabled = running || !this.turns.length;
    part("clear").disabled = !running && !this.turns.length;
    part("welcome").hidden = running || this.turns.length > 0;
    if (usage) {
      this.counted = { turns: this.turns.length, tokens: usage.total_tokens };
      this.meter.show(usage.total_tokens, usage.prompt_tokens_details?.cached_tokens);
    } else if (!running) this.measure();
  }

  /** Keep the end in sight, unless the reader has scrolled away from it. */
  #follow() {
    if (this.atEnd) requestAnimationFrame(() => (this.list.scrollTop = this.list.scrollHeight));
  }
}
