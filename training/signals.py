"""A job that has to stop saves first: the signals that ask for it, and when it obeys."""

import math
import os
import signal
import time

from plumbing.signals import Listener

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)  # save, and leave


class StopSignals:
    """While it is entered, `number` is the first signal to stop that came, or 0.

    A signal that comes more than 3 seconds later ends the process at once: the trainer may hang in
    a collective. What comes within that time counts as the same signal: a scheduler may send it to
    all processes, torchrun hands it on, and end_with_launcher adds one if torchrun itself has
    ended.
    """

    def __init__(self):
        self.number, self.first = 0, math.inf
        self.listener = Listener(SIGNALS, self._note)

    def __enter__(self):
        self.listener.start()
        return self

    def _note(self, number):
        if time.monotonic() - self.first > 3:
            os._exit(128 + number)
        if self.number == 0:
            self.number, self.first = number, time.monotonic()

    def __exit__(self, *error):
        self.listener.stop()
