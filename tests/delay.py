"""A cable between two hosts on which each packet takes a while: python delay.py SECONDS NET NET

NET is the network namespace of a host; the cable is called slow0 there. It is for places where the
kernel has no netem.
"""

import ctypes
import fcntl
import os
import select
import struct
import sys
import time
from collections import deque

SETNS_NETWORK, TUNSETIFF, TAP_WITHOUT_HEADER = 0x40000000, 0x400454CA, 0x0002 | 0x1000


def end_of_cable(namespace):
    """A file: what the host sends is read from it, what is written arrives there."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.setns(os.open(namespace, os.O_RDONLY), SETNS_NETWORK):
        raise OSError(ctypes.get_errno(), f"cannot enter {namespace}")
    file = os.open("/dev/net/tun", os.O_RDWR)
    fcntl.ioctl(file, TUNSETIFF, struct.pack("16sH22x", b"slow0", TAP_WITHOUT_HEADER))
    return file


def main(seconds, *namespaces):
    ends = [end_of_cable(namespace) for namespace in namespaces]
    print("plugged in", flush=True)
    under_way = deque()
    while True:
        left = max(0.0, under_way[0][0] - time.monotonic()) if under_way else None
        for end in select.select(ends, [], [], left)[0]:
            other = ends[1 - ends.index(end)]
            under_way.append((time.monotonic() + seconds, other, os.read(end, 65536)))
        while under_way and under_way[0][0] <= time.monotonic():
            _, end, packet = under_way.popleft()
            os.write(end, packet)


if __name__ == "__main__":
    main(float(sys.argv[1]), *sys.argv[2:])
