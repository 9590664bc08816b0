// The live panel: asks for the engine's figures once a second.

import { duration, rate } from "./generation.js";
import { drawSparkline } from "./sparkline.js";

const part = (id) => document.getElementById(id);
const PERIOD = 1000; // milliseconds
const KEPT = 60; // samples: a minute

export class Live {
  constructor(client) {
    this.client = client;
    this.samples = [];
    this.lines = { speed: [], hits: [], first: [] };
  }

  start() {
    const poll = async () => {
      if (!document.hidden) await this.#poll();
      setTimeout(poll, PERIOD);
    };
    poll();
  }

  async #poll() {
    try {
      this.#show(await this.client.get("stats"));
      this.#state("", true);
    } catch {
      this.#state("no answer", false);
    }
  }

  #state(text, fresh) {
    part("live-state").textContent = text;
    part("side").classList.toggle("stale", !fresh);
  }

  #show(stats) {
    this.samples = [...this.samples, stats].slice(-KEPT);
    part("running").textContent = stats.running.toLocaleString("en");
    part("waiting").textContent = stats.waiting.toLocaleString("en");
    const hits = this.#hitRate(stats);
    this.#line("speed", stats.tokens_per_second, rate);
    this.#line("hits", hits, (share) => `${(100 * share).toFixed(0)} %`, 1);
    this.#line("first", stats.time_to_first_token_p50, duration);
    showPages("device", stats.pages_total, stats.pages_total - stats.pages_free - stats.pages_cached, stats.pages_cached);
    showPages("host", stats.host_pages_total, stats.host_pages_used);
  }

  /** Of the last minute' prompt tokens; of all of them where there were none. */
  #hitRate(now) {
    const before = this.samples[0];
    const asked = now.prefix_queries_total - before.prefix_queries_total;
    if (asked > 0) return (now.prefix_hits_total - before.prefix_hits_total) / asked;
    return now.prefix_queries_total ? now.prefix_hits_total / now.prefix_queries_total : null;
  }

  #line(name, value, format, top) {
    part(name).textContent = value === null || value === undefined ? "–" : format(value);
    this.lines[name] = [...this.lines[name], value ?? 0].slice(-KEPT);
    drawSparkline(part(`${name}-line`), this.lines[name], KEPT, top);
  }
}

function showPages(name, total, used, cached = 0) {
  const whole = Math.max(total, 1);
  part(`${name}-used`).style.width = `${(100 * used) / whole}%`;
  if (cached || part(`${name}-cached`)) part(`${name}-cached`).style.width = `${(100 * cached) / whole}%`;
  part(`${name}-bar`).setAttribute("aria-valuemax", whole);
  part(`${name}-bar`).setAttribute("aria-valuenow", used);
  const count = (pages) => pages.toLocaleString("en");
  part(`${name}-text`).textContent = total ? `${count(used + cached)} of ${count(total)}` : "off";
}
