// The server's endpoints. Addresses are relative, so that the page also works below a proxy's path.

/** What the page shows in one line. */
export class ServerError extends Error {}

export class Client {
  /** @param {() => string} apiKey read before each request; "" when there is none */
  constructor(apiKey) {
    this.apiKey = apiKey;
  }

  async get(path) {
    return (await this.#fetch(path, {})).json();
  }

  async post(path, body, signal) {
    return (await this.#fetch(path, { method: "POST", body: JSON.stringify(body), signal })).json();
  }

  /** Yield the JSON objects of a streamed answer. An error object in mid-stream is thrown. */
  async *stream(path, body, signal) {
    const asked = { ...body, stream: true, stream_options: { include_usage: true } };
    const response = await this.#fetch(path, { method: "POST", body: JSON.stringify(asked), signal });
    for await (const data of events(response.body)) {
      if (data === "[DONE]") return;
      const chunk = JSON.parse(data);
      if (chunk.error) throw new ServerError(chunk.error.message ?? String(chunk.error));
      yield chunk;
    }
    throw new ServerError("The server closed the stream before its end.");
  }

  async #fetch(path, options) {
    const headers = { "Content-Type": "application/json" };
    if (this.apiKey()) headers.Authorization = `Bearer ${this.apiKey()}`;
    let response;
    try {
      response = await fetch(path, { ...options, headers });
    } catch (error) {
      throw error.name === "AbortError" ? error : new ServerError("The server does not answer.");
    }
    if (!response.ok) throw new ServerError(await reason(response));
    return response;
  }
}

async function reason(response) {
  let said = response.statusText;
  try {
    said = (await response.json()).error.message;
  } catch {
    // Not one of the server's own errors (a proxy's, say): the status says what there is to say.
  }
  return `${response.status}: ${said}`;
}

/** Yield the data of each server-sent event, however its bytes were split on the way. */
async function* events(body) {
  const reader = body.pipeThrough(new TextDecoderStream()).getReader();
  let pending = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const parts = (pending + value).replaceAll("\r\n", "\n").split("\n\n");
    pending = parts.pop();
    for (const part of parts) {
      const lines = part.split("\n").filter((line) => line.startsWith("data:"));
      if (lines.length) yield lines.map((line) => line.slice(5).trimStart()).join("\n");
    }
  }
}
