"""A thread that runs transfer jobs."""

import queue
import threading
import time
from collections.abc import Callable

import torch

from megaspan.cache.jobs import Job, RestoreFailed
from megaspan.ops.threads import use_no_team


class Worker:
    """A thread that runs jobs in the order they came, on CUDA in a stream of its own."""

    def __init__(
        self,
        name: str,
        device: torch.device,
        run: Callable[..., None],
        acknowledge: Callable[[Job], None],
    ):
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._run, self._acknowledge = run, acknowledge
        self._jobs: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        self._busy_since: float | None = None  # the last sign of life in the job at hand
        self._newest: torch.cuda.Event | None = None
        self._stopping = False
        self._thread = threading.Thread(target=self._loop, name=f"megaspan {name}", daemon=True)
        self._thread.start()

    def submit(self, job: Job) -> None:
        if self.stream is not None:
            job.submitted = torch.cuda.current_stream(self.stream.device).record_event()
        self._jobs.put(job)

    def progress(self, job: Job) -> None:
        """The thread is alive; raises where it should let go of the job."""
        self._busy_since = time.monotonic()
        if self._stopping:
            raise RestoreFailed("the transfers are closed")
        if job.error:
            raise job.error

    def silent_seconds(self) -> float:
        """Seconds since the last sign of life in the job at hand; 0 without one."""
        since = self._busy_since
        return 0.0 if since is None else time.monotonic() - since

    def event(self) -> torch.cuda.Event | None:
        """On CUDA: the point that the thread's copies have reached."""
        if self.stream is None:
            return None
        event = torch.cuda.Event()
        event.record(self.stream)
        return event

    def keep_pace(self) -> None:
        """On CUDA: wait for all copies but the newest, so that few buffers are in use at once."""
        if self.stream is not None:
            before, self._newest = self._newest, self.event()
            if before is not None:
                before.synchronize()

    def stop(self) -> None:
        self._stopping = True
        self._jobs.put(None)

    def join(self, seconds: float) -> None:
        self._thread.join(seconds)

    @torch.inference_mode()  # pools made in inference mode may be written in it only
    def _loop(self) -> None:
        use_no_team()
        while (job := self._jobs.get()) is not None:
            if not job.claim():
                continue
            started = self._busy_since = time.monotonic()
            try:
                self.progress(job)
                self._run_on_stream(job)
            except Exception as error:
                job.fail(error)
            job.seconds = time.monotonic() - started
            self._busy_since = None
            self._acknowledge(job)

    def _run_on_stream(self, job: Job) -> None:
        if self.stream is None:
            return self._run(job)
        with torch.cuda.stream(self.stream):
            self.stream.wait_event(job.submitted)
            try:
                self._run(job)
            finally:
                self.stream.synchronize()  # an ack means that nothing is under way
