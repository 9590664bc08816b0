// One running request of a mode: its stop button, its timing, its usage.

export class Generation {
  #controller = null;

  constructor(client, startButton, stopButton) {
    this.client = client;
    this.startButton = startButton;
    this.stopButton = stopButton;
    stopButton.addEventListener("click", () => this.stop());
  }

  get running() {
    return this.#controller !== null;
  }

  /** Close the connection: the server aborts a request that nobody reads. */
  stop() {
    this.#controller?.abort();
  }

  /**
   * Send the request and hand each choice to `take`, which says whether it held text.
   * Returns {finish, usage, note}; finish is "stopped" after stop(). Other failures are thrown.
   */
  async run(path, body, take) {
    this.#controller = new AbortController();
    this.#showRunning(true);
    const began = performance.now();
    let first = null;
    let finish = null;
    let usage = null;
    try {
      for await (const chunk of this.client.stream(path, body, this.#controller.signal)) {
        usage = chunk.usage ?? usage;
        const choice = chunk.choices?.[0];
        if (!choice) continue;
        if (take(choice)) first ??= performance.now();
        finish = choice.finish_reason ?? finish;
      }
    } catch (error) {
      if (error.name !== "AbortError") throw error;
      finish = "stopped";
    } finally {
      this.#controller = null;
      this.#showRunning(false);
    }
    return { finish, usage, note: note(finish, usage, began, first, performance.now()) };
  }

  #showRunning(running) {
    const hadFocus = [this.startButton, this.stopButton].includes(document.activeElement);
    this.startButton.hidden = running;
    this.stopButton.hidden = !running;
    if (hadFocus) (running ? this.stopButton : this.startButton).focus();
  }
}

/** Times in milliseconds; `first` is null where no text came. */
function note(finish, usage, began, first, ended) {
  const parts = [{ length: "token limit", stopped: "stopped", abort: "aborted" }[finish]];
  if (usage) {
    const tokens = usage.completion_tokens;
    parts.push(`${tokens.toLocaleString("en")} ${tokens === 1 ? "token" : "tokens"}`);
    const seconds = (ended - first) / 1000;
    if (first !== null && tokens > 1 && seconds > 0) parts.push(`${rate((tokens - 1) / seconds)} tokens/s`);
  }
  if (first !== null) parts.push(`first after ${duration((first - began) / 1000)}`);
  const cached = usage?.prompt_tokens_details?.cached_tokens;
  if (cached) parts.push(`${Math.round((100 * cached) / usage.prompt_tokens)} % of the prompt cached`);
  return parts.filter(Boolean).join(" · ");
}

export function rate(perSecond) {
  return perSecond.toLocaleString("en", { maximumFractionDigits: perSecond < 10 ? 1 : 0 });
}

export function duration(seconds) {
  return seconds < 1 ? `${Math.round(seconds * 1000)} ms` : `${seconds.toFixed(seconds < 10 ? 2 : 0)} s`;
}
