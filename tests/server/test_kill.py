"""kill -9 in the middle of traffic, with tiers below the device: the next server goes on where it was."""

import threading
from pathlib import Path
from typing import Any

import httpx

from tests.server.live_server import wait_until
from tests.server.serve_process import Server, serve_process
from tests.server.small_model import LONG_TEXT, at_once, write_small_model

# Half of the prompts fit on the device, so pages come and go while the process dies.
OPTIONS = ("--batch-invariant", "--dtype", "float32", "--cache-gib", 0.0012, "--host-gib", 0.1)
PROMPTS = [f"# {number}\n{LONG_TEXT * 2}" for number in range(6)]


def ask(server: Server, prompt: str, max_tokens: int = 6) -> dict[str, Any]:
    params = {"temperature": 0, "max_new_tokens": max_tokens, "ignore_eos": True}
    response = httpx.post(
        f"{server.base}/generate", json={"text": prompt, "sampling_params": params}, timeout=60
    )
    assert response.status_code == 200, response.text
    return response.json()


def answers(server: Server) -> list[tuple[list[int], list[float]]]:
    replies = at_once(*[lambda prompt=prompt: ask(server, prompt) for prompt in PROMPTS])
    return [(reply["output_ids"], reply["logprobs"]) for reply in replies]


def keep_asking(server: Server, number: int) -> None:
    """Until the server is gone."""
    turn = 0
    while True:
        try:
            ask(server, f"{PROMPTS[(number + turn) % len(PROMPTS)]}{number} {turn}\n{LONG_TEXT}", 20)
        except httpx.HTTPError:
            return
        turn += 1


def pages(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.page"))


def damage(page: Path, flip: bool) -> bytes:
    """Change a bit of the file, or cut it; returns what it holds now."""
    content = bytearray(page.read_bytes())
    content[-1] ^= 1
    page.write_bytes(content if flip else content[:100])
    return page.read_bytes()


def holds(page: Path, content: bytes) -> bool:
    return page.exists() and page.read_bytes() == content


def test_a_killed_servers_pages_serve_the_next_one(tmp_path):
    """P44, P50: every request is answered as before, from the disk where its pages are whole."""
    model, disk = write_small_model(tmp_path), tmp_path / "disk"
    options = (*OPTIONS, "--disk-folder", disk)
    with serve_process(model, tmp_path / "first.log", *options) as server:
        expected = answers(server)
        threads = [threading.Thread(target=keep_asking, args=(server, number)) for number in range(3)]
        for thread in threads:
            thread.start()
        there = len(pages(disk))
        wait_until(lambda: len(pages(disk)) > there + 3)
        server.kill()
        for thread in threads:
            thread.join(20)
    damaged = {page: damage(page, number % 2 == 0) for number, page in enumerate(pages(disk)[::8])}
    with serve_process(model, tmp_path / "second.log", *options) as server:
        stats = httpx.get(f"{server.base}/stats").json()
        assert stats["disk_pages_used"] > 0
        cached = [ask(server, prompt)["meta_info"]["cached_tokens"] for prompt in PROMPTS]
        assert any(cached)
        assert answers(server) == expected
        stats = httpx.get(f"{server.base}/stats").json()
        assert stats["host_hits_total"] > 0
        assert stats["requests_total"]["error"] == 0
        assert (stats["running"], stats["waiting"], stats["pages_locked"]) == (0, 0, 0)
    dropped = [page for page, content in damaged.items() if not holds(page, content)]
    assert dropped  # those of other prompts, or below another damaged one, have not been read
