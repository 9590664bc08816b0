// One streamed reply: what is on the screen and the message that goes back to the server in the next turn.

import { FencedText, element } from "./fenced.js";
import { duration } from "./generation.js";

export class Reply {
  constructor(container) {
    this.element = container.appendChild(element("article", "message assistant waiting"));
    this.element.setAttribute("aria-label", "Reply");
    this.content = "";
    this.reasoning = "";
    this.calls = []; // {id, name, arguments, text node of the arguments}
    this.fenced = null;
    this.reasoningPart = null;
  }

  /** Take a delta of the stream; true if it held anything to show. */
  take({ delta }) {
    const reasoning = delta.reasoning_content ?? delta.reasoning ?? "";
    const content = delta.content ?? "";
    const calls = delta.tool_calls ?? [];
    if (reasoning) this.#reason(reasoning);
    if (content) this.#write(content);
    for (const call of calls) this.#call(call);
    const shown = Boolean(reasoning || content || calls.length);
    if (shown) this.element.classList.remove("waiting");
    return shown;
  }

  finish(note) {
    this.element.classList.remove("waiting");
    this.fenced?.finish();
    this.#endReasoning(this.onlyReasoned);
    if (note) this.element.appendChild(element("p", "note quiet", note));
  }

  /** A button below the reply, for what might be done about it. */
  offer(label, action) {
    this.element.appendChild(element("button", "offer", label)).addEventListener("click", action);
  }

  get empty() {
    return !this.reasoning && !this.content && !this.calls.length;
  }

  get onlyReasoned() {
    return !this.empty && !this.content && !this.calls.length;
  }

  /** A call that was cut off before its arguments were whole is left out. */
  get message() {
    const message = { role: "assistant", content: this.content };
    if (this.reasoning) message.reasoning_content = this.reasoning;
    const calls = this.calls.filter((call) => isJson(call.arguments || "{}"));
    if (calls.length) {
      message.tool_calls = calls.map((call) => ({
        id: call.id,
        type: "function",
        function: { name: call.name, arguments: call.arguments || "{}" },
      }));
    }
    return message;
  }

  #reason(text) {
    if (!this.reasoningPart) {
      const part = this.element.appendChild(element("details", "reasoning"));
      part.open = true;
      const summary = part.appendChild(element("summary", "quiet", "Reasoning …"));
      const written = part.appendChild(element("div", "prose")).appendChild(new Text());
      this.reasoningPart = { part, summary, written, began: performance.now() };
    }
    this.reasoning += text;
    this.reasoningPart.written.appendData(text);
  }

  #endReasoning(open = false) {
    if (!this.reasoningPart || this.reasoningPart.ended) return;
    const { part, summary, began } = this.reasoningPart;
    summary.textContent = `Reasoning · ${duration((performance.now() - began) / 1000)}`;
    part.open = open;
    this.reasoningPart.ended = true; // once: whoever opens it again keeps it open
  }

  #write(text) {
    this.#endReasoning();
    this.content += text;
    this.fenced ??= new FencedText(this.element);
    this.fenced.append(text);
  }

  #call(delta) {
    this.#endReasoning();
    const { name, arguments: fragment = "" } = delta.function ?? {};
    let call = this.calls[delta.index];
    if (!call) {
      const box = this.element.appendChild(element("div", "code tool"));
      const head = box.appendChild(element("div", "code-head"));
      head.appendChild(element("span", "quiet", "calls"));
      head.appendChild(element("strong", "", name));
      const written = box.appendChild(element("pre")).appendChild(new Text());
      call = this.calls[delta.index] = { id: delta.id, name, arguments: "", written };
    }
    call.arguments += fragment ?? "";
    call.written.appendData(fragment ?? "");
  }
}

function isJson(text) {
  try {
    JSON.parse(text);
    return true;
  } catch {
    return false;
  }
}
