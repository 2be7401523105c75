"""A job that is told to go saves first: the signals that say so, and when they are obeyed."""

import math
import os
import signal
import threading
import time

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # save, and leave


class StopSignals:
    """While it is entered, `number` is the first signal to stop that came, or 0.

    A signal that comes more than 3 seconds later ends the process at once. A thread sees to it,
    since a trainer that hangs in a collective runs no Python. What comes within that time counts
    as the same signal: a scheduler may send it to all processes, torchrun hands it on, and
    end_with_launcher adds one if torchrun itself has ended.
    """

    def __init__(self):
        self.number = 0

    def __enter__(self):
        self.before = {number: signal.signal(number, lambda *_: None) for number in SIGNALS}
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)
        signal.set_wakeup_fd(self.writer)  # every signal writes its number there
        self.thread = threading.Thread(target=self._listen, daemon=True)
        self.thread.start()
        return self

    def _listen(self):
        first = math.inf
        while number := os.read(self.reader, 1)[0]:
            if number in SIGNALS and time.monotonic() - first > 3:
                os._exit(128 + number)
            if number in SIGNALS and self.number == 0:
                self.number, first = number, time.monotonic()

    def __exit__(self, *error):
        signal.set_wakeup_fd(-1)
        for number, handler in self.before.items():
            signal.signal(number, handler)
        os.write(self.writer, b"\0")  # the thread ends
        self.thread.join()
        os.close(self.reader)
        os.close(self.writer)
