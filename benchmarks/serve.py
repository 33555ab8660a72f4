"""Load on `taser serve`: queries a second, latencies, reload and drain.

    python benchmarks/serve.py OUTPUT_DIR [--seconds 60] [--clients 1 4 16 32 64]

OUTPUT_DIR has retriever.json. Prints one JSON line a measurement:

- closed loop: each client asks again when it is answered; with batches, and with batches of one;
- open loop: queries arrive at half the best rate of the closed loop, whether or not others are
  answered;
- reload: SIGHUP every five seconds under closed load; drain: SIGTERM under load. Both count lost
  answers;
- memory: resident MiB of the server before and after `--requests` requests.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import pathlib
import platform
import random
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator

import httpx
import numpy as np

README = pathlib.Path(__file__).parents[1] / "README.md"
# Words, as people ask; pieces of code have many tokens.
QUESTIONS = re.findall(r"\b[a-z]+\b", README.read_text(encoding="utf-8"))


def main() -> None:
    """Starts servers and asks them."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory")
    parser.add_argument("--seconds", type=float, default=60)
    parser.add_argument("--clients", type=int, nargs="+", default=[1, 4, 16, 32, 64])
    parser.add_argument("--requests", type=int, default=100_000)
    arguments = parser.parse_args()
    show(
        "machine",
        cores=os.cpu_count(),
        processor=platform.processor(),
        python=platform.python_version(),
    )
    best: dict[int, float] = {}
    for max_batch in (32, 1):
        with Server(arguments.directory, max_batch=max_batch) as server:
            rates = []
            for clients in arguments.clients:
                measured = asyncio.run(closed_loop(server, clients, arguments.seconds))
                show("closed loop", max_batch=max_batch, clients=clients, **measured)
                rates.append(measured["per_second"])
            best[max_batch] = max(rates)
    show("batches over one by one", ratio=best[32] / best[1])
    with Server(arguments.directory, max_batch=32) as server:
        rate = best[32] / 2
        show("open loop", **asyncio.run(open_loop(server, rate, arguments.seconds)))
        show("reload", **asyncio.run(reloads(server, arguments.seconds)))
        before, start = server.megabytes(), time.monotonic()
        asyncio.run(closed_loop(server, 16, 1e9, requests=arguments.requests))
        show(
            "memory",
            requests=arguments.requests,
            seconds=time.monotonic() - start,
            mib_before=before,
            mib_after=server.megabytes(),
        )
        show("drain", **asyncio.run(drain(server)))


class Server:
    """A `taser serve` in a process of its own, ready to answer."""

    def __init__(self, directory: str, *, max_batch: int) -> None:
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        self.address = f"http://127.0.0.1:{port}"
        command = [sys.executable, "-m", "taser_jax.cli.main", "serve", directory]
        options = [f"--gin.PORT={port}", f"--gin.ServeOptions.max_batch={max_batch}"]
        self.process = subprocess.Popen([*command, *options])

    def __enter__(self) -> Server:
        end = time.monotonic() + 300
        while time.monotonic() < end:
            try:
                if httpx.get(f"{self.address}/readyz").status_code == 200:
                    return self
            except httpx.TransportError:
                time.sleep(0.2)
        raise TimeoutError("the server was not ready within 300 s")

    def __exit__(self, *error: object) -> None:
        self.process.terminate()
        self.process.wait(60)

    def megabytes(self) -> float:
        """Resident memory."""
        status = pathlib.Path(f"/proc/{self.process.pid}/status").read_text()
        return int(status.split("VmRSS:")[1].split()[0]) / 1024


def bodies(seed: int) -> Iterator[dict[str, object]]:
    """Requests of three to eight words."""
    draws = random.Random(seed)
    while True:
        yield {"query": " ".join(draws.choices(QUESTIONS, k=draws.randint(3, 8))), "k": 10}


def latencies(seconds: list[float], *, elapsed: float, failed: int) -> dict[str, float]:
    """Rate, percentiles in milliseconds, and requests without an answer."""
    p50, p95, p99 = np.percentile([1000 * latency for latency in seconds], [50, 95, 99])
    return {
        "per_second": round(len(seconds) / elapsed, 1),
        "p50_ms": round(p50, 1),
        "p95_ms": round(p95, 1),
        "p99_ms": round(p99, 1),
        "failed": failed,
    }


async def closed_loop(
    server: Server, clients: int, seconds: float, *, requests: int | None = None
) -> dict[str, float]:
    """Clients that ask again when they are answered."""
    taken: list[float] = []
    failed = 0
    start = time.monotonic()

    async def client(number: int) -> None:
        nonlocal failed
        async with httpx.AsyncClient(base_url=server.address, timeout=60) as session:
            for body in bodies(number):
                if time.monotonic() - start > seconds or (requests and len(taken) >= requests):
                    return
                asked = time.monotonic()
                answer = await session.post("/search", json=body)
                failed += answer.status_code != 200
                taken.append(time.monotonic() - asked)

    await asyncio.gather(*(client(number) for number in range(clients)))
    return latencies(taken, elapsed=time.monotonic() - start, failed=failed)


async def open_loop(server: Server, rate: float, seconds: float) -> dict[str, float]:
    """Queries at random times with a mean rate."""
    taken: list[float] = []
    failed = 0
    draws = random.Random(0)
    limits = httpx.Limits(max_connections=2000)
    async with httpx.AsyncClient(base_url=server.address, timeout=60, limits=limits) as session:

        async def ask(body: dict[str, object]) -> None:
            nonlocal failed
            asked = time.monotonic()
            answer = await session.post("/search", json=body)
            failed += answer.status_code != 200
            taken.append(time.monotonic() - asked)

        start = time.monotonic()
        tasks = []
        for body in bodies(0):
            if time.monotonic() - start > seconds:
                break
            tasks.append(asyncio.create_task(ask(body)))
            await asyncio.sleep(draws.expovariate(rate))
        await asyncio.gather(*tasks)
        measured = latencies(taken, elapsed=time.monotonic() - start, failed=failed)
    return measured | {"p99_over_p50": round(measured["p99_ms"] / measured["p50_ms"], 2)}


async def reloads(server: Server, seconds: float) -> dict[str, float]:
    """A reload every five seconds, under load of eight clients."""

    async def signals() -> None:
        while True:
            await asyncio.sleep(5)
            server.process.send_signal(signal.SIGHUP)

    task = asyncio.create_task(signals())
    measured = await closed_loop(server, 8, seconds)
    task.cancel()
    metrics = httpx.get(f"{server.address}/metrics").text
    count = metrics.split("\ntaser_reloads_total ")[1].split()[0]
    return measured | {"reloads": float(count)}


async def drain(server: Server) -> dict[str, float]:
    """SIGTERM while 32 requests wait: how many are answered."""
    async with httpx.AsyncClient(base_url=server.address, timeout=60) as session:
        asked = [
            asyncio.create_task(session.post("/search", json=body))
            for body, _ in zip(bodies(1), range(32), strict=False)
        ]
        await asyncio.sleep(0.05)
        server.process.terminate()
        answers = await asyncio.gather(*asked, return_exceptions=True)
    answered = sum(getattr(answer, "status_code", 0) == 200 for answer in answers)
    return {"asked": len(asked), "answered": answered}


def show(what: str, **figures: object) -> None:
    """One line."""
    print(json.dumps({"measured": what, **figures}), flush=True)


if __name__ == "__main__":
    main()
