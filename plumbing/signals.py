"""Signals that a thread waits for, because the main thread may wait for other ranks."""

import os
import signal
import threading
from collections.abc import Callable


class Listener:
    """Calls `act(number)` in a thread for each signal of `numbers` that this process receives.

    Python runs a signal handler in the main thread only, and only after a collective has returned.
    The thread gets the numbers through a pipe, into which Python writes them immediately.
    A process has one listener at most, and a forked child has none.
    """

    def __init__(self, numbers: tuple[int, ...], act: Callable[[int], None]):
        self.numbers, self.act = numbers, act

    def start(self):
        """Listen until `stop()`. Only the main thread can call this."""
        global listening
        self.reader, self.writer = os.pipe()
        os.set_blocking(self.writer, False)
        # From now on every signal that has a handler writes its number into the pipe.
        self.wakeup_fd_before = signal.set_wakeup_fd(self.writer)
        self.before = {number: signal.signal(number, ignore) for number in self.numbers}
        self.thread = threading.Thread(target=self._listen, daemon=True)
        self.thread.start()
        listening = self

    def _listen(self):
        while number := os.read(self.reader, 1)[0]:  # stop() writes a 0
            if number in self.numbers:
                self.act(number)

    def stop(self):
        """Restore the previous handlers, and end the thread."""
        self.restore()
        os.write(self.writer, b"\0")
        self.thread.join()
        self.close()

    def restore(self):
        global listening
        listening = None
        for number, handler in self.before.items():
            signal.signal(number, handler or signal.SIG_DFL)
        signal.set_wakeup_fd(self.wakeup_fd_before)

    def close(self):
        os.close(self.reader)
        os.close(self.writer)


def ignore(number, frame):
    """Do nothing: the thread acts. (With SIG_IGN in its place Python would not see the signal.)"""


# A forked child, such as a worker of a DataLoader or of a multiprocessing.Pool, inherits handlers
# and the pipe: a signal to the child would arrive in the parent's thread. Therefore the child
# undoes both, and until then it receives no signal.
listening: Listener | None = None
forking = threading.local()  # two threads may fork at the same time


def before_fork():
    numbers = listening.numbers if listening else ()
    forking.mask = signal.pthread_sigmask(signal.SIG_BLOCK, numbers)


def after_fork_in_parent():
    signal.pthread_sigmask(signal.SIG_SETMASK, forking.mask)


def after_fork_in_child():
    if inherited := listening:
        inherited.restore()
        inherited.close()
    signal.pthread_sigmask(signal.SIG_SETMASK, forking.mask)


os.register_at_fork(
    before=before_fork,
    after_in_parent=after_fork_in_parent,
    after_in_child=after_fork_in_child,
)
