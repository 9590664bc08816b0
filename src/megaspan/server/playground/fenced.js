// Streamed text with fenced code blocks. Each piece is looked at once, so a long reply costs no more at its end.

const FENCE = /^ {0,3}(`{3,}|~{3,})([^`\n]*)\n?$/;
const MAYBE_FENCE = /^ {0,3}(`{0,2}|~{0,2}|`{3,}[^`]*|~{3,}[^`]*)$/;

export class FencedText {
  constructor(container) {
    this.container = container;
    this.fence = null; // the marker that opened the block which is being written
    this.line = ""; // the beginning of a line that may yet be a fence
    this.atLineStart = true;
    this.target = null; // the text node being written
  }

  append(text) {
    for (const piece of text.split(/(?<=\n)/)) this.#piece(piece);
  }

  /** What was held back is text after all. */
  finish() {
    if (this.line) this.#line(this.line);
    this.line = "";
  }

  #piece(piece) {
    if (!this.atLineStart) {
      this.#write(piece);
    } else {
      this.line += piece;
      if (!this.line.endsWith("\n") && MAYBE_FENCE.test(this.line)) return;
      this.#line(this.line);
      this.line = "";
    }
    this.atLineStart = piece.endsWith("\n");
  }

  #line(line) {
    const match = FENCE.exec(line);
    if (match && this.fence === null) {
      this.fence = match[1];
      this.#openCode(match[2].trim());
    } else if (match && this.fence !== null && match[1].startsWith(this.fence) && !match[2].trim()) {
      this.fence = null;
      this.target = null;
    } else {
      this.#write(line);
    }
  }

  #write(text) {
    if (this.target === null) {
      if (!text.trim()) return; // no empty paragraph beside a code block
      this.target = this.container.appendChild(element("div", "prose")).appendChild(new Text());
    }
    this.target.appendData(text);
  }

  #openCode(language) {
    if (this.target) this.target.data = this.target.data.trimEnd(); // the box brings its own distance
    const box = this.container.appendChild(element("div", "code"));
    const head = box.appendChild(element("div", "code-head"));
    head.appendChild(element("span", "quiet", language || "text"));
    const copy = head.appendChild(element("button", "copy", "Copy"));
    copy.type = "button";
    const code = element("code");
    this.target = code.appendChild(new Text());
    const written = this.target;
    const pre = box.appendChild(element("pre"));
    pre.tabIndex = 0;
    pre.appendChild(code);
    copy.addEventListener("click", () => copyText(written.data, copy));
  }
}

export function element(tag, className = "", text = "") {
  const made = document.createElement(tag);
  if (className) made.className = className;
  if (text) made.textContent = text;
  return made;
}

async function copyText(text, button) {
  try {
    await navigator.clipboard.writeText(text);
    button.textContent = "Copied";
  } catch {
    button.textContent = "Not allowed"; // browsers grant the clipboard to https and localhost only
  }
  setTimeout(() => (button.textContent = "Copy"), 1500);
}
