// Puts the page together: modes, the side panel, errors, and the connection to the server.

import { Chat } from "./chat.js";
import { Client } from "./client.js";
import { Completion } from "./completion.js";
import { Live } from "./live.js";
import { Meter } from "./meter.js";
import { Settings } from "./settings.js";

const part = (id) => document.getElementById(id);

const settings = new Settings(part("settings"));
const client = new Client(() => settings.apiKey);
const meter = new Meter(client);
const modes = {
  chat: new Chat(client, settings, meter, report),
  completion: new Completion(client, settings, meter, report),
};
let mode = "chat";

/** Show an error in one line; null takes it away. */
function report(error) {
  part("error").hidden = !error;
  part("error-text").textContent = error ? error.message : "";
}

function choose(name) {
  mode = name;
  for (const each of Object.keys(modes)) {
    const chosen = each === name;
    part(each).hidden = !chosen;
    part(`${each}-tab`).setAttribute("aria-selected", chosen);
    part(`${each}-tab`).tabIndex = chosen ? 0 : -1;
  }
  showSide(false);
  modes[name].measure();
}

/** On narrow windows the panel takes the place of the conversation; on wide ones it is always there. */
function showSide(open) {
  part("side").classList.toggle("open", open);
  part("side-toggle").setAttribute("aria-expanded", open);
}

async function connect() {
  try {
    part("model").textContent = await meter.connect();
    report(null);
    modes[mode].measure();
  } catch (error) {
    report(error);
  }
}

for (const name of Object.keys(modes)) {
  const tab = part(`${name}-tab`);
  tab.addEventListener("click", () => choose(name));
  tab.addEventListener("keydown", (event) => {
    if (!["ArrowLeft", "ArrowRight"].includes(event.key)) return;
    const other = name === "chat" ? "completion" : "chat";
    choose(other);
    part(`${other}-tab`).focus();
  });
}
document.addEventListener("keydown", (event) => {
  if (event.key === "Escape") modes[mode].stop();
});
part("error-close").addEventListener("click", () => report(null));
part("side-toggle").addEventListener("click", () => showSide(!part("side").classList.contains("open")));
part("settings").elements.api_key.addEventListener("change", connect);
part("settings").elements.system.addEventListener("change", () => modes[mode].measure());

connect();
new Live(client).start();
